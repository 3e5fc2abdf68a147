"""Finds decodes with block tables that begin alike: forks, samples, drafts, and requests behind one system prompt.

A kernel may read these blocks once for all these rows. Each row must have the sums that it has alone, which are cut
into parts of its keys: only whole parts that each of the rows sees, with the same borders, are shared.
"""

from __future__ import annotations

import numpy as np

from .batch import Int32Array, IntArray, PagedBatch


def shared_prefixes(batch: PagedBatch, part: int) -> list[tuple[IntArray, int]]:
    """Return sets of decodes that share parts of a fixed number of keys.

    Args:
        batch: The batch.
        part: Keys of a part.

    Returns:
        As `rows_alike`.
    """
    visible = np.where(batch.counts == 1, batch.lengths // part, 0)
    number = np.arange(1, int(visible.max(initial=0)) + 1)
    ends = np.where(number <= visible[:, None], number * part, 0)
    return rows_alike(batch.tables, ends, batch.block_size)


def rows_alike(tables: IntArray | Int32Array, ends: IntArray, block_size: int) -> list[tuple[IntArray, int]]:
    """Return sets of rows that share parts.

    A set is found by comparing with one row: rows that share more with each other than with it are found only if they
    are not taken with it.

    Args:
        tables: [rows, width], block tables.
        ends: [rows, parts] int64, tokens up to the end of each part that may be shared, ascending; 0 behind them.
        block_size: Tokens per block.

    Returns:
        Pairs of rows, [n] int64 with n >= 2, in order, and of the number of their common leading parts, 1 or more. No
        row is in two sets.
    """
    rows = np.flatnonzero(ends.any(1))
    found: list[tuple[IntArray, int]] = []
    if np.unique(tables[rows, :1]).size == rows.size:
        return found
    alike = dict[tuple[int, bytes], list[int]]()
    for row, end in zip(rows.tolist(), ends[rows, 0].tolist(), strict=True):
        alike.setdefault((end, tables[row, : -(-end // block_size)].tobytes()), []).append(row)
    for members in alike.values():
        others = np.array(members)
        while others.size > 1:
            width = -(-int(ends[others[0]].max()) // block_size)
            common = _common_parts(tables[others, :width], ends[others], block_size)
            longest = np.sort(common)[::-1]
            saved = np.arange(longest.size) * longest  # parts that need not be read again
            parts = int(longest[saved.argmax()])
            found.append((others[common >= parts], parts))
            others = others[common < parts]
    return found


def _common_parts(tables: IntArray | Int32Array, ends: IntArray, block_size: int) -> IntArray:
    """Return how many leading parts each row has in common with the first row: [rows].

    tables: [rows, blocks of the first row's parts].
    """
    differs = tables != tables[0]
    blocks = np.where(differs.any(1), differs.argmax(1), tables.shape[1])
    common = (ends == ends[0]) & (ends > 0) & (ends <= blocks[:, None] * block_size)
    counts: IntArray = np.cumprod(common, axis=1).sum(1)
    return counts
