"""SQLite's file: deleted content leaves it, and a failing disk loses nothing."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvforge.gateway.storage import (
    Append,
    Chain,
    Claim,
    Delete,
    Entry,
    Expire,
    Get,
    GetEntry,
    List,
    Mark,
    Put,
    Read,
    Release,
    RemoveEntry,
    Renew,
    StorageFailed,
    Usage,
    Watch,
)
from kvforge.gateway.storage.database import Row
from kvforge.gateway.storage.inline import InlineStorage
from kvforge.gateway.storage.schema import SCHEMA_VERSION
from kvforge.gateway.storage.sqlite import SqliteDatabase
from kvforge.protocol.errors import KvforgeError

SECRET = b"the quick brown secret"
X = {"tenant": "a", "kind": "thing", "id": "x"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "gateway.sqlite"


@pytest.fixture
def storage(file: Path) -> Iterator[InlineStorage]:
    made = InlineStorage(f"sqlite:{file}")
    yield made
    made._engine.close()


def on_disk(file: Path) -> dict[str, int]:
    """Return how often the secret stands in each file of the database."""
    counts = {path.name: path.read_bytes().count(SECRET) for path in file.parent.iterdir()}
    return {name: count for name, count in counts.items() if count}


def test_a_deleted_document_is_gone_from_the_disk(file: Path, storage: InlineStorage) -> None:
    body = SECRET * 2000  # with pages of its own
    for name in ("kept", "other"):
        storage.done(Put(**{**X, "id": name}, body=b"-" * 5000))
    storage.done(Put(**X, body=SECRET), Append(**X, name="items", entries=[Entry("e", body), Entry("f", SECRET)]))
    storage.done(Put(**X, body=b"now " + SECRET))
    assert sum(on_disk(file).values()) > 2000
    storage.done(RemoveEntry(**X, name="items", entry="e"))
    assert 0 < sum(on_disk(file).values()) < 10, "the entry alone is gone"
    storage.done(Delete(**X))
    assert on_disk(file) == {}
    storage.done(Put(**X, body=body, keep_s=1e-9))
    storage.done(Expire())
    assert on_disk(file) == {}
    assert [document.id for document in storage.done(List(tenant="a", kind="thing"))[0]] == [  # type: ignore[union-attr]
        "kept",
        "other",
    ]


def test_a_reader_delays_the_removal_from_the_log_and_no_more(file: Path, storage: InlineStorage) -> None:
    storage.done(Put(**X, body=SECRET))
    reader = sqlite3.connect(file, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT COUNT(*) FROM documents").fetchone() == (1,)
    storage.done(Delete(**X))
    assert storage._engine.untidy and on_disk(file), "the log is read by another process"
    reader.close()
    storage._engine.tidy()
    assert not storage._engine.untidy and on_disk(file) == {}


def test_the_file_is_its_users_alone(file: Path, storage: InlineStorage) -> None:
    storage.done(Put(**X, body=b""))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
    assert (modes, stat.S_IMODE(file.parent.stat().st_mode)) == ({0o600}, 0o700)


def test_a_full_disk_is_an_error_and_loses_nothing(storage: InlineStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.done(Put(**X, body=b"before"))
    storage._engine.close()
    opened = SqliteDatabase.open

    def nearly_full(database: SqliteDatabase) -> None:
        opened(database)
        ((pages,),) = database.execute("PRAGMA page_count")
        database.execute(f"PRAGMA max_page_count = {pages + 4}")

    y = {**X, "id": "y"}
    with monkeypatch.context() as patched:
        patched.setattr(SqliteDatabase, "open", nearly_full)
        small, big, get = storage._engine.run([[Put(**X, body=b"small")], [Put(**y, body=b"x" * 100_000)], [Get(**X)]])
        assert isinstance(big, StorageFailed) and "full" in big.message and "free space" in big.message
        assert not isinstance(small, KvforgeError) and not isinstance(get, KvforgeError)
        assert get[0].body == b"small"  # type: ignore[union-attr]
        storage._engine.close()
    storage.done(Put(**y, body=b"x" * 100_000))
    assert storage.done(Get(**X))[0].body == b"small"  # type: ignore[union-attr]


def test_a_damaged_file_is_refused_and_left_as_it_is(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"no database" * 1000)
    storage = InlineStorage(f"sqlite:{file}")
    with pytest.raises(StorageFailed, match=r"not a database.*restore a copy"):
        storage.done(Put(**X, body=b""))
    assert str(file) in storage.reason
    assert file.read_bytes() == b"no database" * 1000


def test_a_page_that_was_overwritten_is_an_error_of_the_calls_that_need_it(file: Path) -> None:
    storage = InlineStorage(f"sqlite:{file}")
    storage.done(Put(**X, body=b"x" * 300_000))
    storage._engine.close()
    damaged = bytearray(file.read_bytes())
    at = damaged.index(b"CREATE TABLE documents")
    damaged[8192:] = b"\xff" * (len(damaged) - 8192)
    assert at < 8192
    file.write_bytes(damaged)
    with pytest.raises(StorageFailed, match="malformed"):
        storage.done(Get(**X))
    with pytest.raises(StorageFailed, match="malformed"):
        storage.done(Claim(kind="thing", owner="me", lease_s=1.0))
    storage._engine.close()


def test_a_locked_file_leaves_no_connection_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 warns of a connection that is collected open."""
    connect, made = sqlite3.connect, list[sqlite3.Connection]()
    file.parent.mkdir()
    locking = connect(file, isolation_level=None)
    locking.execute("BEGIN EXCLUSIVE")

    def counted(*given: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*given, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", counted)
    monkeypatch.setattr("kvforge.gateway.storage.sqlite.BUSY_S", 0.01)
    storage = InlineStorage(f"sqlite:{file}")
    with pytest.raises(StorageFailed, match="locked"):
        storage.done(Get(**X))
    locking.close()
    assert storage.done(Get(**X)) == [None]
    storage._engine.close()
    assert len(made) > 2
    for connection in made:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def test_tables_of_another_version_are_refused(file: Path, storage: InlineStorage) -> None:
    storage.done(Put(**X, body=b""))
    storage._engine._db.execute("UPDATE kvforge_schema SET version = 99")
    storage._engine.close()
    with pytest.raises(StorageFailed, match=f"have version 99, and this gateway knows {SCHEMA_VERSION}"):
        storage.done(Get(**X))


def test_a_file_that_is_removed_is_an_error_and_then_a_new_one(file: Path, storage: InlineStorage) -> None:
    storage.done(Put(**X, body=b"1"))
    for path in file.parent.iterdir():
        path.unlink()
    with pytest.raises(StorageFailed, match="was removed or replaced while it was open"):
        storage.done(Put(**X, body=b"2"))
    assert storage.done(Get(**X)) == [None]
    storage.done(Put(**X, body=b"3"))
    assert file.exists()


def test_statements_that_are_run_often_read_no_document_but_their_own(
    storage: InlineStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant may have millions of documents: each statement finds its rows by an index."""
    storage.done(Put(**X, body=b"x", keep_s=60.0), Append(**X, name="items", entries=[Entry("e", b"")]))
    plans: list[str] = []
    execute = SqliteDatabase.execute

    def explained(database: SqliteDatabase, statement: str, values: Sequence[object] = ()) -> list[Row]:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            plans.extend(
                f"{row[3]}: {statement}" for row in execute(database, f"EXPLAIN QUERY PLAN {statement}", values)
            )
        return execute(database, statement, values)

    monkeypatch.setattr(SqliteDatabase, "execute", explained)
    storage._engine._tenant_bytes_max = 600
    held = {**X, "name": "items"}
    storage.done(
        *(Get(**X), List(tenant="a", kind="thing", after="x"), Chain(**X, keep_s=600.0), Usage(), Usage(tenant="a")),
        *(Read(**held, after="e"), GetEntry(**held, entry="e"), RemoveEntry(**held, entry="e"), Watch(**X, for_s=1.0)),
        *(Claim(kind="thing", owner="me", lease_s=1.0), Renew(owner="me", lease_s=1.0), Release(owner="me")),
        *(Mark(**X, owner="me", state="on"), Put(**{**X, "id": "y"}, body=b"y" * 200), Expire(), Delete(**X)),
    )
    assert len(plans) > 20
    scans = [plan for plan in plans if plan.startswith("SCAN") and "USING" not in plan and "SCAN tenants" not in plan]
    assert scans == []
    whole = [plan for plan in plans if "SCAN documents USING" in plan]
    assert all("documents_in_progress_of" in plan for plan in whole)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = InlineStorage(f"sqlite:{tmp_path}/file/gateway.sqlite")
    with pytest.raises(StorageFailed, match=r"file/gateway.sqlite: (File exists|Not a directory)"):
        storage.done(Get(**X))
