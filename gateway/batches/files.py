"""Files in the storage: a document each, with the content as entries of a list.

Invariant: the chunks of an uploaded file have CHUNK_BYTES each, but for the last, so that an offset names its chunk.
The output of a batch is appended as it comes, in chunks of any size.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress

from kvforge.gateway.config import Settings
from kvforge.gateway.http.errors import TooLarge
from kvforge.gateway.storage import Append, Delete, Document, Entry, Get, List, Put, Read, Storage
from kvforge.protocol.errors import Conflict, KvforgeError, QuotaExceeded

from .records import (
    CHUNKS,
    FILE,
    FILE_RECORD,
    PROCESSED,
    UPLOADING,
    FileRecord,
    NoSuchStored,
    changed,
    encode,
    known_id,
    new_id,
)

CHUNK_BYTES = 256 << 10
READ_CHUNKS = 4
FILES_MAX = 10_000
UPLOAD_S = 3600.0  # a file that is not complete is removed this long after its last piece
TRIES = 8


class FilesFull(QuotaExceeded):
    """A tenant's files have reached a limit."""

    def __init__(self, tenant: str, needed: int, ceiling: int, unit: str, setting: str = "") -> None:
        problem = f"tenant {tenant!r} would have {needed} {unit}; its ceiling is {ceiling}"
        remedy = "delete files" + (f", or raise {setting} in gateway.toml" if setting else "")
        KvforgeError.__init__(self, f"{problem}; {remedy}", tenant=tenant, needed=needed, ceiling=ceiling)


class Files:
    """The files of all tenants.

    Args:
        storage: Where they are.
        settings: The gateway's settings.
    """

    def __init__(self, storage: Storage, settings: Settings) -> None:
        self.storage, self.limits = storage, settings.batches
        self.keep_s = settings.storage.retention_s

    async def get(self, tenant: str, name: str, field: str | None = None) -> tuple[Document, FileRecord]:
        """Return a complete file.

        Raises:
            NoSuchStored: There is none; names the field.
        """
        known_id(FILE, name, field)
        (document,) = await self.storage.apply(Get(tenant=tenant, kind=FILE, id=name))
        if isinstance(document, Document):
            record = FILE_RECORD.decode(document.body)
            if _exists(record):
                return document, record
        raise NoSuchStored(FILE, name, field)

    async def listed(
        self, tenant: str, *, after: str, limit: int, descending: bool, purpose: str
    ) -> tuple[list[tuple[str, FileRecord]], bool]:
        """Return complete files with their ids, and whether more follow.

        Raises:
            NotFound: There is no file `after`.
        """
        found: list[tuple[str, FileRecord]] = []
        if after:
            known_id(FILE, after, "after")
        while True:
            page = List(tenant=tenant, kind=FILE, after=after, limit=min(limit + 1, 1000), descending=descending)
            (documents,) = await self.storage.apply(page)
            assert isinstance(documents, list)
            for document in documents:
                assert isinstance(document, Document)
                after, record = document.id, FILE_RECORD.decode(document.body)
                if _exists(record) and purpose in ("", record.purpose):
                    found.append((document.id, record))
            if len(found) > limit or len(documents) < page.limit:
                return found[:limit], len(found) > limit

    async def delete(self, tenant: str, name: str) -> None:
        """Remove a file, and its content from the disk.

        Raises:
            NoSuchStored: There is none.
        """
        document, _ = await self.get(tenant, name)
        await self.storage.apply(Delete(tenant=tenant, kind=FILE, id=document.id))

    async def content(self, tenant: str, name: str, at: int = 0) -> AsyncIterator[bytes]:
        """Yield the content of a file in pieces.

        Args:
            tenant: Its owner.
            name: Its id.
            at: The offset of the first byte, for an uploaded file.
        """
        behind, skip = at // CHUNK_BYTES - 1, at % CHUNK_BYTES
        while True:
            read = Read(tenant=tenant, kind=FILE, id=name, name=CHUNKS, behind=behind, limit=READ_CHUNKS)
            (entries,) = await self.storage.apply(read)
            assert isinstance(entries, list)
            for entry in entries:
                assert isinstance(entry, Entry)
                yield entry.body[skip:] if skip else entry.body
                behind, skip = entry.position, 0
            if len(entries) < READ_CHUNKS:
                return

    async def begin(self, tenant: str, announced: int) -> Upload:
        """Begin an upload.

        Args:
            tenant: Its owner.
            announced: How many bytes are expected.

        Raises:
            TooLarge: The file is too large.
            FilesFull: The tenant has too many files, or too much in them.
        """
        left = await self._room(tenant)
        upload = Upload(self, tenant, min(left, self.limits.file_bytes_max), left)
        upload.check(announced)
        await upload.begin()
        return upload

    async def use(self, tenant: str, name: str, batch: str) -> Put:
        """Return the operation that keeps a file from expiring while a batch reads it.

        Raises:
            NoSuchStored: There is no such file.
        """
        document, record = await self.get(tenant, name, "input_file_id")
        record = changed(record, users=[*record.users, batch])
        body = encode(record)
        return Put(tenant=tenant, kind=FILE, id=name, body=body, keep_s=0.0, expect=document.version)

    async def leave(self, tenant: str, name: str, batch: str) -> None:
        """Let a file expire again when its last batch has ended."""
        for _ in range(TRIES):
            try:
                document, record = await self.get(tenant, name)
                record = changed(record, users=[user for user in record.users if user != batch])
                left_s = max(1.0, record.expires_at - time.time()) if record.expires_at and not record.users else 0.0
                put = Put(tenant=tenant, kind=FILE, id=name, body=encode(record), keep_s=left_s)
                await self.storage.apply(_expecting(put, document.version))
                return
            except NoSuchStored:
                return
            except Conflict:
                continue

    async def _room(self, tenant: str) -> int:
        """Return how many bytes the tenant may add to its files."""
        every = List(tenant=tenant, kind=FILE, limit=FILES_MAX, bodies=False)
        (documents,) = await self.storage.apply(every)
        assert isinstance(documents, list)
        if len(documents) >= FILES_MAX:
            raise FilesFull(tenant, len(documents) + 1, FILES_MAX, "files")
        held = sum(document.size_bytes for document in documents if isinstance(document, Document))
        return max(0, self.limits.tenant_file_bytes_max - held)


class Upload:
    """A file that is being received; see `Files.begin`."""

    def __init__(self, files: Files, tenant: str, bytes_max: int, left: int) -> None:
        self._files, self._tenant, self._bytes_max, self._left = files, tenant, bytes_max, left
        self.id = new_id("file-")
        self._held = bytearray()
        self._chunks = 0
        self.bytes = 0

    def check(self, size: int) -> None:
        """Check that the file may be so large.

        Raises:
            TooLarge: It may never be.
            FilesFull: It may not beside the tenant's other files.
        """
        most = self._files.limits.file_bytes_max
        if size > most:
            raise TooLarge("file", f"is larger than the limit of {most} bytes (batches.file_bytes_max in gateway.toml)")
        if size > self._bytes_max:
            ceiling = self._files.limits.tenant_file_bytes_max
            needed = ceiling - self._left + size
            raise FilesFull(self._tenant, needed, ceiling, "bytes in files", "[batches] tenant_file_bytes_max")

    async def begin(self) -> None:
        """Write the document, which is not shown yet."""
        record = FileRecord(filename="", purpose="", bytes=0, created_at=int(time.time()), status=UPLOADING)
        await self._files.storage.apply(self._put(record, UPLOAD_S, expect=0))

    async def write(self, data: bytes) -> None:
        """Append a piece.

        Raises:
            KvforgeError: The file is too large, or the storage failed.
        """
        self.bytes += len(data)
        self.check(self.bytes)
        self._held += data
        while len(self._held) >= CHUNK_BYTES:
            await self._append(bytes(self._held[:CHUNK_BYTES]))
            del self._held[:CHUNK_BYTES]

    async def end(self, filename: str, purpose: str, keep_s: float) -> FileRecord:
        """Complete the file, which clients see from now on.

        Args:
            filename: Its name.
            purpose: Its purpose.
            keep_s: When it expires, in seconds from now; 0: never.
        """
        if self._held:
            await self._append(bytes(self._held))
        now = int(time.time())
        record = FileRecord(
            filename=filename,
            purpose=purpose,
            bytes=self.bytes,
            created_at=now,
            expires_at=round(now + keep_s) if keep_s else 0,
        )
        await self._files.storage.apply(self._put(record, keep_s, expect=1))
        return record

    async def cancel(self) -> None:
        """Remove what was received."""
        with suppress(KvforgeError):  # it expires by itself
            await self._files.storage.apply(Delete(tenant=self._tenant, kind=FILE, id=self.id))

    def _put(self, record: FileRecord, keep_s: float, expect: int) -> Put:
        body = encode(record)
        return Put(tenant=self._tenant, kind=FILE, id=self.id, body=body, keep_s=keep_s, expect=expect)

    async def _append(self, chunk: bytes) -> None:
        entry = Entry(f"{self._chunks:08d}", chunk)
        self._chunks += 1
        await self._files.storage.apply(
            Append(tenant=self._tenant, kind=FILE, id=self.id, name=CHUNKS, entries=[entry])
        )


def _exists(record: FileRecord) -> bool:
    """Return whether clients see the file. The storage removes an expired one with its next sweep."""
    expired = 0 < record.expires_at <= time.time() and not record.users
    return record.status == PROCESSED and not expired


def _expecting(put: Put, version: int) -> Put:
    return changed(put, expect=version)
