"""Output of commands on a terminal and elsewhere."""

from __future__ import annotations

import io
import itertools

import pytest

from kvforge.commands import printing
from kvforge.commands.progress import Progress
from kvforge.commands.screen import Columns, InTurn, printable, screen
from kvforge.protocol.messages import WorkerHealth


def test_progress_without_a_terminal_is_a_line_a_step() -> None:
    stream, seconds = io.StringIO(), itertools.count(0.0, 10.0)
    progress = Progress(stream, clock=lambda: next(seconds))
    for percent in range(0, 101, 5):
        progress.step("m", "downloading", percent / 100)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "m: downloading",
        "m: downloading 25 %",
        "m: downloading 50 %",
        "m: downloading 75 %",
        "m: downloading 100 %",
    ]


def test_quick_steps_have_no_line_each_without_a_terminal() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, clock=lambda: now[0])
    for at, phase in ((0.0, "connecting"), (0.1, "loading weights"), (2.5, "loading weights"), (2.6, "packing")):
        now[0] = at
        progress.step("w", phase, 0.0)
    progress.step("w", "ready", 0.0)
    progress.step("w", "ready", 0.0)
    assert stream.getvalue().splitlines() == ["w: connecting", "w: loading weights", "w: ready"]


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({}, ""),
        ({"drafts": 4}, "    drafts: at most 4 for a request in a step; none verified yet\n"),
        (
            {"drafts": 4, "drafted_total": 8, "accepted_total": 6},
            "    drafts: at most 4 for a request in a step; 6 of 8 accepted (75 %)\n",
        ),
    ],
)
def test_drafts_of_a_worker(counts: dict[str, int], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_drafts(WorkerHealth(name="w", pid=1, state="ready", **counts))
    assert capsys.readouterr().out == line


def test_the_host_tier_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"host_cached": 5, "host_saved_total": 9, "host_loaded_total": 4, "host_missed_total": 1}
    for blocks in (0, 8):
        printing.print_host_tier(WorkerHealth(name="w", pid=1, state="ready", host_blocks=blocks, **counts))
    line = "    host tier: 5 of 8 blocks cached; 9 saved, 4 loaded, 1 missed"
    assert capsys.readouterr().out == f"{line}\n"
    returned = counts | {"host_blocks": 8, "host_returns_total": 5, "host_returns_used_total": 4}
    swapped = counts | {"host_blocks": 8, "host_swapped_total": 3, "host_swap_saved_us_total": 1_260_000}
    printing.print_host_tier(WorkerHealth(name="w", pid=1, state="ready", **swapped))
    assert capsys.readouterr().out == f"{line}; 3 requests swapped in, 1.3 s saved\n"
    printing.print_host_tier(WorkerHealth(name="w", pid=1, state="ready", **returned))
    assert capsys.readouterr().out == f"{line}; 5 sequences back before a request, 4 used\n"


def test_texts_in_turn_come_out_whole_and_in_order() -> None:
    stream = io.StringIO()
    shown = screen(["one", "two", "three"], stream)
    assert isinstance(shown, InTurn)
    for index, text in ((1, "B"), (0, "A"), (2, "C"), (0, "a"), (2, "c")):
        shown.add(index, text)
    shown.end(2)
    shown.end(0)
    shown.add(1, "b\x1b[2J")
    shown.end(1)
    shown.close()
    assert stream.getvalue() == "[1] one\nAa\n\n[2] two\nBb[2J\n\n[3] three\nCc\n"


def test_columns_keep_their_width_and_height() -> None:
    stream = io.StringIO()
    shown = Columns(["one", "two"], stream, 10, 6)
    for _ in range(40):
        shown.add(0, "words and ")
        shown.add(1, "日本語")
    shown.close()
    last = stream.getvalue().rpartition("A\r")[2].replace("\x1b[2K", "").splitlines()
    assert len(last) == 6
    assert last[0].split() == ["one", "two"]
    assert last[2].startswith("...")
    assert all(len(line) <= 22 for line in last)


def test_a_model_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[31m\r\x07b\n\tc") == "a[31mb\n\tc"


def test_a_table_lines_numbers_up(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table(("name", "n"), [("a", 5), ("long", 10)])
    assert capsys.readouterr().out == "name   n\na      5\nlong  10\n"
