"""The identity of each file of a journal, and the position up to which the journal was acknowledged.

A segment and a snapshot name the journal, the boot of the coordinator and of the host, and their predecessor: the
CRC-32 of the last record before them, which in turn covers that of the record before it. The file `acknowledged` names
the last record that was written before any of its effects left the process.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvforge.protocol.errors import JournalCorrupt

MAGIC = b"kvfJ"
_SIZES = struct.Struct("<4sII")  # magic, bytes of the head, CRC-32 of the head
HEAD_BYTES_MAX = 4096
ACKNOWLEDGED = "acknowledged"
_MARK = struct.Struct("<4sIQIB3x16s40s")  # magic, CRC-32, next record, CRC-32 of the last, power, journal, host's boot
_MARK_MAGIC = b"kvfA"
_MARK_PLACE, _MARK_PLACE_AT = struct.Struct("<IQI"), 4  # the part that changes: CRC-32, next record, CRC-32 of the last
_HOST_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_boot() -> str:
    """Return the boot id of this host; "" if the system does not provide it."""
    try:
        return _HOST_BOOT.read_text().strip()[:40]
    except OSError:
        return ""


class Origin(NamedTuple):
    """The position at which a journal continues.

    Attributes:
        journal: 16 random bytes, the same in all its files.
        boot: The boot of the coordinator that wrote the state.
        before: The CRC-32 of the last record, 0 for none.
    """

    journal: bytes
    boot: str = ""
    before: int = 0

    @classmethod
    def new(cls, boot: str = "") -> Origin:
        """Return the origin of a journal without records."""
        return cls(secrets.token_bytes(16), boot)


class SegmentHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a segment: the number of its first record, and the version of the state that its records lead to."""

    version: int
    journal: bytes
    boot: str
    host_boot: str
    number: int
    before: int


def pack_head(head: SegmentHead) -> bytes:
    """Return the encoded head of a segment."""
    packed = msgspec.msgpack.encode(head)
    return _SIZES.pack(MAGIC, len(packed), zlib.crc32(packed)) + packed


def unpack_head(data: memoryview, name: str) -> tuple[SegmentHead, int] | None:
    """Return a segment's head and the offset of its records; None if the head is incomplete.

    Raises:
        JournalCorrupt: The head is intact but cannot be decoded.
    """
    if len(data) < _SIZES.size:
        return None
    magic, size, crc = _SIZES.unpack_from(data)
    end = _SIZES.size + size
    if magic != MAGIC or size > HEAD_BYTES_MAX or end > len(data) or zlib.crc32(data[_SIZES.size : end]) != crc:
        return None
    try:
        return msgspec.msgpack.decode(data[_SIZES.size : end], type=SegmentHead), end
    except msgspec.MsgspecError:
        raise JournalCorrupt(name, _SIZES.size, problem="cannot decode the head of the segment") from None


class AcknowledgedPosition(NamedTuple):
    """The position up to which a journal was acknowledged.

    Attributes:
        number: Number of the next record.
        before: The CRC-32 of the last record.
        durable: Each record was synced to the disk before it was acknowledged.
    """

    number: int
    before: int
    durable: bool
    journal: bytes
    host_boot: str


class AcknowledgedPositionWriter:
    """Writes the mark of one journal in place: 80 bytes, within one sector of the disk."""

    def __init__(self, folder: Path, durable: bool, journal: bytes) -> None:
        """Open the file, creating it if needed. Raise OSError."""
        self._data = bytearray(_MARK.pack(_MARK_MAGIC, 0, 0, 0, durable, journal, host_boot().encode()))
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(folder / ACKNOWLEDGED, flags, 0o600)

    def write(self, number: int, before: int) -> None:
        """Mark everything before record `number` as acknowledged. Raise OSError."""
        data = self._data
        _MARK_PLACE.pack_into(data, _MARK_PLACE_AT, 0, number, before)
        _MARK_PLACE.pack_into(data, _MARK_PLACE_AT, zlib.crc32(data), number, before)
        os.pwrite(self._descriptor, data, 0)

    def stat(self) -> os.stat_result:
        """Return `os.fstat` of the open file. Raise OSError."""
        return os.fstat(self._descriptor)

    def sync(self) -> None:
        """Sync the mark to the disk. Raise OSError."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_acknowledged_position(folder: Path) -> AcknowledgedPosition | None:
    """Return the mark of a journal; None if there is no such file.

    Raises:
        JournalCorrupt: The file is damaged.
        OSError: It cannot be read.
    """
    try:
        data = (folder / ACKNOWLEDGED).read_bytes()
    except FileNotFoundError:
        return None
    if not data:
        return None  # created, but nothing was acknowledged
    if len(data) != _MARK.size:
        raise JournalCorrupt(ACKNOWLEDGED, 0, problem=f"it has {len(data)} bytes, not {_MARK.size}")
    magic, crc, *rest = _MARK.unpack(data)
    if magic != _MARK_MAGIC or crc != zlib.crc32(_MARK.pack(magic, 0, *rest)):
        raise JournalCorrupt(ACKNOWLEDGED, 0, problem="its checksum does not match")
    number, before, durable, journal, boot = rest
    return AcknowledgedPosition(number, before, bool(durable), journal, boot.rstrip(b"\0").decode(errors="replace"))
