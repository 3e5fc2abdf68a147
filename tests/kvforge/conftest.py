"""Shared fixtures of both clients' tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import Client
from tests.kvforge.fake_coordinator import Running


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def fake(folder: Path) -> Iterator[Running]:
    with Running(folder) as running:
        yield running


@pytest.fixture
def kv(fake: Running) -> Iterator[Client]:
    with Client(fake.endpoint, timeout_s=30, stream_timeout_s=60) as client:
        yield client
