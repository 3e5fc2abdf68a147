"""Fixtures: the scripted gateway, and the installed clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.clients import installs, recording
from tests.gateway.clients.running import Home
from tests.gateway.clients.stage import Stage


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """The server for all tests of this process, one after another."""
    with Stage() as stage:
        yield stage


@pytest.fixture
def home(tmp_path: Path, stage: Stage) -> Home:
    """Private folders of this test's client."""
    return Home(tmp_path, stage.proxy)


@pytest.fixture
def recorded(request: pytest.FixtureRequest, stage: Stage, home: Home) -> Iterator[None]:
    """Compare what a client asked for with its recorded requests, or record them (see `recording.py`)."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        return
    name, asked = request.node.name.removeprefix("test_"), recording.fields(stage.exchanges)
    if recording.RECORD in os.environ:
        recording.record(name, stage, home.path)
    assert asked == recording.fields(recording.load(name)), f"{recording.RECORD}=1 records"


@pytest.fixture(scope="session")
def modules() -> Path:
    """The folder of the clients from npm."""
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
