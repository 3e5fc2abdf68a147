"""Fixtures for tests that run whole worlds: other tests' objects would delay the collection of dead worlds."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tools.simulation.runner import collected_at_their_end


@pytest.fixture(autouse=True, scope="module")
def apart() -> Iterator[None]:
    """Exclude existing objects from garbage collection."""
    with collected_at_their_end():
        yield


@pytest.fixture(autouse=True)
def over() -> Iterator[None]:
    """Collect the worlds of a test, and their files, at its end."""
    yield
    gc.collect()
