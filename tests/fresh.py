"""Seeds and cases that change each day.

tests/simulation/test_fresh.py simulates a day's seeds, which do not occur on another. Of a rotation of cases, a run of
all tests takes a day's share; the next days take the others. A run of chosen files, or with -k, takes all cases.
The day is the date in UTC, or KVFORGE_DAY, which repeats the seeds and the cases of that day.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import TypeVar

import pytest

Case = TypeVar("Case")
DAY = "KVFORGE_DAY"
SEEDS_A_DAY = 24
_all_tests = [False]


def choose_day(config: pytest.Config) -> None:
    """Set KVFORGE_DAY, which child processes inherit: midnight may pass while the tests run.

    Args:
        config: pytest's, with the files and the expressions that select tests.
    """
    os.environ.setdefault(DAY, datetime.now(UTC).date().isoformat())
    _all_tests[0] = not config.getoption("file_or_dir") and not config.getoption("keyword")


def of_the_day(cases: Iterable[Case], days: int) -> list[Case]:
    """Return every `days`th case, other ones on the next day; all in a run of chosen tests.

    Args:
        cases: All cases, in an order that stays.
        days: The days after which each case was taken once.
    """
    if not _all_tests[0]:
        return [*cases]
    today = date.fromisoformat(os.environ[DAY]).toordinal()
    return [case for place, case in enumerate(cases) if (place - today) % days == 0]


def seeds_of(day: str) -> range:
    """Return the seeds of a day.

    Args:
        day: a date as YYYY-MM-DD.

    Raises:
        ValueError: `day` is not such a date.
    """
    start = date.fromisoformat(day).toordinal() * SEEDS_A_DAY
    return range(start, start + SEEDS_A_DAY)


def headline() -> str:
    """Return the seeds of the day, whether cases rotate, and how to repeat both."""
    day = os.environ[DAY]
    seeds = seeds_of(day)
    cases = "the cases of this day" if _all_tests[0] else "all cases"
    return f"fresh seeds: {seeds[0]} to {seeds[-1]}; {cases} (repeat with {DAY}={day})"
