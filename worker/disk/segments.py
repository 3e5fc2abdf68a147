"""The segment files of one identity: slots of one KV block each.

A segment begins with the records of its slots (`records`), one behind the other, so that recovery reads them at once.
The blocks follow, on whole pages. Segments are made when their first slot is written, and their space is reserved then:
a full disk is noticed before a block is half-written.

A block is written in this order: its old record is removed, then the block, then its record. A process that dies leaves
a slot without a record. Nothing waits for the disk (fsync), except `close`: if the host dies, the kernel may not have
written the last half minute, in any order. Recovery then finds no record, or one with another checksum than the
block's: a miss in each case. Blocks go past the page cache where the file system allows that (`direct`).

Several processes may read. One of them writes, and makes segments, which the others open when they read there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvforge.worker.checksums import checksums, weights_of

from . import direct as direct_io
from .direct import FLAGS, PAGE, BlockIo
from .records import MAGIC, Entry, Record, is_empty, pack, place, record_bytes, unpack
from .sealing import Sealer, Unsealed
from .store import Damaged, DiskFull, NotFound, Recovered

SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Geometry:
    """Sizes of segments.

    Attributes:
        block_bytes: Bytes of a KV block.
        block_tokens: Tokens of a KV block.
        segment_bytes: A segment takes at most this much, or one slot.
    """

    block_bytes: int
    block_tokens: int
    segment_bytes: int = SEGMENT_BYTES

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return record_bytes(self.block_tokens)

    @property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return -(-self.block_bytes // PAGE) * PAGE

    @property
    def slots(self) -> int:
        """Slots of a segment."""
        return max(1, (self.segment_bytes - PAGE) // (self.stride + self.record_bytes))

    @property
    def blocks_at(self) -> int:
        """Where the blocks of a segment begin."""
        return -(-self.slots * self.record_bytes // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Bytes of a segment."""
        return self.blocks_at + self.slots * self.stride


class Segments:
    """The slots of one identity: [0, total).

    Args:
        folder: The folder of the identity.
        identity: 16 bytes.
        geometry: The sizes.
        segments_max: The most segments. Files beyond are deleted.
        sealer: Seals records and blocks.
        direct: False: blocks go through the page cache in any case.

    Attributes:
        total: Number of slots.
        folder: The folder.
        indirect: Why blocks go through the page cache; "" where they go past it.
    """

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        geometry: Geometry,
        segments_max: int,
        sealer: Sealer | None = None,
        *,
        direct: bool = True,
    ) -> None:
        self.folder, self._identity, self.geometry = folder, identity, geometry
        self._sealer = sealer if sealer is not None else Sealer()
        self._segments_max = segments_max
        self.total = segments_max * geometry.slots
        self._weights = weights_of(geometry.block_bytes)
        self._number = 0
        self._files: list[int] = []
        self._io = BlockIo(geometry.stride, folder, direct=direct)
        self.indirect = self._io.problem
        for path in sorted(folder.glob("segment-*")):
            at, there = self._path(len(self._files)), len(self._files) < segments_max
            if path == at and there and path.stat().st_size == geometry.size:
                self._add(os.open(path, FLAGS), path)
            else:
                path.unlink()

    @property
    def usable(self) -> int:
        """Slots of the segments that exist."""
        return len(self._files) * self.geometry.slots

    def recover(self) -> Recovered:
        """Read the records of all slots.

        Raises:
            OSError: The disk failed.
        """
        geometry, records, dropped = self.geometry, {}, 0
        size = geometry.record_bytes
        for number, file in enumerate(self._files):
            area = os.pread(file, geometry.slots * size, 0)
            for at in range(geometry.slots):
                packed, slot = area[at * size : (at + 1) * size], number * geometry.slots + at
                if is_empty(packed):
                    continue
                record = unpack(packed, self._identity, slot, self._sealer, geometry.block_tokens)
                if record is None:
                    dropped += 1
                else:
                    records[slot] = record
                    self._number = max(self._number, record.number)
        return Recovered(records, dropped)

    def write(self, slot: int, entry: Entry, checksum: int, block: npt.NDArray[np.uint8]) -> None:
        """Write a block.

        Args:
            slot: The slot. What was in it is lost.
            entry: What the block is.
            checksum: Of its bytes.
            block: [block_bytes] uint8, contiguous.

        Raises:
            DiskFull: There is no space.
            OSError: The disk failed. The slot may have any content, which is a miss.
        """
        file, record_at, block_at = self._place(slot)
        nonce, tag, sealed = self._sealer.seal(block.data, place(self._identity, slot) + b"block")
        self._number += 1
        record = Record(self._number, entry, checksum, nonce, tag)
        packed = pack(record, self._identity, slot, self._sealer, self.geometry.record_bytes)
        direct_io.write(file, bytes(len(MAGIC)), record_at)
        self._io.write(file, sealed, block_at)
        direct_io.write(file, packed, record_at)

    def read(self, slot: int, value: int, block: npt.NDArray[np.uint8]) -> int:
        """Read a block.

        Args:
            slot: The slot.
            value: The chained hash that its entry must have.
            block: [block_bytes] uint8, contiguous, to be filled. It may have any content after an error.

        Returns:
            The checksum of its bytes.

        Raises:
            NotFound: The slot has another entry, or none.
            Damaged: The block has other bytes than were written.
            OSError: The disk failed.
        """
        geometry = self.geometry
        self._find(slot)
        if slot >= self.usable:
            raise NotFound(f"slot {slot} of {self.usable}")
        file, record_at, block_at = self._place(slot)
        packed = os.pread(file, geometry.record_bytes, record_at)
        record = unpack(packed, self._identity, slot, self._sealer, geometry.block_tokens)
        if record is None or record.entry.value != value:
            raise NotFound(f"slot {slot}")
        if not self._sealer.key_id:
            self._io.read(file, block.data, block_at)
        else:
            sealed = bytearray(geometry.block_bytes)
            self._io.read(file, memoryview(sealed), block_at)
            try:
                plain = self._sealer.unseal(record.nonce, record.tag, sealed, place(self._identity, slot) + b"block")
            except Unsealed as error:
                raise Damaged(f"slot {slot}: {error}") from None
            block[:] = np.frombuffer(plain, np.uint8)
        if int(checksums(block.reshape(1, -1), self._weights)[0]) != record.checksum:
            raise Damaged(f"slot {slot}")
        return record.checksum

    def drop(self, slot: int) -> None:
        """Remove the record of a slot.

        Raises:
            OSError: The disk failed.
        """
        if slot < self.usable:
            file, record_at, _ = self._place(slot)
            direct_io.write(file, bytes(self.geometry.record_bytes), record_at)

    def wipe(self, slot: int) -> None:
        """Overwrite the record and the block of a slot with zeros, on the disk.

        Raises:
            OSError: The disk failed.
        """
        if slot < self.usable:
            file, record_at, block_at = self._place(slot)
            direct_io.write(file, bytes(self.geometry.record_bytes), record_at)
            direct_io.write(file, bytes(self.geometry.stride), block_at)
            os.fdatasync(file)

    def close(self) -> None:
        """Write everything to the disk, and close the files.

        Raises:
            OSError: The disk failed.
        """
        files, self._files = self._files, []
        self._io.close()
        try:
            for file in files:
                os.fdatasync(file)
        finally:
            for file in files:
                os.close(file)

    def _place(self, slot: int) -> tuple[int, int, int]:
        """Return the file of a slot, made if it is new, and where its record and its block are."""
        assert 0 <= slot < self.total, f"slot {slot} is not one of {self.total}"
        geometry = self.geometry
        number, at = divmod(slot, geometry.slots)
        while number >= len(self._files):
            path = self._path(len(self._files))
            self._add(self._create(path), path)
        return self._files[number], at * geometry.record_bytes, geometry.blocks_at + at * geometry.stride

    def _find(self, slot: int) -> None:
        """Open segments up to that of a slot which another process has made since."""
        while slot >= self.usable and (path := self._path(len(self._files))).exists():
            self._add(os.open(path, FLAGS), path)

    def _add(self, file: int, path: Path) -> None:
        self._io.add(file, path)
        self._files.append(file)

    def _create(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, self.geometry.size)
        except OSError as error:
            os.close(file)
            path.unlink()
            raise DiskFull(f"{path.parent}: {error.strerror}") from error
        return file

    def _path(self, number: int) -> Path:
        return self.folder / f"segment-{number:06}"
