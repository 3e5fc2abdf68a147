"""The prefix index of one pool: it maps token prefixes to the blocks that hold their KV.

An entry records that a block holds the KV of certain tokens after a certain parent entry. Matches are exact: a lookup
compares the block's tokens, and follows parents by block *and generation* from a root that represents the salt. The
chained hash only finds candidates. Invariant: every entry is for a full, worker-acknowledged block, never for a free
one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..waits import Waits, prefix_of
from .blocks import FREE, KV, NO_BLOCKS, BlockIds, Blocks
from .changes import IndexChanges
from .hashing import BlockHasher, Hashes

Tokens = npt.NDArray[np.int32]
PARTIAL_CANDIDATES_MAX = 16


class PrefixStore:
    """Per-block data of the entries of all pools: struct-of-arrays indexed by global block id.

    Attributes:
        changed: Records index changes for external mirrors; None if there is no mirror.
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
        """Restore a copy, with a view of its own tokens and no mirror."""
        for name, value in state.items():
            setattr(self, name, value)
        self.changed = None
        self._show()


class PrefixCache:
    """The entries of one pool.

    Most entries have one child. `_children` then holds the child itself instead of a dictionary.
    """

    def __init__(self, store: PrefixStore, blocks: Blocks, waits: Waits, hasher: BlockHasher) -> None:
        self._store, self._blocks, self._waits, self._hasher = store, blocks, waits, hasher
        self._by_hash: dict[int, int] = {}
        self._children: dict[int, int | dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def key(self, block: int) -> int:
        """Return the key of an entry: block and generation in one integer."""
        return block | int(self._blocks.generation[block]) << 32

    def keys(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the keys of [n] blocks."""
        keys: npt.NDArray[np.int64] = ids | self._blocks.generation[ids].astype(np.int64) << 32
        return keys

    def has_all(self, ids: BlockIds) -> bool:
        """Return whether each of [n] blocks is indexed."""
        return bool(self._blocks.indexed[ids].all())

    def hash_of(self, block: int) -> int:
        """Return the chained hash of an indexed block."""
        return int(self._store.hash[block])

    def parent_of(self, block: int) -> int:
        """Return the parent key of an indexed block."""
        return int(self._store.parent[block])

    def tokens_of(self, block: int) -> Tokens:
        """Return the tokens of an indexed block, [block_size] int32."""
        tokens: Tokens = self._store.tokens[block]
        return tokens

    def alive(self, key: int) -> bool:
        """Return whether a parent key is a root or still names an entry."""
        if key < 0:
            return True
        block = key & 0xFFFFFFFF
        return bool(self._blocks.indexed[block]) and int(self._blocks.generation[block]) == key >> 32

    def all_alive(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return `alive` for [n] keys."""
        ids = np.where(keys < 0, 0, keys & 0xFFFFFFFF)
        alive: npt.NDArray[np.bool_] = self._blocks.indexed[ids] & (self._blocks.generation[ids] == keys >> 32)
        return alive | (keys < 0)

    # -------------------------------------------------------------------------------------------------------- lookup

    def match(self, salt: int, tokens: Tokens, hashes: Hashes) -> BlockIds:
        """Return the longest run of indexed blocks that hold a prefix of `tokens`.

        Args:
            salt: Salt of the root.
            tokens: Prompt tokens, [tokens] int32.
            hashes: Chained hashes of the leading full blocks that may be shared.

        Returns:
            Block ids, [n] int64.
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
        """Return how many leading candidates hold exactly these tokens with exactly these parents."""
        size, store = self._blocks.block_size, self._store
        keys = ids | self._blocks.generation[ids].astype(np.int64) << 32
        parents = np.concatenate([[root_key(salt)], keys[:-1]])
        good = store.parent[ids] == parents
        if store.contents[ids].tobytes() != tokens[: ids.size * size].tobytes():
            good &= (store.tokens[ids] == tokens[: ids.size * size].reshape(-1, size)).all(axis=1)
        return ids.size if np.count_nonzero(good) == ids.size else int(np.argmin(good))

    def ends_within(self, key: int, blocks: int) -> bool:
        """Return whether at most `blocks` entries are behind one, along the newest ones."""
        for _ in range(blocks + 1):
            after = self._children.get(key)
            if after is None:
                return True
            key = self.key(next(reversed(after)) if isinstance(after, dict) else after)
        return False

    def match_partial(self, parent: int, rest: Tokens) -> tuple[int, int]:
        """Return the child of `parent` that shares the most leading tokens with `rest`, and how many; else (-1, 0)."""
        best, most = -1, 0
        children = self._children.get(parent)
        if children is None or not rest.size:
            return best, most
        for count, block in enumerate(reversed(children) if isinstance(children, dict) else (children,)):
            if count >= PARTIAL_CANDIDATES_MAX:
                break
            own = self._store.tokens[block][: rest.size]
            same = own == rest[: own.size]
            common = int(same.argmin())  # the first difference, or 0 if all are equal
            if same[common]:
                common = own.size
            if common > most:
                best, most = block, common
        return best, most

    # ------------------------------------------------------------------------------------------------------- entries

    def find(self, value: int) -> int | None:
        """Return the block indexed under a chained hash, or None."""
        return self._by_hash.get(value)

    def is_of(self, block: int, parent: int, tokens: Tokens) -> bool:
        """Return whether an indexed block holds exactly these tokens after exactly this parent."""
        # For so few items, comparing bytes is several times faster than numpy's comparison.
        return bool(self._store.parent[block] == parent) and self._store.tokens[block].tobytes() == tokens.tobytes()

    def strangers(self, block: int, value: int) -> list[int]:
        """Return the children that an earlier entry of a block has left, and that do not follow the hash `value`.

        A block that is held while it is removed from the index keeps its key, also if its tokens change.
        """
        left = self._children.get(self.key(block))
        if left is None:
            return []
        children = np.array(list(left) if isinstance(left, dict) else [left])
        starts = np.full(children.size, value, np.uint64)
        expected = self._hasher.extend(starts, self._store.tokens[children])
        strange: list[int] = children[expected != self._store.hash[children]].tolist()
        return strange

    def add(self, block: int, parent: int, value: int, tokens: Tokens) -> int:
        """Index a block under a new chained hash and return the key of its entry."""
        assert self._blocks.state[block] != FREE, "a free block cannot be indexed"
        store = self._store
        store.hash[block], store.parent[block], store.tokens[block] = value, parent, tokens
        self._by_hash[value] = block
        self._add_child(parent, block)
        self._blocks.indexed[block] = True
        if store.changed is not None:  # descendants of an earlier entry of the block become hittable again
            self._note_added(store.changed, np.array(self._chains([block]), np.int64))
        self._wake_waiting((value,))
        return self.key(block)

    def _add_child(self, parent: int, block: int) -> None:
        siblings = self._children.setdefault(parent, block)
        if isinstance(siblings, dict):
            siblings[block] = None
        elif siblings != block:
            self._children[parent] = {siblings: None, block: None}

    def _add_children(self, parents: list[int], blocks: list[int]) -> None:
        """Add children in bulk: in a run of blocks, nearly every block is the only child of the one before it."""
        children = self._children
        if parents[0] in children:
            self._add_child(parents[0], blocks[0])
            parents, blocks = parents[1:], blocks[1:]
        if children.keys().isdisjoint(parents):
            before = len(children)
            children.update(zip(parents, blocks, strict=True))
            if len(children) == before + len(blocks):
                return
            for parent in parents:  # some parents are equal
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
        """Apply `add` to n > 0 blocks together.

        Args:
            ids: Block ids, [n].
            parents: Parent keys, [n].
            values: Chained hashes, [n].
            contents: Tokens, [n, block_size] int32.

        Returns:
            False, with nothing changed, if a block or a hash is indexed already, if two hashes are equal, or if a block
            has strangers.
        """
        store, hashes, new = self._store, values.tolist(), ids.tolist()
        if np.count_nonzero(self._blocks.indexed[ids]) or not self._by_hash.keys().isdisjoint(hashes):
            return False
        if not self._children.keys().isdisjoint(self.keys(ids).tolist()) and any(map(self.strangers, new, hashes)):
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
        self._wake_waiting(hashes)
        return True

    def _wake_waiting(self, values: Iterable[int]) -> None:
        """Wake requests that wait for blocks with these chained hashes."""
        for value in values if self._waits.awaits_prefix else ():
            self._waits.wake(prefix_of(value))

    def remove(self, block: int) -> None:
        """Remove a block's entry from the index. The block's state stays as it is."""
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
        """Return the keys of entries and all their descendants, parents first."""
        keys: list[int] = []
        children, left = self._children, blocks
        while left:
            keys.append(self.key(left.pop()))
            after = children.get(keys[-1])
            if after is not None:
                left += after if isinstance(after, dict) else (after,)
        return keys

    def _after(self, keys: list[int]) -> list[int]:
        """Return the children left under these keys by earlier entries: indexed, but unreachable until now."""
        after = [self._children[key] for key in keys if key in self._children]
        return [block for own in after for block in (own if isinstance(own, dict) else (own,))]

    def _note_added(self, changed: IndexChanges, keys: npt.NDArray[np.int64]) -> None:
        ids, store = keys & 0xFFFFFFFF, self._store
        changed.added(keys, store.parent[ids], store.hash[ids], store.tokens[ids])

    def reachable(self) -> npt.NDArray[np.int64]:
        """Return the keys of all entries that can be hit, parents first: [n] int64."""
        roots = [own for key, own in self._children.items() if key < 0]
        first = [block for own in roots for block in (own if isinstance(own, dict) else (own,))]
        return np.array(self._chains(first), np.int64)

    def note_all(self, changed: IndexChanges) -> None:
        """Record every reachable entry as newly added."""
        self._note_added(changed, self.reachable())

    # ---------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self, base: int, count: int) -> None:
        """Check that entries, hashes and children of blocks [base, base + count) agree with each other."""
        blocks, store = self._blocks, self._store
        ids = np.fromiter(self._by_hash.values(), np.int64, len(self._by_hash))
        region = np.arange(base, base + count)
        indexed = region[blocks.indexed[region] & (blocks.kind[region] == KV)]
        assert np.array_equal(np.sort(ids), indexed), "indexed"
        assert store.hash[ids].tolist() == list(self._by_hash), "a hash names another block"
        assert (blocks.state[ids] != FREE).all(), "a free block is indexed"
        alone = {key: own for key, own in self._children.items() if not isinstance(own, dict)}
        above, listed = [*alone], [*alone.values()]
        if len(alone) < len(self._children):
            for key, own in self._children.items():
                if isinstance(own, dict):
                    assert len(own) > 1, "an only child is stored in a dictionary"
                    above += [key] * len(own)
                    listed += own
        children = np.array(listed, np.int64)
        assert np.array_equal(np.sort(children), indexed), "children"
        assert (store.parent[children] == np.array(above, np.int64)).all(), "a child is under the wrong parent"
        ids = ids[self.all_alive(store.parent[ids])]
        parents = store.parent[ids]
        hashes = store.hash[np.where(parents < 0, 0, parents & 0xFFFFFFFF)]
        starts = np.where(parents < 0, (-parents - 1).astype(np.uint64), hashes)
        expected = self._hasher.extend(starts, store.tokens[ids])
        assert expected.tolist() == store.hash[ids].tolist(), "an entry's hash is not the hash of its content"


def _items(contents: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
    """Return a view with one item for each block: numpy gathers and scatters these about twice as fast."""
    items: npt.NDArray[np.void] = contents.view(f"V{4 * contents.shape[1]}")[:, 0]
    return items


def root_key(salt: int) -> int:
    """Return the key that first blocks under `salt` have as their parent."""
    return -salt - 1
