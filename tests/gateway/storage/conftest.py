"""Both databases, for tests of storages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.storage.postgres_server import PostgresServer, why_not


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test process."""
    if reason := why_not():
        pytest.skip(reason)
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once for each kind."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'storage' / 'gateway.sqlite'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()
