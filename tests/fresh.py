"""Seeds that change each day: tests/simulation/test_fresh.py simulates them.

The day is the date in UTC, or KVFORGE_DAY, which repeats the seeds of that day. A day's seeds do not occur on another.
"""

from __future__ import annotations

import os
from datetime import UTC, date, datetime

DAY = "KVFORGE_DAY"
SEEDS_A_DAY = 24


def choose_day() -> None:
    """Set KVFORGE_DAY, which child processes inherit: midnight may pass while the tests run."""
    os.environ.setdefault(DAY, datetime.now(UTC).date().isoformat())


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
    """Return the seeds of the day and how to repeat them."""
    day = os.environ[DAY]
    seeds = seeds_of(day)
    return f"fresh seeds: {seeds[0]} to {seeds[-1]} (repeat with {DAY}={day})"
