"""The longest hit of a prefix in a pool and its host tier, for models with blocks of several kinds.

A hit of so many blocks needs the KV blocks of all of them, the window blocks that are in sight behind the last, and a
checkpoint of the recurrent state just there. Each may be in the pool or on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from .blocks import NO_BLOCKS, BlockIds
from .groups import Group
from .hashing import Hashes
from .host_copies import READS_MAX
from .host_parts import CHECKPOINT
from .prefix_cache import Tokens, root_key

NOTHING: tuple[int, ...] = ()
Found = tuple[tuple[int, ...], tuple[int, ...]]  # blocks of the pool, or else nodes of the host tier


class HostHit(msgspec.Struct):
    """What a prefix has in a pool and on the host; see `Placement` for the attributes.

    Attributes:
        checkpoint: The blocks of the checkpoint, if it is in the pool.
        known: How many blocks have KV in the pool or on the host, with or without what else a hit needs.
    """

    hits: BlockIds
    host: tuple[int, ...]
    ring: tuple[tuple[int, ...], ...]
    host_windows: tuple[int, ...]
    checkpoint: tuple[int, ...]
    host_checkpoint: tuple[int, ...]
    known: int


def find_in_both(
    group: Group,
    salt: int,
    tokens: Tokens,
    hashes: Hashes,
    least: int,
    end: int,
    *,
    first_of: Callable[[Group, int], int],
) -> HostHit | None:
    """Return the longest hit of a prefix.

    Args:
        group: The group, which has a host tier.
        salt: The salt of the prefix.
        tokens: Tokens in the form in which they are indexed, [n] int32.
        hashes: The chained hashes of their full blocks.
        least: The hit must have more blocks than these.
        end: The most blocks that it may have.
        first_of: Returns the first block in sight behind so many tokens: `Windows.first`.
    """
    search = PrefixSearch(group, salt, tokens, hashes, end)
    if search.has_entries:
        search.match()
        search.limit(READS_MAX)
    longest = search.longest(least, group.pool.blocks.block_size, first_of)
    return None if longest is None else search.hit(*longest)


class PrefixSearch:
    """What a pool and its host tier have of a prefix.

    Attributes:
        known: How many blocks have KV.
    """

    def __init__(self, group: Group, salt: int, tokens: Tokens, hashes: Hashes, end: int) -> None:
        assert group.host is not None
        self._group, self._tier, self._reads = group, group.host.tier, len(group.host.reads)
        self._prefix, self._end = (salt, tokens, hashes), end
        self._chain = self._tier.chain(root_key(salt), tokens, hashes, end)
        self._matched, self._keys = NO_BLOCKS, list[int]()
        self._windows: dict[int, Found | None] = {}
        self.known = 0

    @property
    def has_entries(self) -> bool:
        """Whether the host tier has something of the prefix, or had."""
        return bool(self._chain)

    def match(self) -> None:
        """Look for the prefix in the pool."""
        self._matched = self._group.index.match(*self._prefix)[: self._end]
        self._keys = self._group.index.keys(self._matched).tolist()
        self.known = len(self._keys)

    def limit(self, reads_max: int) -> None:
        """Count the blocks on the host behind those in the pool, as many as a step can read with their parts."""
        most = len(self._keys) + (reads_max - self._reads) // (1 + self._group.window_pages) - self._group.state_blocks
        while self.known < min(len(self._chain), most) and self._tier.is_hit(self._chain[self.known]):
            self.known += 1

    def longest(self, least: int, size: int, first_of: Callable[[Group, int], int]) -> tuple[int, int] | None:
        """Return the first block in sight and the number of blocks of the longest hit of more than `least` blocks.

        Args:
            least: Blocks.
            size: Tokens of a block.
            first_of: Returns the first block in sight behind so many tokens.
        """
        group, count = self._group, self.known
        while count > least:
            if group.state_blocks and self._checkpoint(count) is None:
                count -= 1
                continue
            first = first_of(group, count * size) if group.window_pages else count
            lacking = next((each for each in range(count - 1, first - 1, -1) if self.windows(each) is None), None)
            if lacking is None:
                return first, count
            count = lacking  # a longer hit would see this block
        return None

    def windows(self, number: int) -> Found | None:
        """Return the window blocks of a block in the pool, or else their nodes on the host; None if neither has all."""
        if number not in self._windows:
            self._windows[number] = self._find(number, self._group.pool.parts.windows, 0, self._group.window_pages)
        return self._windows[number]

    def _checkpoint(self, count: int) -> Found | None:
        return self._find(count - 1, self._group.pool.parts.checkpoints, CHECKPOINT, self._group.state_blocks)

    def _find(self, number: int, parts: dict[int, tuple[int, ...]], first: int, count: int) -> Found | None:
        ids = parts.get(self._keys[number]) if number < len(self._keys) else None
        if ids is not None:
            return ids, NOTHING
        nodes = self._tier.parts(self._chain[number], first, count) if number < len(self._chain) else None
        return None if nodes is None else (NOTHING, nodes)

    def hit(self, first: int, count: int) -> HostHit:
        """Return the hit of so many blocks, which has all it needs.

        Args:
            first: The first block whose window blocks are in sight.
            count: The blocks.
        """
        pairs = [pair for number in range(first, count) if (pair := self.windows(number)) is not None]
        state = self._checkpoint(count) if self._group.state_blocks else None
        checkpoint, host_checkpoint = state if state is not None else (NOTHING, NOTHING)
        return HostHit(
            hits=np.asarray(self._matched[:count], np.int64),
            host=tuple(self._chain[len(self._keys) : count]),
            ring=tuple(ids for ids, _ in pairs),
            host_windows=tuple(node for _, nodes in pairs for node in nodes),
            checkpoint=checkpoint,
            host_checkpoint=host_checkpoint,
            known=self.known,
        )
