"""The interface of a storage."""

from __future__ import annotations

from typing import Protocol

from .operations import Operation, Result


class Storage(Protocol):
    """Durable documents with lists of entries, kept apart by tenant.

    A document has a tenant, a kind (such as `response` or `file`), an id, one body of bytes, and any number of named
    lists, to which entries are appended. A caller decides what the bytes mean. Each kind has one owner among the
    packages of the gateway.

    - **Atomic:** the operations of one call are done together or not at all. A call that fails has changed nothing.
    - **Durable:** what a call has written survives the death of any process and, as far as the disk keeps its word, of
      the host.
    - **Private:** every operation names its tenant; documents of others are not found.
    - **Bounded:** a document with `keep_s` is removed that long after its last use, and sooner, the least recently used
      first, where its tenant needs more than `tenant_bytes_max`. Documents in progress and documents without `keep_s`
      are never removed by the storage. A call for which there is no room fails with QuotaExceeded.
    - **Gone:** the bytes of a removed document are overwritten in SQLite's file and cut from its log. In PostgreSQL its
      rows are vacuumed; the server's own log is the server's matter.
    - **Work in progress:** a document with a `state` belongs to an owner for as long as it renews its lease. After that
      any process claims it, so work outlives its process. Two processes may both believe that they own it: write the
      outcome with `Put(expect=VERSION)`, where the first write wins.

    The event loop may call it at any time. Calls are done in the order in which they were made.
    """

    async def apply(self, *operations: Operation) -> list[Result]:
        """Do operations as one transaction.

        Returns:
            The result of each operation, as its class documents it.

        Raises:
            NotFound: A document or entry that an operation needs does not exist.
            Conflict: A document has another version, or an entry's id is taken.
            QuotaExceeded: There is no room for the tenant.
            QueueFull: Too many calls wait.
            CapacityExceeded: A `Chain` is longer than its limits.
            StorageFailed: The database cannot be reached, is damaged or has no room on its disk.
        """

    @property
    def reason(self) -> str:
        """Why the last call failed with StorageFailed; "" if it did not."""

    @property
    def exists(self) -> bool:
        """Whether there may be stored documents, so that it is worth looking for work in progress."""

    async def close(self) -> None:
        """Finish the calls that were made and close the database."""
