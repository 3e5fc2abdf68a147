"""Index entries for the full blocks of a pool: for one block, for one of each of several sequences, or for a run.

`Indexing` calls these functions with the hashes of what steps have filled. Most blocks are new to the index and are
added together. Where an entry exists, collides or has lost its parent, they are added one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .block_pool import BlockPool
from .hashing import Hashes
from .prefix_cache import Tokens


def index_each(
    pool: BlockPool,
    ids: npt.NDArray[np.integer],
    parents: npt.NDArray[np.int64],
    values: Hashes,
    contents: npt.NDArray[np.int32],
) -> npt.NDArray[np.int64]:
    """Apply `index_block` to one block of each of n sequences.

    Args:
        pool: The pool of the blocks.
        ids: Block ids, [n].
        parents: Parent keys, [n].
        values: Chained hashes, [n].
        contents: Tokens, [n, block_size] int32.

    Returns:
        Keys of the entries, [n] int64.
    """
    _note_filled(pool, ids, values)
    if pool.index.add_new(ids, parents, values, contents):
        return pool.index.keys(ids)
    each = zip(ids.tolist(), parents.tolist(), values.tolist(), contents, strict=True)
    return np.array([index_block(pool, *entry) for entry in each])


def index_run(
    pool: BlockPool, ids: npt.NDArray[np.integer], parent: int, values: Hashes, contents: npt.NDArray[np.int32]
) -> int:
    """Apply `index_block` to consecutive blocks of one sequence.

    Args:
        pool: The pool of the blocks.
        ids: Block ids, [n > 0].
        parent: The parent key of the first.
        values: Chained hashes, [n].
        contents: Tokens, [n, block_size] int32.

    Returns:
        The key of the last entry.
    """
    _note_filled(pool, ids, values)
    keys = pool.index.keys(ids)
    if pool.index.add_new(ids, np.concatenate([[parent], keys[:-1]]), values, contents):
        return int(keys[-1])
    for block, value, tokens in zip(ids.tolist(), values.tolist(), contents, strict=True):
        parent = index_block(pool, block, parent, value, tokens)
    return parent


def index_block(pool: BlockPool, block: int, parent: int, value: int, tokens: Tokens) -> int:
    """Index a full, acknowledged, held block under its chained hash.

    An existing entry for the same content stays, and its key is returned. An entry that collides, or that lost its
    parent, is replaced.

    Args:
        pool: The pool of the block.
        block: The block.
        parent: The key of its parent.
        value: Its chained hash.
        tokens: Its tokens, [block_size] int32.

    Returns:
        The key of the entry.
    """
    index = pool.index
    old = index.find(value)
    if old is not None:
        if index.is_of(old, parent, tokens):
            return index.key(old)
        pool.unindex(old)
    if pool.blocks.indexed[block]:
        gone: list[int] = []
        pool.eviction.remove_entry(block, gone)
        pool.free_gone(gone)
    for child in index.strangers(block, value):
        pool.unindex(child)
    return index.add(block, parent, value, tokens)


def _note_filled(pool: BlockPool, ids: npt.NDArray[np.integer], values: Hashes) -> None:
    """Let the host tier know about blocks that are going to be indexed: [n] ids and chained hashes."""
    host = pool.eviction.host
    if host is not None and pool.writeback is not None:
        host.note_computed(ids, values)
        pool.writeback.note(ids)
