"""The entries of host and disk tiers: nodes of a trie, a block of tokens each."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from .wipes import NO_TAG

Tokens = npt.NDArray[np.int32]
NO_HOST_BLOCK = -1
NO_ENTRY = -1


class HostNode(msgspec.Struct):
    """A block of tokens behind a prefix.

    Attributes:
        parent: The node of the block before it, or a root key (`prefix_cache.root_key`).
        value: Its chained hash, unsigned 64 bit. It is also the tag that the worker stores beside the block.
        tokens: Its tokens, int32 in native order; of a part, its number (`host_parts`).
        entry: The key of the device entry that was last seen with this content; NO_ENTRY for none.
        block: Its host block; NO_HOST_BLOCK for none.
        written: A worker has acknowledged the copy into the block.
        readers: Copies out of the block that are pending or in flight.
        children: Nodes behind it.
        whole: `HostTier.breaks` when all blocks before it were in the tier; -1: that was not seen.
        once: Its block was used once when the pool evicted it, and was not read since; see `HostYield`.
        owner: The tenant that is charged for its block; 0 for none.
        damaged: A read did not find the content in the block, which is freed once nothing reads it.
        tag: The tenant that was charged when the entry was made, as `Wipes` names it; NO_TAG for none.
        wiped: The tenant was wiped: the entry is dropped once no copy uses its block, and its bytes are overwritten.
    """

    parent: int
    value: int
    tokens: bytes
    entry: int = NO_ENTRY
    block: int = NO_HOST_BLOCK
    written: bool = False
    readers: int = 0
    children: int = 0
    damaged: bool = False
    owner: int = 0
    tag: int = NO_TAG
    wiped: bool = False
    whole: int = -1
    once: bool = False
