"""Fixtures for tests of steps."""

from __future__ import annotations

import pytest

from tests.worker.quick_loads import load_alike


@pytest.fixture(autouse=True)
def _loads_are_quick(quick_loads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are tested here, and loads elsewhere."""
    load_alike(monkeypatch)
