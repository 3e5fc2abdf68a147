"""Plans placements: which cached blocks a sequence shares, what it reads from the host, and what it allocates.

A plan changes nothing. `Residency` checks that there is room for it, and carries it out.
"""

from __future__ import annotations

import numpy as np

from ..limits import Limits
from . import host_hits
from .blocks import NO_BLOCKS, Blocks
from .checkpoints import Checkpoints
from .groups import Group
from .hashing import Hashes
from .placement import NO_DONOR, Placement
from .prefix_cache import root_key
from .sequences import Sequences, Tokens
from .windows import Windows


class Planner:
    """Plans placements in groups."""

    def __init__(
        self, limits: Limits, sequences: Sequences, blocks: Blocks, checkpoints: Checkpoints, windows: Windows
    ) -> None:
        self._limits, self._sequences, self._blocks = limits, sequences, blocks
        self._checkpoints, self._windows = checkpoints, windows

    def plan_placement(
        self,
        group: Group,
        salt: int,
        tokens: Tokens,
        hashes: Hashes,
        shared_max: int | None = None,
        *,
        host: bool = True,
        whole: bool = False,
    ) -> Placement:
        """Plan a placement for `tokens` in the group, without changes.

        Args:
            group: The group.
            salt: The salt of the prefix chain.
            tokens: Token ids, [n] int32.
            hashes: The hashes of their full blocks.
            shared_max: How many leading tokens may come from cached blocks; None: all but the last.
            host: Whether the host tier counts, if the pool has blocks of several kinds. In others it does.
            whole: The last token may come from a cached block too: nothing goes on behind it. Not if the pool has
                blocks of several kinds.
        """
        most = tokens.size - 1 if shared_max is None else min(shared_max, tokens.size - 1)
        most += whole
        if group.pool.mixed:
            plan = self._plan_with_state if group.state_blocks else self._plan_with_windows
            found = plan(group, salt, tokens, hashes, shared_max)
            if group.host is None or not host:
                return found
            return self._plan_from_host(found, salt, tokens, hashes, most // self._blocks.block_size)
        size, partial_tokens_min = self._blocks.block_size, self._limits.cache.partial_tokens_min
        hits = group.index.match(salt, tokens, hashes)[: most // size]
        partial = (-1, 0)
        rest = tokens[hits.size * size : most]
        needed = self._sequences.blocks_for(tokens.size) - hits.size
        if group.host is not None and (entries := group.host.match(salt, tokens, hashes, hits.size, most // size)):
            found = Placement(group, hits, partial, needed)
            found.host = entries
            return found
        if rest.size >= partial_tokens_min:
            parent = group.index.key(int(hits[-1])) if hits.size else root_key(salt)
            block, common = group.index.match_partial(parent, rest)
            if common >= partial_tokens_min:
                partial = (block, common)
        return Placement(group, hits, partial, needed)

    def _plan_with_state(
        self, group: Group, salt: int, tokens: Tokens, hashes: Hashes, shared_max: int | None
    ) -> Placement:
        """Plan a placement with as many cached blocks as a checkpoint of the recurrent state is behind."""
        size, pool = self._blocks.block_size, group.pool
        needed = self._sequences.blocks_for(tokens.size) + group.state_blocks
        most = tokens.size - 1 if shared_max is None else min(shared_max, tokens.size - 1)
        matched = group.index.match(salt, tokens, hashes)[: most // size]
        count = self._checkpoints.last(group, matched)
        while count and group.window_pages and not self._windows.usable(group, matched)[count]:
            count = self._checkpoints.last(group, matched[: count - 1])
        shared_end = self._checkpoints.positions(group).last(tokens, matched.size * size) if matched.size else 0
        shared_end = shared_end if shared_end > count * size else 0
        without = Placement(group, NO_BLOCKS, (-1, 0), needed)
        if group.window_pages:
            self._with_ahead(without, tokens.size)
        without.shared_end = shared_end
        if not count:
            return without
        blocks = np.array(pool.parts.checkpoints[group.index.key(int(matched[count - 1]))], np.int64)
        found = Placement(group, matched[:count], (-1, 0), needed - count, NO_DONOR, without)
        found.checkpoint, found.shared_end = blocks, shared_end
        return self._with_hits(found, tokens.size) if group.window_pages else found

    def _plan_from_host(self, otherwise: Placement, salt: int, tokens: Tokens, hashes: Hashes, end: int) -> Placement:
        """Plan a placement with what the host tier has beyond the pool, if that is more tokens than `otherwise` has."""
        group, size = otherwise.group, self._blocks.block_size
        found = host_hits.find_in_both(
            group, salt, tokens, hashes, int(otherwise.hits.size), end, first_of=self._windows.first
        )
        if found is None:
            return otherwise
        count = found.hits.size + len(found.host)
        fresh = self._sequences.blocks_for(tokens.size) - found.hits.size + group.state_blocks
        placement = Placement(group, found.hits, (-1, 0), int(fresh), NO_DONOR, otherwise)
        placement.host, placement.ring, placement.host_windows = found.host, found.ring, found.host_windows
        placement.host_checkpoint = found.host_checkpoint
        placement.checkpoint = np.array(found.checkpoint, np.int64)
        if group.state_blocks:
            last = self._checkpoints.positions(group).last(tokens, found.known * size)
            placement.shared_end = last if last > count * size else 0
        if not group.window_pages:
            return placement
        placement.windows = np.array([block for ids in found.ring for block in ids], np.int64)
        placement.needed += len(found.host_windows)
        return self._with_ahead(placement, tokens.size)

    def _plan_with_windows(
        self, group: Group, salt: int, tokens: Tokens, hashes: Hashes, shared_max: int | None
    ) -> Placement:
        """Plan a placement with as many cached blocks as window blocks for their last tokens are cached."""
        size, partial_tokens_min, pool = self._blocks.block_size, self._limits.cache.partial_tokens_min, group.pool
        most = tokens.size - 1 if shared_max is None else min(shared_max, tokens.size - 1)
        matched = group.index.match(salt, tokens, hashes)[: most // size]
        count = int(self._windows.usable(group, matched).nonzero()[0][-1])
        hits, needed = matched[:count], self._sequences.blocks_for(tokens.size) - count
        found = self._with_hits(Placement(group, hits, (-1, 0), needed), tokens.size)
        rest = tokens[count * size : most]
        if count < matched.size or rest.size < partial_tokens_min:
            return found
        parent = group.index.key(int(hits[-1])) if count else root_key(salt)
        block, common = group.index.match_partial(parent, rest)
        if common < partial_tokens_min or (key := group.index.key(block)) not in pool.parts.windows:
            return found
        copied = Placement(group, hits, (block, common), needed + group.window_pages, NO_DONOR, found)
        copied.partial_windows = np.array(pool.parts.windows[key], np.int64)
        return self._with_hits(copied, tokens.size)

    def _with_hits(self, placement: Placement, tokens: int) -> Placement:
        """Add the window blocks in sight behind the shared tokens to a placement for so many tokens."""
        cached = placement.cached_tokens(self._blocks.block_size)
        placement.windows = self._windows.in_sight(placement.group, placement.hits, cached)
        return self._with_ahead(placement, tokens)

    def _with_ahead(self, placement: Placement, tokens: int) -> Placement:
        """Add to a placement what its first steps take for windows."""
        group, s = placement.group, self._sequences
        held = placement.windows.size + placement.partial_windows.size + len(placement.host_windows)
        placement.ahead = max(0, self._windows.most(group, s.blocks_for(tokens)) - held)
        return placement

    def plan_fork(self, group: Group, slot: int, tokens: int) -> Placement | None:
        """Plan a placement for a sequence that shares the first `tokens` tokens of `slot`, which all have KV there.

        Returns:
            The placement; None if the slot has released what the sequence would see.
        """
        s, size = self._sequences, self._blocks.block_size
        full, rest = divmod(tokens - 1, size)
        partial = (int(s.table[slot, full]), rest) if rest else (-1, 0)
        found = Placement(group, s.blocks_of(slot)[:full], partial, s.blocks_for(tokens) - full)
        if not group.window_pages:
            return found
        return self.share_windows(found, slot, tokens - 1, tokens)

    def share_windows(self, placement: Placement, slot: int, shared: int, tokens: int) -> Placement | None:
        """Add the window blocks of a sequence to a placement that shares its first tokens.

        Args:
            placement: The placement.
            slot: The slot of the sequence.
            shared: How many tokens are shared.
            tokens: How many tokens the new sequence has.

        Returns:
            The placement; None if the sequence has released what is in sight there.
        """
        group, windows = placement.group, self._windows
        full, first = int(placement.hits.size), windows.first(group, shared)
        if not windows.holds(group, slot, shared):
            return None
        placement.windows = windows.between(group, slot, first, full)
        if placement.partial[1]:
            placement.partial_windows = windows.between(group, slot, full, full + 1)
            placement.needed += group.window_pages
        return self._with_ahead(placement, tokens)
