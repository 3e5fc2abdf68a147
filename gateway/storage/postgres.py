"""PostgreSQL, for several gateways that share what they store. Needs psycopg (`pip install kvforge[postgres]`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from .creation import commit_tables
from .database import Busy, Row
from .failures import StorageFailed

CONNECT_S = 5
STATEMENT_MS = 20_000
LOCK = 0x6B76666F726765  # the advisory lock of those that create the tables
_NUMBER, _BLOB = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "BYTEA"


class PostgresDatabase:
    """A connection to a PostgreSQL server.

    Args:
        url: `postgresql://USER@HOST:PORT/DATABASE`; the password may also come from libpq's variables and files.
    """

    locks_rows = True

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self.changed = 0

    def open(self) -> None:
        """Connect, and create or check the tables; see `Database`."""
        try:
            import psycopg
        except ImportError as error:
            raise StorageFailed(
                shown(self._url), f"psycopg is missing ({error})", "install kvforge[postgres]"
            ) from None
        try:
            self._connection = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_S,
                application_name="kvforge-gateway",
                options=f"-c statement_timeout={STATEMENT_MS} -c idle_in_transaction_session_timeout={STATEMENT_MS}",
            )
        except psycopg.Error as error:
            raise self._failed(error) from None
        self.begin(writes=True)
        self.execute("SELECT pg_advisory_xact_lock(?)", (LOCK,))
        commit_tables(self, shown(self._url), _NUMBER, _BLOB, "database")

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Run one statement; see `Database`."""
        import psycopg

        assert self._connection is not None, "opened before"
        try:
            cursor = self._connection.execute(statement.replace("?", "%s"), values)
            self.changed = cursor.rowcount
            return cursor.fetchall() if cursor.description is not None else []
        except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure) as error:
            raise Busy(str(error)) from None
        except psycopg.errors.UniqueViolation as error:  # two processes created the same row at the same time
            raise Busy(str(error)) from None
        except psycopg.Error as error:
            raise self._failed(error) from None

    def now(self) -> float:
        """Return the server's time; see `Database`."""
        return float(self.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8")[0][0])

    def begin(self, *, writes: bool) -> None:
        """Begin a transaction; see `Database`."""
        self.execute("BEGIN" if writes else "BEGIN READ ONLY")

    def commit(self) -> None:
        """Commit the transaction; see `Database`."""
        self.execute("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction; see `Database`."""
        if self._connection is not None and not self._connection.closed:
            self.execute("ROLLBACK")

    def tidy(self) -> bool:
        """Vacuum the tables; see `Database`."""
        self.execute("VACUUM documents, entries")
        return True

    def close(self) -> None:
        """Close the connection; see `Database`."""
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
            self._connection = None

    def _failed(self, error: Exception) -> StorageFailed:
        text = " ".join(str(error).split()) or type(error).__name__
        return StorageFailed(shown(self._url), text, "check the server and [storage] url in gateway.toml")


def shown(url: str) -> str:
    """Return a URL without its password and parameters."""
    parts = urlsplit(url)
    host = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    return f"{parts.scheme}://{parts.username + '@' if parts.username else ''}{host}{parts.path}"
