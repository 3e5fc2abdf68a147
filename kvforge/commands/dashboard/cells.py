"""The map of blocks as characters: one cell a block, or the busiest of several where there is no room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.client.tables import BlockColumns

# What a block is, by rising weight: a cell that stands for several shows the heaviest, so that none is overlooked.
FREE, CACHED, USED, SHARED = range(4)
NAMES = ("free", "cached", "used", "shared")
CHARACTERS = "·o█#"
ASCII = ".o+#"
STYLES = ("bright_black", "blue", "green", "magenta")


def states(columns: BlockColumns, base: int, count: int) -> npt.NDArray[np.int8]:
    """The state of each block of a pool, [count] int8; fewer where the tables have no more of them.

    A block without holders that is still charged to a tenant is cached, or free as soon as the present step is over.
    """
    refcount, owner = columns.refcount[base : base + count], columns.owner[base : base + count]
    found = np.where(owner != 0, CACHED, FREE).astype(np.int8)
    found[refcount == 1] = USED
    found[refcount > 1] = SHARED
    return found


def scaled(found: npt.NDArray[np.int8], cells: int) -> tuple[npt.NDArray[np.int8], int]:
    """At most `cells` cells, [n] int8, and how many blocks each stands for (the last one perhaps for fewer)."""
    each = max(1, -(-found.size // max(1, cells)))
    if not found.size:
        return found, each
    return np.maximum.reduceat(found, np.arange(0, found.size, each)), each


def rows(cells: npt.NDArray[np.int8], width: int) -> list[list[tuple[int, int]]]:
    """Lines of the map: each a list of runs (state, length)."""
    lines = []
    for start in range(0, cells.size, width):
        line = cells[start : start + width]
        ends = np.append(np.flatnonzero(np.diff(line)) + 1, line.size)
        starts = np.concatenate(([0], ends[:-1]))
        lines.append([(int(line[at]), int(end - at)) for at, end in zip(starts, ends, strict=True)])
    return lines
