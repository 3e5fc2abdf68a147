"""What is written down of a batch, by its owner.

Invariant: every write expects the version of the one before. Of two processes that believe to own a batch one writes,
and the other one learns that it has lost it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from kvforge.gateway.storage import Append, Delete, Document, Entry, Get, Operation, Put
from kvforge.protocol.errors import Conflict, KvforgeError

from .files import Files
from .records import (
    BATCH,
    BATCH_RECORD,
    CANCELLED,
    CANCELLING,
    CHUNKS,
    COMPLETED,
    EXPIRED,
    FAILED,
    FILE,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT_PURPOSE,
    UPLOADING,
    BatchRecord,
    Counts,
    FileRecord,
    Problem,
    changed,
    encode,
    new_id,
)
from .retries import AWAY, Backoff, retried

LOST = "lost"
TIMES = {FAILED: "failed_at", COMPLETED: "completed_at", EXPIRED: "expired_at", CANCELLED: "cancelled_at"}
log = logging.getLogger(__name__)


class BatchLost(Exception):
    """Another process owns the batch, or a client changed it."""


class Ledger:
    """The record of a batch that this process owns, and its output files.

    Args:
        document: The document of the batch, as it was claimed.
        files: All files.
        owner: The name of this process.
        lease_s: How long it owns the batch after the last renewal.

    Attributes:
        tenant, id: The key of the batch.
        record: What is written down.
        version: Of the document.
    """

    def __init__(self, document: Document, files: Files, owner: str, lease_s: float) -> None:
        self.tenant, self.id, self._group = document.tenant, document.id, document.group
        self.version = document.version
        self.record: BatchRecord = BATCH_RECORD.decode(document.body)
        self._files, self._owner, self._lease_s = files, owner, lease_s
        self._writing = asyncio.Lock()

    @property
    def expired(self) -> bool:
        """Whether the completion window is over."""
        return time.time() >= self.record.expires_at

    @property
    def undecided(self) -> int:
        """How many requests have no outcome."""
        counts = self.record.counts
        return counts.total - counts.completed - counts.failed

    async def begin(self, total: int) -> None:
        """Write that the batch is in progress, with empty output files."""
        now = int(time.time())
        record = changed(
            self.record,
            status=IN_PROGRESS,
            in_progress_at=now,
            counts=Counts(total=total),
            output_file_id=new_id("file-"),
            error_file_id=new_id("file-"),
        )
        unseen = FileRecord(filename="", purpose=OUTPUT_PURPOSE, bytes=0, created_at=now, status=UPLOADING)
        outputs = (record.output_file_id, record.error_file_id)
        puts = [Put(tenant=self.tenant, kind=FILE, id=name, body=encode(unseen)) for name in outputs]
        await self._write(record, *puts)

    async def append(self, record: BatchRecord, output: bytes, errors: bytes) -> None:
        """Append to the output files, and write a record with their new sizes.

        Raises:
            BatchLost: The batch was changed by another process.
            CapacityExceeded: The tenant has no room left.
        """
        appends: list[Operation] = []
        for name, text in ((record.output_file_id, output), (record.error_file_id, errors)):
            if text:
                entry = Entry(f"{self.version:012d}", text)
                appends.append(Append(tenant=self.tenant, kind=FILE, id=name, name=CHUNKS, entries=[entry]))
        record = changed(
            record,
            output_bytes=record.output_bytes + len(output),
            error_bytes=record.error_bytes + len(errors),
        )
        await self._write(record, *appends)

    async def end(self, status: str, problems: Sequence[Problem] = ()) -> None:
        """Complete the output files and the batch.

        Raises:
            BatchLost: The batch was changed by another process.
        """
        now = int(time.time())
        if status == COMPLETED and self.record.status != FINALIZING:
            await self._write(changed(self.record, status=FINALIZING, finalizing_at=now))
        record = self.record
        await retried(lambda: self._files.leave(self.tenant, record.input_file_id, self.id), self.id)
        operations: list[Operation] = []
        for name, size, kind in (
            (record.output_file_id, record.output_bytes, "output"),
            (record.error_file_id, record.error_bytes, "error"),
        ):
            if name and size:
                operations.append(self._completed(name, size, f"{self.id}_{kind}.jsonl", now))
            elif name:
                operations.append(Delete(tenant=self.tenant, kind=FILE, id=name))
        ended = changed(record, status=status, errors=list(problems), done=[], **{TIMES[status]: now})
        await self._write(ended, *operations)
        log.info("batch %s of tenant %s: %s", self.id, self.tenant, status)

    async def why_lost(self) -> str:
        """Return CANCELLING or LOST if the batch is no longer this process's; "" if it is, as far as is known."""
        async with self._writing:
            try:
                document = await self._document()
            except KvforgeError:
                return ""
            if document is None:
                return LOST
            if document.version == self.version:
                return ""
            return CANCELLING if BATCH_RECORD.decode(document.body).status == CANCELLING else LOST

    async def _write(self, record: BatchRecord, *operations: Operation) -> None:
        """Write the record together with other operations, as soon as the storage does it."""
        async with self._writing:
            put = Put(
                tenant=self.tenant,
                kind=BATCH,
                id=self.id,
                body=encode(record),
                group=self._group,
                state="" if record.over else record.status,
                keep_s=self._files.keep_s if record.over else 0.0,
                expect=self.version,
                owner="" if record.over else self._owner,
                lease_s=0.0 if record.over else self._lease_s,
            )
            backoff = Backoff(self.id)
            while True:
                try:
                    await self._files.storage.apply(*operations, put)
                    break
                except Conflict:
                    if not await self._is_written(put):
                        raise BatchLost from None
                    break
                except AWAY as error:
                    await backoff.storage(error)
            self.version += 1
            self.record = record

    async def _is_written(self, put: Put) -> bool:
        """Return whether a call that seemed to fail has written the record."""
        document = await retried(self._document, self.id)
        return document is not None and document.version == self.version + 1 and document.body == put.body

    async def _document(self) -> Document | None:
        (document,) = await self._files.storage.apply(Get(tenant=self.tenant, kind=BATCH, id=self.id))
        return document if isinstance(document, Document) else None

    def _completed(self, name: str, size: int, filename: str, now: int) -> Put:
        keep_s = self.record.keep_output_s
        record = FileRecord(
            filename=filename,
            purpose=OUTPUT_PURPOSE,
            bytes=size,
            created_at=now,
            expires_at=round(now + keep_s) if keep_s else 0,
        )
        return Put(tenant=self.tenant, kind=FILE, id=name, body=encode(record), keep_s=keep_s)
