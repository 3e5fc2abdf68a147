"""The journal writer: the events of one turn become one record, which is kept before any effect leaves.

With durability "power" the record is then on the disk. With "process" it is in the memory of a file (`unwritten.py`),
and in its segment after the turn.

A plain file is used rather than SQLite, because SQLite silently ends its write-ahead log at the first damaged frame,
even in the middle. Appending to a file is also the cheapest (benchmarks/journal.py).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvforge.protocol.errors import JournalFull, KvforgeError, StateRemoved

from ..core.events import Boot, Event
from .disk import failed, sync_folder
from .entries import STATE_VERSION, Frame, pack
from .identity import ACKNOWLEDGED, AcknowledgedPositionWriter, Origin, SegmentHead, host_boot, pack_head
from .records import HEADER, crc_of, record
from .unwritten import UnwrittenRecords

DURABILITIES = ("process", "power", "none")
SEGMENT = "records-{:016d}"
FULL_LOOK_S, FULL_TELL_S = 0.05, 10.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last is a limit of the process (RLIMIT_FSIZE)
log = logging.getLogger("coordinator")


def segments(folder: Path) -> dict[int, Path]:
    """Return the segments by the number of their first record, in order."""
    return _numbered(folder, "records-")


def states(folder: Path) -> dict[int, Path]:
    """Return the snapshots by the number of the first record that they do not contain, in order."""
    return _numbered(folder, "state-")


def remove_before(folder: Path, number: int, durable: bool) -> None:
    """Remove the segments and snapshots that a snapshot before record `number` replaces.

    With `durable`, the name of the snapshot is synced to the disk first. Raise OSError.
    """
    if durable:
        sync_folder(folder)
    for first, path in (*segments(folder).items(), *states(folder).items()):
        if first < number:
            path.unlink(missing_ok=True)


def _numbered(folder: Path, prefix: str) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as there:  # cheaper than pathlib
        found = sorted(entry.name for entry in there if entry.name.startswith(prefix))
    numbers = [name.removeprefix(prefix) for name in found]
    return {int(number): folder / name for name, number in zip(found, numbers, strict=True) if number.isdecimal()}


class MessageInFlight(Protocol):
    """The interface of `poison_detector.PoisonDetector` that the journal uses."""

    def begin(self, frames: Sequence[Frame]) -> None:
        """Begin processing a message.

        Raises:
            MessageRefused: Earlier processes died of this message.
        """

    def message_applied(self) -> None:
        """Record that the message was applied."""

    def turn_written(self) -> None:
        """Record that the turn is written."""


class Journal:
    """Appends records to the last segment. `bytes` is the size of all segments since the last snapshot."""

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        durable: bool = False,
        bytes_before: int = 0,
        stopping: Callable[[], bool] = lambda: False,
        origin: Origin | None = None,
        unwritten: UnwrittenRecords | None = None,
    ) -> None:
        """Begin a segment.

        Args:
            folder: An existing folder.
            number: The number of the first record.
            durable: Sync each record to the disk before any effect leaves ("power").
            bytes_before: The size of the segments before this one.
            stopping: Returns whether to stop waiting for space on the disk.
            origin: The position at which the journal continues; None starts a new one.
            unwritten: Where records are stored until `flush`; None writes each at once. Not with `durable`.

        Raises:
            OSError: A file cannot be created.
        """
        self.folder, self.number = folder, number
        self._origin = origin or Origin.new()
        self._before = self._origin.before  # the CRC-32 of the last record
        self.bytes = bytes_before
        self._durable, self._stopping, self._unwritten = durable, stopping, unwritten
        self._noted: list[tuple[Event | Boot, int, Sequence[Frame]]] = []
        self.poison_detector: MessageInFlight | None = None
        self._end = self._first = 0
        self._descriptor = -1
        self._mark = AcknowledgedPositionWriter(folder, durable, self._origin.journal)
        self._begin()
        self._acknowledge()
        if durable:
            self._mark.sync()

    @property
    def origin(self) -> Origin:
        """The position at which the next record continues the journal."""
        return self._origin._replace(before=self._before)

    def _begin(self) -> None:
        """Begin a segment. On failure, the previous segment stays the last one. Raise OSError."""
        path = self.folder / SEGMENT.format(self.number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        head = SegmentHead(version=STATE_VERSION, host_boot=host_boot(), number=self.number, **self.origin._asdict())
        data = pack_head(head)
        descriptor = os.open(path, flags, 0o600)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._durable:
                os.fdatasync(descriptor)
                sync_folder(self.folder)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._end, self._first = descriptor, len(data), self.number

    def note(self, event: Event | Boot, now_us: int, frames: Sequence[Frame] = ()) -> None:
        """Add an event that enters the core at `now_us`, with the frames of its message."""
        self._noted.append((event, now_us, frames))

    def commit(self) -> None:
        """Keep the events added since the last call. If this raises, none of their effects may leave.

        Raises:
            JournalFull: The disk is full, and the process was asked to stop.
            JournalFailed: The disk refuses the write.
            StateRemoved: The file was removed.
        """
        if not self._noted:
            return
        parts: list[Frame] = []
        for event, now_us, frames in self._noted:  # together, because what runs after the core starts with empty caches
            parts += pack(event, now_us, frames)
        unwritten = self._unwritten
        if unwritten is not None:
            self._check_named()
            if size := unwritten.add(parts):
                self.bytes += HEADER.size + size
                self._noted.clear()
                self.number += 1
                return
            self.flush()
        data = record(self.number, parts, self._before)
        self._append(data)
        self.bytes += len(data)
        self._noted.clear()
        self.number += 1
        self._before = crc_of(data)
        self._acknowledge_or_fail()
        if unwritten is not None:
            unwritten.clear(self.number)

    def flush(self) -> None:
        """Write the stored records to the segment. If this raises, they stay stored.

        Raises:
            KvforgeError: As `commit`.
        """
        unwritten = self._unwritten
        if unwritten is None or not (payloads := unwritten.payloads()):
            return
        number, before, data = self.number - len(payloads), self._before, bytearray()
        for payload in payloads:
            made = record(number, [payload], before)
            data += made
            number, before = number + 1, crc_of(made)
        self._append(data)
        self._before = before
        self._acknowledge_or_fail()
        unwritten.clear(number)

    def _append(self, data: bytearray) -> None:
        """Write records to the segment, which must have a name."""
        try:
            self._put(data)
        except OSError as error:
            raise failed(self.folder / SEGMENT.format(self._first), error) from None
        self._check_named()

    def _check_named(self) -> None:
        """Raise StateRemoved if the segment was removed."""
        if not os.fstat(self._descriptor).st_nlink:
            raise StateRemoved(str(self.folder), "new events could not be kept there")

    def _acknowledge_or_fail(self) -> None:
        try:
            self._acknowledge()
        except OSError as error:
            raise failed(self.folder / ACKNOWLEDGED, error) from None

    def _acknowledge(self) -> None:
        """Mark everything written so far as acknowledged: its effects may leave from now on."""
        self._mark.write(self.number, self._before)

    def _put(self, data: bytearray) -> None:
        logged_s = 0.0
        while True:
            try:
                written = os.write(self._descriptor, data)
                if written == len(data):
                    if self._durable:
                        os.fdatasync(self._descriptor)
                    break
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
            os.ftruncate(self._descriptor, self._end)  # remove a partial record
            if time.monotonic() - logged_s > FULL_TELL_S:
                logged_s = time.monotonic()
                log.error("no room for the journal in %s: waiting for space", self.folder)
            if self._stopping():
                raise JournalFull(str(self.folder))
            time.sleep(FULL_LOOK_S)
        if logged_s:
            log.warning("there is space for the journal in %s again", self.folder)
        self._end += len(data)

    @property
    def missing(self) -> bool:
        """Whether the folder, or a file of the journal in it, was removed or replaced."""
        path, mark = self.folder / SEGMENT.format(self._first), self.folder / ACKNOWLEDGED
        try:
            return not (
                os.path.samestat(path.stat(), os.fstat(self._descriptor))
                and os.path.samestat(mark.stat(), self._mark.stat())
                and (self._unwritten is None or self._unwritten.is_in(self.folder))
            )
        except OSError:
            return True

    def rotate(self) -> int:
        """Begin the next segment. Return the number of its first record.

        Raises:
            OSError: It cannot be created.
            KvforgeError: As `flush`.
        """
        assert not self._noted, "a segment ends between two turns"
        self.flush()
        if self.number == self._first:  # the segment has no records
            return self.number
        self._begin()
        self.bytes = 0
        return self.number

    def close(self) -> None:
        """Close the files. Idempotent. Stored records that cannot be written stay stored."""
        if self._descriptor >= 0:
            if self._unwritten is not None:
                with suppress(KvforgeError):
                    self.flush()
                self._unwritten.close()
            os.close(self._descriptor)
            self._descriptor = -1
        self._mark.close()
