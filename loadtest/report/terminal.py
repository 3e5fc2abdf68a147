"""The document as text for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from ..machine import table
from .number_format import NOTHING, pairs
from .tables import Table, ends, tables

CELL_MAX = 120


def text(found: dict[str, Any]) -> str:
    """Return the verdict and the tables, without control characters from the server's messages."""
    model = found["model"]
    lines = [
        verdict_line(found),
        *(f"  {sentence}" for sentence in found["verdict"]["why"]),
        "",
        pairs(found["machine"]),
        pairs(found["versions"]),
        *([pairs(model)] if model else []),
        pairs({name: value for name, value in found["options"].items() if value not in (None, False, [])}),
        "",
        ends(found),
    ]
    for each in tables(found):
        lines += ["", *set_table(each)]
    lines += _tail(found["tail"]) + _chaos(found["chaos"])
    lines += [f"note: {sentence}" for sentence in found["verdict"]["notes"]]
    return "\n".join(plain(line) for line in lines)


def verdict_line(found: dict[str, Any]) -> str:
    """Return one line about the validity of the run."""
    judged = found["verdict"]
    if not judged["valid"]:
        return "INVALID: this is not a measurement of the server"
    lags = [lag["p99"] for lag in judged["lag_ms"].values() if lag is not None]
    return f"valid: the driver was at most {max(lags):.2f} ms late at p99 (limit {judged['limit_ms']:.2f} ms)"


def plain(line: str) -> str:
    """Replace control characters, which a terminal would interpret."""
    return "".join(" " if unicodedata.category(letter).startswith("C") else letter for letter in line)


def set_table(each: Table) -> list[str]:
    """Return the lines of a table."""
    header: Sequence[str] = (each.title, *each.header[1:])
    lines = table(header, [[cell[:CELL_MAX] for cell in map(plain, row)] for row in each.rows]).splitlines()
    return [*lines, each.note] if each.note else lines


def _tail(tail: Sequence[dict[str, Any]]) -> list[str]:
    if not tail:
        return []
    sentences = [f"{request['latency_ms']:10,.0f} ms  {request.get('sentence') or NOTHING}" for request in tail]
    return ["", f"The {len(tail)} slowest", *sentences]


def _chaos(chaos: dict[str, Any] | None) -> list[str]:
    return [] if chaos is None else ["", "Faults", *(f"  {sentence}" for sentence in chaos.get("sentences", ()))]
