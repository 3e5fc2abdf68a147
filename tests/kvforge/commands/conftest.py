"""Shared fixtures of the command tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvforge.commands import cli
from tests.kvforge.fake_coordinator import Running


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One fake coordinator for the tests that leave it intact."""
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as folder, Running(Path(folder)) as running:
        yield running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process; return its status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run
