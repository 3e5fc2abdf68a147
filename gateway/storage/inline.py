"""A storage without a process: each call is done at once, in the event loop. For tests and tools."""

from __future__ import annotations

from kvforge.protocol.errors import KvforgeError, StorageFailed

from .engine import Engine
from .operations import Operation, Result
from .process import database_of


class InlineStorage:
    """A `Storage` in the calling process.

    Args:
        url: `sqlite:PATH` or `postgresql://...`.
        tenant_bytes_max: The limit of a tenant in bytes.
    """

    def __init__(self, url: str, *, tenant_bytes_max: int = 1 << 30) -> None:
        self._engine = Engine(database_of(url), tenant_bytes_max)
        self.reason = ""
        self.exists = True

    async def apply(self, *operations: Operation) -> list[Result]:
        """Do operations as one transaction; see `Storage`."""
        return self.done(*operations)

    def done(self, *operations: Operation) -> list[Result]:
        """Do operations as one transaction, without an event loop."""
        (outcome,) = self._engine.run([operations])
        if self._engine.untidy:
            self._engine.tidy()
        if isinstance(outcome, KvforgeError):
            self.reason = outcome.message if isinstance(outcome, StorageFailed) else ""
            raise outcome
        self.reason = ""
        return outcome

    async def close(self) -> None:
        """Close the database; see `Storage`."""
        self._engine.close()
