"""How a sequence would come to live in a group: found out without changing anything, carried out by the cache."""

from __future__ import annotations

import numpy as np

from .blocks import BlockIds
from .groups import Group


class Placement:
    """How a sequence would come to live in a group: the cached blocks it shares, one it copies from, and the rest."""

    def __init__(self, group: Group, hits: BlockIds, partial: tuple[int, int], needed: int) -> None:
        self.group, self.hits, self.partial, self.needed = group, hits, partial, needed

    @property
    def keep(self) -> BlockIds:
        """The cached blocks that must survive the allocation of the rest."""
        return np.append(self.hits, self.partial[0]) if self.partial[1] else self.hits

    def cached_tokens(self, block_size: int) -> int:
        """Tokens whose KV is there already."""
        return int(self.hits.size) * block_size + self.partial[1]
