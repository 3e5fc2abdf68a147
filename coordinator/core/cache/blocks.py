"""State of every block, for all pools.

A block is in exactly one state:

    FREE         in its pool's free list, content meaningless
    REFERENCED   its reference count is above zero
    QUARANTINED  no holders, but a step in flight may still touch it
    CACHED       no holders; its content is indexed by prefix and may be reused or evicted

The reference count is the number of holders: sequences with the block in their table, plus named external holders.
The generation is bumped when a block gives up its content, which invalidates older references to the block.

A block in use is of one kind: it holds the KV of tokens, a part of a sequence's recurrent state, a part of a checkpoint
of such a state, or the KV of tokens in layers with a sliding window. Free blocks count as KV.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.layout import BLOCK_KINDS, BLOCK_STATES

FREE, REFERENCED, QUARANTINED, CACHED = range(len(BLOCK_STATES))
KV, RECURRENT, CHECKPOINT, WINDOW = range(len(BLOCK_KINDS))

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
        self.kind = np.zeros(blocks_max, np.int8)
        self.indexed = np.zeros(blocks_max, np.bool_)
        self.touch = np.zeros(blocks_max, np.int64)
        self.since_us = np.zeros(blocks_max, np.int64)
        self.external: dict[int, dict[str, int]] = {}
        self.changed: list[BlockIds] = []
