"""For tests that play whole worlds: with what other tests have in memory Python would look for dead ones too late."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tools.simulation.runner import collected_at_their_end


@pytest.fixture(autouse=True, scope="module")
def apart() -> Iterator[None]:
    """What is there before is not looked through."""
    with collected_at_their_end():
        yield


@pytest.fixture(autouse=True)
def over() -> Iterator[None]:
    """The worlds of a test go with it, and their files."""
    yield
    gc.collect()
