"""Zeroing of blocks that come from another tenant."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.messages import Int32Array
from kvforge.worker.attention.pool import KvPool


class BlockZeroer:
    """Zeroes blocks of a pool before the rest of a step, even if the rest is invalid.

    If it fails, the step fails, and so does each later one until these blocks are zeroed: their new tenant must not see
    the data of the previous one.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._unzeroed = np.zeros(0, np.int32)  # blocks that still have to be zeroed

    def zero(self, blocks: Int32Array) -> None:
        """Queue the zeroing of blocks, and of those of earlier steps that failed. blocks: [n] int32, pool-local."""
        if not blocks.size and not self._unzeroed.size:
            return
        self._unzeroed = np.union1d(self._unzeroed, blocks)
        self._pool.zero_blocks(self._unzeroed)
        self._unzeroed = self._unzeroed[:0]
