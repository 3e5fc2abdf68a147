"""Writer and reader of the shared tables.

Each row carries its own version counter, odd while it is written: a reader that meets a row in the middle of a write
reads that row again and no other. A reader maps the file read-only: it can neither change nor delay anything.
The order of plain stores is what x86-64 guarantees to other cores; numpy adds no fence of its own.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DeadlineExceeded, ProtocolError
from .layout import GAUGES, HEADER, LAYOUT_VERSION, MAGIC, PAGE_BYTES, Geometry, arrays, file_bytes
from .messages import Int32Array, Int64Array

READ_WAIT_S = 1.0
SPINS_MAX = 32


class TablesWriter:
    """The coordinator's side: creates the file, writes it, removes it."""

    def __init__(self, path: Path, geometry: Geometry, boot: str) -> None:
        """Creates `path` (0600, replacing a stale file of a dead boot). Raises OSError."""
        self.path = path
        self.geometry = geometry
        size = file_bytes(geometry)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            os.ftruncate(handle, size)
            self._map = mmap.mmap(handle, size)
            header = np.frombuffer(self._map, HEADER, 1)
            header["layout_version"] = LAYOUT_VERSION
            header["header_bytes"] = HEADER.itemsize
            header["boot"] = boot.encode()
            header["slots"], header["blocks"] = geometry.slots, geometry.blocks
            header["blocks_per_sequence"], header["block_size"] = geometry.blocks_per_sequence, geometry.block_size
            header["file_bytes"], header["pid"] = size, os.getpid()
            header["magic"] = MAGIC  # last: a file with the magic is complete
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        self._gauges = np.frombuffer(self._map, "<i8", 1 + len(GAUGES), PAGE_BYTES)
        views = _views(self._map, geometry)
        self.row_version: Int64Array = views["row_version"]
        self.row_length: Int32Array = views["row_length"]
        self.row_blocks: Int32Array = views["row_blocks"]
        self.row_sequence: Int64Array = views["row_sequence"]
        self.block_refcount: Int32Array = views["block_refcount"]
        self.block_generation: Int32Array = views["block_generation"]
        self.block_owner: Int32Array = views["block_owner"]
        self.block_table: Int32Array = views["block_table"]

    def begin_rows(self, slots: Int64Array) -> None:
        """Marks rows as being written. [n] slots; duplicates are harmless."""
        self.row_version[slots] += 1

    def end_rows(self, slots: Int64Array) -> None:
        """Marks the same rows as whole again."""
        self.row_version[slots] += 1

    def write_gauges(self, values: Sequence[int]) -> None:
        """Publishes one consistent set of gauges, in the order of layout.GAUGES."""
        self._gauges[0] += 1
        self._gauges[1:] = values
        self._gauges[0] += 1

    def close(self) -> None:
        """Removes the file. Readers that still map it keep what they see."""
        self.path.unlink(missing_ok=True)


class TablesReader:
    """Everyone else's side: maps the file read-only.

    Raises FileNotFoundError, or ProtocolError where the file is not a table file of this layout or of another boot.
    """

    def __init__(self, path: Path, boot: str | None = None) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
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
        self.geometry = Geometry(
            slots=int(header["slots"]),
            blocks=int(header["blocks"]),
            blocks_per_sequence=int(header["blocks_per_sequence"]),
            block_size=int(header["block_size"]),
        )
        if header["file_bytes"] != size or size != file_bytes(self.geometry):
            raise ProtocolError(f"{path} has {size} bytes; its header says {header['file_bytes']}")
        self._gauges = np.frombuffer(self._map, "<i8", 1 + len(GAUGES), PAGE_BYTES)
        views = _views(self._map, self.geometry)
        self._row_version: Int64Array = views["row_version"]
        self._row_length: Int32Array = views["row_length"]
        self._row_blocks: Int32Array = views["row_blocks"]
        self._row_sequence: Int64Array = views["row_sequence"]
        self._block_table: Int32Array = views["block_table"]
        self.block_refcount: Int32Array = views["block_refcount"]
        self.block_generation: Int32Array = views["block_generation"]
        self.block_owner: Int32Array = views["block_owner"]
        self.retries = 0

    def rows(self, slots: npt.NDArray[np.integer[Any]], width: int) -> tuple[Int32Array, Int32Array, Int64Array]:
        """The first `width` columns, the lengths and the sequence ids of `slots`, each row whole.

        Returns ([n, width] int32, [n] int32, [n] int64). Raises DeadlineExceeded where a row never comes to rest
        (its writer died in the middle).
        """
        before = self._row_version[slots]
        table = self._block_table[slots, :width]
        length, sequence = self._row_length[slots], self._row_sequence[slots]
        torn = ((before & 1) != 0) | (self._row_version[slots] != before)
        if not torn.any():
            return table, length, sequence
        for index in np.flatnonzero(torn):
            row = int(slots[index])
            self.retries += 1
            for _ in self._attempts():
                version = self._row_version[row]
                table[index] = self._block_table[row, :width]
                length[index], sequence[index] = self._row_length[row], self._row_sequence[row]
                if version & 1 == 0 and self._row_version[row] == version:
                    break
            else:
                raise DeadlineExceeded(f"row {row} of the shared tables is being written without end")
        return table, length, sequence

    def _attempts(self) -> Iterator[None]:
        """Tries again at once while the writer is at work, then lets it have the core, until READ_WAIT_S is over."""
        deadline = time.monotonic() + READ_WAIT_S
        for attempt in itertools.count():
            self.retries += attempt > 0
            yield
            if attempt >= SPINS_MAX:
                if time.monotonic() >= deadline:
                    return
                time.sleep(0)

    def row(self, slot: int) -> tuple[Int32Array, int, int]:
        """One row: its used block ids [blocks] int32, its length in tokens, its sequence id (0 = free slot)."""
        index = np.array([slot])
        for _ in self._attempts():
            used = int(self._row_blocks[slot])
            table, length, sequence = self.rows(index, used)
            if int(self._row_blocks[slot]) == used:
                return table[0], int(length[0]), int(sequence[0])
        raise DeadlineExceeded(f"row {slot} of the shared tables is being written without end")

    def gauges(self) -> dict[str, int]:
        """One consistent set of the coordinator's gauges."""
        for _ in self._attempts():
            version = int(self._gauges[0])
            values = self._gauges[1:].tolist()
            if version & 1 == 0 and int(self._gauges[0]) == version:
                return dict(zip(GAUGES, values, strict=True))
        raise DeadlineExceeded("the gauges of the shared tables are being written without end")


def _views(memory: mmap.mmap, geometry: Geometry) -> dict[str, npt.NDArray[Any]]:
    return {name: np.ndarray(spec.shape, spec.dtype, memory, spec.offset) for name, spec in arrays(geometry).items()}
