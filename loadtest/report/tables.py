"""The tables of a document as rows of text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..drive.outcome import ENDS
from ..measure.group import LATENCIES
from ..measure.percentiles import PERCENTILES, name
from ..measure.verdict import LAGS
from .number_format import milliseconds, number, percent, spread
from .timeline import shares, which

Document = dict[str, Any]
COLUMNS = ("mean", *(name(each) for each in PERCENTILES), "max")
RATES = {
    "requests_per_s": "requests finished",
    "input_tokens_per_s": "input tokens",
    "output_tokens_per_s": "output tokens",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        title: Its title.
        header: The names of the columns.
        rows: The rows; the first column is text, the others are numbers.
        note: A sentence below it, or "".
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def tables(found: Document) -> list[Table]:
    """Return all tables with rows, the most important first."""
    made = [latency(found), rates(found), groups("tenant", found["tenants"]), groups("class", found["kinds"])]
    made += [divided(found), server(found), errors(found), lag(found)]
    return [table for table in made if table.rows]


def latency(found: Document) -> Table:
    """Return the table of latencies."""
    intervals = found["windows"]["intervals"]
    rows = []
    for key, words in LATENCIES.items():
        summary = found["all"]["latency_ms"][key]
        if summary is not None:
            cells = [spread(summary[column], intervals.get(f"{key}_{column}_ms")) for column in COLUMNS]
            rows.append([words, *cells, str(summary["count"])])
    return Table("Latency, ms", ("", *COLUMNS, "count"), rows, noise(found))


def noise(found: Document) -> str:
    """Return a note about confidence intervals, if there are any."""
    windows = found["windows"]
    if not any(windows["intervals"].values()):
        return ""
    return (
        f"± is half of a {windows['confidence']:.0%} interval over {windows['count']} windows of "
        f"{number(windows['seconds'])} s; latencies count from the intended arrival of a request"
    )


def rates(found: Document) -> Table:
    """Return the table of throughput."""
    intervals, whole = found["windows"]["intervals"], found["all"]
    rows = [[words, spread(whole["throughput"][key], intervals.get(key))] for key, words in RATES.items()]
    rows.append([good_words(found), spread(whole["goodput"]["requests_per_s"], intervals.get("goodput_per_s"))])
    return Table("Throughput, per second", ("", "measured span"), rows)


def good_words(found: Document) -> str:
    """Describe the goodput and its objective."""
    bounds = ", ".join(f"{name} ≤ {milliseconds(bound)}" for name, bound in found["objective"].items())
    return f"goodput ({bounds}): {percent(found['all']['goodput']['share'])}" if bounds else "goodput (no objective)"


def groups(word: str, by_name: Document) -> Table:
    """Return the table of tenants or classes."""
    header = (word, "due", "finished", "ttft p50", "ttft p99", "itl p50", "itl p99", "e2e p50", "e2e p99",
              "out tokens/s", "good", "cached")  # fmt: skip
    rows = []
    for key, group in by_name.items():
        times = [
            number((group["latency_ms"][time] or {}).get(column)) for time in ("ttft", "itl", "e2e")
            for column in ("p50", "p99")
        ]  # fmt: skip
        prompts = group["prompt_tokens"]
        rows.append([
            key or NAMELESS,
            str(group["requests"]["due"]),
            str(group["requests"]["finished"]),
            *times,
            number(group["throughput"]["output_tokens_per_s"]),
            percent(group["goodput"]["share"]),
            percent(group["cached_tokens"] / prompts if prompts else None),
        ])  # fmt: skip
    return Table(f"By {word}, ms", header, rows)


NAMELESS = "(none)"


def divided(found: Document) -> Table:
    """Return where time was spent by all requests and by the tail, then by tenant and class."""
    rows = []
    for part, each in found["why"].items():
        rows.append([which(part, each), str(each["requests"]), number(each["mean_ms"]), shares(each)])
        if part != "all":
            rows += [
                [f"… {word} {key or NAMELESS}", str(one["requests"]), number(one["mean_ms"]), shares(one)]
                for word, by_name in (("tenant", each["tenants"]), ("class", each["kinds"]))
                for key, one in by_name.items()
            ]
    return Table("Time by phase", ("", "requests", "mean, ms", "share of time"), rows)


def server(found: Document) -> Table:
    """Return the table of the server's own counts."""
    rows = []
    for key in ("pending", "running", "referenced", "cached", "free", "quarantined"):
        values = found["occupancy"][key]
        if values is not None and (values["max"] or key in ("pending", "running")):
            what = "requests" if key in ("pending", "running") else "blocks"
            rows.append([f"{what} {key}", f"{number(values['mean'])} mean, {number(values['max'])} max"])
    counted = found["server"]
    if counted is not None:
        rows.append(["preemptions", str(counted["preemptions"])])
        rows.append(["recomputed after preemption", f"{percent(counted['recomputed_share'])} of all computed tokens"])
        rows.append(["steps", f"{counted['steps']:,}"])
    prefix = found["prefix"]
    if prefix["queried_tokens"]:
        hits = f"{percent(prefix['share'])} of {prefix['queried_tokens']:,} tokens"
        rows.append(["prefix cache hits", hits])
        if "infinite" in prefix:
            rows.append(["hits of an unlimited cache", percent(prefix["infinite"]["share"])])
    return Table("Server", ("", ""), rows)


def errors(found: Document) -> Table:
    """Return the table of errors."""
    rows = [
        [error["state"].replace("_", " "), error["code"], str(error["count"]), error["message"]]
        for error in found["all"]["errors"]
    ]
    return Table("Errors", ("state", "code", "count", "first message"), rows)


def lag(found: Document) -> Table:
    """Return the table of the driver's lag."""
    judged = found["verdict"]
    rows = [
        [f"lag in {words}", *(number(row[column]) for column in ("p50", "p99", "max")), str(row["count"])]
        for key, words in LAGS.items()
        if (row := judged["lag_ms"][key]) is not None
    ]
    note = f"{judged['drivers']} processes, the busiest used {judged['cpu_share_max']:.0%} of a core"
    return Table("Driver, ms", ("", "p50", "p99", "max", "count"), rows, note)


def ends(found: Document) -> str:
    """Describe how the requests of the span ended, in one sentence."""
    requests, span = found["all"]["requests"], found["span"]
    shown = ", ".join(f"{requests[end]} {end.replace('_', ' ')}" for end in ENDS if requests[end])
    return (
        f"{requests['due']} requests in the measured {number(span['seconds'])} s "
        f"({number(span['start_s'])} s to {number(span['end_s'])} s of {number(span['wall_s'])} s)"
        + (f": {shown}" if shown else "")
    )
