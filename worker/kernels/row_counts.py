"""How many rows a product of oneDNN may have: few different numbers.

oneDNN compiles each product anew for each number of rows, and keeps a quarter of a megabyte or more of it for ever: a
worker of a model with four shapes of weights grew by 2 GB once steps had had every number of tokens up to 512. So rows
of zeros are put behind those that are wanted, an eighth of them at most. What is beside a row does not change its bits.
Nor does how many there are, but for a single row of more than LONG numbers, which oneDNN sums in another order (where
that is rounded to 16 bits it shows in one number of ten thousand): it gets a row of zeros as well.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

COUNTS_PER_DOUBLING = 8
LONG = 1024


def row_count(rows: int) -> int:
    """The number of rows that is computed where `rows` are wanted: at least as many, at most an eighth more."""
    if rows <= COUNTS_PER_DOUBLING:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * COUNTS_PER_DOUBLING)
    return -(-rows // step) * step


def least_rows(k: int) -> int:
    """How many rows of k numbers a product must have at least."""
    return 2 if k > LONG else 1


def padded(x: torch.Tensor) -> torch.Tensor:
    """x [rows, k] with rows of zeros behind it, [`row_count(rows)`, k]; itself where there are none to add."""
    rows, k = x.shape  # len(x) asks Python's code of torch
    missing = max(row_count(rows), least_rows(k)) - rows
    return pad(x, (0, 0, 0, missing)) if missing else x
