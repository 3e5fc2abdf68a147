"""Records: what one turn was told, as bytes in a file.

A record is MAGIC, the length of its payload, a CRC-32 of its number and payload, its number; then the payload. Numbers
count up by one through all segments, so that a record is only valid in its own place.

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
HEADER = struct.Struct("<4sIIQ")  # magic, bytes of the payload, CRC-32, number
RECORD_BYTES_MAX = 1 << 30
_NUMBER = struct.Struct("<Q")


class Record(NamedTuple):
    """number: its place among all records. start, end: where it lies in its file."""

    number: int
    payload: memoryview
    start: int
    end: int


def record(number: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """A record of the payload that the parts make together."""
    payload = b"".join(parts)
    assert len(payload) < RECORD_BYTES_MAX, "a turn takes in less"
    return HEADER.pack(MAGIC, len(payload), zlib.crc32(payload, zlib.crc32(_NUMBER.pack(number))), number) + payload


def read(data: memoryview, number: int, name: str) -> Iterator[Record]:
    """The records of a segment from `number` on, until its end or its torn tail.

    name: of the file, for people. Raises JournalCorrupt where something is damaged and valid records follow.
    """
    at = 0
    while (found := _valid(data, at, number)) is not None:
        yield found
        at, number = found.end, number + 1
    if (later := _later(data, at, number)) is not None:
        raise JournalCorrupt(name, at, number, later.number)


def _valid(data: memoryview, at: int, number: int | None = None) -> Record | None:
    """The record that begins there, where it is whole; number: the one that it must have."""
    start = at + HEADER.size
    if start > len(data):
        return None
    magic, size, crc, own = HEADER.unpack_from(data, at)
    if magic != MAGIC or size >= RECORD_BYTES_MAX or start + size > len(data) or (number is not None and own != number):
        return None
    payload = data[start : start + size]
    if zlib.crc32(payload, zlib.crc32(_NUMBER.pack(own))) != crc:
        return None
    return Record(own, payload, at, start + size)


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
