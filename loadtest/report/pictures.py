"""The pictures of one run, drawn from the document alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..measure.group import LATENCIES
from .drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Picture, draw, legend, log_axis
from .number_format import number
from .timeline import divided, timeline

Document = dict[str, Any]
BLOCKS = {"referenced": BLUE, "cached": GREEN, "quarantined": RED, "free": GREY}
TIMES = {"ttft": BLUE, "itl": GREEN, "e2e": PURPLE}
SHADED = "Shaded: warm-up and drain (not measured)."


def pictures(found: Document) -> list[Picture]:
    """Draw all pictures that have data."""
    made = []
    if any(found["series"]["offered"]):
        made.append(throughput(found))
        if _timed(found):
            made.append(latency(found))
    if any(found["curves"].values()):
        made.append(distributions(found))
    if len(found["occupancy"]["columns"]["at_s"]) > 1:
        made.append(occupancy(found))
    if any(request.get("segments") for request in found["tail"]):
        made.append(timeline(found))
    if found["why"]:
        made.append(divided(found))
    return made


def throughput(found: Document) -> Picture:
    """Draw requests and tokens per second over time."""
    series, whole = found["series"], found["all"]["throughput"]
    at_s = series["at_s"]

    def draws(axes: Any) -> None:
        requests, prompts, answers = axes
        requests.plot(at_s, series["offered"], color=GREY, label="offered", drawstyle="steps-mid", linewidth=1.1)
        requests.plot(at_s, series["finished"], color=BLUE, label="finished", drawstyle="steps-mid")
        requests.set_title("requests per second")
        # Prompts are often ten times as long as answers, so they have an axis of their own.
        prompts.plot(at_s, series["input_tokens"], color=ORANGE, drawstyle="steps-mid")
        prompts.set_title("input tokens per second")
        answers.plot(at_s, series["output_tokens"], color=GREEN, drawstyle="steps-mid")
        answers.set_title("output tokens per second")
        _over_time(found, axes)

    return draw(
        "throughput",
        "Throughput over time",
        alt=f"Requests and tokens per second over the run; measured: {number(whole['requests_per_s'])} requests and "
        f"{number(whole['output_tokens_per_s'])} output tokens per second.",
        caption=f"One value per {series['slice_s']:g} s. {_marked(found)}",
        draws=draws,
        panels=(3, 1),
        height_in=5.4,
        sharex=True,
    )


def latency(found: Document) -> Picture:
    """Draw median and 99th percentile of each latency over time."""
    series, shown = found["series"], _timed(found)

    def draws(axes: Any) -> None:
        for panel, (time, colour) in zip(np.atleast_1d(axes), shown.items(), strict=True):
            p50, p99 = (_gaps(series[f"{time}_{each}_ms"]) for each in ("p50", "p99"))
            panel.fill_between(series["at_s"], p50, p99, color=colour, alpha=0.15, linewidth=0)
            panel.plot(series["at_s"], p99, color=colour, linewidth=0.9, label="p99", marker=".", markersize=3)
            panel.plot(series["at_s"], p50, color=colour, label="p50", marker=".", markersize=3)
            panel.set_title(f"{LATENCIES[time]}, ms")
            log_axis(panel, "y")
        _over_time(found, axes)

    medians = ", ".join(_medians(found, time) for time in shown)
    return draw(
        "latency",
        "Latency over time",
        alt=f"Median and 99th percentile of each latency over the run. {medians}.",
        caption=f"Requests due in each {series['slice_s']:g} s. {_marked(found)}",
        draws=draws,
        panels=(len(shown), 1),
        height_in=0.6 + 1.8 * len(shown),
        sharex=True,
    )


def _timed(found: Document) -> dict[str, str]:
    """Return the latencies that have values, with their colours."""
    return {time: colour for time, colour in TIMES.items() if any(found["series"][f"{time}_p50_ms"])}


def distributions(found: Document) -> Picture:
    """Draw the cumulative distribution of each latency."""
    shown = {time: points for time, points in found["curves"].items() if points}

    def draws(axes: Any) -> None:
        for panel, (time, points) in zip(np.atleast_1d(axes), shown.items(), strict=True):
            summary = found["all"]["latency_ms"][time]
            values, shares = zip(*points, *([(summary["max"], 1.0)] if summary is not None else []), strict=True)
            panel.plot(np.maximum(values, 1e-3), shares, color=TIMES[time])
            panel.fill_between(np.maximum(values, 1e-3), shares, color=TIMES[time], alpha=0.12, linewidth=0)
            log_axis(panel, "x")
            panel.set_ylim(0, 1.01)
            panel.set_title(f"{LATENCIES[time]}, ms")
            for column, style in (("p50", "--"), ("p99", ":")):
                if summary is not None:
                    panel.axvline(summary[column], color=TIMES[time], linestyle=style, linewidth=1)
                    panel.plot([], [], color=TIMES[time], linestyle=style, linewidth=1,
                               label=f"{column} {number(summary[column])}")  # fmt: skip
            panel.legend(loc="lower right", handlelength=1.4)

    return draw(
        "distributions",
        "Distributions",
        alt=f"Share of requests at or below each latency. {', '.join(_medians(found, time) for time in shown)}.",
        caption="The share at or below each time, on a logarithmic time axis.",
        draws=draws,
        panels=(1, len(shown)),
        height_in=3.0,
        sharey=True,
    )


def occupancy(found: Document) -> Picture:
    """Draw the requests and blocks of the server over time."""
    columns = found["occupancy"]["columns"]
    states = [state for state in BLOCKS if any(columns[state])]

    def draws(axes: Any) -> None:
        requests, *blocks = np.atleast_1d(axes)
        for name, colour in (("running", BLUE), ("pending", ORANGE)):
            requests.plot(columns["at_s"], columns[name], color=colour, label=name)
        requests.set_title("requests")
        for panel in blocks:
            panel.stackplot(
                columns["at_s"],
                [columns[state] for state in states],
                labels=states,
                colors=[BLOCKS[state] for state in states],
                alpha=0.85,
                linewidth=0,
            )
            panel.set_title("blocks by state")
            panel.margins(y=0)
        _over_time(found, axes)

    means = {name: found["occupancy"][name] for name in ("pending", "running", *states)}
    averages = ", ".join(f"{name} {number(each['mean'])}" for name, each in means.items() if each)
    return draw(
        "occupancy",
        "Occupancy",
        alt=f"Requests and blocks of the server over the run; average over the measured span: {averages}.",
        caption=f"As reported by the server. {_marked(found)}",
        draws=draws,
        panels=(2 if states else 1, 1),
        height_in=4.2 if states else 2.4,
        sharex=True,
    )


def _over_time(found: Document, axes: Any) -> None:
    """Set up a time axis, shade what is not measured, and mark each kill with a red line."""
    span, panels = found["span"], np.atleast_1d(axes)
    for panel in panels:
        panel.set_xlim(0, max(span["wall_s"], 1e-3))
        if panel.get_yscale() == "linear":
            panel.set_ylim(bottom=0)
        for low, high in ((0.0, span["start_s"]), (span["end_s"], span["wall_s"])):
            if high > low:
                panel.axvspan(low, high, color=GREY, alpha=0.13, linewidth=0)
        for kill in (found["chaos"] or {}).get("kills", ()):
            panel.axvline(kill["at_s"], color=RED, linestyle="--", linewidth=1)
        legend(panel)
    panels[-1].set_xlabel("seconds since the start")


def _marked(found: Document) -> str:
    """Describe the marks in pictures over time."""
    return SHADED if not (found["chaos"] or {}).get("kills") else f"{SHADED} Red lines: a process was killed."


def _gaps(values: list[float | None]) -> list[float]:
    """Replace None by NaN, and 0 by a value that a logarithmic axis can show."""
    return [float("nan") if value is None else max(value, 1e-3) for value in values]


def _medians(found: Document, time: str) -> str:
    summary = found["all"]["latency_ms"][time]
    if summary is None:
        return f"{LATENCIES[time]}: not measured"
    return f"{LATENCIES[time]}: p50 {number(summary['p50'])} ms, p99 {number(summary['p99'])} ms"
