"""Row counts of oneDNN's products, limited to a few different numbers.

oneDNN compiles a product for each number of rows, and keeps a quarter of a megabyte or more of code for ever: a worker
of a model with four shapes of weights grew by 2 GB once steps had had every number of tokens up to 512. Rows of zeros
are therefore appended, an eighth of the wanted rows at most. Other rows do not change a row's bits. Neither does the
row count, except for a single row of more than LONG numbers, which oneDNN sums in another order (rounded to 16 bits,
one number in ten thousand differs): it gets a row of zeros too.

With AVX-512, oneDNN's products of one to three rows take longer than that of four, which reads as much: 1.1 to 1.4
times (benchmarks/NOTES.md, "Drafts on two quiet cores"). Fewer rows get rows of zeros there.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

COUNTS_PER_DOUBLING = 8
LONG = 1024
QUICK_ROWS = 4


def row_count(rows: int) -> int:
    """Return the number of rows to compute for `rows` wanted rows: at most an eighth more."""
    if rows <= COUNTS_PER_DOUBLING:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * COUNTS_PER_DOUBLING)
    return -(-rows // step) * step


def least_rows(k: int) -> int:
    """Return the least number of rows of k numbers that a product must have, or is quicker with."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return QUICK_ROWS
    return 2 if k > LONG else 1


def padded(x: torch.Tensor) -> torch.Tensor:
    """Append rows of zeros to x [rows, k] up to `row_count(rows)`; return x itself if none are needed."""
    rows, k = x.shape  # faster than len(x), which runs Python code of torch
    missing = max(row_count(rows), least_rows(k)) - rows
    return pad(x, (0, 0, 0, missing)) if missing else x
