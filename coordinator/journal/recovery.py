"""Recovery: the last snapshot, and the replay of every later event."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvforge.protocol.errors import InvalidConfiguration, JournalCorrupt

from ..core.events import Boot, ClientCame, FromClient, FromWorker
from ..core.machine import Machine
from ..publish import all_changed, forget_changes
from . import snapshot
from .entries import Entry, Reader, check_snapshot_version, check_version
from .identity import ACKNOWLEDGED, Origin, SegmentHead, host_boot, read_acknowledged_position, unpack_head
from .log import segments, states
from .records import Record, read

log = logging.getLogger("coordinator")


class Recovered(NamedTuple):
    """A recovered machine.

    Attributes:
        now_us: Time of the last event.
        number: Number of the next record.
        numbers: Connection numbers used so far.
        written_s: When the journal was last written, in Unix time.
        bytes: Size of the segments that were read.
        records: Records applied.
        torn: The file with a torn tail, the end of its valid records, and the bytes behind; None if there is none.
        origin: The position at which the journal continues.
        snapshot_us: Time to read the snapshot.
        took_us: Time to read and apply everything.
    """

    machine: Machine
    now_us: int
    number: int
    numbers: int
    written_s: float
    bytes: int
    records: int
    torn: tuple[Path, int, int] | None
    origin: Origin
    snapshot_us: int
    took_us: int


class Replay:
    """A replay of a journal, entry by entry. `machine` is the state after the last one; None before the Boot."""

    def __init__(self, folder: Path) -> None:
        """Read the snapshot, if there is one.

        Raises:
            JournalCorrupt: A file is damaged.
            InvalidConfiguration: Another version of kvforge wrote it.
        """
        self.folder = folder
        self.machine: Machine | None = None
        self.now_us = self.numbers = self.bytes = self.records = self.entries = 0
        self.number, self._end = 1, 0
        self.torn: tuple[Path, int, int] | None = None
        self.origin = Origin(b"")
        self._mark = read_acknowledged_position(folder)  # before the rest, which a running coordinator keeps extending
        self._reader = Reader()
        for self.number, path in list(states(folder).items())[-1:]:
            found = snapshot.Snapshot(path)
            head = found.head
            check_snapshot_version(path.name, head.version)
            if head.number != self.number:
                problem = f"its name does not match its content, a snapshot before record {head.number}"
                raise JournalCorrupt(path.name, 0, problem=problem)
            self.machine, self.now_us, self.numbers = found.machine(), head.now_us, head.numbers
            self.origin = Origin(head.journal, head.boot, head.before)
            self._check_journal(path.name, head.journal)

    def run(
        self,
        until: Callable[[Entry], bool] = lambda _entry: False,
        begins: Callable[[int], None] = lambda _number: None,
    ) -> None:
        """Apply the remaining records, up to the first entry for which `until` is true.

        Args:
            until: Called with each entry before it is applied.
            begins: Called with the number of each record before it is applied.

        Raises:
            JournalCorrupt: A file is damaged.
            InvalidConfiguration: Another version of kvforge wrote it.
        """
        for name, record in self._records():
            self.records += 1
            begins(record.number)
            for entry in self._entries(name, record):
                if until(entry):
                    return
                self._apply(entry)
            self.number = record.number + 1
            self.origin = self.origin._replace(before=record.crc)
            if self.machine is not None:
                forget_changes(self.machine)
        self._check_acknowledged()

    def _check_journal(self, name: str, journal: bytes) -> None:
        """Raise JournalCorrupt if a file belongs to another journal than those before it."""
        if journal != (self.origin.journal or journal) or (self._mark is not None and journal != self._mark.journal):
            raise JournalCorrupt(name, 0, problem="it belongs to another journal than the other files")

    def _check_acknowledged(self) -> None:
        """Raise JournalCorrupt if acknowledged records are missing."""
        mark, number = self._mark, self.number
        if mark is None:
            if self.machine is not None:
                raise JournalCorrupt(ACKNOWLEDGED, 0, problem="the file is missing")
            return
        if number < mark.number or (number == mark.number and mark.before != self.origin.before):
            if not mark.durable and mark.host_boot != host_boot():
                log.warning(
                    "the host was rebooted, and records %d to %d were not on its disk: durability is "
                    '"process"; set it to "power" to keep them',
                    number,
                    mark.number - 1,
                )
                return
            name = next(reversed([*states(self.folder).values(), *segments(self.folder).values()]), self.folder).name
            end = self.torn[1] if self.torn is not None else self._end
            missing = f"record {number} to {mark.number - 1} were acknowledged and are missing"
            raise JournalCorrupt(name, end, number, mark.number, problem=missing)

    def _entries(self, name: str, record: Record) -> Iterator[Entry]:
        """Yield the entries of a record. Even an intact record may be impossible to decode."""
        entries = self._reader.entries(record.payload)
        while True:
            try:
                entry = next(entries, None)
            except InvalidConfiguration:
                raise
            except Exception as error:
                log.error("cannot decode record %d: %s: %s", record.number, type(error).__name__, error)
                raise JournalCorrupt(name, record.start) from error
            if entry is None:
                return
            yield entry

    def _records(self) -> Iterator[tuple[str, Record]]:
        """Yield the records after the snapshot, with the names of their files. They must be consecutive."""
        files = {first: path for first, path in segments(self.folder).items() if first >= self.number}
        last = max(files, default=0)
        for first, path in files.items():
            if first != self.number:
                raise JournalCorrupt(path.name, 0, self.number, first)
            data, end = memoryview(path.read_bytes()), 0
            if (found := unpack_head(data, path.name)) is not None:
                head, end = found
                check_version(path.name, head.version)
                self._check_segment(path.name, head)
                self.origin = Origin(head.journal, head.boot, head.before)
                for record in read(data, first, path.name, end, head.before):
                    yield path.name, record
                    end = record.end
            elif first != last:
                raise JournalCorrupt(path.name, 0, problem="it has no valid segment head")
            self.bytes += end
            self._end = end
            if end < len(data):
                if first != last:
                    raise JournalCorrupt(path.name, end, self.number, last)
                self.torn = (path, end, len(data) - end)

    def _check_segment(self, name: str, head: SegmentHead) -> None:
        """Raise JournalCorrupt if a segment does not continue the records before it."""
        self._check_journal(name, head.journal)
        if head.number != self.number:
            raise JournalCorrupt(name, 0, problem=f"it begins with record {head.number}, not {self.number}")
        if self.origin.journal and head.before != self.origin.before:
            raise JournalCorrupt(name, 0, problem="it does not continue the records before it")

    def _apply(self, entry: Entry) -> None:
        event, self.now_us = entry
        self.entries += 1
        if isinstance(event, Boot):
            self.machine = Machine(event, entry.now_us)
            return
        assert self.machine is not None, "a journal begins with a Boot or with a snapshot"
        self.machine.apply(event, entry.now_us)
        if isinstance(event, FromClient | ClientCame):
            self.numbers = max(self.numbers, event.client)
        elif isinstance(event, FromWorker):
            self.numbers = max(self.numbers, event.worker)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable the garbage collector: a replay creates no garbage, and repeated walks over all objects are costly."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def recover(folder: Path, begins: Callable[[int], None] = lambda _number: None) -> Recovered | None:
    """Recover the machine from the folder's journal, with nothing published yet; None if there is no journal.

    Args:
        folder: The state folder.
        begins: Called with the number of each record before it is applied.

    Raises:
        JournalCorrupt: A file is damaged.
        InvalidConfiguration: Another version of kvforge wrote it.
    """
    files = [*segments(folder).values(), *states(folder).values()]
    written_s = max((path.stat().st_mtime for path in files), default=0.0)
    began_ns = time.monotonic_ns()
    with _no_collections():
        replay = Replay(folder)
        snapshot_us = (time.monotonic_ns() - began_ns) // 1000
        replay.run(begins=begins)
    if replay.machine is None:
        return None
    all_changed(replay.machine)
    return Recovered(
        replay.machine,
        replay.now_us,
        replay.number,
        replay.numbers,
        written_s,
        replay.bytes,
        replay.records,
        replay.torn,
        replay.origin,
        snapshot_us,
        (time.monotonic_ns() - began_ns) // 1000,
    )


def cut_torn(found: Recovered) -> None:
    """Remove an incomplete last record, since the journal continues in another segment. Raise OSError."""
    if found.torn is not None:
        path, end, more = found.torn
        log.warning("removed an incomplete record at the end of %s: %d bytes", path.name, more)
        os.truncate(path, end)
