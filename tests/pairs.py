"""Pairs of two parameters of a test: in `make test` each value of both, in `make test-all` every pair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_pair(firsts: Iterable[Any], seconds: Iterable[Any]) -> list[Any]:
    """Return all pairs as parameters, most as soak tests.

    Args:
        firsts: Values of the first parameter, or tuples of several parameters.
        seconds: The same for the second.

    Returns:
        One `pytest.param` for each pair. Those without the mark have each value at least once.
    """
    ones, others = list(firsts), list(seconds)
    return [
        pytest.param(
            *_flat(one), *_flat(other), marks=[] if row % len(others) == column % len(ones) else pytest.mark.soak
        )
        for row, one in enumerate(ones)
        for column, other in enumerate(others)
    ]


def _flat(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)
