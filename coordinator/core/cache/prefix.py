"""The prefix index of one pool: which blocks hold the KV of which token prefix.

An entry says: this block holds the KV of these tokens, coming after that parent entry. Its identity is exact: a
lookup compares the block's tokens and follows parents by block *and generation*, from a root that stands for the
salt. The chained hash only finds candidates. Invariant: an entry exists only for a full block whose KV a worker has
acknowledged, and never for a free block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..waits import Waits, prefix_of
from .blocks import FREE, NO_BLOCKS, BlockIds, Blocks
from .changes import IndexChanges
from .hashing import BlockHasher, Hashes

Tokens = npt.NDArray[np.int32]
PARTIAL_CANDIDATES_MAX = 16


class PrefixStore:
    """What the entries of all pools keep per block: struct-of-arrays indexed by global block id.

    changed: what those who mirror the indexes are to be told; None: nobody does.
    """

    def __init__(self, blocks_max: int, block_size: int) -> None:
        self.hash = np.zeros(blocks_max, np.uint64)
        self.parent = np.zeros(blocks_max, np.int64)
        self.tokens = np.zeros((blocks_max, block_size), np.int32)
        self.changed: IndexChanges | None = None
        self._show()

    def _show(self) -> None:
        self.contents = _items(self.tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("contents", "changed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy shows its own tokens: a hit must never be compared with another store's. It has no mirror."""
        for name, value in state.items():
            setattr(self, name, value)
        self.changed = None
        self._show()


class PrefixIndex:
    """The entries of one pool.

    Of most entries there is one child: then it stands there itself, and not in a dictionary of its own.
    """

    def __init__(self, store: PrefixStore, blocks: Blocks, waits: Waits, hasher: BlockHasher) -> None:
        self._store, self._blocks, self._waits, self._hasher = store, blocks, waits, hasher
        self._by_hash: dict[int, int] = {}
        self._children: dict[int, int | dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def key(self, block: int) -> int:
        """The exact name of an entry: its block and generation in one integer."""
        return block | int(self._blocks.generation[block]) << 32

    def keys(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """The same of [n] blocks."""
        keys: npt.NDArray[np.int64] = ids | self._blocks.generation[ids].astype(np.int64) << 32
        return keys

    def has_all(self, ids: BlockIds) -> bool:
        """Whether each of [n] blocks is indexed."""
        return bool(self._blocks.indexed[ids].all())

    def hash_of(self, block: int) -> int:
        """The chained hash of an indexed block."""
        return int(self._store.hash[block])

    def alive(self, key: int) -> bool:
        """Whether a parent key (or root) still names an entry."""
        if key < 0:
            return True
        block = key & 0xFFFFFFFF
        return bool(self._blocks.indexed[block]) and int(self._blocks.generation[block]) == key >> 32

    def all_alive(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """The same for [n] keys."""
        ids = np.where(keys < 0, 0, keys & 0xFFFFFFFF)
        alive: npt.NDArray[np.bool_] = self._blocks.indexed[ids] & (self._blocks.generation[ids] == keys >> 32)
        return alive | (keys < 0)

    # -------------------------------------------------------------------------------------------------------- lookup

    def match(self, salt: int, tokens: Tokens, hashes: Hashes) -> BlockIds:
        """The longest run of indexed blocks that hold a prefix of `tokens`: [n] int64.

        hashes: the chained hashes of the leading full blocks that may be used.
        """
        found: list[int] = []
        if self._by_hash:
            get = self._by_hash.get
            for value in hashes.tolist():
                block = get(value)
                if block is None:
                    break
                found.append(block)
        if not found:
            return NO_BLOCKS
        ids = np.array(found, np.int64)
        return ids[: self._verified(salt, tokens, ids)]

    def _verified(self, salt: int, tokens: Tokens, ids: BlockIds) -> int:
        """How many leading candidates hold exactly these tokens after exactly these parents."""
        size, store = self._blocks.block_size, self._store
        keys = ids | self._blocks.generation[ids].astype(np.int64) << 32
        parents = np.concatenate([[root_key(salt)], keys[:-1]])
        good = store.parent[ids] == parents
        if store.contents[ids].tobytes() != tokens[: ids.size * size].tobytes():
            good &= (store.tokens[ids] == tokens[: ids.size * size].reshape(-1, size)).all(axis=1)
        return ids.size if np.count_nonzero(good) == ids.size else int(np.argmin(good))

    def match_partial(self, parent: int, rest: Tokens) -> tuple[int, int]:
        """The child of `parent` that agrees with most of `rest`: (block, leading tokens in common), or (-1, 0)."""
        best, most = -1, 0
        children = self._children.get(parent)
        if children is None or not rest.size:
            return best, most
        for count, block in enumerate(reversed(children) if isinstance(children, dict) else (children,)):
            if count >= PARTIAL_CANDIDATES_MAX:
                break
            own = self._store.tokens[block][: rest.size]
            same = own == rest[: own.size]
            common = int(same.argmin())  # of the first that differs, or 0 where none does
            if same[common]:
                common = own.size
            if common > most:
                best, most = block, common
        return best, most

    # ------------------------------------------------------------------------------------------------------- entries

    def find(self, value: int) -> int | None:
        """The block that is indexed under a chained hash."""
        return self._by_hash.get(value)

    def is_of(self, block: int, parent: int, tokens: Tokens) -> bool:
        """Whether an indexed block holds exactly these tokens after exactly this parent."""
        return bool(self._store.parent[block] == parent) and np.array_equal(self._store.tokens[block], tokens)

    def add(self, block: int, parent: int, value: int, tokens: Tokens) -> int:
        """Indexes a block under a chained hash that no other has. Returns its entry's key."""
        assert self._blocks.state[block] != FREE, "a free block cannot be indexed"
        store = self._store
        store.hash[block], store.parent[block], store.tokens[block] = value, parent, tokens
        self._by_hash[value] = block
        self._add_child(parent, block)
        self._blocks.indexed[block] = True
        if store.changed is not None:  # a block that was indexed before may have kept what follows it
            self._note_added(store.changed, np.array(self._chains([block]), np.int64))
        self._tell((value,))
        return self.key(block)

    def _add_child(self, parent: int, block: int) -> None:
        siblings = self._children.setdefault(parent, block)
        if isinstance(siblings, dict):
            siblings[block] = None
        elif siblings != block:
            self._children[parent] = {siblings: None, block: None}

    def _add_children(self, parents: list[int], blocks: list[int]) -> None:
        """Of blocks that follow each other, nearly all but the first are the first child of their parent."""
        children = self._children
        if parents[0] in children:
            self._add_child(parents[0], blocks[0])
            parents, blocks = parents[1:], blocks[1:]
        if children.keys().isdisjoint(parents):
            before = len(children)
            children.update(zip(parents, blocks, strict=True))
            if len(children) == before + len(blocks):
                return
            for parent in parents:  # some have the same
                children.pop(parent, None)
        for parent, block in zip(parents, blocks, strict=True):
            self._add_child(parent, block)

    def add_new(
        self,
        ids: npt.NDArray[np.integer],
        parents: npt.NDArray[np.int64],
        values: Hashes,
        contents: npt.NDArray[np.int32],
    ) -> bool:
        """`add` for [n] blocks together: their parents, values, [n, block_size] contents. n is above 0.

        False where one of them is indexed already, or any under one of the values, or two have the same value: then
        nothing has changed.
        """
        store, hashes, new = self._store, values.tolist(), ids.tolist()
        if np.count_nonzero(self._blocks.indexed[ids]) or not self._by_hash.keys().isdisjoint(hashes):
            return False
        assert not np.count_nonzero(self._blocks.state[ids] == FREE), "a free block cannot be indexed"
        before = len(self._by_hash)
        self._by_hash.update(zip(hashes, new, strict=True))
        if len(self._by_hash) < before + len(hashes):
            for value in hashes:
                self._by_hash.pop(value, None)
            return False
        store.hash[ids], store.parent[ids], store.contents[ids] = values, parents, _items(contents)
        again = [] if store.changed is None else self._after(self.keys(ids).tolist())
        self._add_children(parents.tolist(), new)
        self._blocks.indexed[ids] = True
        if store.changed is not None:
            store.changed.added(self.keys(ids), parents, values, contents)
            if again:
                self._note_added(store.changed, np.array(self._chains(again), np.int64))
        self._tell(hashes)
        return True

    def _tell(self, values: Iterable[int]) -> None:
        """Blocks with these chained hashes can be shared from now on."""
        for value in values if self._waits.awaits_prefix else ():
            self._waits.wake(prefix_of(value))

    def remove(self, block: int) -> None:
        """Takes a block's entry out of the index (the block itself stays as it is)."""
        assert self._blocks.indexed[block]
        if self._store.changed is not None:
            self._store.changed.removed(self._chains([block]))
        self._blocks.indexed[block] = False
        del self._by_hash[int(self._store.hash[block])]
        parent = int(self._store.parent[block])
        siblings = self._children[parent]
        if not isinstance(siblings, dict):
            del self._children[parent]
            return
        del siblings[block]
        if len(siblings) == 1:
            self._children[parent] = next(iter(siblings))

    # ------------------------------------------------------------------------------------------------------- mirrors

    def _chains(self, blocks: list[int]) -> list[int]:
        """The keys of entries and of all that follow them, each behind the one that it follows."""
        keys: list[int] = []
        children, left = self._children, blocks
        while left:
            keys.append(self.key(left.pop()))
            after = children.get(keys[-1])
            if after is not None:
                left += after if isinstance(after, dict) else (after,)
        return keys

    def _after(self, keys: list[int]) -> list[int]:
        """The blocks that follow entries of these keys: they are not out of the index, though nothing hits them."""
        after = [self._children[key] for key in keys if key in self._children]
        return [block for own in after for block in (own if isinstance(own, dict) else (own,))]

    def _note_added(self, changed: IndexChanges, keys: npt.NDArray[np.int64]) -> None:
        ids, store = keys & 0xFFFFFFFF, self._store
        changed.added(keys, store.parent[ids], store.hash[ids], store.tokens[ids])

    def reachable(self) -> npt.NDArray[np.int64]:
        """The keys of all entries that can be hit, each behind the one that it follows: [n] int64."""
        roots = [own for key, own in self._children.items() if key < 0]
        first = [block for own in roots for block in (own if isinstance(own, dict) else (own,))]
        return np.array(self._chains(first), np.int64)

    def tell_all(self, changed: IndexChanges) -> None:
        """Notes everything that can be hit, as if it had just come."""
        self._note_added(changed, self.reachable())

    # ---------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self, base: int, count: int) -> None:
        """Entries, hashes and children name the same blocks of the pool [base, base + count), and every entry's content
        is what its hash says."""
        blocks, store = self._blocks, self._store
        ids = np.fromiter(self._by_hash.values(), np.int64, len(self._by_hash))
        region = np.arange(base, base + count)
        assert set(ids.tolist()) == set(region[blocks.indexed[region]].tolist()), "indexed blocks"
        assert store.hash[ids].tolist() == list(self._by_hash), "a hash names another block"
        assert (blocks.state[ids] != FREE).all(), "a free block is indexed"
        listed = [
            (parent, block)
            for parent, own in self._children.items()
            for block in (own if isinstance(own, dict) else (own,))
        ]
        assert all(not isinstance(own, dict) or len(own) > 1 for own in self._children.values()), "an only child's form"
        assert sorted(block for _, block in listed) == sorted(ids.tolist()), "children"
        assert all(store.parent[block] == parent for parent, block in listed), "a child is under the wrong parent"
        ids = ids[self.all_alive(store.parent[ids])]
        parents = store.parent[ids]
        above = store.hash[np.where(parents < 0, 0, parents & 0xFFFFFFFF)]
        starts = np.where(parents < 0, (-parents - 1).astype(np.uint64), above)
        expected = self._hasher.extend(starts, store.tokens[ids])
        assert expected.tolist() == store.hash[ids].tolist(), "an entry's hash is not the hash of its content"


def _items(contents: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
    """The same memory as [n] items, each a block's tokens: numpy gathers and scatters them about twice as fast."""
    items: npt.NDArray[np.void] = contents.view(f"V{4 * contents.shape[1]}")[:, 0]
    return items


def root_key(salt: int) -> int:
    """The parent key of first blocks under `salt`."""
    return -salt - 1
