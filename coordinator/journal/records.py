"""Records: the serialised events of one turn.

A record has MAGIC, the length of its payload, a CRC-32 of the rest, the CRC-32 of the previous record, its number, and
the payload. Numbers are consecutive through all segments, and each record names its predecessor, so a record is valid
only in its place of its own journal.

A file that ends in an incomplete record, or in a damaged one without valid records behind it, has a torn tail: the
process died while writing it, and none of its effects has left. Damage with a valid record behind it is a disk fault.
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
_ROOM = bytes(HEADER.size)


class Record(NamedTuple):
    """A record of a segment.

    Attributes:
        number: Its number among all records.
        crc: Its CRC-32.
        before: The CRC-32 of the previous record.
        start: Its first byte in the file.
        end: The byte after it.
    """

    number: int
    crc: int
    before: int
    payload: memoryview
    start: int
    end: int


def record(number: int, parts: Sequence[bytes | memoryview], before: int = 0) -> bytearray:
    """Encode a record with the payload joined from `parts`. `before` is the CRC-32 of the previous record."""
    data = bytearray().join((_ROOM, *parts))
    size = len(data) - len(_ROOM)
    assert size < RECORD_BYTES_MAX, "a turn receives less"
    crc = zlib.crc32(memoryview(data)[len(_ROOM) :], zlib.crc32(_PLACE.pack(before, number)))
    HEADER.pack_into(data, 0, MAGIC, size, crc, before, number)
    return data


def crc_of(record: bytes | bytearray) -> int:
    """Return the CRC-32 of a record, which the next one refers to."""
    crc: int = HEADER.unpack_from(record)[2]
    return crc


def read(data: memoryview, number: int, name: str, at: int = 0, before: int = 0) -> Iterator[Record]:
    """Yield the records of a segment, until its end or its torn tail.

    Args:
        data: The whole file.
        number: The number of the first record.
        name: The name of the file.
        at: The offset of the first record in bytes.
        before: The CRC-32 of the record before the first.

    Raises:
        JournalCorrupt: There is damage before valid records, or a record has another predecessor.
    """
    while (found := _valid(data, at, number)) is not None:
        if found.before != before:
            raise JournalCorrupt(name, at, problem=f"record {number} does not belong after the record before it")
        yield found
        at, number, before = found.end, number + 1, found.crc
    if (later := _later(data, at, number)) is not None:
        raise JournalCorrupt(name, at, number, later.number)


def _valid(data: memoryview, at: int, number: int | None = None) -> Record | None:
    """Return the record at an offset if it is valid; `number` is the expected number."""
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
    """Return a valid record behind `at` with a higher number than the one missing there."""
    rest = bytes(data[at:])
    place = rest.find(MAGIC)
    while place >= 0:
        found = _valid(data, at + place)
        if found is not None and found.number > number:
            return found
        place = rest.find(MAGIC, place + 1)
    return None
