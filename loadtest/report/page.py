"""The report as one HTML file without external resources; its content security policy forbids any fetch.

Invariant: all text from outside (tenants, options, server messages) is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import compare as beside
from . import sweep as sweeping
from .drawing import Picture
from .tables import Table, divided, ends, errors, good_words, groups, lag, latency, rates, server
from .terminal import verdict_line
from .timeline import name, shares_ms
from .words import NOTHING, number, pairs, percent

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
Document = dict[str, Any]


def page(
    found: Document, pictures: Sequence[Picture], *, compare: Document | None = None, sweep: Document | None = None
) -> str:
    """Return the HTML of a report.

    Args:
        found: The document.
        pictures: The pictures of the document and the sweep.
        compare: The result of `compare.compare`.
        sweep: The result of `sweep.sweep`.
    """
    drawn = {picture.name: picture for picture in pictures}
    parts = [_head(found), _verdict(found), _tiles(found)]
    if sweep is not None:
        knee = f"<p><b>{escape(sweep['knee']['sentence'].capitalize())}.</b></p>"
        parts += _section("Sweep", knee, _figure(drawn.get("sweep")), _table(sweeping.table(sweep)))
    if compare is not None:
        parts += _section("Comparison", _compared(compare))
    parts += _section(
        "Latency", _table(latency(found)), *(_figure(drawn.get(each)) for each in ("distributions", "latency"))
    )
    parts += _section("Throughput", _table(rates(found)), _figure(drawn.get("throughput")))
    parts += _section(
        "By tenant and class", _table(groups("tenant", found["tenants"])), _table(groups("class", found["kinds"]))
    )
    parts += _section("Time by phase", _figure(drawn.get("breakdown")), _table(divided(found), words=True))
    parts += _section("The slowest requests", _figure(drawn.get("slowest")), _slowest(found["tail"]))
    parts += _section("Server", _figure(drawn.get("occupancy")), _table(server(found), words=True))
    parts += _section("Errors", _table(errors(found), words=True))
    parts += _section("Faults", _faults(found["chaos"]))
    parts += _section("Driver", _table(lag(found)))
    parts += _section("Configuration", _configuration(found))
    return _file(found["title"], "\n".join(part for part in parts if part))


def _file(title: str, body: str) -> str:
    here = Path(__file__).parent
    css, script = ((here / part).read_text(encoding="utf-8") for part in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _head(found: Document) -> str:
    model = found["model"] or {}
    about = " · ".join(str(each) for each in (model.get("name"), found["machine"].get("processor")) if each)
    return f"<h1>{escape(found['title'])}</h1>\n<p class=soft>{escape(about)}</p>\n<p>{escape(ends(found))}.</p>"


def _verdict(found: Document) -> str:
    judged = found["verdict"]
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in (*judged["why"], *judged["notes"]))
    kind = "valid" if judged["valid"] else "invalid"
    listed = f"<ul>{sentences}</ul>" if sentences else ""
    return f'<div class="verdict {kind}" role=status><strong>{escape(verdict_line(found))}</strong>{listed}</div>'


def _tiles(found: Document) -> str:
    whole = found["all"]
    times = [
        (number((whole["latency_ms"][time] or {}).get("p50")), "ms", f"{words}, p50; p99 "
         + number((whole["latency_ms"][time] or {}).get("p99")))
        for time, words in (("ttft", "time to first token"), ("itl", "between tokens"), ("e2e", "end to end"))
    ]  # fmt: skip
    speed = whole["throughput"]
    made = [
        *times,
        (number(speed["output_tokens_per_s"]), "/s", "output tokens"),
        (number(speed["requests_per_s"]), "/s", "requests finished"),
        (percent(whole["goodput"]["share"]), "", good_words(found).split(":")[0]),
    ]
    cells = (
        f"<div class=tile><b>{escape(value)} <small>{unit}</small></b><span>{escape(words)}</span></div>"
        for value, unit, words in made
    )
    return f"<div class=tiles>{''.join(cells)}</div>"


def _section(title: str, *parts: str) -> list[str]:
    """Return a heading and its parts; nothing without parts."""
    there = [part for part in parts if part]
    return [f"<h2>{escape(title)}</h2>", *there] if there else []


def _figure(picture: Picture | None) -> str:
    if picture is None:
        return ""
    svg = picture.svg.replace("<svg", f'<svg role="img" aria-label="{escape(picture.alt)}"', 1)
    words = f"<b>{escape(picture.title)}.</b> {escape(picture.caption)}"
    return f"<figure>{svg}<figcaption>{words}</figcaption></figure>"


def _table(table: Table, *, words: bool = False) -> str:
    """Render a table. With `words` all columns are text."""
    if not table.rows:
        return ""
    kind = " class=words" if words else ""
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in (table.header[0] or table.title, *table.header[1:]))
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    head = f"<thead><tr>{head}</tr></thead>"
    return f"<div class=scroll><table{kind}>{head}<tbody>{rows}</tbody></table></div>{note}"


def _cell(text: str) -> str:
    kind = f" class={text}" if text in (beside.BETTER, beside.WORSE) else ""
    return f"<td{kind}>{escape(text)}</td>"


def _compared(compared: Document) -> str:
    notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in compared["notes"])
    return _table(beside.table(compared)) + (f'<ul class="notes soft">{notes}</ul>' if notes else "")


def _slowest(tail: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for request in tail:
        spent = ", ".join(f"{state} {number(ms)}" for state, ms in shares_ms(dict(request)).items())
        sentence = str(request.get("sentence") or NOTHING)
        rows.append([name(dict(request)), number(request["latency_ms"]), spent or NOTHING, sentence])
    return _table(Table("", ("request", "ms", "spent on, ms", "why"), rows), words=True)


def _faults(chaos: Document | None) -> str:
    if chaos is None:
        return ""
    first, *others = [*map(str, chaos.get("sentences", ())), ""]
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in others if sentence)
    kind = "better" if chaos.get("kept") else "worse"
    return f"<p class={kind}><b>{escape(first)}</b></p><ul>{listed}</ul>"


def _configuration(found: Document) -> str:
    taken, windows = found["percentiles"], found["windows"]
    how = {
        "measured": f"{number(found['span']['start_s'])} s to {number(found['span']['end_s'])} s",
        "windows": f"{windows['count']} of {number(windows['seconds'])} s",
        "percentiles": f"{taken['package']}, {taken['lowest_us']} to {taken['highest_us']:,} µs, "
        f"{taken['digits']} digits",
        "seed": found["seed"],
        "format": found["format"],
    }
    parts = [
        _pairs("Options", found["options"]),
        _pairs("How it was measured", how),
        _pairs("Machine", found["machine"]),
        _pairs("Versions", found["versions"]),
        _pairs("Model", found["model"] or {}),
    ]
    return f"<div class=two>{''.join(f'<div>{part}</div>' for part in parts if part)}</div>"


def _pairs(title: str, values: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in values.items() if value is not None}
    rows = [[str(key), pairs(value) if isinstance(value, Mapping) else str(value)] for key, value in shown.items()]
    return _table(Table(title, ("", ""), rows), words=True)
