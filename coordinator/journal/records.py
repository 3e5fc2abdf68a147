"""Records: what one turn was told, as bytes in a file.

A record is MAGIC, the length of its payload, a CRC-32 of the rest, the CRC-32 of the record before it, its number; then
the payload. Numbers count up by one through all segments, and each record names its predecessor: a record is valid only
in its own place of its own journal.

A file that ends in the middle of a record, or in one that is damaged with nothing valid behind it, has a torn tail: the
process died while it wrote, and nothing that followed from that record has left it. Something damaged with a valid
record behind it is a fault of the disk.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvforge.protocol.errors import JournalCorrupt

MAGIC = b"kvfR"
HEADER = struct.Struct("<4sIIIQ")  # magic, bytes of the payload, CRC-32, that of the record before, number
RECORD_BYTES_MAX = 1 << 30
_PLACE = struct.Struct("<IQ")


class Record(NamedTuple):
    """number: its place among all records. crc: its own. before: the CRC-32 of the record before it. start, end: where
    it lies in its file."""

    number: int
    crc: int
    before: int
    payload: memoryview
    start: int
    end: int


def record(number: int, parts: Sequence[bytes | memoryview], before: int = 0) -> bytes:
    """A record of the payload that the parts make together. before: the CRC-32 of the record before it."""
    payload = b"".join(parts)
    assert len(payload) < RECORD_BYTES_MAX, "a turn takes in less"
    crc = zlib.crc32(payload, zlib.crc32(_PLACE.pack(before, number)))
    return HEADER.pack(MAGIC, len(payload), crc, before, number) + payload


def crc_of(record: bytes) -> int:
    """The CRC-32 of a record, which the next one names."""
    crc: int = HEADER.unpack_from(record)[2]
    return crc


def read(data: memoryview, number: int, name: str, at: int = 0, before: int = 0) -> Iterator[Record]:
    """The records of a segment, until its end or its torn tail.

    Args:
        data: The whole file.
        number: The number of the first record.
        name: The name of the file.
        at: Where the records begin, in bytes.
        before: The CRC-32 of the record before the first.

    Raises:
        JournalCorrupt: Something is damaged and valid records follow, or a record follows another one than is there.
    """
    while (found := _valid(data, at, number)) is not None:
        if found.before != before:
            raise JournalCorrupt(name, at, problem=f"record {number} follows another record than the one before it")
        yield found
        at, number, before = found.end, number + 1, found.crc
    if (later := _later(data, at, number)) is not None:
        raise JournalCorrupt(name, at, number, later.number)


def _valid(data: memoryview, at: int, number: int | None = None) -> Record | None:
    """The record that begins there, where it is whole; number: the one that it must have."""
    start = at + HEADER.size
    if start > len(data):
        return None
    magic, size, crc, before, own = HEADER.unpack_from(data, at)
    if magic != MAGIC or size >= RECORD_BYTES_MAX or start + size > len(data) or (number is not None and own != number):
        return None
    payload = data[start : start + size]
    if zlib.crc32(payload, zlib.crc32(_PLACE.pack(before, own))) != crc:
        return None
    return Record(own, crc, before, payload, at, start + size)


def _later(data: memoryview, at: int, number: int) -> Record | None:
    """A valid record behind `at`, of a higher number than the one that is missing there."""
    rest = bytes(data[at:])
    place = rest.find(MAGIC)
    while place >= 0:
        found = _valid(data, at + place)
        if found is not None and found.number > number:
            return found
        place = rest.find(MAGIC, place + 1)
    return None
