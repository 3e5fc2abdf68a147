"""Blocks: what is known of each, whatever pool it is in.

A block is in exactly one state:

    FREE         in its pool's free list, content meaningless
    REFERENCED   its count, the number of holders, is above zero
    QUARANTINED  nobody holds it, but a step that was sent may still touch it
    CACHED       nobody holds it, its content is indexed by prefix and may be used again or evicted

Reference counts are the number of holders: sequences whose table names the block, plus named external holders.
A generation is bumped whenever a block's content is given up, so an old name for it can be told from a new one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FREE, REFERENCED, QUARANTINED, CACHED = range(4)
STATE_NAMES = ("free", "referenced", "quarantined", "cached")

BlockIds = npt.NDArray[np.int64]
NO_BLOCKS: BlockIds = np.zeros(0, np.int64)


class Blocks:
    """Struct-of-arrays over every block of every pool, indexed by global block id."""

    def __init__(self, blocks_max: int, block_size: int, first_generation: int = 0) -> None:
        self.block_size = block_size
        self.refcount = np.zeros(blocks_max, np.int32)
        self.generation = np.full(blocks_max, first_generation, np.int32)
        self.owner = np.zeros(blocks_max, np.int32)
        self.state = np.zeros(blocks_max, np.int8)
        self.indexed = np.zeros(blocks_max, np.bool_)
        self.touch = np.zeros(blocks_max, np.int64)
        self.since_us = np.zeros(blocks_max, np.int64)
        self.external: dict[int, dict[str, int]] = {}
        self.changed: list[BlockIds] = []
