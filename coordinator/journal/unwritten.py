"""The records of the last turn: a mapped file that survives the process.

A write to a segment takes the system 5 to 25 us, mostly for new memory of its cache. With durability "process", a turn
stores its record here before its effects leave, and the record is written to its segment after them. The file keeps its
memory, so storing a record takes a copy. If the process dies in between, the next one appends the record to the last
segment (`complete_segment`).

The file has a head and consecutive records: each is its number, its length, and its payload twice. A record counts once
the head names its end, by a single store of 8 bytes. The file is valid for the boot of the host that wrote it. In that
boot, damage is refused: the effects of a record that counts may have left. Two copies show it as a
checksum would; copying takes a quarter of the time for a large record.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvforge.protocol.errors import JournalCorrupt

from .entries import Frame
from .identity import host_boot

FILE = "unwritten"
SIZE = 1 << 20
MAGIC = b"kvfU"
_HEAD = struct.Struct("<4s4x16s40sQQ")  # magic, journal, the host's boot, number of the first record, end of the last
_U64, _ENTRY = struct.Struct("<Q"), struct.Struct("<QII")  # _ENTRY: number, length of the payload, its complement
FIRST_AT, END_AT = 64, 72
START = _HEAD.size
_LOW = 0xFFFF_FFFF


class Unwritten(NamedTuple):
    """What a file holds: its journal, the number of the first record, and the payload of each."""

    journal: bytes
    first: int
    payloads: list[bytes]


class UnwrittenRecords:
    """The writer's side."""

    def __init__(self, folder: Path, journal: bytes, number: int) -> None:
        """Create the file, or empty it.

        Args:
            folder: The state folder.
            journal: As in `identity.Origin`.
            number: The number of the next record.

        Raises:
            OSError: The file cannot be created.
        """
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._file = os.fstat(descriptor)
            os.posix_fallocate(descriptor, 0, SIZE)  # so that no store can fail
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._map[END_AT:START] = packed_end(START)
        self._map[:END_AT] = _HEAD.pack(MAGIC, journal, host_boot().encode(), number, 0)[:END_AT]
        self._end, self._first, self._number = START, number, number

    def add(self, parts: Sequence[Frame]) -> int:
        """Store a record with the payload joined from `parts`. Return its size, or 0 if there is no room for it."""
        size = sum(map(len, parts))
        at = self._end + _ENTRY.size
        end = at + 2 * size
        if end > SIZE:
            return 0
        room = self._map
        _ENTRY.pack_into(room, self._end, self._number, size, size ^ _LOW)
        for part in parts:
            after = at + len(part)
            room[at:after] = part
            room[at + size : after + size] = part
            at = after
        room[END_AT:START] = packed_end(end)  # from here on, the record counts
        self._end = end
        self._number += 1
        return size

    def payloads(self) -> list[bytes]:
        """Return the payload of each record."""
        return _payloads(self._map, self._end, self._first)

    @property
    def end(self) -> int:
        """The end of the last record in the file."""
        return self._end

    def clear(self, number: int) -> None:
        """Forget the records, which are written. `number` is that of the next one."""
        self._map[END_AT:START] = packed_end(START)
        self._map[FIRST_AT:END_AT] = _U64.pack(number)
        self._end, self._first, self._number = START, number, number

    def is_in(self, folder: Path) -> bool:
        """Return whether the file is in the folder under its name. Raise OSError."""
        return os.path.samestat((folder / FILE).stat(), self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if not self._map.closed:
            self._map.close()


def read_unwritten(folder: Path) -> Unwritten | None:
    """Return the records that a dead process left.

    Returns:
        The records; None if there are none, or the host was rebooted.

    Raises:
        JournalCorrupt: The file is damaged.
        OSError: It cannot be read.
    """
    try:
        data = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return None
    if not any(data[:START]):
        return None  # its writer died before it was complete
    if len(data) != SIZE or not data.startswith(MAGIC):
        raise JournalCorrupt(FILE, 0, problem="its head or its size is wrong")
    _magic, journal, boot, first, end = _HEAD.unpack_from(data)
    if boot.rstrip(b"\0") != host_boot().encode():
        return None
    end, complement = end & _LOW, end >> 32
    if end ^ complement != _LOW:
        raise JournalCorrupt(FILE, END_AT, problem="its end is wrong")
    payloads = _payloads(data, end, first)
    return Unwritten(journal, first, payloads) if payloads else None


def forget_unwritten(folder: Path) -> None:
    """Forget the records, which are written. Raise OSError."""
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, packed_end(START), END_AT)
    finally:
        os.close(descriptor)


def packed_end(end: int) -> bytes:
    """Return an end and its complement, so that damage does not make another one."""
    return _U64.pack(end | (end ^ _LOW) << 32)


def _payloads(data: bytes | mmap.mmap, end: int, number: int) -> list[bytes]:
    """Return the payloads in front of `end`, from record `number` on. Raise JournalCorrupt where they are damaged."""
    at, found = START, []
    if not START <= end <= SIZE:
        raise JournalCorrupt(FILE, END_AT, problem=f"it names {end} as its end")
    while at < end:
        start = at + _ENTRY.size
        stored, size, complement = _ENTRY.unpack_from(data, at) if start <= end else (number, 0, 0)
        middle, after = start + size, start + 2 * size
        payload = bytes(data[start:middle])
        if after > end or size ^ complement != _LOW or stored != number or data[middle:after] != payload:
            raise JournalCorrupt(FILE, at, problem="its two copies differ, or its head is wrong")
        at, number = after, number + 1
        found.append(payload)
    return found
