"""The map of blocks as characters: one cell per block, or per several blocks where space is short."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.client.tables import BlockColumns

# States by rising weight: a cell for several blocks shows the heaviest one, so that none is overlooked.
FREE, CACHED, USED, SHARED = range(4)
NAMES = ("free", "cached", "used", "shared")
CHARACTERS = "·o█#"
ASCII = ".o+#"
STYLES = ("bright_black", "blue", "green", "magenta")


def states(columns: BlockColumns, base: int, count: int) -> npt.NDArray[np.int8]:
    """Return the state of each block of a pool.

    A block without holders that is still charged to a tenant is cached, or becomes free after the present step.

    Args:
        columns: The blocks.
        base: The id of the pool's first block.
        count: The number of its blocks.

    Returns:
        [count] int8; fewer if the tables hold fewer.
    """
    refcount, owner = columns.refcount[base : base + count], columns.owner[base : base + count]
    found = np.where(owner != 0, CACHED, FREE).astype(np.int8)
    found[refcount == 1] = USED
    found[refcount > 1] = SHARED
    return found


def scaled(found: npt.NDArray[np.int8], cells: int) -> tuple[npt.NDArray[np.int8], int]:
    """Reduce the map to a number of cells.

    Args:
        found: [blocks] int8.
        cells: The largest number of cells.

    Returns:
        The cells [n] int8, and the number of blocks per cell (the last one may stand for fewer).
    """
    each = max(1, -(-found.size // max(1, cells)))
    if not found.size:
        return found, each
    return np.maximum.reduceat(found, np.arange(0, found.size, each)), each


def rows(cells: npt.NDArray[np.int8], width: int) -> list[list[tuple[int, int]]]:
    """Return the lines of the map, each a list of runs (state, length)."""
    lines = []
    for start in range(0, cells.size, width):
        line = cells[start : start + width]
        ends = np.append(np.flatnonzero(np.diff(line)) + 1, line.size)
        starts = np.concatenate(([0], ends[:-1]))
        lines.append([(int(line[at]), int(end - at)) for at, end in zip(starts, ends, strict=True)])
    return lines
