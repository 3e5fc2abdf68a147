"""What enters and leaves the prefix indexes, for those who keep a mirror of them (`coordinator.kv_events`).

Told are the entries that a prompt can hit, and no others: an entry is hit from its root on, block by block. So one
whose chain is broken leaves with the entry that broke it, though the index may keep it for a while; and one that
holds a token that was generated, where kinds are told apart, is never told, nor is what follows it: tokens that come
in from outside are of the other kind. Invariant: who has applied everything that `take` returned, in order, holds
exactly what `PrefixIndex.reachable` names in all pools.

The core notes, which is a copy of what changed; what it means is found out when it is taken, once a turn. Nothing of
this is part of the state: whoever wants to be told again begins with `Residents.tell_changes`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import GENERATED

Tokens = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
BLOCK = 0xFFFFFFFF  # of a key: the block; the rest is its generation
UNTOLD = -1
FEW = 8  # of so many entries numpy takes longer than Python does for one after the other
_TOKEN = np.int32(GENERATED - 1)


class Stored(NamedTuple):
    """Blocks of a pool that can be hit now, each after the one before it.

    salt: of the chain's root. parent: the hash of the entry that the first one follows; None: it begins a prompt.
    hashes: [n]. tokens: [n * block_size], ids of the vocabulary.
    """

    pool: int
    salt: int
    parent: int | None
    hashes: list[int]
    tokens: list[int]


class Removed(NamedTuple):
    """Blocks of a pool that cannot be hit any more."""

    pool: int
    hashes: list[int]


class Cleared(NamedTuple):
    """The pool is gone, and no other holds anything either."""

    pool: int


Change = Stored | Removed | Cleared


class _Pool(NamedTuple):
    """There is a pool, or there is none any more."""

    number: int
    base: int
    blocks: int
    gone: bool


class _Added(NamedTuple):
    """[n] keys, parents, hashes, [n, block_size] contents with marks."""

    keys: Keys
    parents: Keys
    hashes: npt.NDArray[np.uint64]
    contents: Tokens


class IndexChanges:
    """What was noted since it was last taken, and what is told so far: by block, its key, hash and salt.

    Of more than `blocks_noted_max` blocks nothing is kept: `take` says so.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_noted_max = 2 * blocks_max
        self._noted: list[_Pool | _Added | list[int]] = []
        self._blocks_noted = 0
        self._key = np.full(blocks_max, UNTOLD, np.int64)
        self._hash = np.zeros(blocks_max, np.uint64)
        self._salt = np.zeros(blocks_max, np.int64)
        self._pool = np.zeros(blocks_max, np.int64)
        self._told = 0

    def pool(self, number: int, base: int, count: int, *, gone: bool = False) -> None:
        """A pool [base, base + count) came, or went with all it had."""
        self._noted.append(_Pool(number, base, count, gone))

    def added(self, keys: Keys, parents: Keys, hashes: npt.NDArray[np.uint64], contents: Tokens) -> None:
        """Entries were made, in this order: [n] keys, parents, hashes, [n, block_size] contents, which are copied."""
        if keys.size and self._room(keys.size):
            self._noted.append(_Added(keys, parents, hashes, contents.copy()))

    def removed(self, keys: list[int]) -> None:
        """Entries cannot be hit any more."""
        if self._room(len(keys)):
            self._noted.append(keys)

    def _room(self, count: int) -> bool:
        self._blocks_noted += count
        return self._blocks_noted <= self._blocks_noted_max

    def take(self) -> list[Change] | None:
        """What is to be told since the last call, in order. None: it was too much, and all must be told anew."""
        if self._blocks_noted > self._blocks_noted_max:
            return None
        noted, self._noted, self._blocks_noted = self._noted, [], 0
        changes: list[Change] = []
        for one in noted:
            if isinstance(one, _Added):
                self._tell_added(one, changes)
            elif isinstance(one, _Pool):
                self._tell_pool(one, changes)
            else:
                self._tell_removed(one, changes)
        return changes

    # ----------------------------------------------------------------------------------------------- what it comes to

    def _tell_added(self, added: _Added, changes: list[Change]) -> None:
        """Entry by entry would be slow. A prompt's follow each other; those of a decode step, one of each sequence, do
        not, nor is the parent of one among the others."""
        keys, parents = added.keys, added.parents
        cuts = (np.flatnonzero(parents[1:] != keys[:-1]) + 1).tolist()
        of_prompts = np.maximum.reduce(added.contents, axis=1) < GENERATED
        if len(cuts) == keys.size - 1:
            self._tell_each(added, of_prompts, changes)
            return
        for first, end in zip([0, *cuts], [*cuts, keys.size], strict=True):
            told = end if of_prompts[first:end].all() else first + int(np.argmin(of_prompts[first:end]))
            above = int(parents[first])
            parent, salt = (None, -above - 1) if above < 0 else self._of(above)
            if told == first or salt == UNTOLD:
                continue
            blocks, run = keys[first:told] & BLOCK, slice(first, told)
            self._key[blocks], self._hash[blocks], self._salt[blocks] = keys[run], added.hashes[run], salt
            self._told += told - first
            pool, hashes = int(self._pool[blocks[0]]), added.hashes[run].tolist()
            changes.append(Stored(pool, salt, parent, hashes, (added.contents[run] & _TOKEN).ravel().tolist()))

    def _tell_each(self, added: _Added, of_prompts: npt.NDArray[np.bool_], changes: list[Change]) -> None:
        """Those none of which follows another one of them."""
        parents = added.parents
        if parents.size <= FEW:
            self._tell_few(added, of_prompts, changes)
            return
        roots = parents < 0
        above = np.where(roots, 0, parents & BLOCK)
        (told,) = (of_prompts & (roots | (self._key[above] == parents))).nonzero()
        if not told.size:
            return
        keys, hashes, roots, above = added.keys[told], added.hashes[told], roots[told], above[told]
        blocks = keys & BLOCK
        salts = np.where(roots, -parents[told] - 1, self._salt[above])
        from_above = self._hash[above].tolist()
        self._key[blocks], self._hash[blocks], self._salt[blocks] = keys, hashes, salts
        self._told += told.size
        for pool, salt, root, parent, value, tokens in zip(
            self._pool[blocks].tolist(),
            salts.tolist(),
            roots.tolist(),
            from_above,
            hashes.tolist(),
            (added.contents[told] & _TOKEN).tolist(),
            strict=True,
        ):
            changes.append(Stored(pool, salt, None if root else parent, [value], tokens))

    def _tell_few(self, added: _Added, of_prompts: npt.NDArray[np.bool_], changes: list[Change]) -> None:
        """The same, one by one."""
        columns = (added.keys, added.parents, added.hashes, added.contents & _TOKEN, of_prompts)
        for key, above, value, tokens, told in zip(*(column.tolist() for column in columns), strict=True):
            parent, salt = (None, -above - 1) if above < 0 else self._of(above)
            if not told or salt == UNTOLD:
                continue
            block = key & BLOCK
            self._key[block], self._hash[block], self._salt[block] = key, value, salt
            self._told += 1
            changes.append(Stored(int(self._pool[block]), salt, parent, [value], tokens))

    def _of(self, key: int) -> tuple[int | None, int]:
        """Hash and salt of what was told under a key."""
        block = key & BLOCK
        return (int(self._hash[block]), int(self._salt[block])) if self._key[block] == key else (None, UNTOLD)

    def _tell_removed(self, keys: list[int], changes: list[Change]) -> None:
        blocks = [key & BLOCK for key in keys if self._key[key & BLOCK] == key]
        if blocks:
            self._key[blocks] = UNTOLD
            self._told -= len(blocks)
            changes.append(Removed(int(self._pool[blocks[0]]), self._hash[blocks].tolist()))

    def _tell_pool(self, pool: _Pool, changes: list[Change]) -> None:
        region = slice(pool.base, pool.base + pool.blocks)
        if not pool.gone:
            self._pool[region] = pool.number
            return
        hashes = self._hash[region][self._key[region] != UNTOLD]
        if hashes.size:
            alone = hashes.size == self._told
            changes.append(Cleared(pool.number) if alone else Removed(pool.number, hashes.tolist()))
        self._key[region] = UNTOLD
        self._told -= hashes.size
