"""Detects messages that crash the coordinator: records the one being processed for the next process.

A client resends a message that crashed the coordinator, and would crash the next one too. The file `in-hand` is memory
mapped: a store survives the process, and no system call is needed for a message. A new process finds the message, or
the record of the journal, that was in hand when the previous one died, and counts its deaths. A message that has killed
`deaths_max` coordinators in a row is refused; one that was handled is forgotten.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from kvforge.protocol.errors import MessageRefused

from .entries import Frame

FILE = "in-hand"
SUSPECTS_MAX = 32
EDGE_BYTES = 4096  # bytes hashed at each end of a frame, to distinguish messages
_MAGIC = b"kvfH"
_HEAD = struct.Struct("<4sIQQQ")  # magic, deaths of the record, message in hand, largest of the turn, record in hand
_SUSPECT = struct.Struct("<QQ")  # message, deaths
_SIZE = _HEAD.size + SUSPECTS_MAX * _SUSPECT.size
_U64 = struct.Struct("<Q")
_MESSAGE_AT, _RECORD_AT = 8, 24


def fingerprint(frames: Sequence[Frame]) -> int:
    """Return a number that distinguishes a message: its size, and a CRC-32 of its edges. Never 0."""
    crc = size = 0
    for frame in frames:
        size += len(frame)
        crc = zlib.crc32(frame[:EDGE_BYTES], crc)
        if len(frame) > EDGE_BYTES:
            crc = zlib.crc32(frame[-EDGE_BYTES:], crc)
    return (min(size, 0xFFFFFFFF) << 32 | crc) or 1


class PoisonDetector:
    """The file of one folder.

    Attributes:
        record: The record that previous processes died of during recovery; 0 for none.
        record_deaths: How many processes died in a row.
    """

    def __init__(self, folder: Path, deaths_max: int) -> None:
        """Open the file, and count the death that it shows. Raise OSError."""
        self._deaths_max = deaths_max
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(folder / FILE, flags, 0o600)
        try:
            data = os.pread(descriptor, _SIZE, 0)
            os.ftruncate(descriptor, _SIZE)
            os.pwrite(descriptor, data.ljust(_SIZE, b"\0")[:_SIZE], 0)  # allocate the space, so no store can fail
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        magic, deaths, message, _, record = _HEAD.unpack_from(self._map)
        self._suspects: dict[int, int] = {}
        self._tried: list[int] = []  # suspects that were handled in this turn
        self.record = self.record_deaths = self._largest = 0
        if magic == _MAGIC:
            found = _SUSPECT.iter_unpack(self._map[_HEAD.size :])
            self._suspects = {suspect: count for suspect, count in found if suspect}
            if message:
                self._suspects[message] = self._suspects.pop(message, 0) + 1
            if record:
                self.record, self.record_deaths = record, deaths + 1
        self._write()

    def _write(self) -> None:
        while len(self._suspects) > SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]
        data = _HEAD.pack(_MAGIC, self.record_deaths, 0, 0, 0)
        data += b"".join(_SUSPECT.pack(suspect, count) for suspect, count in self._suspects.items())
        self._map[:] = data.ljust(_SIZE, b"\0")

    def begin(self, frames: Sequence[Frame]) -> None:
        """Begin processing a client's message.

        Raises:
            MessageRefused: Earlier processes died of this message.
        """
        message = fingerprint(frames)
        if self._suspects and (deaths := self._suspects.get(message, 0)) >= self._deaths_max:
            raise MessageRefused(sum(map(len, frames)), deaths)
        self._largest = max(self._largest, message)
        if message in self._suspects:
            self._tried.append(message)
        _U64.pack_into(self._map, _MESSAGE_AT, message)

    def message_applied(self) -> None:
        """Record that the message was applied. The largest of a turn stays in hand until the turn is written."""
        _U64.pack_into(self._map, _MESSAGE_AT, self._largest)

    def turn_written(self) -> None:
        """Record that the turn is written, which leaves nothing in hand."""
        if not self._largest:
            return
        _U64.pack_into(self._map, _MESSAGE_AT, 0)
        if self._tried:
            for message in self._tried:
                self._suspects.pop(message, None)
            self._tried.clear()
            self._write()
        self._largest = 0

    def recovering(self, record: int) -> None:
        """Begin applying a record of the journal."""
        if record != self.record and self.record_deaths:
            struct.pack_into("<I", self._map, 4, 0)
        elif self.record_deaths:
            struct.pack_into("<I", self._map, 4, self.record_deaths)
        _U64.pack_into(self._map, _RECORD_AT, record)

    def recovered(self) -> None:
        """Record that all records were applied."""
        self.record = self.record_deaths = 0
        self._write()

    def suspect(self, frames: Sequence[Frame]) -> None:
        """Refuse a message from now on, because it was in a record that was set aside."""
        self._suspects[fingerprint(frames)] = self._deaths_max
        self._write()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if not self._map.closed:
            self._map.close()
