"""Finds decodes with block tables that begin alike: forks, samples, drafts, and requests behind one system prompt.

A kernel may read these blocks once for all these rows. Each row must have the sums that it has alone, which are cut
into parts of a fixed number of keys: only whole parts that each of the rows sees are shared.
"""

from __future__ import annotations

import numpy as np

from .batch import IntArray, PagedBatch


def shared_prefixes(batch: PagedBatch, part: int) -> list[tuple[IntArray, int]]:
    """Return sets of decodes that share parts.

    A set is found by comparing with one row: rows that share more with each other than with it are found only if they
    are not taken with it.

    Args:
        batch: The batch.
        part: Keys of a part.

    Returns:
        Pairs of rows, [n] int64 with n >= 2, in order, and of the number of their common leading parts, 1 or more. No
        row is in two sets.
    """
    visible = batch.lengths // part
    (rows,) = ((batch.counts == 1) & (visible > 0)).nonzero()
    found: list[tuple[IntArray, int]] = []
    if rows.size < 2:
        return found
    first, alike = -(-part // batch.block_size), dict[bytes, list[int]]()
    for row in rows.tolist():
        alike.setdefault(batch.tables[row, :first].tobytes(), []).append(row)
    for members in alike.values():
        others = np.array(members)
        while others.size > 1:
            common = _common_parts(batch, others, visible[others], part)
            longest = np.sort(common)[::-1]
            saved = np.arange(longest.size) * longest  # parts that need not be read again
            parts = int(longest[saved.argmax()])
            found.append((others[common >= parts], parts))
            others = others[common < parts]
    return found


def _common_parts(batch: PagedBatch, rows: IntArray, visible: IntArray, part: int) -> IntArray:
    """Return how many leading parts each row has in common with the first row: [n]. visible: parts of each."""
    width = -(-int(visible[0]) * part // batch.block_size)
    tables = batch.tables[rows, :width]
    differs = tables != tables[0]
    blocks = np.where(differs.any(1), differs.argmax(1), width)
    common: IntArray = np.minimum(blocks * batch.block_size // part, np.minimum(visible, visible[0]))
    return common
