"""The scripted gateway, and the clients as they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.clients import installs
from tests.gateway.clients.running import Home
from tests.gateway.clients.stage import Stage


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """The server of all tests of this process, one after another."""
    with Stage() as stage:
        yield stage


@pytest.fixture
def home(tmp_path: Path, stage: Stage) -> Home:
    """Folders of a client of this test alone."""
    return Home(tmp_path, stage.proxy)


@pytest.fixture(scope="session")
def modules() -> Path:
    """Where npm has installed the clients."""
    return _or_skipped(installs.node_modules)


@pytest.fixture(scope="session")
def python() -> installs.Python:
    """The interpreter of a set of Python clients, by the set's name."""
    return lambda name: _or_skipped(lambda: installs.python_with(name))


def _or_skipped(installed: Callable[[], Path]) -> Path:
    try:
        return installed()
    except installs.Missing as missing:
        if os.environ.get(installs.CHOICE) == installs.REQUIRED:
            raise
        pytest.skip(str(missing))
