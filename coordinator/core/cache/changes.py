"""Changes of the prefix indexes, for external mirrors (`kvforge.coordinator.kv_events`).

Only entries that a prompt can hit are reported. A hit walks from the root, block by block. An entry with a
broken chain is therefore reported as removed together with the entry that broke it, although the index may keep it a
while. Where kinds are distinguished, an entry that holds a generated token is never reported, and neither are its
descendants, because tokens from outside are prompt tokens.

Invariant: a mirror that applies everything that `take` returns, in order, holds exactly what `PrefixCache.reachable`
returns for all pools.

The core records raw changes as copies, and `take` interprets them once a turn. None of this is part of the core's
state: `KVCacheManager.record_changes` starts the report again from the beginning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import GENERATED

Tokens = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
BLOCK = 0xFFFFFFFF  # mask for the block in a key; the rest is its generation
UNREPORTED = -1
FEW = 8  # up to this many entries, a Python loop is faster than numpy
_TOKEN = np.int32(GENERATED - 1)


class Stored(NamedTuple):
    """Blocks of a pool that became hittable, each the child of the one before it.

    Attributes:
        pool: Number of the pool.
        salt: Salt of the chain's root.
        parent: Hash of the entry before the first block; None if the first block begins a prompt.
        hashes: Chained hashes, [n].
        tokens: Token ids of the vocabulary, [n * block_size].
    """

    pool: int
    salt: int
    parent: int | None
    hashes: list[int]
    tokens: list[int]


class Removed(NamedTuple):
    """Blocks of a pool that can no longer be hit."""

    pool: int
    hashes: list[int]


class Cleared(NamedTuple):
    """The pool is gone, and no other pool has reported entries."""

    pool: int


Change = Stored | Removed | Cleared


class _Pool(NamedTuple):
    """A pool was added or removed."""

    number: int
    base: int
    blocks: int
    gone: bool


class _Added(NamedTuple):
    """Entries added: keys, parents and hashes [n], contents with marks [n, block_size]."""

    keys: Keys
    parents: Keys
    hashes: npt.NDArray[np.uint64]
    contents: Tokens


class IndexChanges:
    """Changes recorded since the last `pop_changes`, and the entries reported so far: key, hash and salt of each block.

    If more than `blocks_noted_max` blocks change between two calls, the changes are dropped and `take` returns None.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_noted_max = 2 * blocks_max
        self._noted: list[_Pool | _Added | list[int]] = []
        self._blocks_noted = 0
        self._key = np.full(blocks_max, UNREPORTED, np.int64)
        self._hash = np.zeros(blocks_max, np.uint64)
        self._salt = np.zeros(blocks_max, np.int64)
        self._pool = np.zeros(blocks_max, np.int64)
        self._reported = 0

    def pool(self, number: int, base: int, count: int, *, gone: bool = False) -> None:
        """Record that a pool of blocks [base, base + count) was added or removed."""
        self._noted.append(_Pool(number, base, count, gone))

    def added(self, keys: Keys, parents: Keys, hashes: npt.NDArray[np.uint64], contents: Tokens) -> None:
        """Record new entries, in order: keys, parents and hashes [n]; contents [n, block_size], which are copied."""
        if keys.size and self._room(keys.size):
            self._noted.append(_Added(keys, parents, hashes, contents.copy()))

    def removed(self, keys: list[int]) -> None:
        """Record entries that can no longer be hit."""
        if self._room(len(keys)):
            self._noted.append(keys)

    def _room(self, count: int) -> bool:
        self._blocks_noted += count
        return self._blocks_noted <= self._blocks_noted_max

    def pop_changes(self) -> list[Change] | None:
        """Return the changes since the last call, in order; None if too many occurred to keep them."""
        if self._blocks_noted > self._blocks_noted_max:
            return None
        noted, self._noted, self._blocks_noted = self._noted, [], 0
        changes: list[Change] = []
        for one in noted:
            if isinstance(one, _Added):
                self._report_added(one, changes)
            elif isinstance(one, _Pool):
                self._report_pool(one, changes)
            else:
                self._report_removed(one, changes)
        return changes

    # ------------------------------------------------------------------------------------------------- interpretation

    def _report_added(self, added: _Added, changes: list[Change]) -> None:
        """Report added entries in runs of a parent and its descendants, as prompts have them.

        The entries of a decode step, one for each sequence, are not linked to each other; these are handled together.
        """
        keys, parents = added.keys, added.parents
        cuts = (np.flatnonzero(parents[1:] != keys[:-1]) + 1).tolist()
        of_prompts = np.maximum.reduce(added.contents, axis=1) < GENERATED
        if len(cuts) == keys.size - 1:
            self._report_each(added, of_prompts, changes)
            return
        for first, end in zip([0, *cuts], [*cuts, keys.size], strict=True):
            reported = end if of_prompts[first:end].all() else first + int(np.argmin(of_prompts[first:end]))
            above = int(parents[first])
            parent, salt = (None, -above - 1) if above < 0 else self._of(above)
            if reported == first or salt == UNREPORTED:
                continue
            blocks, run = keys[first:reported] & BLOCK, slice(first, reported)
            self._key[blocks], self._hash[blocks], self._salt[blocks] = keys[run], added.hashes[run], salt
            self._reported += reported - first
            pool, hashes = int(self._pool[blocks[0]]), added.hashes[run].tolist()
            changes.append(Stored(pool, salt, parent, hashes, (added.contents[run] & _TOKEN).ravel().tolist()))

    def _report_each(self, added: _Added, of_prompts: npt.NDArray[np.bool_], changes: list[Change]) -> None:
        """Report entries that are not linked to each other."""
        parents = added.parents
        if parents.size <= FEW:
            self._report_few(added, of_prompts, changes)
            return
        roots = parents < 0
        above = np.where(roots, 0, parents & BLOCK)
        (reported,) = (of_prompts & (roots | (self._key[above] == parents))).nonzero()
        if not reported.size:
            return
        keys, hashes, roots, above = added.keys[reported], added.hashes[reported], roots[reported], above[reported]
        blocks = keys & BLOCK
        salts = np.where(roots, -parents[reported] - 1, self._salt[above])
        from_above = self._hash[above].tolist()
        self._key[blocks], self._hash[blocks], self._salt[blocks] = keys, hashes, salts
        self._reported += reported.size
        for pool, salt, root, parent, value, tokens in zip(
            self._pool[blocks].tolist(),
            salts.tolist(),
            roots.tolist(),
            from_above,
            hashes.tolist(),
            (added.contents[reported] & _TOKEN).tolist(),
            strict=True,
        ):
            changes.append(Stored(pool, salt, None if root else parent, [value], tokens))

    def _report_few(self, added: _Added, of_prompts: npt.NDArray[np.bool_], changes: list[Change]) -> None:
        """Report unlinked entries in a Python loop."""
        columns = (added.keys, added.parents, added.hashes, added.contents & _TOKEN, of_prompts)
        for key, above, value, tokens, reported in zip(*(column.tolist() for column in columns), strict=True):
            parent, salt = (None, -above - 1) if above < 0 else self._of(above)
            if not reported or salt == UNREPORTED:
                continue
            block = key & BLOCK
            self._key[block], self._hash[block], self._salt[block] = key, value, salt
            self._reported += 1
            changes.append(Stored(int(self._pool[block]), salt, parent, [value], tokens))

    def _of(self, key: int) -> tuple[int | None, int]:
        """Return the hash and salt that were reported under a key."""
        block = key & BLOCK
        return (int(self._hash[block]), int(self._salt[block])) if self._key[block] == key else (None, UNREPORTED)

    def _report_removed(self, keys: list[int], changes: list[Change]) -> None:
        blocks = [key & BLOCK for key in keys if self._key[key & BLOCK] == key]
        if blocks:
            self._key[blocks] = UNREPORTED
            self._reported -= len(blocks)
            changes.append(Removed(int(self._pool[blocks[0]]), self._hash[blocks].tolist()))

    def _report_pool(self, pool: _Pool, changes: list[Change]) -> None:
        region = slice(pool.base, pool.base + pool.blocks)
        if not pool.gone:
            self._pool[region] = pool.number
            return
        hashes = self._hash[region][self._key[region] != UNREPORTED]
        if hashes.size:
            alone = hashes.size == self._reported
            changes.append(Cleared(pool.number) if alone else Removed(pool.number, hashes.tolist()))
        self._key[region] = UNREPORTED
        self._reported -= hashes.size
