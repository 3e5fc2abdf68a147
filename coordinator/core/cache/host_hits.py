"""The longest hit of a prefix in a pool and its host tier, for models with blocks of several kinds.

A hit of so many blocks needs the KV blocks of all of them, the window blocks that are in sight behind the last, and a
checkpoint of the recurrent state just there. Each may be in the pool or on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from .blocks import BlockIds
from .groups import Group
from .hashing import Hashes
from .host_copies import READS_MAX
from .host_parts import CHECKPOINT
from .prefix_cache import Tokens, root_key

NOTHING: tuple[int, ...] = ()


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
    assert group.host is not None
    search = PrefixSearch(group, salt, tokens, hashes, end)
    count = search.known
    size = group.pool.blocks.block_size
    while count > least:
        if group.state_blocks and not search.has_checkpoint(count):
            count -= 1
            continue
        first = first_of(group, count * size) if group.window_pages else count
        lacking = next((number for number in range(count - 1, first - 1, -1) if search.windows(number) is None), None)
        if lacking is None:
            return search.hit(first, count)
        count = lacking  # a longer hit would see this block
    return None


class PrefixSearch:
    """What a pool and its host tier have of a prefix.

    Attributes:
        known: How many blocks have KV.
    """

    def __init__(self, group: Group, salt: int, tokens: Tokens, hashes: Hashes, end: int) -> None:
        assert group.host is not None
        self._group, self._tier = group, group.host.tier
        self._chain = self._tier.chain(root_key(salt), tokens, hashes, end)
        self.known = 0
        if not self._chain:
            return
        self._matched = group.index.match(salt, tokens, hashes)[:end]
        self._keys = group.index.keys(self._matched).tolist()
        self._windows: dict[int, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}
        room = READS_MAX - len(group.host.reads)
        most = len(self._keys) + room // (1 + group.window_pages) - group.state_blocks
        self.known = len(self._keys)
        while self.known < min(len(self._chain), most) and self._tier.is_hit(self._chain[self.known]):
            self.known += 1

    def windows(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the window blocks of a block in the pool, or else their nodes on the host; None if neither has all."""
        if number not in self._windows:
            self._windows[number] = self._find(number, self._group.pool.windows, 0, self._group.window_pages)
        return self._windows[number]

    def has_checkpoint(self, count: int) -> bool:
        """Return whether there is a checkpoint just behind so many blocks."""
        return self._checkpoint(count) is not None

    def _checkpoint(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return self._find(count - 1, self._group.pool.checkpoints, CHECKPOINT, self._group.state_blocks)

    def _find(
        self, number: int, parts: dict[int, tuple[int, ...]], first: int, count: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
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
