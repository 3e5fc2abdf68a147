"""Checksums of whole blocks, equal on every device, in the host file and on the disk.

The checksum of a row of bytes is the sum of w[i] * (2i+1) over its words w of 8 bytes, modulo 2^64. The factors are
odd, so a change within one word always changes the sum, and integers add up to the same in any order: kernels and numpy
agree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD = 8  # bytes

Sums = npt.NDArray[np.uint64]


def checksums(rows: npt.NDArray[np.uint8], weights: Sums) -> Sums:
    """Return the checksum of each row: [n] uint64.

    Args:
        rows: [n, bytes] uint8, contiguous.
        weights: As `weights_of` returns them for so many bytes.
    """
    words = rows.view(np.uint64) if rows.shape[1] % WORD == 0 else rows.astype(np.uint64)
    return np.einsum("ij,j->i", words, weights)


def weights_of(block_bytes: int) -> Sums:
    """Return the factors of a row's words. Rows that are no multiple of a word are summed byte by byte."""
    words = block_bytes // WORD if block_bytes % WORD == 0 else block_bytes
    return 2 * np.arange(words, dtype=np.uint64) + 1
