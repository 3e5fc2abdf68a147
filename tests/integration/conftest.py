"""Starts slow, mostly idle work before the tests that need it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import systemd_boot


@pytest.fixture(scope="session")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a machine with systemd that boots beside other tests; one for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "systemd"
    process = systemd_boot.begin(folder)
    yield folder
    if process is not None:
        process.wait()  # its tests may run in another process


@pytest.fixture(scope="session", autouse=True)
def _begun(request: pytest.FixtureRequest) -> None:
    """Boot the machine with the first test of this folder, if tests of the machine follow."""
    if any("booted" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("booted")
