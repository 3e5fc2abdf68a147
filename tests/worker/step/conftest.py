"""Fixtures for tests of steps."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _loads_are_quick(alike_loads: None) -> None:
    """Steps are tested here, and loads elsewhere."""
