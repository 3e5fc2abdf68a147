"""Indexing of the blocks that acknowledged steps have filled.

For each sequence, `hashed` counts its leading indexed blocks, `chain` is the chained hash of the last of these, and
`parent` is the key of its entry. The next block is hashed and linked from these values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .groups import Group
from .hashing import BlockHasher, Hashes
from .pool_indexing import index_each, index_run
from .prefix_cache import root_key
from .sequences import Sequences, Slots, unmarked
from .windows import Windows

Tokens = npt.NDArray[np.int32]


class Indexing:
    """Hashes and indexes the blocks of sequences.

    Attributes:
        kinds: Distinguish generated tokens from prompt tokens, because their KV differs in its bits.
    """

    def __init__(self, sequences: Sequences, hasher: BlockHasher, windows: Windows) -> None:
        self._sequences, self._hasher, self._windows = sequences, hasher, windows
        self.kinds = False

    def contents(self, tokens: Tokens) -> Tokens:
        """Return tokens in the form in which they are indexed: with their marks if kinds are distinguished."""
        return tokens if self.kinds else unmarked(tokens)

    def hashes(self, salt: int, tokens: Tokens, *, whole: bool = False) -> Hashes:
        """Return the chained hashes of the full blocks that a hit may use: the last token must be computed.

        Args:
            salt: The salt of the prefix chain.
            tokens: Token ids, [n] int32.
            whole: The last token may come from a hit too.
        """
        size = self._sequences.block_size
        return self._hasher.chain(salt, tokens[: (tokens.size - 1 + whole) // size * size])

    def filled(self, group: Group) -> None:
        """Index the blocks of the group's sequences that acknowledged steps have filled.

        Sequences that filled exactly one block, as in decoding, are handled together in numpy; the rest one by one.
        """
        s = self._sequences
        (slots,) = (s.pool == group.number).nonzero()
        new = s.computed[slots] // s.block_size - s.hashed[slots]
        filled = new > 0
        if not np.count_nonzero(filled):
            return
        slots, new = slots[filled], new[filled]
        simple = (new == 1) & group.index.all_alive(s.parent[slots])
        if alike := np.count_nonzero(simple):
            self._one_each(group, slots[simple])
        for slot in slots[~simple].tolist() if alike < slots.size else ():
            self.filled_by(group, slot)

    def _one_each(self, group: Group, slots: Slots) -> None:
        s = self._sequences
        first = s.hashed[slots]
        tokens = s.tokens[slots[:, None], (first * s.block_size)[:, None] + np.arange(s.block_size)]
        contents = self.contents(tokens)
        values = self._hasher.extend(s.chain[slots], contents)
        keys = index_each(group.pool, s.table[slots, first], s.parent[slots], values, contents)
        s.hashed[slots], s.chain[slots], s.parent[slots] = first + 1, values, keys
        if group.window_pages:
            self._windows.note_indexed(group, slots, first, keys.tolist())

    def filled_by(self, group: Group, slot: int, end: int | None = None) -> None:
        """Index the newly filled blocks of one sequence.

        Args:
            group: Its group.
            slot: Its slot.
            end: Index its first `end` blocks, which must be filled; None for all filled ones.
        """
        s, pool = self._sequences, group.pool
        if not pool.index.alive(int(s.parent[slot])):  # an ancestor was evicted: start again from the root
            self.restart(slot)
        first = int(s.hashed[slot])
        full = int(s.computed[slot]) // s.block_size if end is None else end
        tokens = self.contents(s.tokens[slot, first * s.block_size : full * s.block_size])
        values = self._hasher.chain(int(s.chain[slot]), tokens)
        contents = tokens.reshape(-1, s.block_size)
        parent = index_run(pool, s.table[slot, first:full], int(s.parent[slot]), values, contents)
        s.hashed[slot], s.chain[slot], s.parent[slot] = full, values[-1], parent
        if group.window_pages:
            held = max(first, int(s.window_first[slot]))
            entries = [pool.index.find(value) for value in values[held - first :].tolist()]
            keys = [pool.index.key(entry) for entry in entries if entry is not None]
            self._windows.note_indexed(group, np.full(len(keys), slot), np.arange(held, held + len(keys)), keys)

    def restart(self, slot: int) -> None:
        """Start indexing again from the root. Entries that exist keep their keys."""
        s = self._sequences
        s.hashed[slot], s.chain[slot], s.parent[slot] = 0, s.salt[slot], root_key(int(s.salt[slot]))

    def shared(self, group: Group, slot: int, hits: npt.NDArray[np.int64]) -> None:
        """Set the indexing state of a sequence that begins with shared blocks.

        If a shared block is not indexed (a sibling computed content that already had an entry), indexing starts from
        the root and finds the existing entries.
        """
        s, index = self._sequences, group.index
        if hits.size and index.has_all(hits):
            s.hashed[slot], s.chain[slot], s.parent[slot] = (
                hits.size,
                index.hash_of(int(hits[-1])),
                index.key(int(hits[-1])),
            )
        else:
            self.restart(slot)
