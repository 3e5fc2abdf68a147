"""The process that copies between the host file and the disk: `python -m kvforge.worker.disk.copying SETTINGS`.

A worker starts it, and it dies with the worker. It inherits the descriptors of both locked files, so that their locks
last until it has ended too. Over a socket it announces what it recovered, then gets orders, which its children carry
out (`copiers`):

| direction | bytes |
|---|---|
| to the worker, once | the head: entries, damaged records, slots that exist; then each entry, its owner and tokens |
| to the worker, once | why blocks go through the page cache: the bytes of that text, and it |
| from the worker | orders, as rows of `DiskOrders` with owner and tokens behind each |
| to the worker | results, as rows of `DiskResults` |

All numbers are int32 in native order. The end of the socket ends the process, after it has written all to the disk.
"""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path

import msgspec
import numpy as np

from kvforge.protocol.messages import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_ENTRY_NUMBERS,
    DISK_FAILED,
    DISK_FULL,
    DISK_NOT_FOUND,
    DISK_ORDER_NUMBERS,
    DISK_WIPE,
    DISK_WRITE,
    Int32Array,
)
from kvforge.worker.host_file import MappedBlocks

from .copiers import Copiers
from .folder import BoundedSegments
from .records import Entry
from .recovery import usable
from .sealing import Sealer, read_key
from .segments import Geometry
from .store import BlockStore, Damaged, DiskFull, NotFound

HEAD_NUMBERS, OWNER_NUMBERS = 3, 2
READERS = 4
log = logging.getLogger("worker")


def order_numbers(block_tokens: int) -> int:
    """Return the numbers of an order."""
    return DISK_ORDER_NUMBERS + OWNER_NUMBERS + block_tokens


class CopyingSettings(msgspec.Struct, frozen=True):
    """What the process is started with.

    Attributes:
        socket: Descriptor of the socket.
        host: Descriptor of the host file.
        host_blocks: Its blocks.
        around: The worker's folder, which it keeps locked.
        folder: The folder of the identity.
        identity: 32 hex digits.
        block_bytes: Bytes of a block.
        block_tokens: Tokens of a block.
        segment_bytes: The most bytes of a segment.
        segments_max: The most segments.
        bytes_max: The most bytes of all identities.
        key_file: The file with the key, "" for none.
        readers: How many processes read.
        direct: Whether blocks go past the page cache where that is possible.
    """

    socket: int
    host: int
    host_blocks: int
    around: str
    folder: str
    identity: str
    block_bytes: int
    block_tokens: int
    segment_bytes: int
    segments_max: int
    bytes_max: int
    key_file: str
    readers: int = READERS
    direct: bool = True

    @property
    def geometry(self) -> Geometry:
        """The sizes of segments."""
        return Geometry(self.block_bytes, self.block_tokens, self.segment_bytes)

    def segments(self) -> BoundedSegments:
        """Open the segments."""
        return BoundedSegments(
            Path(self.around),
            Path(self.folder),
            bytes.fromhex(self.identity),
            self.geometry,
            self.segments_max,
            Sealer(read_key(self.key_file)),
            self.bytes_max,
            direct=self.direct,
        )


class Copying:
    """Carries out orders on one host file and one store. block_tokens: tokens of a block."""

    def __init__(self, store: BlockStore, host: MappedBlocks, block_tokens: int) -> None:
        self._store, self._host, self._block_tokens = store, host, block_tokens
        self._logged = ""

    def recovered(self) -> Int32Array:
        """Return the head and the entries of earlier lives: [3 + n * (8 + block_tokens)] int32."""
        found = self._store.recover()
        entries, _ = usable(found.records)
        tokens_at = DISK_ENTRY_NUMBERS + OWNER_NUMBERS
        width = tokens_at + self._block_tokens
        rows = np.zeros((len(entries), width), np.int32)
        for row, (slot, entry) in zip(rows, entries, strict=True):
            row[0], row[5] = slot, entry.first
            row[1:5] = np.array([entry.value, entry.parent], np.uint64).view(np.int32)
            row[DISK_ENTRY_NUMBERS:tokens_at] = np.array([entry.owner], np.uint64).view(np.int32)
            row[tokens_at:] = np.frombuffer(entry.tokens, np.int32)
        head = np.array([len(entries), found.dropped, self._store.usable], np.int32)
        return np.concatenate([head, rows.reshape(-1)])

    def carry_out(self, order: Int32Array) -> Int32Array:
        """Carry out one order: [11 + block_tokens] int32. Return its result, [3] int32."""
        number, kind, host, slot = order[:4].tolist()
        value, parent = np.ascontiguousarray(order[4:8]).view(np.uint64).tolist()
        usable_slots = 0
        try:
            if kind == DISK_WRITE:
                tokens_at = DISK_ORDER_NUMBERS + OWNER_NUMBERS
                (owner,) = np.ascontiguousarray(order[DISK_ORDER_NUMBERS:tokens_at]).view(np.uint64).tolist()
                entry = Entry(value, parent, bool(order[8]), order[tokens_at:].tobytes(), owner)
                outcome = self._write(host, slot, entry)
            elif kind == DISK_WIPE:
                self._store.wipe(slot)
                outcome = DISK_DONE
            else:
                outcome = self._read(host, slot, value)
        except DiskFull as error:
            outcome, usable_slots = DISK_FULL, self._store.usable
            self._log(f"disk tier: no space for more than {usable_slots} blocks: {error}")
        except OSError as error:
            outcome = DISK_FAILED
            self._log(f"disk tier: the device failed: {error}")
        return np.array([number, outcome, usable_slots], np.int32)

    def _write(self, host: int, slot: int, entry: Entry) -> int:
        if int(self._host.tags[host]) != entry.value:
            return DISK_NOT_FOUND
        self._store.write(slot, entry, int(self._host.sums[host]), self._host.data[host])
        return DISK_DONE

    def _read(self, host: int, slot: int, value: int) -> int:
        self._host.tags[host] = 0
        try:
            checksum = self._store.read(slot, value, self._host.data[host])
        except NotFound:
            return DISK_NOT_FOUND
        except Damaged as error:
            log.warning("disk tier: a block has other bytes than were written: %s", error)
            self._store.drop(slot)
            return DISK_DAMAGED
        self._host.sums[host] = checksum
        self._host.tags[host] = value
        return DISK_DONE

    def _log(self, problem: str) -> None:
        if problem != self._logged:
            log.error("%s", problem)
            self._logged = problem


def main() -> int:
    """Serve the socket until the worker closes it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    settings = msgspec.json.decode(sys.argv[1], type=CopyingSettings)
    store = settings.segments()
    host = MappedBlocks(settings.host, settings.host_blocks, settings.block_bytes)
    copying = Copying(store, host, settings.block_tokens)
    with socket.socket(fileno=settings.socket) as worker:
        worker.setblocking(True)
        worker.sendall(copying.recovered().tobytes())
        how = store.indirect.encode()
        worker.sendall(np.array([len(how)], np.int32).tobytes() + how)
        copiers = Copiers(worker, copying.carry_out, store.close, 4 * order_numbers(settings.block_tokens))
        return copiers.serve(settings.readers)


if __name__ == "__main__":
    sys.exit(main())
