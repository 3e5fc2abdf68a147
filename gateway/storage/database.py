"""The interface between the engine and a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Row = tuple[Any, ...]


class Busy(Exception):
    """Another process's transaction is in the way: the same transaction may succeed if it is tried again."""


class Database(Protocol):
    """A connection to a database, used by one process. Statements mark their values with `?`.

    Every call may raise StorageFailed, or Busy.
    """

    locks_rows: bool
    """Whether transactions run beside each other, so that rows must be locked (FOR UPDATE)."""

    def open(self) -> None:
        """Connect, and create or check the tables."""

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Run one statement and return its rows."""

    @property
    def changed(self) -> int:
        """The number of rows that the last INSERT, UPDATE or DELETE changed."""

    def now(self) -> float:
        """Return the time in seconds since 1970, by a clock that all users of the database share."""

    def begin(self, *, writes: bool) -> None:
        """Begin a transaction."""

    def commit(self) -> None:
        """Commit the transaction durably."""

    def rollback(self) -> None:
        """Undo the transaction, if there is one."""

    def tidy(self) -> bool:
        """Remove what deleted rows have left behind. Return whether that was done; if not, call it again later."""

    def close(self) -> None:
        """Close the connection."""
