"""The journal that is written: what entered the core in one turn becomes one record, before anything leaves.

A file, and not SQLite, whose write-ahead log ends at its first damaged frame without a word: what was damaged in the
middle of it would be taken for its end. Appending is also what costs least (benchmarks/journal.py).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvforge.protocol.errors import JournalFull, StateRemoved

from ..core.events import Boot, Event
from .disk import failed, sync_folder
from .entries import STATE_VERSION, Frame, pack
from .identity import ACKNOWLEDGED, MarkWriter, Origin, SegmentHead, host_boot, pack_head
from .records import crc_of, record

DURABILITIES = ("process", "power", "none")
SEGMENT = "records-{:016d}"
FULL_LOOK_S, FULL_TELL_S = 0.05, 10.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last is a limit of the process (RLIMIT_FSIZE)
log = logging.getLogger("coordinator")


def segments(folder: Path) -> dict[int, Path]:
    """The segments by the number of their first record, in order."""
    return _numbered(folder, "records-")


def states(folder: Path) -> dict[int, Path]:
    """The snapshots by the number of the first record that is not in them, in order."""
    return _numbered(folder, "state-")


def remove_before(folder: Path, number: int, durable: bool) -> None:
    """A snapshot holds what came before that record: the segments and snapshots that are older are not needed.

    durable: nothing goes before the snapshot's own name is on the disk. Raises OSError.
    """
    if durable:
        sync_folder(folder)
    for first, path in (*segments(folder).items(), *states(folder).items()):
        if first < number:
            path.unlink(missing_ok=True)


def _numbered(folder: Path, prefix: str) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as there:  # of a few files pathlib would make many objects
        found = sorted(entry.name for entry in there if entry.name.startswith(prefix))
    numbers = [name.removeprefix(prefix) for name in found]
    return {int(number): folder / name for name, number in zip(found, numbers, strict=True) if number.isdecimal()}


class MessageInHand(Protocol):
    """The interface of `in_hand.InHand` that the journal uses."""

    def take(self, frames: Sequence[Frame]) -> None:
        """A message is worked on from now on. Raises MessageRefused."""

    def handled(self) -> None:
        """It was applied."""

    def turned(self) -> None:
        """The turn is written."""


class Journal:
    """Appends records to the last segment. bytes: of all segments since the last snapshot."""

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        durable: bool = False,
        bytes_before: int = 0,
        stopping: Callable[[], bool] = lambda: False,
        origin: Origin | None = None,
    ) -> None:
        """Begin a segment.

        Args:
            folder: An existing folder.
            number: The number of the first record.
            durable: Each record is on the disk before anything leaves ("power").
            bytes_before: The size of the segments before this one.
            stopping: Whether waiting for room on the disk has become pointless.
            origin: Where the journal goes on; None: a new one begins.

        Raises:
            OSError: A file cannot be made.
        """
        self.folder, self.number = folder, number
        self.origin = origin or Origin.new()
        self.bytes = bytes_before
        self._durable, self._stopping = durable, stopping
        self._noted: list[Frame] = []
        self.in_hand: MessageInHand | None = None
        self._end = self._first = 0
        self._descriptor = -1
        self._mark = MarkWriter(folder, durable, self.origin.journal)
        self._begin()
        self._acknowledge()
        if durable:
            self._mark.sync()

    def _begin(self) -> None:
        """The segment before stays the last one where this one cannot be begun. Raises OSError."""
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
        """It enters the core at that time. frames: those of its message."""
        self._noted += pack(event, now_us, frames)

    def commit(self) -> None:
        """Writes what was noted since the last call. Where it raises, nothing that follows from it may leave.

        Raises:
            JournalFull: There is no room, and the process is to stop.
            JournalFailed: The disk refuses it.
            StateRemoved: The file that it was written to has no name any more.
        """
        if not self._noted:
            return
        data = record(self.number, self._noted, self.origin.before)
        try:
            self._put(data)
            if not os.fstat(self._descriptor).st_nlink:
                raise StateRemoved(str(self.folder), "what was accepted since could not be kept there")
        except OSError as error:
            raise failed(self.folder / SEGMENT.format(self._first), error) from None
        self.bytes += len(data)
        self._noted.clear()
        self.number += 1
        self.origin = self.origin._replace(before=crc_of(data))
        try:
            self._acknowledge()
        except OSError as error:
            raise failed(self.folder / ACKNOWLEDGED, error) from None

    def _acknowledge(self) -> None:
        """Mark everything written so far as acknowledged: it may have consequences from now on."""
        self._mark.write(self.number, self.origin.before)

    def _put(self, data: bytes) -> None:
        told_s = 0.0
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
            os.ftruncate(self._descriptor, self._end)  # what there was room for
            if time.monotonic() - told_s > FULL_TELL_S:
                told_s = time.monotonic()
                log.error("no room for the journal in %s: nothing goes on until there is", self.folder)
            if self._stopping():
                raise JournalFull(str(self.folder))
            time.sleep(FULL_LOOK_S)
        if told_s:
            log.warning("there is room for the journal in %s again", self.folder)
        self._end += len(data)

    @property
    def missing(self) -> bool:
        """Whether the folder, or a file of the journal in it, is not there any more, or is another one."""
        path, mark = self.folder / SEGMENT.format(self._first), self.folder / ACKNOWLEDGED
        try:
            return not (
                os.path.samestat(path.stat(), os.fstat(self._descriptor))
                and os.path.samestat(mark.stat(), self._mark.stat())
            )
        except OSError:
            return True

    def rotate(self) -> int:
        """Begins the next segment. Returns the number of its first record. Raises OSError."""
        assert not self._noted, "a segment ends between two turns"
        if self.number == self._first:  # nothing was written since it began
            return self.number
        self._begin()
        self.bytes = 0
        return self.number

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._mark.close()
