"""Writer and reader of the shared tables.

Row writes are numbered. Each row holds the number of its last write, which the writer sets before it changes the row's
content, and one counter holds the number of the last completed write. A reader reads the counter, then the rows, then
the numbers of the rows. A row is consistent if its number is not above the counter; the reader reads only the other
rows again.

A length may change alone, without a new number: one aligned 32-bit store is never torn, and each length published while
the rest of the row stays is valid for that row. Readers map the file read-only, so that they can neither change nor
delay anything. The order of plain stores is what x86-64 guarantees to other cores; numpy adds no fence of its own.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import trust
from .errors import DeadlineExceeded, ProtocolError
from .handover import StepRing, StepRingReader
from .layout import GAUGES, HEADER, LAYOUT_VERSION, MAGIC, PAGE_BYTES, Geometry, arrays, file_bytes
from .messages import Int32Array, Int64Array
from .service_metrics import (
    SPINS_MAX,
    ServiceMetrics,
    ServiceMetricsReader,
    ServiceMetricsWriter,
    attempts,
    undisturbed,
)

TOGETHER_MAX = 4
GAUGE_VALUES = struct.Struct(f"<{len(GAUGES)}q")

Int8Array = npt.NDArray[np.int8]
Rows = tuple[Int32Array, Int32Array, Int64Array]
Copies = tuple[npt.NDArray[np.void], Int32Array, Int64Array]


def _nothing(_tables: TablesWriter) -> None: ...


class TablesWriter:
    """The coordinator's side: creates the file, writes it, removes it."""

    def __init__(
        self, path: Path, geometry: Geometry, boot: str, fill: Callable[[TablesWriter], None] = _nothing
    ) -> None:
        """Create the file with mode 0600. It replaces a stale file of an earlier boot.

        The caller must be the only writer of the folder: unfinished files that a killed coordinator left are removed.

        Args:
            path: The table file.
            geometry: The sizes of the tables.
            boot: The id of the coordinator's boot.
            fill: Writes the initial content before the file becomes visible. A worker that keeps its pool may open the
                file as soon as it exists.

        Raises:
            OSError: The file cannot be created, for example on a full disk.
        """
        self.path = path
        self.geometry = geometry
        size = file_bytes(geometry)
        for unfinished in path.parent.glob(f"{path.name}.*"):
            unfinished.unlink(missing_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            self._make_room(handle, size)
            self._map = mmap.mmap(handle, size)
            header = np.frombuffer(self._map, HEADER, 1)
            header["layout_version"] = LAYOUT_VERSION
            header["header_bytes"] = HEADER.itemsize
            header["boot"] = boot.encode()
            header["slots"], header["blocks"] = geometry.slots, geometry.blocks
            header["blocks_per_sequence"], header["block_size"] = geometry.blocks_per_sequence, geometry.block_size
            header["pools"] = geometry.pools
            header["states_per_sequence"] = geometry.states_per_sequence
            header["file_bytes"], header["pid"] = size, os.getpid()
            header["magic"] = MAGIC  # last: a file with the magic is complete
            self._look_at(geometry)
            fill(self)
            status = os.fstat(handle)
            self._made = status.st_dev, status.st_ino
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)

    @staticmethod
    def _make_room(handle: int, size: int) -> None:
        # Not ftruncate: with a sparse file, the first write that finds the disk full kills the process by SIGBUS.
        os.posix_fallocate(handle, 0, size)

    def _look_at(self, geometry: Geometry) -> None:
        views = _views(self._map, geometry)
        self._gauges = views["gauges"]
        self.metrics = ServiceMetricsWriter(views)
        self._rows_written: Int64Array = views["rows_written"]
        self._number = 0
        self.row_version: Int64Array = views["row_version"]
        self.row_length: Int32Array = views["row_length"]
        self.row_blocks: Int32Array = views["row_blocks"]
        self.row_sequence: Int64Array = views["row_sequence"]
        self.block_refcount: Int32Array = views["block_refcount"]
        self.block_generation: Int32Array = views["block_generation"]
        self.block_owner: Int32Array = views["block_owner"]
        self.block_kind: Int8Array = views["block_kind"]
        self.block_state: Int8Array = views["block_state"]
        self.block_table: Int32Array = views["block_table"]
        self.row_states: Int32Array = views["row_states"]
        self.state_table: Int32Array = views["state_table"]
        self.step_ring = StepRing(views["mail_head"], views["mail"])
        self._rings: dict[tuple[int, int], npt.NDArray[np.void]] = {}

    def begin_rows(self, slots: Int64Array) -> None:
        """Mark rows as being written until `end_rows`.

        All changes of a row happen between the two calls, except a length that changes alone.

        Args:
            slots: [n] int64, the slots of the rows; duplicates are harmless.
        """
        assert self._number % 2 == 0, "rows are being written already"
        self._number += 1
        self.row_version[slots] = self._number

    def end_rows(self, slots: Int64Array) -> None:
        """Mark the same rows as completely written."""
        self._number += 1
        self.row_version[slots] = self._number
        self._rows_written[()] = self._number

    def write_rings(self, slots: Int64Array, places: Int64Array, ids: Int32Array, first: int, width: int) -> None:
        """Write groups of columns of the state table, those of windows; see `ring_items`.

        Args:
            slots: [n] int64, the slots of the rows.
            places: [n] int64, a group of each.
            ids: [n * width] int32, what to write.
            first: The first column of group 0.
            width: Columns of a group.
        """
        if (rings := self._rings.get((first, width))) is None:
            rings = self._rings[first, width] = ring_items(self.state_table, first, width)
        rings[slots, places] = ids.view(rings.dtype)

    def write_gauges(self, values: Sequence[int]) -> None:
        """Publish one consistent set of gauges, in the order of `layout.GAUGES`."""
        self._gauges[0] += 1
        GAUGE_VALUES.pack_into(self._map, PAGE_BYTES + 8, *values)  # numpy would build an array first
        self._gauges[0] += 1

    def close(self) -> None:
        """Remove the file, unless another coordinator has replaced it. Readers that map it keep its last content."""
        try:
            status = self.path.lstat()
        except OSError:
            return
        if (status.st_dev, status.st_ino) == self._made:
            self.path.unlink(missing_ok=True)


class TablesReader:
    """The readers' side: maps the file read-only.

    Raises:
        InvalidConfiguration: The file, or a folder of its path, belongs to a user who is not trusted (`trust`).
        FileNotFoundError: There is no such file.
        ProtocolError: The file is not a table file of this layout, or belongs to another boot.
    """

    def __init__(self, path: Path, boot: str | None = None) -> None:
        trust.check_path(path, "runtime_dir")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size, self.inode = status.st_size, (status.st_dev, status.st_ino)
            if size < 2 * PAGE_BYTES:
                raise ProtocolError(f"{path} is not a kvforge table file: it has {size} bytes")
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        header = np.frombuffer(self._map, HEADER, 1)[0]
        if header["magic"] != MAGIC:
            raise ProtocolError(f"{path} is not a kvforge table file")
        if header["layout_version"] != LAYOUT_VERSION:
            raise ProtocolError(f"{path} has layout {header['layout_version']}; this side reads {LAYOUT_VERSION}")
        self.boot = bytes(header["boot"]).decode("ascii", "replace")
        if boot is not None and self.boot != boot:
            raise ProtocolError(f"{path} belongs to boot {self.boot}, not to {boot}")
        self.pid = int(header["pid"])
        self.geometry = Geometry(
            slots=int(header["slots"]),
            blocks=int(header["blocks"]),
            blocks_per_sequence=int(header["blocks_per_sequence"]),
            block_size=int(header["block_size"]),
            pools=int(header["pools"]),
            states_per_sequence=int(header["states_per_sequence"]),
        )
        if header["file_bytes"] != size or size != file_bytes(self.geometry):
            raise ProtocolError(f"{path} has {size} bytes; its header declares {header['file_bytes']}")
        views = _views(self._map, self.geometry)
        self._gauges = views["gauges"]
        self._metrics = ServiceMetricsReader(views)
        self._rows_written: Int64Array = views["rows_written"]
        self._row_version: Int64Array = views["row_version"]
        self._row_length: Int32Array = views["row_length"]
        self._row_blocks: Int32Array = views["row_blocks"]
        self._row_sequence: Int64Array = views["row_sequence"]
        self._block_table: Int32Array = views["block_table"]
        self.row_states: Int32Array = views["row_states"]
        self._state_table: Int32Array = views["state_table"]
        self._widen(1)
        self.block_refcount: Int32Array = views["block_refcount"]
        self.block_generation: Int32Array = views["block_generation"]
        self.block_owner: Int32Array = views["block_owner"]
        self.block_kind: Int8Array = views["block_kind"]
        self.block_state: Int8Array = views["block_state"]
        self._step_ring_head, self._step_slots = views["mail_head"], views["mail"]
        self.retries = 0

    def watch(self, pool: int, epoch: int) -> StepRingReader:
        """Return a view of the steps that the coordinator hands to a pool's worker.

        Args:
            pool: The number of the pool.
            epoch: The registration of the worker from which the steps count.
        """
        return StepRingReader(self._step_ring_head[pool], self._step_slots[pool], epoch)

    def rows(self, slots: npt.NDArray[np.integer[Any]], width: int) -> Rows:
        """Read several rows; each row is consistent.

        Args:
            slots: [n] integers, the slots of the rows.
            width: How many columns of the block table to read.

        Returns:
            The block ids [n, width] int32, the lengths in tokens [n] int32, the sequence ids [n] int64.

        Raises:
            ValueError: The table has fewer columns.
            IndexError: A slot does not exist.
            DeadlineExceeded: A row stays inconsistent because its writer died during a write.
        """
        at = np.asarray(slots, np.intp)
        if width != self._width:
            self._widen(width)
        over = self._rows_written.item()
        found = self._copy(at)
        versions = self._row_version[at]
        (torn,) = (versions > over).nonzero()
        if torn.size:
            self._read_again(at, found, torn, max(versions[torn].tolist()))
        prefixes, lengths, sequences = found
        return np.ndarray((at.size, width), "<i4", prefixes), lengths, sequences

    def _copy(self, at: npt.NDArray[np.intp]) -> Copies:
        """Copy the current content of the rows, torn or not.

        Each row of the block table is one numpy item: numpy copies items about twice as fast as the same bytes cell by
        cell.
        """
        return self._prefixes[at], self._row_length[at], self._row_sequence[at]

    def _widen(self, width: int) -> None:
        """Keep a view of the first `width` columns, [slots], in which each row is one item."""
        if not 0 < width <= self.geometry.blocks_per_sequence:
            raise ValueError(f"width must be 1 to {self.geometry.blocks_per_sequence}, not {width}")
        self._width, self._prefixes = width, self._block_table[:, :width].view(f"V{4 * width}")[:, 0]

    def _read_again(self, at: npt.NDArray[np.intp], found: Copies, torn: npt.NDArray[np.intp], version: int) -> None:
        """Replace the rows at the indices `torn` of `found` until all are consistent: first together, then one by one.

        A single row is read fast enough to fit between two writes of a writer that never pauses.

        Args:
            at: [n] slots of all rows.
            found: The copies of all rows, changed in place.
            torn: Indices into `at` of the torn rows.
            version: The highest version of the torn rows.
        """
        for _ in range(TOGETHER_MAX):
            torn, version = self._once_more(at, found, torn, version)
            if not torn.size:
                return
        for one in torn[:, None]:
            for _ in attempts():
                left, version = self._once_more(at, found, one, version)
                if not left.size:
                    break
            else:
                raise _unending(int(at[one[0]]))

    def _once_more(
        self, at: npt.NDArray[np.intp], found: Copies, torn: npt.NDArray[np.intp], version: int
    ) -> tuple[npt.NDArray[np.intp], int]:
        """Read the rows at the indices `torn` of `found` again.

        Returns:
            The indices that are still torn, and the highest version of all rows read.
        """
        self.retries += torn.size
        prefixes, lengths, sequences = found
        again = at[torn]
        over = self._over(version)
        prefixes[torn], lengths[torn], sequences[torn] = self._copy(again)
        versions = self._row_version[again]
        newest = max(versions.tolist())  # faster than numpy for so few rows
        return (torn[:0] if newest <= over else torn[versions > over]), newest

    def _over(self, version: int) -> int:
        """Return the number of the last completed write, waiting briefly until the write of `version` is completed.

        A write takes microseconds, and rows that are copied before it is completed would have to be copied again.
        """
        wanted = version + (version & 1)
        for _ in range(SPINS_MAX):
            over: int = self._rows_written.item()
            if over >= wanted:
                break
        return over

    def row(self, slot: int) -> tuple[Int32Array, int, int]:
        """Read one row.

        Args:
            slot: The slot of the row.

        Returns:
            The used block ids [blocks] int32, the length in tokens, the sequence id (0 for a free slot).

        Raises:
            DeadlineExceeded: The row stays inconsistent because its writer died during a write.
        """
        for _ in attempts():
            over = self._rows_written.item()
            table = self._block_table[slot, : self._row_blocks[slot]].copy()
            length, sequence = int(self._row_length[slot]), int(self._row_sequence[slot])
            if self._row_version[slot] <= over:
                return table, length, sequence
            self.retries += 1
        raise _unending(slot)

    def states(self, slots: npt.NDArray[np.integer[Any]], width: int) -> Int32Array:
        """Read the blocks that hold the recurrent state of several sequences; each row is consistent.

        Args:
            slots: [n] integers, the slots of the rows.
            width: How many columns of the state table to read: the worker's `WorkerReady.state_blocks`.

        Returns:
            Global block ids, [n, width] int32.

        Raises:
            ValueError: The table has fewer columns.
            IndexError: A slot does not exist.
            DeadlineExceeded: A row stays inconsistent because its writer died during a write.
        """
        if not 0 < width <= self.geometry.states_per_sequence:
            raise ValueError(f"width must be 1 to {self.geometry.states_per_sequence}, not {width}")
        at = np.asarray(slots, np.intp)
        found: Int32Array = self._states(at, self._state_table, (at, slice(width)))
        return found

    def state_groups(
        self, slots: npt.NDArray[np.integer[Any]], first: int, width: int, groups: npt.NDArray[np.integer[Any]]
    ) -> Int32Array:
        """Read groups of columns of the state table, those of windows among them; each row is consistent.

        Args:
            slots: [n] integers, the slots of the rows.
            first: The first column of group 0.
            width: Columns of a group. One copy of a group takes a third of the time of five copies of a column.
            groups: [n, m] integers, the groups of each row.

        Returns:
            Global block ids, [n, m, width] int32.

        Raises:
            IndexError: A slot or a group does not exist.
            DeadlineExceeded: A row stays inconsistent because its writer died during a write.
        """
        at, places = np.asarray(slots, np.intp), np.ascontiguousarray(groups, np.intp)
        found = self._states(at, ring_items(self._state_table, first, width), (at[:, None], places))
        return found.view(np.int32).reshape(*places.shape, width)

    def _states(self, at: npt.NDArray[np.intp], table: npt.NDArray[Any], cells: tuple[Any, ...]) -> npt.NDArray[Any]:
        for _ in attempts():
            over = self._rows_written.item()
            found: npt.NDArray[Any] = table[cells]
            versions = self._row_version[at]
            (torn,) = (versions > over).nonzero()
            if not torn.size:
                return found
            self.retries += torn.size
        raise _unending(int(at[torn[0]]))

    def occupied_slots(self) -> npt.NDArray[np.intp]:
        """Return the slots that hold a sequence now, [n]. They may have changed when their rows are read."""
        # Copy first: numpy counts, then collects, and fails if the number changes in between.
        return np.flatnonzero(self._row_sequence.copy())

    def slot_of(self, sequence_id: int) -> int | None:
        """Return the slot that holds a sequence now, or None. The caller must check the row that it reads there.

        Args:
            sequence_id: The sequence's id, above 0.
        """
        (slots,) = (self._row_sequence == sequence_id).nonzero()
        return int(slots[0]) if slots.size else None

    def gauges(self) -> dict[str, int]:
        """Return one consistent set of the coordinator's gauges.

        Raises:
            DeadlineExceeded: The coordinator died during a write.
        """
        values = undisturbed(self._gauges, lambda: self._gauges[1:].tolist())
        return dict(zip(GAUGES, values, strict=True))

    def metrics(self) -> ServiceMetrics:
        """Return all numbers as of one instant.

        Raises:
            DeadlineExceeded: The coordinator died during a write.
        """
        return self._metrics.all()


def ring_items(table: Int32Array, first: int, width: int) -> npt.NDArray[np.void]:
    """Return a view of a table of states in which each group of columns is one item.

    numpy copies one item in a third of the time of five columns.

    Args:
        table: [slots, columns] int32.
        first: The first column of group 0.
        width: Columns of a group.

    Returns:
        [slots, groups].
    """
    end = first + (table.shape[1] - first) // width * width
    items: npt.NDArray[np.void] = table[:, first:end].view(_item(width))
    return items


@cache
def _item(width: int) -> np.dtype[np.void]:
    """Return the type of so many int32 as one item."""
    return np.dtype(f"V{4 * width}")


def _unending(slot: int) -> DeadlineExceeded:
    return DeadlineExceeded(f"row {slot} of the shared tables stays inconsistent: its writer died or hangs")


def _views(memory: mmap.mmap, geometry: Geometry) -> dict[str, npt.NDArray[Any]]:
    specs = arrays(geometry).items()
    views = {name: np.ndarray(spec.shape, spec.dtype, memory, spec.offset, spec.strides) for name, spec in specs}
    return {**views, "gauges": np.frombuffer(memory, "<i8", 1 + len(GAUGES), PAGE_BYTES)}
