"""Setting aside of a record that crashed several recoveries in a row, if no later record depends on it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvforge.protocol.errors import JournalCorrupt

from .disk import sync_file, sync_folder
from .entries import FROM_CLIENT, raw_entries
from .identity import AcknowledgedPositionWriter, read_acknowledged_position, unpack_head
from .log import segments
from .poison_detector import PoisonDetector
from .records import read

NAME = "set-aside-{:016d}"
log = logging.getLogger("coordinator")


def set_aside(folder: Path, poison_detector: PoisonDetector) -> None:
    """Cut the record that crashed recoveries off the journal, and keep its bytes in a separate file.

    This is possible only for the last record, because later ones depend on it. Its client messages will be refused.

    Args:
        folder: The folder of the journal.
        poison_detector: Names the record.

    Raises:
        JournalCorrupt: It is not the last record.
        OSError: A file cannot be written.
    """
    number, deaths = poison_detector.record, poison_detector.record_deaths
    (*_, path) = segments(folder).values()
    data = memoryview(path.read_bytes())
    head, mark = unpack_head(data, path.name), read_acknowledged_position(folder)
    records = list(read(data, head[0].number, path.name, head[1], head[0].before)) if head is not None else []
    if not records or records[-1].number != number or mark is None:
        ended = f"{deaths} coordinators in a row ended while they applied record {number}"
        problem = f"{ended}, and later ones depend on it"
        raise JournalCorrupt(path.name, 0, problem=problem)
    last = records[-1]
    kept = folder / NAME.format(number)
    kept.write_bytes(data[last.start : last.end])
    sync_file(kept)
    messages = [frames for kind, frames in raw_entries(last.payload) if kind == FROM_CLIENT]
    for frames in messages:
        poison_detector.suspect(frames)
    writer = AcknowledgedPositionWriter(folder, mark.durable, mark.journal)
    writer.write(min(mark.number, number), last.before)
    writer.sync()
    writer.close()
    os.truncate(path, last.start)
    sync_folder(folder)
    log.error(
        "record %d of the journal was set aside in %s: %d coordinators in a row died while applying it; its %d "
        "client messages will be refused",
        number,
        kept,
        deaths,
        len(messages),
    )
