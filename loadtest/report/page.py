"""The report as one HTML file without external resources; its content security policy forbids any fetch.

Invariant: all text from outside (tenants, options, server messages) is escaped, by the template engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import compare as beside
from . import sweep as sweeping
from .drawing import Picture
from .number_format import NOTHING, number, pairs, percent
from .tables import Table, divided, ends, errors, good_words, groups, lag, latency, rates, server
from .terminal import verdict_line
from .timeline import name, shares_ms

if TYPE_CHECKING:
    from jinja2 import Template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
Document = dict[str, Any]
Section = dict[str, Any]


def page(
    found: Document, pictures: Sequence[Picture], *, compare: Document | None = None, sweep: Document | None = None
) -> str:
    """Return the HTML of a report.

    Args:
        found: The document.
        pictures: The pictures of the document and the sweep.
        compare: The result of `compare.compare`.
        sweep: The result of `sweep.sweep`.

    Raises:
        Unavailable: The extra `loadtest` is not installed.
    """
    model = found["model"] or {}
    about = (model.get("name"), found["machine"].get("processor"))
    here = Path(__file__).parent
    css, script = ((here / part).read_text(encoding="utf-8") for part in ("page.css", "page.js"))
    return _template().render(
        policy=POLICY,
        css=css,
        script=script,
        labelled=_labelled,
        marks=(beside.BETTER, beside.WORSE),
        title=found["title"],
        about=" · ".join(str(each) for each in about if each),
        ends=ends(found),
        verdict=found["verdict"],
        verdict_line=verdict_line(found),
        tiles=_tiles(found),
        sections=_sections(found, {picture.name: picture for picture in pictures}, compare, sweep),
    )


def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")


def _labelled(picture: Picture) -> str:
    """Return the SVG with its text alternative."""
    return picture.svg.replace("<svg", f'<svg role="img" aria-label="{escape(picture.alt)}"', 1)


def _sections(
    found: Document, drawn: Mapping[str, Picture], compare: Document | None, sweep: Document | None
) -> list[Section]:
    """Return the sections in order; a section without parts is not shown."""
    sections = []
    if sweep is not None:
        knee = {"kind": "", "first": f"{sweep['knee']['sentence'].capitalize()}.", "others": []}
        sections.append(
            _section("Sweep", ("finding", knee), ("figure", drawn.get("sweep")), ("table", sweeping.table(sweep)))
        )
    if compare is not None:
        sections.append(_section("Comparison", ("table", beside.table(compare)), ("notes", compare["notes"])))
    times = [("figure", drawn.get(each)) for each in ("distributions", "latency")]
    by = [("table", groups("tenant", found["tenants"])), ("table", groups("class", found["kinds"]))]
    return [
        *sections,
        _section("Latency", ("table", latency(found)), *times),
        _section("Throughput", ("table", rates(found)), ("figure", drawn.get("throughput"))),
        _section("By tenant and class", *by),
        _section("Time by phase", ("figure", drawn.get("breakdown")), ("words", divided(found))),
        _section("The slowest requests", ("figure", drawn.get("slowest")), ("words", _slowest(found["tail"]))),
        _section("Server", ("figure", drawn.get("occupancy")), ("words", server(found))),
        _section("Errors", ("words", errors(found))),
        _section("Faults", ("finding", _faults(found["chaos"]))),
        _section("Driver", ("table", lag(found))),
        _section("Configuration", ("beside", _configuration(found))),
    ]


def _section(title: str, *parts: tuple[str, Any]) -> Section:
    """Return a section with the parts that hold something."""
    return {"title": title, "parts": [(kind, part) for kind, part in parts if _holds_something(part)]}


def _holds_something(part: Any) -> bool:
    return bool(part.rows) if isinstance(part, Table) else bool(part)


def _tiles(found: Document) -> list[tuple[str, str, str]]:
    """Return the value, the unit and the words of each tile."""
    whole = found["all"]
    times = [
        (number((whole["latency_ms"][time] or {}).get("p50")), "ms", f"{words}, p50; p99 "
         + number((whole["latency_ms"][time] or {}).get("p99")))
        for time, words in (("ttft", "time to first token"), ("itl", "between tokens"), ("e2e", "end to end"))
    ]  # fmt: skip
    speed = whole["throughput"]
    return [
        *times,
        (number(speed["output_tokens_per_s"]), "/s", "output tokens"),
        (number(speed["requests_per_s"]), "/s", "requests finished"),
        (percent(whole["goodput"]["share"]), "", good_words(found).split(":")[0]),
    ]


def _slowest(tail: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for request in tail:
        spent = ", ".join(f"{state} {number(ms)}" for state, ms in shares_ms(dict(request)).items())
        sentence = str(request.get("sentence") or NOTHING)
        rows.append([name(dict(request)), number(request["latency_ms"]), spent or NOTHING, sentence])
    return Table("", ("request", "ms", "spent on, ms", "why"), rows)


def _faults(chaos: Document | None) -> Document | None:
    if chaos is None:
        return None
    first, *others = [*map(str, chaos.get("sentences", ())), ""]
    return {
        "kind": "better" if chaos.get("kept") else "worse",
        "first": first,
        "others": [each for each in others if each],
    }


def _configuration(found: Document) -> list[Table]:
    taken, windows = found["percentiles"], found["windows"]
    how = {
        "measured": f"{number(found['span']['start_s'])} s to {number(found['span']['end_s'])} s",
        "windows": f"{windows['count']} of {number(windows['seconds'])} s",
        "percentiles": f"{taken['package']}, {taken['lowest_us']} to {taken['highest_us']:,} µs, "
        f"{taken['digits']} digits",
        "seed": found["seed"],
        "format": found["format"],
    }
    made = [
        _pairs("Options", found["options"]),
        _pairs("How it was measured", how),
        _pairs("Machine", found["machine"]),
        _pairs("Versions", found["versions"]),
        _pairs("Model", found["model"] or {}),
    ]
    return [each for each in made if each.rows]


def _pairs(title: str, values: Mapping[str, Any]) -> Table:
    shown = {key: value for key, value in values.items() if value is not None}
    rows = [[str(key), pairs(value) if isinstance(value, Mapping) else str(value)] for key, value in shown.items()]
    return Table(title, ("", ""), rows)
