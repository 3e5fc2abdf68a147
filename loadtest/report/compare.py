"""Compares two results: whether a difference exceeds the noise of both."""

from __future__ import annotations

import math
from typing import Any

from ..measure.group import LATENCIES
from ..measure.windows import SUMMARIES, TIMES
from .number_format import NOTHING, number, percent, spread
from .result import checked
from .tables import RATES, Table
from .terminal import plain, set_table

HIGHER = {**RATES, "goodput_per_s": "goodput, requests"}
WITHIN, BETTER, WORSE, UNKNOWN = "within the noise", "better", "worse", "noise unknown"
HEADER = ("", "earlier", "this one", "difference", "verdict")
APART = ("options", "machine", "versions", "model", "objective")
LENGTHS_APART = 0.1


def compare(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Compare two documents.

    A difference of window means exceeds the noise if it is larger than the root of the sum of both squared half-widths.

    Returns:
        rows: {name, words, earlier, later (interval or None), change, verdict}; notes: sentences about other
            differences.

    Raises:
        InvalidRequest: A document has another format.
    """
    for found in (earlier, later):
        checked(found, "compare", "a result")
    names = {f"{time}_{each}_ms": f"{LATENCIES[time]}, {each}, ms" for time in TIMES for each in SUMMARIES}
    names |= {name: f"{words} a second" for name, words in HIGHER.items()}
    before, after = (found["windows"]["intervals"] for found in (earlier, later))
    rows = [
        {"name": name, "words": words, **_difference(name, before.get(name), after.get(name))}
        for name, words in names.items()
        if before.get(name) is not None or after.get(name) is not None
    ]
    return {"rows": rows, "notes": _notes(earlier, later)}


def _difference(name: str, before: Any, after: Any) -> dict[str, Any]:
    found = {"earlier": before, "later": after, "change": None, "verdict": UNKNOWN}
    if before is None or after is None:
        return found
    change = after["mean"] - before["mean"]
    found["change"] = change / before["mean"] if before["mean"] else None
    if abs(change) <= math.hypot(before["half"], after["half"]):
        found["verdict"] = WITHIN
    else:
        found["verdict"] = BETTER if (change > 0) == (name in HIGHER) else WORSE
    return found


def table(compared: dict[str, Any]) -> Table:
    """Return the comparison as a table."""
    rows = [
        [row["words"], _cell(row["earlier"]), _cell(row["later"]), _signed(row["change"]), row["verdict"]]
        for row in compared["rows"]
    ]
    note = "means over the windows of each run, ± half of their 95% interval: a difference within both is noise"
    return Table("Compared with the earlier result", HEADER, rows, note)


def text(compared: dict[str, Any]) -> str:
    """Return the comparison as text for the terminal."""
    notes = (plain(f"note: {sentence}") for sentence in compared["notes"])
    return "\n".join([*set_table(table(compared)), *notes])


def _cell(interval: Any) -> str:
    return NOTHING if interval is None else spread(interval["mean"], interval)


def _signed(change: float | None) -> str:
    return NOTHING if change is None else f"+{percent(change)}" if change > 0 else percent(change)


def _notes(earlier: dict[str, Any], later: dict[str, Any]) -> list[str]:
    notes = [
        f"{name} is invalid: {'; '.join(found['verdict']['why'])}"
        for name, found in (("the earlier result", earlier), ("this one", later))
        if not found["verdict"]["valid"]
    ]
    if earlier["seed"] != later["seed"]:
        notes.append(f"different seeds: {earlier['seed']} then, {later['seed']} now")
    for part in APART:
        before, after = earlier[part] or {}, later[part] or {}
        differing = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
        notes += [f"{part}, {key}: {before.get(key, NOTHING)} then, {after.get(key, NOTHING)} now" for key in differing]
    then, now = (found["windows"]["seconds"] for found in (earlier, later))
    if abs(then - now) > LENGTHS_APART * now:
        notes.append(f"different windows: {number(then)} s then, {number(now)} s now; longer windows have less noise")
    return notes
