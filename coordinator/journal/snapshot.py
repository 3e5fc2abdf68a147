"""Snapshots: the whole machine in one file, which replaces everything that came before it.

The file has MAGIC; its head and the state, each preceded by its size; the table of arrays; and a CRC-32 of all that.
The state has a declared format (`declared.py`): a struct of plain values that refers to arrays by their index. Reading
creates nothing else, and checks each length before it allocates.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvforge.protocol.errors import JournalCorrupt

from ..core.limits import Limits
from ..core.machine import Machine
from .declared import SavedMachine
from .entries import STATE_VERSION
from .identity import host_boot
from .log import Journal
from .memory import ArrayWriter, Bytes, read_arrays
from .restoring import limits_of, restored
from .saving import saved

MAGIC = b"kvfT"
STATE = "state-{:016d}"
_SIZE = struct.Struct("<Q")
_CRC = struct.Struct("<I")
log = logging.getLogger("coordinator")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a snapshot.

    Attributes:
        version: The version of the state.
        now_us: The time of the last event.
        numbers: Connection numbers used so far.
        number: The first record that the snapshot does not contain.
        journal: As in `identity.Origin`.
        boot: As in `identity.Origin`.
        before: As in `identity.Origin`.
        host_boot: The boot of the host that wrote it.
    """

    version: int
    now_us: int
    numbers: int
    number: int = 0
    journal: bytes = b""
    boot: str = ""
    before: int = 0
    host_boot: str = ""

    @classmethod
    def of(cls, journal: Journal, now_us: int, numbers: int) -> Head:
        """Return the head of a snapshot that contains everything written to a journal."""
        origin = journal.origin._asdict()
        return cls(
            version=STATE_VERSION,
            now_us=now_us,
            numbers=numbers,
            number=journal.number,
            host_boot=host_boot(),
            **origin,
        )


class _Checked:
    """A file with a running checksum of the written bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc = file, 0

    def write(self, data: bytes | memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self._file.write(data)


def write(path: Path, machine: Machine, head: Head) -> None:
    """Write a snapshot to a temporary file, and rename it when it is complete and on the disk.

    On failure the temporary file is removed, because other writers may wait for its space.

    Args:
        path: The final name of the file.
        machine: The machine, between two turns.
        head: The head of the snapshot.

    Raises:
        OSError: It cannot be written.
    """
    arrays = ArrayWriter()
    state = msgspec.msgpack.encode(saved(machine, arrays))
    unfinished = path.with_suffix(".part")
    try:
        _write(unfinished, head, state, arrays)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.rename(path)


def _write(unfinished: Path, head: Head, state: bytes, arrays: ArrayWriter) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as file:
        out = _Checked(file)
        out.write(MAGIC)
        for part in (msgspec.msgpack.encode(head), state):
            out.write(_SIZE.pack(len(part)))
            out.write(part)
        arrays.write(out.write)
        file.write(_CRC.pack(out.crc))
        file.flush()
        os.fsync(file.fileno())


class Snapshot:
    """An intact snapshot file, and its head."""

    def __init__(self, path: Path) -> None:
        """Map and check the file.

        Raises:
            JournalCorrupt: The file is damaged.
        """
        self._name = path.name
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < len(MAGIC) + _CRC.size:
                raise JournalCorrupt(path.name, 0)
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if data[: len(MAGIC)] != MAGIC:
            raise JournalCorrupt(path.name, 0)
        if _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(data[: -_CRC.size]):
            raise JournalCorrupt(path.name, len(data))
        self._rest = Bytes(data[len(MAGIC) : -_CRC.size])
        with self._raising_corrupt():
            self.head = msgspec.msgpack.decode(self._rest.read(self._rest.number()), type=Head)

    def machine(self) -> Machine:
        """Restore the machine; call it once.

        Raises:
            JournalCorrupt: The content is inconsistent.
        """
        with self._raising_corrupt():
            state = msgspec.msgpack.decode(self._rest.read(self._rest.number()), type=SavedMachine)
            limits = limits_of(state.limits)
            bytes_max = memory_bytes()
            if (needed := bytes_needed(limits)) > bytes_max:
                raise ValueError(f"its limits need {needed} bytes of memory, but the host has {bytes_max}")
            return restored(state, limits, read_arrays(self._rest, bytes_max))

    @contextmanager
    def _raising_corrupt(self) -> Iterator[None]:
        """Raise JournalCorrupt for any error in decoding: even an intact file may be inconsistent."""
        try:
            yield
        except Exception as error:
            log.error("cannot decode the state in %s: %s: %s", self._name, type(error).__name__, error)
            raise JournalCorrupt(self._name, len(MAGIC) + self._rest.at) from error


def bytes_needed(limits: Limits) -> int:
    """Return about how much memory the arrays of a machine need at most."""
    bounds, cache = limits.bounds, limits.cache
    of_block = 64 + 4 * cache.block_size
    of_sequence = 512 + 4 * bounds.blocks_per_sequence_max + 8 * limits.context_tokens_max + 4 * bounds.stop_tokens_max
    of_tenant = 4096
    return bounds.blocks_max * of_block + bounds.sequences_max * of_sequence + bounds.tenants_max * of_tenant


def memory_bytes() -> int:
    """Return the memory of this host, an upper bound for any snapshot that it has written."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
