"""What the coordinator publishes, read where it is: from the file of its shared tables, without a message to it.

The file is mapped read-only, so a reader can neither change nor delay anything. What is read is as new as the
coordinator's last turn, and a turn is published before its answers are sent: whoever has an answer finds it here too.
"""

from __future__ import annotations

import math
import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvforge.protocol import transport
from kvforge.protocol.errors import BlockNotFound, CoordinatorUnavailable, SequenceNotFound, Unavailable
from kvforge.protocol.messages import Int32Array, Int64Array, Welcome
from kvforge.protocol.numbers import Numbers
from kvforge.protocol.tables import TablesReader

from .sequences import SequenceRef, sequence_id
from .values import INT64_MAX, whole


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRow:
    """One sequence, all of one instant. length: its tokens. blocks: [blocks] int32, the ids of its blocks in order.

    `blocks` is empty where the sequence holds none: it is empty itself, or its blocks were taken away.
    """

    sequence_id: int
    length: int
    blocks: Int32Array


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """One block. refcount: its holders. generation: how often it was recycled. owner: a tenant's number, 0 = nobody."""

    refcount: int
    generation: int
    owner: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockColumns:
    """Every block by its id, as in `BlockCounts`: [n] int32 each."""

    refcount: Int32Array
    generation: Int32Array
    owner: Int32Array


class Tables:
    """The shared tables of one start of a coordinator, which `boot` names. Nothing needs to be closed.

    runtime_dir: by default KVFORGE_RUNTIME_DIR, else where a coordinator without a configuration serves.
    Every read gives copies, and none waits longer than about a second. After the coordinator's end the tables show what
    it last wrote, also when another one serves in the same folder: look at `alive`, then make a new object. A killed
    one that goes on with all that it knew is the same start, in a new file: from then on that one is read.
    Raises CoordinatorUnavailable where there is no file, Unavailable where it cannot be read, and ProtocolError naming
    both layout versions where it is of another one.
    """

    def __init__(self, runtime_dir: str | os.PathLike[str] | None = None) -> None:
        folder = Path(runtime_dir) if runtime_dir is not None else transport.default_runtime_dir()
        try:
            self._hold(folder.absolute() / transport.TABLES_FILE)
        except FileNotFoundError:
            raise CoordinatorUnavailable(
                f"no coordinator serves in {folder.absolute()}: is it running? Start it with `kvforge up`, "
                "or name another folder with --runtime-dir or KVFORGE_RUNTIME_DIR"
            ) from None

    @classmethod
    def of(cls, welcome: Welcome, endpoint: str) -> Self:
        """The tables of the coordinator that sent `welcome`. Raises Unavailable, ProtocolError."""
        tables, path = cls.__new__(cls), Path(welcome.tables_path)
        try:
            tables._hold(path)
        except FileNotFoundError:
            raise CoordinatorUnavailable(
                f"the shared tables of the coordinator at {endpoint} are not here ({path}): "
                "it runs on another machine, where they can be read, or has just ended"
            ) from None
        if tables.boot != welcome.boot:
            raise CoordinatorUnavailable(
                f"{path} is not of the coordinator at {endpoint}, but of boot {tables.boot[:8]}: "
                "that one runs on another machine, or has just been started again (then ask again)"
            )
        return tables

    def _hold(self, path: Path) -> None:
        self._path, self._held = path, _open(path)
        self._seen = self._held.inode

    @property
    def _reader(self) -> TablesReader:
        """The tables as they lie there now. Raises ProtocolError where they are of another layout by now."""
        try:
            status = self._path.stat()
        except OSError:  # between two lives of the coordinator, or after the last
            return self._held
        # The old file exists as long as it is mapped: no new one has its number.
        if (inode := (status.st_dev, status.st_ino)) != self._seen:
            try:
                found = _open(self._path)
            except FileNotFoundError:
                return self._held
            self._seen = inode
            if found.boot == self._held.boot:
                self._held = found
        return self._held

    @property
    def boot(self) -> str:
        """The start of the coordinator that writes, or wrote, these tables; `Stats.boot` is the same."""
        return self._held.boot

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._held.geometry.block_size

    @property
    def pid(self) -> int:
        """The coordinator's process, by its number on its own machine."""
        return self._reader.pid

    @property
    def alive(self) -> bool:
        """Whether the coordinator's process still runs. One that was killed leaves its file, with its last numbers."""
        return not self.ended()

    def ended(self, wait_s: float = 0.0) -> bool:
        """Waits for the end of the coordinator's process, for `wait_s` seconds at most; returns whether it came."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            poll = select.poll()
            poll.register(process, select.POLLIN)  # readable as soon as it has ended, even while nobody waited for it
            return bool(poll.poll(math.ceil(wait_s * 1000)))
        finally:
            os.close(process)

    def gauges(self) -> dict[str, int]:
        """The coordinator's counters and gauges by name (`protocol.layout.GAUGES`), all of one instant.

        Raises DeadlineExceeded where the coordinator ended, or hangs, in the middle of writing them.
        """
        return self._reader.gauges()

    def numbers(self) -> Numbers:
        """All that is counted, by tenant and by worker too, with the gauges of the same moment (`protocol.meters`).

        They are some milliseconds older than the last turn at most, a second where requests wait and nothing happens,
        and as new as it where no request is alive.
        Raises DeadlineExceeded as `gauges` does.
        """
        return self._reader.numbers()

    def sequences(self) -> tuple[Int64Array, Int32Array]:
        """Every sequence, clients' and requests': ids [n] int64 and lengths [n] int32, in tokens, in no special order.

        Each length belongs to its id; one that came or went during the call may be there or not. Raises
        DeadlineExceeded as `gauges` does.
        """
        reader = self._reader
        _, lengths, ids = reader.rows(reader.slots_taken(), 1)
        taken = ids != 0
        return ids[taken], lengths[taken]

    def sequence(self, sequence: SequenceRef) -> SequenceRow:
        """One sequence, by its handle or id. Raises SequenceNotFound, InvalidRequest, and DeadlineExceeded as above."""
        wanted, reader = sequence_id(sequence), self._reader
        # If the slot changes hands before its row is read, look again. That ends, since no id is given twice.
        while (slot := reader.slot_of(wanted)) is not None:
            blocks, length, found = reader.row(slot)
            if found == wanted:
                return SequenceRow(wanted, length, blocks)
        raise SequenceNotFound(wanted)

    def block(self, block_id: int) -> BlockCounts:
        """One block. Raises BlockNotFound outside the tables, which may have room for more blocks than there are.

        Each number was true during the call; of a block that changed hands meanwhile they may be of before and after.
        """
        reader, block_id = self._reader, whole("block_id", block_id, -INT64_MAX, INT64_MAX)
        if not 0 <= block_id < reader.geometry.blocks:
            raise BlockNotFound(block_id)
        counts = (reader.block_refcount, reader.block_generation, reader.block_owner)
        return BlockCounts(*(int(column[block_id]) for column in counts))

    def blocks(self, count: int) -> BlockColumns:
        """The first `count` blocks, or as many as the tables have room for: copies. Numbers as `block` gives them."""
        reader, upto = self._reader, slice(whole("count", count, 0, INT64_MAX))
        columns = (reader.block_refcount, reader.block_generation, reader.block_owner)
        return BlockColumns(*(column[upto].copy() for column in columns))

    def __repr__(self) -> str:
        return f"<Tables of boot {self.boot[:8]}, process {self.pid}>"


def _open(path: Path) -> TablesReader:
    try:
        return TablesReader(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unavailable(f"the shared tables {path} cannot be read: {error.strerror}") from None
