"""Snapshots: the whole machine in one file, so that what came before it need not be kept, nor applied again.

The file is MAGIC; its head and the state, each with its size in front; the table of arrays; a CRC-32 of all that. The
state is a declared format (`declared.py`): a struct of plain values that names arrays by their place in the table.
Reading makes nothing but these, and checks each length before it allocates.
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

    version: the version of the state. now_us: the time of the last event. numbers: connection numbers given out so far.
    number: the first record that is not in it. journal, boot, before: as in `identity.Origin`. host_boot: the boot of
    the host that wrote it.
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
        """The head of a snapshot that holds all that was written to a journal."""
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
    """A file whose bytes are summed up as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc = file, 0

    def write(self, data: bytes | memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self._file.write(data)


def write(path: Path, machine: Machine, head: Head) -> None:
    """Writes the file under another name, and gives it its own when it is whole and on the disk. A file that cannot be
    finished is removed: its space may be what others wait for.

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
    """A file that is as it was written. head: what it is of."""

    def __init__(self, path: Path) -> None:
        """Raises JournalCorrupt."""
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
        with self._meant():
            self.head = msgspec.msgpack.decode(self._rest.take(self._rest.number()), type=Head)

    def machine(self) -> Machine:
        """The machine; call it once. Raises JournalCorrupt."""
        with self._meant():
            state = msgspec.msgpack.decode(self._rest.take(self._rest.number()), type=SavedMachine)
            limits = limits_of(state.limits)
            bytes_max = memory_bytes()
            if (needed := bytes_needed(limits)) > bytes_max:
                raise ValueError(f"its limits need {needed} bytes of memory, and there are {bytes_max}")
            return restored(state, limits, read_arrays(self._rest, bytes_max))

    @contextmanager
    def _meant(self) -> Iterator[None]:
        """Bytes that are as they were written may mean nothing all the same. Raises JournalCorrupt."""
        try:
            yield
        except Exception as error:
            log.error("%s makes no state: %s: %s", self._name, type(error).__name__, error)
            raise JournalCorrupt(self._name, len(MAGIC) + self._rest.at) from error


def bytes_needed(limits: Limits) -> int:
    """About how much memory a machine takes at most for its arrays."""
    bounds, cache = limits.bounds, limits.cache
    of_block = 64 + 4 * cache.block_size
    of_sequence = 512 + 4 * bounds.blocks_per_sequence_max + 8 * limits.context_tokens_max + 4 * bounds.stop_tokens_max
    of_tenant = 4096
    return bounds.blocks_max * of_block + bounds.sequences_max * of_sequence + bounds.tenants_max * of_tenant


def memory_bytes() -> int:
    """The memory of this machine: no snapshot that a machine of this host wrote takes more."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
