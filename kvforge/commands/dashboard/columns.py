"""Aligns rows of cells under a heading, in columns as wide as their content."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

CELL_MAX = 28  # columns of the terminal; the last cell of a row may be longer
GAP = "  "


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return one line per row, with columns of equal width.

    Args:
        rows: The heading first; all with the same number of cells.
        right: Indices of columns to align to the right.
    """
    *columns, last = zip(*rows, strict=True)
    widths = [min(CELL_MAX, max(map(cell_len, column))) for column in columns]
    lines = []
    for *cells, end in rows:
        padded = [_padded(cell, width, at in right) for at, (cell, width) in enumerate(zip(cells, widths, strict=True))]
        if len(widths) in right:
            end = _padded(end, max(map(cell_len, last)), to_right=True)
        lines.append(GAP.join([*padded, end]).rstrip())
    return lines


def _padded(cell: str, width: int, to_right: bool) -> str:
    if cell_len(cell) >= width:
        return set_cell_size(cell, width)
    space = " " * (width - cell_len(cell))
    return space + cell if to_right else cell + space
