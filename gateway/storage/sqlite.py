"""SQLite in a file of the gateway's state folder."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .creation import commit_tables
from .database import Busy, Row
from .failures import StorageFailed

BUSY_S, TIDY_S = 2.0, 0.2
CACHE_KIB = 8192
FREED_PAGES = 1000  # returned to the file system after each deletion
_NUMBER, _BLOB = "INTEGER PRIMARY KEY AUTOINCREMENT", "BLOB"
_BUSY = ("database is locked", "database table is locked", "database schema is locked", "cannot start a transaction")
_FULL = ("disk is full", "disk I/O error", "readonly database", "unable to open")


class SqliteDatabase:
    """A SQLite file, which several processes may open.

    A committed transaction is on the disk (WAL, synchronous=FULL). Deleted content is overwritten with zeros
    (secure_delete), and `tidy` cuts it from the log.

    Args:
        path: The file; its folder is created.
    """

    locks_rows = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self.changed = 0

    def open(self) -> None:
        """Open the file, and create or check the tables; see `Database`."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileExistsError):  # readable by its user alone, as its log will be
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            self._connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
            self._identity = _identity(self._path)
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from None
        except sqlite3.Error as error:
            raise self._failure(error) from None
        for setting in (
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = ON",
            "temp_store = MEMORY",
            f"cache_size = -{CACHE_KIB}",
        ):
            self.execute(f"PRAGMA {setting}")
        self.begin(writes=True)
        commit_tables(self, str(self._path), _NUMBER, _BLOB, "file")

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Run one statement; see `Database`."""
        assert self._connection is not None, "opened before"
        try:
            cursor = self._connection.execute(statement, values)
            self.changed = cursor.rowcount
            return cursor.fetchall()
        except sqlite3.Error as error:
            raise self._failure(error) from None

    def now(self) -> float:
        """Return the time; see `Database`. All users of the file are on this host."""
        return time.time()

    def begin(self, *, writes: bool) -> None:
        """Begin a transaction; see `Database`.

        A file that was removed or replaced would take what is written and lose it when the process ends.
        """
        if self._identity != _identity(self._path):
            raise self._failed("the file was removed or replaced while it was open")
        self.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    def commit(self) -> None:
        """Commit the transaction; see `Database`."""
        self.execute("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction; see `Database`. Some errors have undone it already."""
        if self._connection is not None and self._connection.in_transaction:
            self.execute("ROLLBACK")

    def tidy(self) -> bool:
        """Write the log's pages, which are zeros by now, into the file and empty the log; see `Database`."""
        self.execute(f"PRAGMA incremental_vacuum({FREED_PAGES})")
        self.execute(f"PRAGMA busy_timeout = {round(TIDY_S * 1000)}")
        try:
            ((busy, *_),) = self.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")
        return not busy

    def close(self) -> None:
        """Close the file; see `Database`."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _failure(self, error: sqlite3.Error) -> StorageFailed | Busy:
        text = str(error)
        return Busy(text) if text.startswith(_BUSY) else self._failed(text)

    def _failed(self, text: str) -> StorageFailed:
        remedy = "restore a copy of the file, or move it and its -wal away to begin with an empty one"
        if any(word in text for word in _FULL) or not isinstance(text, str):
            remedy = "free space on its disk and check its permissions; nothing that was stored is lost"
        return StorageFailed(str(self._path), text, remedy)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
