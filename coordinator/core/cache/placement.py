"""A placement plan for a sequence: computed without side effects, carried out by the cache."""

from __future__ import annotations

import numpy as np

from .blocks import NO_BLOCKS, BlockIds
from .groups import Group
from .returns import Return

NO_DONOR = -1


class Placement:
    """A placement plan: the cached blocks a sequence shares, the block it copies from, and the blocks it allocates.

    Attributes:
        hits: Cached blocks to share, [n] int64.
        partial: The block to copy leading tokens from, and how many; 0 for no copy.
        needed: Blocks to allocate, those of a recurrent state included.
        donor: The slot of the kept sequence that the shared blocks belong to, which must stay; NO_DONOR for none.
        otherwise: The plan for when there is no room beside the donor or the checkpoint, or for window blocks.
        checkpoint: Blocks to copy the recurrent state from, those of a checkpoint or of the donor, [n] int64.
        windows: Window blocks to share, for the last of the shared blocks, [n] int64; see `windows`.
        partial_windows: Those to copy leading tokens from, with `partial`.
        ahead: Window blocks that the first steps of the sequence take. There must be room for them.
        host: Host entries to copy to the first blocks behind `hits`: nodes of the group's tier.
        ring: With `host_windows` or `host`: the window blocks in sight behind the shared tokens, for each block of
            tokens in order; () for one whose window blocks come from the host.
        host_windows: Host entries of the latter, in order.
        host_checkpoint: Host entries to copy to the blocks of the recurrent state.
        returns: How a preempted request comes back by this plan; None if it has no choice.
        shared_end: Where a checkpoint is wanted, because the KV of more tokens is there; 0: nowhere.
    """

    def __init__(
        self,
        group: Group,
        hits: BlockIds,
        partial: tuple[int, int],
        needed: int,
        donor: int = NO_DONOR,
        otherwise: Placement | None = None,
    ) -> None:
        self.group, self.hits, self.partial, self.needed = group, hits, partial, needed
        self.donor, self.otherwise = donor, otherwise
        self.checkpoint, self.shared_end = NO_BLOCKS, 0
        self.windows = self.partial_windows = NO_BLOCKS
        self.ahead = 0
        self.host: tuple[int, ...] = ()
        self.ring: tuple[tuple[int, ...], ...] = ()
        self.host_windows: tuple[int, ...] = ()
        self.host_checkpoint: tuple[int, ...] = ()
        self.returns: Return | None = None

    @property
    def reads(self) -> tuple[int, ...]:
        """All host entries that the plan reads."""
        return self.host + self.host_windows + self.host_checkpoint

    @property
    def keep(self) -> BlockIds:
        """The cached blocks that must survive the allocation of the rest."""
        ids = np.append(self.hits, self.partial[0]) if self.partial[1] else self.hits
        more = [part for part in (self.checkpoint, self.windows, self.partial_windows) if part.size]
        return np.concatenate((ids, *more)) if more else ids

    def cached_tokens(self, block_size: int) -> int:
        """Return how many prompt tokens already have KV, on the device or on the host."""
        return (int(self.hits.size) + len(self.host)) * block_size + self.partial[1]
