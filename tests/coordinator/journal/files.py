"""Helpers that read and modify a journal's files."""

from __future__ import annotations

from pathlib import Path

from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.coordinator.journal.identity import AcknowledgedPositionWriter, unpack_head
from kvforge.coordinator.journal.log import segments
from kvforge.coordinator.journal.records import Record, read
from kvforge.coordinator.journal.snapshot import Head


def head_of(number: int, version: int = STATE_VERSION) -> Head:
    """A snapshot head of a fictitious journal."""
    return Head(
        version=version, now_us=1, numbers=1, number=number, journal=bytes(16), boot="b" * 32, before=0, host_boot=""
    )


def records_of(path: Path) -> list[Record]:
    """The records of a segment, which must be the journal's first."""
    data = memoryview(path.read_bytes())
    head = unpack_head(data, path.name)
    assert head is not None
    return list(read(data, head[0].number, path.name, head[1], head[0].before))


def acknowledge(folder: Path, last: Record) -> None:
    """Mark this record of the only segment as the last acknowledged one."""
    (path,) = segments(folder).values()
    head = unpack_head(memoryview(path.read_bytes()), path.name)
    assert head is not None
    mark = AcknowledgedPositionWriter(folder, False, head[0].journal)
    mark.write(last.number + 1, last.crc)
    mark.close()
