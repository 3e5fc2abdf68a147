"""A run for each value of an option: the latency-throughput curve and its knee."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..measure.windows import TIMES
from .drawing import BLUE, GREEN, ORANGE, PURPLE, RED, Picture, draw, legend, log_axis
from .number_format import number, percent
from .tables import Table
from .terminal import set_table

GOOD_SHARE_MIN = 0.9
SLOWER_MAX = 2.0
RULE = (
    "The knee is the highest value that the server handles well, as it does all lower ones: at least "
    f"{GOOD_SHARE_MIN:.0%} of the requests met the objective. Without an objective: at least {GOOD_SHARE_MIN:.0%} "
    f"finished, and the median end to end is at most {SLOWER_MAX:g} times that of the lowest value."
)


def sweep(option: str, runs: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Return option, points (one for each run, by ascending value), knee {value (or None), sentence} and rule.

    Invalid runs do not count, neither for the knee nor against it.

    Args:
        option: The swept option.
        runs: (value, document) of each run.
    """
    points = [_point(value, found) for value, found in sorted(runs, key=lambda run: run[0])]
    return {"option": option, "points": points, "knee": _knee(option, points), "rule": RULE}


def _point(value: float, found: dict[str, Any]) -> dict[str, Any]:
    whole, seconds = found["all"], found["span"]["seconds"]
    due = whole["requests"]["due"]
    point = {
        "value": value,
        "valid": found["verdict"]["valid"],
        "why": found["verdict"]["why"],
        "objective": bool(found["objective"]),
        "offered_per_s": due / seconds if seconds else None,
        "finished_share": whole["requests"]["finished"] / due if due else None,
        "good_share": whole["goodput"]["share"],
        "goodput_per_s": whole["goodput"]["requests_per_s"],
        **whole["throughput"],
    }
    for time in TIMES:
        summary = whole["latency_ms"][time] or {}
        point |= {f"{time}_{each}_ms": summary.get(each) for each in ("p50", "p99")}
    return point


def _knee(option: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    counted = [point for point in points if point["valid"] and point["good_share"] is not None]
    if not counted:
        return {"value": None, "sentence": "no run is valid: the knee is unknown"}
    carried = 0
    while carried < len(counted) and _well(counted[carried], counted[0]):
        carried += 1
    if not carried:
        first = counted[0]
        return {"value": None, "sentence": f"the knee is below {option} {first['value']:g}: {_why(first, first)}"}
    last = counted[carried - 1]
    if carried == len(counted):
        sentence = f"no knee up to {option} {last['value']:g}"
    else:
        beyond = counted[carried]
        sentence = f"the knee is at {option} {last['value']:g}: at {beyond['value']:g}, {_why(beyond, counted[0])}"
    return {"value": last["value"], "sentence": sentence}


def _well(point: dict[str, Any], lowest: dict[str, Any]) -> bool:
    if point["objective"]:
        return bool(point["good_share"] >= GOOD_SHARE_MIN)
    return bool(point["finished_share"] >= GOOD_SHARE_MIN and _slower(point, lowest) <= SLOWER_MAX)


def _slower(point: dict[str, Any], lowest: dict[str, Any]) -> float:
    mine, least = point["e2e_p50_ms"], lowest["e2e_p50_ms"]
    return mine / least if mine is not None and least else float("inf")


def _why(point: dict[str, Any], lowest: dict[str, Any]) -> str:
    if point["objective"]:
        return f"{percent(point['good_share'])} of the requests met the objective"
    if point["finished_share"] < GOOD_SHARE_MIN:
        return f"{percent(point['finished_share'])} of the requests finished"
    return f"the median end to end is {_slower(point, lowest):.1f} times that of {lowest['value']:g}"


def table(swept: dict[str, Any]) -> Table:
    """Return a table with a row for each value."""
    header = (swept["option"], "offered/s", "finished/s", "out tokens/s", "good", "ttft p50", "ttft p99", "itl p50",
              "itl p99", "e2e p50", "e2e p99", "valid")  # fmt: skip
    rows = []
    for point in swept["points"]:
        cells = [number(point[name]) for name in ("offered_per_s", "requests_per_s", "output_tokens_per_s")]
        times = [number(point[f"{time}_{each}_ms"]) for time in TIMES for each in ("p50", "p99")]
        valid = "yes" if point["valid"] else "no"
        rows.append([f"{point['value']:g}", *cells, percent(point["good_share"]), *times, valid])
    return Table(f"Sweep of {swept['option']}, ms", header, rows, swept["rule"])


def text(swept: dict[str, Any]) -> str:
    """Return the sweep as text for the terminal."""
    return "\n".join([*set_table(table(swept)), f"{swept['knee']['sentence']}"])


def picture(swept: dict[str, Any]) -> Picture:
    """Draw latency over throughput, and throughput over the swept value."""
    points, knee = swept["points"], swept["knee"]["value"]

    def draws(axes: Any) -> None:
        latency, output = axes
        for name, words, colour in (
            ("ttft_p50_ms", "ttft p50", BLUE),
            ("ttft_p99_ms", "ttft p99", ORANGE),
            ("e2e_p50_ms", "e2e p50", PURPLE),
        ):
            there = [point for point in points if point[name] and point["output_tokens_per_s"] is not None]
            places = [point["output_tokens_per_s"] for point in there]
            latency.plot(places, [point[name] for point in there], color=colour, marker="o", markersize=4, label=words)
        log_axis(latency, "y")
        latency.set_xlabel("output tokens per second")
        latency.set_title("latency, ms")
        values = [point["value"] for point in points]
        for name, words, colour in (
            ("offered_per_s", "offered", ORANGE),
            ("requests_per_s", "finished", BLUE),
            ("goodput_per_s", "good", GREEN),
        ):
            rates = [float("nan") if point[name] is None else point[name] for point in points]
            output.plot(values, rates, color=colour, marker="o", markersize=4, label=words)
        if knee is not None:
            output.axvline(knee, color=RED, linestyle="--", linewidth=1, label="knee")
        output.set_xlabel(swept["option"])
        output.set_title("requests per second")
        output.set_ylim(bottom=0)
        output.legend(loc="upper left", handlelength=1.4)
        legend(latency)

    return draw(
        "sweep",
        "The latency-throughput curve",
        alt=f"{len(points)} runs, {swept['option']} {points[0]['value']:g} to {points[-1]['value']:g}; "
        f"{swept['knee']['sentence']}.",
        caption="Left: latency by throughput. Right: requests offered, finished, and meeting the objective.",
        draws=draws,
        panels=(1, 2),
        height_in=3.4,
    )
