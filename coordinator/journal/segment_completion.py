"""Completion of the last segment, after a process that died before it wrote the records of its last turn."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvforge.protocol.errors import JournalCorrupt

from .entries import STATE_VERSION
from .identity import unpack_head
from .log import segments
from .records import crc_of, read, record
from .unwritten import forget_unwritten, read_unwritten

log = logging.getLogger("coordinator")


def complete_segment(folder: Path) -> int:
    """Append the unwritten records of a dead process to the last segment.

    A process that dies here leaves an incomplete last record, as one that dies while it writes; the next one starts
    again. Damage of the segment is left to the recovery, which reports it.

    Args:
        folder: The state folder, which no other process uses.

    Returns:
        How many records were missing in the segment.

    Raises:
        JournalCorrupt: The stored records are damaged.
        OSError: A file cannot be read or written.
    """
    unwritten, paths = read_unwritten(folder), list(segments(folder).values())
    if unwritten is None or not paths:
        return 0
    path = paths[-1]
    data = memoryview(path.read_bytes())
    try:
        found = unpack_head(data, path.name)
        if found is None or found[0].journal != unwritten.journal or found[0].version != STATE_VERSION:
            return 0
        end, number, before = found[1], found[0].number, found[0].before
        for each in read(data, number, path.name, end, before):
            end, number, before = each.end, each.number + 1, each.crc
    except JournalCorrupt:
        return 0
    if unwritten.first > number:
        return 0
    missing, payloads = bytearray(), unwritten.payloads[number - unwritten.first :]
    for payload in payloads:
        made = record(number, [payload], before)
        missing += made
        number, before = number + 1, crc_of(made)
    if missing:
        os.truncate(path, end)
        with path.open("ab") as file:
            file.write(missing)
        log.info("added to %s what the last process had not written there: %d bytes", path.name, len(missing))
    forget_unwritten(folder)
    return len(payloads)
