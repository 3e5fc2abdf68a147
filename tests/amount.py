"""The number of random examples and of checks: all in `make test-all` and of chosen tests, fewer in `make test`.

`make test` takes the first examples of the same sequence, so that it repeats nothing that `make test-all` leaves out.
"""

from __future__ import annotations

import pytest

SHARE = 0.25  # of the examples, in `make test`
LEFT_OUT = "not soak"  # what `make test` selects by
_share = [1.0]


def choose(config: pytest.Config) -> None:
    """Choose for the tests that pytest collects next.

    Args:
        config: pytest's, with the expression that selects tests by their marks.
    """
    _share[0] = SHARE if config.getoption("markexpr") == LEFT_OUT else 1.0


def examples(count: int) -> int:
    """Return how many examples a test takes.

    Args:
        count: The number in `make test-all`.

    Returns:
        At least one.
    """
    return max(1, round(_share[0] * count))


def thinned(every: int) -> int:
    """Return `every` in `make test`, else 1: how many events pass between two checks of a long test."""
    return every if _share[0] < 1.0 else 1
