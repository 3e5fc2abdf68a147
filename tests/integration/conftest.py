"""The shared cluster, and slow, mostly idle work that starts before the tests that need it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import Client
from tests.integration import systemd_boot
from tests.integration.shared import Shared
from tools.cluster.cluster import Cluster


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


@pytest.fixture(scope="session")
def _shared_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.start("w0")
        yield cluster


@pytest.fixture
def shared(_shared_cluster: Cluster) -> Iterator[Shared]:
    """Return the cluster of all tests that kill nothing and change no setting. Its counters go on between tests."""
    with Client(_shared_cluster.endpoint, timeout_s=60, connect_timeout_s=30) as client:
        found = Shared(_shared_cluster, client)
        yield found
        found.check()
