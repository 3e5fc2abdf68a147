"""How many functions and files one decode turn passes, and that docs/step.md names these files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.turn_calls import Call, files_of, steady_turn

ROOT = Path(__file__).parents[2]
CALLS_MAX, FILES_MAX = 100, 25
WITH_JOURNAL_CALLS_MAX = 110


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """The calls of a steady turn of 256 sequences."""
    return steady_turn()


def test_a_decode_turn_has_a_bounded_number_of_calls_and_files(calls: list[Call]) -> None:
    assert len(calls) <= CALLS_MAX, f"{len(calls)} calls: see python -m benchmarks.turn_calls"
    assert len(files_of(calls)) <= FILES_MAX, files_of(calls)


def test_the_journal_adds_few_calls() -> None:
    assert len(steady_turn(durability="process")) <= WITH_JOURNAL_CALLS_MAX


def test_the_description_of_a_step_names_every_file(calls: list[Call]) -> None:
    text = (ROOT / "docs" / "step.md").read_text()
    missing = [file for file in files_of(calls) if f"(../{file})" not in text]
    assert not missing, f"docs/step.md does not name {missing}"
