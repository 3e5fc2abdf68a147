"""A PostgreSQL server that goes away and comes back."""

from __future__ import annotations

import pytest

from kvforge.gateway.storage import Delete, Get, Put, StorageFailed
from kvforge.gateway.storage.inline import InlineStorage
from kvforge.gateway.storage.postgres import shown
from kvforge.gateway.storage.schema import SCHEMA_VERSION
from tests.gateway.storage.postgres_server import PostgresServer

X = {"tenant": "a", "kind": "thing", "id": "x"}


def test_a_server_that_restarts_is_an_error_meanwhile(postgres: PostgresServer) -> None:
    storage = InlineStorage(postgres.new_database())
    storage.done(Put(**X, body=b"kept"))
    postgres.stop()
    try:
        for _ in range(2):
            with pytest.raises(StorageFailed, match=r"postgresql://kvforge@/made_\d+: .*\[storage\] url"):
                storage.done(Put(**X, body=b"lost"))
    finally:
        postgres.start()
    assert storage.done(Get(**X))[0].body == b"kept"  # type: ignore[union-attr]
    storage._engine.close()


def test_deleted_rows_are_vacuumed(postgres: PostgresServer) -> None:
    storage = InlineStorage(postgres.new_database())
    storage.done(Put(**X, body=b"x" * 10_000))
    storage.done(Delete(**X))
    rows = storage._engine._db.execute(
        "SELECT n_dead_tup, last_vacuum FROM pg_stat_user_tables WHERE relname = ?", ("documents",)
    )
    assert rows[0][0] == 0 and rows[0][1] is not None and not storage._engine.untidy
    storage._engine._db.execute("UPDATE kvforge_schema SET version = 99")
    storage._engine.close()
    with pytest.raises(StorageFailed, match=f"have version 99, and this gateway knows {SCHEMA_VERSION}"):
        storage.done(Get(**X))


def test_a_password_is_not_shown() -> None:
    assert shown("postgresql://me:secret@db.example:5433/kv?sslmode=require") == "postgresql://me@db.example:5433/kv"
