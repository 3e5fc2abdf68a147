"""The printed report."""

from __future__ import annotations

import pytest

from kvforge.loadtest.drive.outcome import RunResult
from kvforge.loadtest.measure.document import Context, document
from kvforge.loadtest.measure.objective import Objective
from kvforge.loadtest.report.number_format import number
from kvforge.loadtest.report.terminal import text
from tests.loadtest.synthetic import context, run


def test_the_verdict_comes_first_and_every_part_is_there() -> None:
    measured = run()
    measured.outcomes[39].message = "a\x1b[2Jb"
    said = text(document(measured, context(measured, objective=Objective.parse("ttft=200ms"))))
    assert said.startswith("valid: the driver was at most 0.0")
    for words in ("time to first token", "±", "By tenant", "By class", "goodput (ttft ≤ 200 ms): ", "61.0%",
                  "worker_error", "blocks referenced", "The 10 slowest", "nothing was lost", "note: "):  # fmt: skip
        assert words in said
    assert "\x1b" not in said


def test_an_invalid_run_says_so_in_its_first_line() -> None:
    measured = run(duration_s=5, lag_s=0.1)
    said = text(document(measured, context(measured))).splitlines()
    assert said[0].startswith("INVALID") and "the driver was late: " in said[1]
    assert text(document(RunResult(outcomes=[]), Context(options={}))).startswith("INVALID")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (4.567, "4.57"),
        (45.67, "45.7"),
        (1234.6, "1,235"),
        (-2.0, "-2.00"),
    ],
)
def test_numbers_have_three_digits_that_matter(value: float | None, words: str) -> None:
    assert number(value) == words
