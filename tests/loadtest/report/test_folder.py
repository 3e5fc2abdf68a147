"""The folder of a report: its contents, its independence of other files, and its safety against hostile names."""

from __future__ import annotations

import csv
import errno
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvforge.loadtest.drive.outcome import INTERRUPTED, REFUSED, Outcome, RunResult
from kvforge.loadtest.measure.document import Context, document
from kvforge.loadtest.report import sweep as sweeping
from kvforge.loadtest.report.compare import compare
from kvforge.loadtest.report.folder import write
from kvforge.loadtest.report.result import encoded, read, save
from kvforge.protocol.errors import InvalidRequest
from tests.loadtest.report.everything import PICTURES, write_everything
from tests.loadtest.synthetic import context, run


class Read(HTMLParser):
    """Collects every element with its attributes, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_everything_is_there(folder: Path) -> None:
    names = {"index.html", "result.json", "requests.csv", *(f"{name}.png" for name in PICTURES)}
    assert {each.name for each in folder.iterdir()} == names
    found = read(folder / "result.json")
    assert found["sweep"]["option"] == "rate" and found["compare"]["rows"]
    rows = list(csv.DictReader((folder / "requests.csv").read_text().splitlines()))
    assert len(rows) == 128 and rows[0]["state"] == "finished" and int(rows[0]["tokens"]) > 0


def test_the_page_needs_nothing_but_itself(folder: Path) -> None:
    text = (folder / "index.html").read_text()
    assert "://" not in text and "@import" not in text
    page = Read()
    page.feed(text)
    assert not page.open
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in page.elements:
        for name in ("href", "xlink:href", "src", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
        for reference in re.findall(r"url\(#(.*?)\)", " ".join(filter(None, attributes.values()))):
            assert reference in names
    figures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(figures) == len(PICTURES) and all(len(figure["aria-label"] or "") > 40 for figure in figures)


def test_what_others_have_named_is_only_text(folder: Path) -> None:
    text = (folder / "index.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<b>beta" not in text and "&lt;b&gt;beta&lt;/b&gt;" in text
    assert "<w0>" not in text and "<others>" not in text


def test_a_report_that_is_made_again_is_the_same(folder: Path, tmp_path: Path) -> None:
    write_everything(tmp_path)
    for made in folder.iterdir():
        assert made.read_bytes() == (tmp_path / made.name).read_bytes(), made.name


def test_a_run_of_nothing_has_a_report(tmp_path: Path) -> None:
    write(tmp_path, document(RunResult(outcomes=[]), Context(options={"rate": 1.0})), None)
    assert {each.name for each in tmp_path.iterdir()} == {"index.html", "result.json"}
    assert "INVALID" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("state", [REFUSED, pytest.param(INTERRUPTED, marks=pytest.mark.soak)])
def test_a_run_in_which_nothing_finished_has_a_report(tmp_path: Path, state: str) -> None:
    outcomes = [
        Outcome(session=index, due_s=index / 10, state=state, awake_s=index / 10, sent_s=index / 10, ended_s=2.5)
        for index in range(20)
    ]
    measured = replace(run(), outcomes=outcomes, wall_s=2.6)
    found = document(measured, context(measured))
    write(tmp_path, found, measured, sweep=sweeping.sweep("rate", [(1.0, found), (2.0, found)]))
    assert {"index.html", "throughput.png"} <= {each.name for each in tmp_path.iterdir()}
    assert not (tmp_path / "latency.png").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not a result"),
        ('{"format": 1}', "is not a result"),
        ('{"format": 99, "windows": {}}', "has format 99, but this version reads 1"),
    ],
)
def test_what_is_no_result_of_this_format_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "result.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequest, match=words) as refused:
        read(file)
    assert str(refused.value).startswith("compare: ")


def test_a_file_that_cannot_be_written_is_named_and_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/result\.json'"):
        save(tmp_path / "result.json", b"{}")
    assert not list(tmp_path.iterdir())


def damages(found: Any) -> Iterator[str]:
    """Drop or replace each part in turn, at any depth; yield which."""
    for key in list(found) if isinstance(found, dict) else range(min(2, len(found))):
        before = found[key]
        for other in (None, "x", -1, [], {}, float("nan"), float("inf"), True):
            found[key] = other
            yield f"{key}={other}"
        if isinstance(found, dict):
            del found[key]
            yield f"{key} left out"
        found[key] = before
        if isinstance(before, dict | list):
            yield from (f"{key}.{what}" for what in damages(before))


def test_a_damaged_result_is_refused_when_it_is_read_or_does_no_harm(tmp_path: Path) -> None:
    measured = run(rate=8, seed=1, duration_s=3)
    later, file = document(measured, context(measured)), tmp_path / "result.json"
    earlier = json.loads(json.dumps(later))
    for part in ("all", "tenants", "kinds", "curves", "series", "server", "prefix", "occupancy", "why", "tail", "span"):
        del earlier[part]  # no comparison without these
    earlier["windows"]["intervals"] = dict(list(earlier["windows"]["intervals"].items())[:2])
    refused = 0
    for what in damages(earlier):
        file.write_text(json.dumps(earlier))
        try:
            read_back = read(file)
        except InvalidRequest as error:
            assert "compare: " in str(error), what
            refused += 1
            continue
        encoded(later | {"compare": compare(read_back, later)})
    assert refused > 50


def test_two_results_are_compared_with_their_noise() -> None:
    quick, again, slow = (
        document(measured, context(measured, seed=seed))
        for seed, measured in enumerate((run(rate=8, seed=1), run(rate=8, seed=2), run(rate=24, seed=1)))
    )
    verdicts = {row["name"]: row["verdict"] for row in compare(quick, slow)["rows"]}
    assert verdicts["itl_mean_ms"] == "worse" and verdicts["output_tokens_per_s"] == "better"
    assert {row["verdict"] for row in compare(quick, quick)["rows"]} == {"within the noise"}
    assert sum(row["verdict"] != "within the noise" for row in compare(quick, again)["rows"]) <= 2
    assert any("different seeds: 0 then, 1 now" in note for note in compare(quick, again)["notes"])
    alone = json.loads(json.dumps(quick))
    alone["windows"]["intervals"] = dict.fromkeys(alone["windows"]["intervals"])
    assert {row["verdict"] for row in compare(alone, quick)["rows"]} == {"noise unknown"}


def points(*runs: tuple[float, float, float, bool]) -> list[tuple[float, dict[str, Any]]]:
    """Return points of (value, share that met the objective or finished, median end to end, valid)."""
    measured = run(rate=5, duration_s=3)
    made = []
    for value, share, e2e_ms, valid in runs:
        found = document(measured, context(measured))
        found["all"]["goodput"]["share"] = share
        found["all"]["requests"] |= {"due": 100, "finished": round(100 * share)}
        found["all"]["latency_ms"]["e2e"]["p50"] = e2e_ms
        found["verdict"]["valid"] = valid
        made.append((value, found))
    return made


def test_the_knee_is_the_last_value_that_is_served_well() -> None:
    late = sweeping.sweep("rate", points((8, 1.0, 25.0, True), (2, 1.0, 10.0, True), (4, 1.0, 18.0, True)))
    assert late["knee"] == {
        "value": 4, "sentence": "the knee is at rate 4: at 8, the median end to end is 2.5 times that of 2"
    }  # fmt: skip
    runs = points((1, 0.99, 10.0, True), (2, 0.7, 11.0, False), (4, 0.95, 90.0, True), (8, 0.5, 90.0, True))
    for _, found in runs:
        found["objective"] = {"ttft": 300.0}
    good = sweeping.sweep("rate", runs)["knee"]
    assert good["value"] == 4 and good["sentence"].endswith("at 8, 50.0% of the requests met the objective")
    assert "no knee up to rate 4" in sweeping.sweep("rate", runs[:3])["knee"]["sentence"]
    assert sweeping.sweep("rate", runs[3:])["knee"]["value"] is None
    assert "no run is valid" in sweeping.sweep("rate", runs[1:2])["knee"]["sentence"]
