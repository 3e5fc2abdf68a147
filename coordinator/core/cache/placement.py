"""A placement plan for a sequence: computed without side effects, carried out by the cache."""

from __future__ import annotations

import numpy as np

from .blocks import BlockIds
from .groups import Group


class Placement:
    """A placement plan: the cached blocks a sequence shares, the block it copies from, and the blocks it allocates.

    Attributes:
        hits: Cached blocks to share, [n] int64.
        partial: The block to copy leading tokens from, and how many; 0 for no copy.
        needed: Blocks to allocate.
    """

    def __init__(self, group: Group, hits: BlockIds, partial: tuple[int, int], needed: int) -> None:
        self.group, self.hits, self.partial, self.needed = group, hits, partial, needed

    @property
    def keep(self) -> BlockIds:
        """The cached blocks that must survive the allocation of the rest."""
        return np.append(self.hits, self.partial[0]) if self.partial[1] else self.hits

    def cached_tokens(self, block_size: int) -> int:
        """Return how many prompt tokens already have KV."""
        return int(self.hits.size) * block_size + self.partial[1]
