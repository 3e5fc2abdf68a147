"""Reads the state that the coordinator publishes in its shared tables, without a message to it.

The file is mapped read-only, so that a reader can neither change nor delay anything. The state is that of the
coordinator's last turn. A turn is published before its replies are sent, so that the effect of a reply is visible here.
"""

from __future__ import annotations

import math
import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvforge.protocol import platforms, transport
from kvforge.protocol.errors import BlockNotFound, CoordinatorUnavailable, SequenceNotFound, Unavailable
from kvforge.protocol.layout import BLOCK_KINDS, BLOCK_STATES
from kvforge.protocol.messages import Int32Array, Int64Array, Welcome
from kvforge.protocol.service_metrics import ServiceMetrics
from kvforge.protocol.tables import Int8Array, TablesReader

from .deprecated import warn_renamed
from .sequences import SequenceRef, sequence_id
from .values import INT64_MAX, whole


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRow:
    """One sequence at one instant.

    Attributes:
        sequence_id: Its id.
        length: Its tokens.
        blocks: [blocks] int32, the ids of its blocks in order; empty if it is empty or was evicted.
    """

    sequence_id: int
    length: int
    blocks: Int32Array


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """One block.

    Attributes:
        refcount: The number of its holders.
        generation: How often it was recycled.
        owner: The number of the tenant that is charged for it, 0 for none.
        kind: What it holds: the "kv" of tokens, a part of a recurrent "state" or of a "checkpoint" of one, or the KV of
            layers with a sliding "window". "kv" for a free block.
        state: "free", "referenced", "cached", or "quarantined": no holders, but a step in flight may touch it.
    """

    refcount: int
    generation: int
    owner: int
    kind: str
    state: str


@dataclass(frozen=True, slots=True, eq=False)
class BlockColumns:
    """All blocks by id, as in `BlockCounts`: [n] int32 each.

    Kinds and states are [n] int8, places in `BLOCK_KINDS` and `BLOCK_STATES` of `kvforge.protocol.layout`.
    """

    refcount: Int32Array
    generation: Int32Array
    owner: Int32Array
    kind: Int8Array
    state: Int8Array


class Tables:
    """The shared tables of one boot of a coordinator. Nothing needs to be closed.

    Reads return copies, and none waits longer than about a second. After the coordinator's end the tables keep its last
    state, even if another coordinator serves in the same folder: check `alive`, then create a new object. A coordinator
    that recovers from its journal keeps its boot and publishes a new file, which is then read.

    Args:
        runtime_dir: The runtime folder, by default KVFORGE_RUNTIME_DIR, else that of a coordinator without a
            configuration.

    Raises:
        CoordinatorUnavailable: There is no file.
        Unavailable: The file cannot be read, or this is not Linux.
        ProtocolError: The file has another layout version.
    """

    def __init__(self, runtime_dir: str | os.PathLike[str] | None = None) -> None:
        platforms.check_tables()
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
        """Return the tables of the coordinator that sent `welcome`.

        Raises:
            Unavailable: The file is not there, cannot be read, or belongs to another coordinator, or this is not Linux.
            ProtocolError: The file has another layout version.
        """
        platforms.check_tables()
        tables, path = cls.__new__(cls), Path(welcome.tables_path)
        try:
            tables._hold(path)
        except FileNotFoundError:
            raise CoordinatorUnavailable(
                f"the shared tables of the coordinator at {endpoint} are not at {path}: "
                "it runs on another machine, where they can be read, or has just ended"
            ) from None
        if tables.boot != welcome.boot:
            raise CoordinatorUnavailable(
                f"{path} belongs to boot {tables.boot[:8]}, not to the coordinator at {endpoint}: "
                "that one runs on another machine, or has just restarted (then try again)"
            )
        return tables

    def _hold(self, path: Path) -> None:
        self._path, self._held = path, _open(path)
        self._seen = self._held.inode

    @property
    def _reader(self) -> TablesReader:
        """Return the reader of the current file. Raises ProtocolError if its layout has changed."""
        try:
            status = self._path.stat()
        except OSError:  # the coordinator is restarting or has ended
            return self._held
        # The old file exists as long as it is mapped, so that no new file can have its inode number.
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
        """Return the boot of the coordinator that wrote these tables, as in `Stats.boot`."""
        return self._held.boot

    @property
    def block_size(self) -> int:
        """Return the number of tokens in a block."""
        return self._held.geometry.block_size

    @property
    def pid(self) -> int:
        """Return the process id of the coordinator, on its own machine."""
        return self._reader.pid

    @property
    def alive(self) -> bool:
        """Return whether the coordinator's process still runs. A killed one leaves its file with its last numbers."""
        return not self.ended()

    def ended(self, wait_s: float = 0.0) -> bool:
        """Wait for the end of the coordinator's process.

        Args:
            wait_s: The limit in seconds.

        Returns:
            Whether the process has ended.
        """
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            poll = select.poll()
            poll.register(process, select.POLLIN)  # readable once it has ended, even before it is reaped
            return bool(poll.poll(math.ceil(wait_s * 1000)))
        finally:
            os.close(process)

    def gauges(self) -> dict[str, int]:
        """Return the coordinator's counters and gauges by name (`protocol.layout.GAUGES`), all of one instant.

        Raises:
            DeadlineExceeded: The coordinator died or hangs during a write.
        """
        return self._reader.gauges()

    def metrics(self) -> ServiceMetrics:
        """Return all metrics, by tenant and by worker too, with the gauges of the same instant (`protocol.meters`).

        They are at most some milliseconds older than the last turn, or a second where requests wait and nothing
        happens. Without live requests they are current.

        Raises:
            DeadlineExceeded: The coordinator died or hangs during a write.
        """
        return self._reader.metrics()

    def numbers(self) -> ServiceMetrics:
        """Return `metrics()`. Deprecated: removed in the next version."""
        warn_renamed("Tables.numbers()", "metrics()")
        return self.metrics()

    def sequences(self) -> tuple[Int64Array, Int32Array]:
        """Return all sequences of clients and requests, in no special order.

        A sequence that appears or ends during the call may be missing.

        Returns:
            Ids [n] int64 and their lengths in tokens [n] int32.

        Raises:
            DeadlineExceeded: The coordinator died or hangs during a write.
        """
        reader = self._reader
        _, lengths, ids = reader.rows(reader.occupied_slots(), 1)
        taken = ids != 0
        return ids[taken], lengths[taken]

    def sequence(self, sequence: SequenceRef) -> SequenceRow:
        """Return one sequence.

        Args:
            sequence: Its handle or id.

        Raises:
            SequenceNotFound: There is no such sequence.
            InvalidRequest: The value is not a handle or an id.
            DeadlineExceeded: The coordinator died or hangs during a write.
        """
        wanted, reader = sequence_id(sequence), self._reader
        # Look again if the slot changes hands before its row is read. This ends, because ids are never reused.
        while (slot := reader.slot_of(wanted)) is not None:
            blocks, length, found = reader.row(slot)
            if found == wanted:
                return SequenceRow(wanted, length, blocks)
        raise SequenceNotFound(wanted)

    def block(self, block_id: int) -> BlockCounts:
        """Return one block.

        Each number was correct during the call. If the block changed hands meanwhile, the numbers may mix both states.

        Raises:
            BlockNotFound: The id is outside the tables, which may have room for more blocks than exist.
        """
        reader, block_id = self._reader, whole("block_id", block_id, -INT64_MAX, INT64_MAX)
        if not 0 <= block_id < reader.geometry.blocks:
            raise BlockNotFound(block_id)
        return BlockCounts(
            refcount=int(reader.block_refcount[block_id]),
            generation=int(reader.block_generation[block_id]),
            owner=int(reader.block_owner[block_id]),
            kind=BLOCK_KINDS[reader.block_kind[block_id]],
            state=BLOCK_STATES[reader.block_state[block_id]],
        )

    def blocks(self, count: int) -> BlockColumns:
        """Return copies of the first `count` blocks, or of as many as the tables have room for.

        Consistency is as in `block`.
        """
        reader, upto = self._reader, slice(whole("count", count, 0, INT64_MAX))
        return BlockColumns(
            refcount=reader.block_refcount[upto].copy(),
            generation=reader.block_generation[upto].copy(),
            owner=reader.block_owner[upto].copy(),
            kind=reader.block_kind[upto].copy(),
            state=reader.block_state[upto].copy(),
        )

    def __repr__(self) -> str:
        return f"<Tables of boot {self.boot[:8]}, process {self.pid}>"


def _open(path: Path) -> TablesReader:
    try:
        return TablesReader(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unavailable(f"the shared tables {path} cannot be read: {error.strerror}") from None
