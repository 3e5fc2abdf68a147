"""The parts of a socket, for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.coordinator.transport.parts import Parts


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.close()
