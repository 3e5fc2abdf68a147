"""What a prefix cache without a limit would hit: the bound that a server's own hits stand beside.

A block is known by all tokens from the start of the prompt to its end, as in any prefix cache: by one 64-bit number,
the sum of its blocks' hashes, each mixed with its place. Two unlike prefixes are taken for one with a probability of
2^-64 for each pair.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array

from . import draws
from .draws import KeyArray


class InfiniteCache:
    """Counts hits in arrival order. block_size: tokens; tenants share nothing. Raises InvalidRequest.

    hit_tokens, prompt_tokens: of all prompts so far.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise InvalidRequest("block_size", f"is {block_size}; it must be at least 1 token")
        self._block_size = block_size
        self._weights = draws.noise(draws.key(block_size), np.arange(block_size)) | np.uint64(1)
        self._seen: set[int] = set()
        self.hit_tokens = self.prompt_tokens = 0

    @property
    def share(self) -> float:
        """Hit tokens of all prompt tokens, 0 to 1; 0 before the first."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def look_up(self, prompt: Int32Array, tenant: str = "") -> int:
        """How many leading tokens of the prompt [tokens] int32 were there, in whole blocks; then all of them are."""
        prefixes = self._prefixes(prompt, tenant)
        known = self._known(prefixes)
        self._seen.update(prefixes[known:].tolist())
        self.hit_tokens += known * self._block_size
        self.prompt_tokens += len(prompt)
        return known * self._block_size

    def hold(self, tokens: Int32Array, tenant: str = "") -> None:
        """Holds a sequence [tokens] int32, such as a prompt with its answer, and counts nothing."""
        prefixes = self._prefixes(tokens, tenant)
        self._seen.update(prefixes[self._known(prefixes) :].tolist())

    def _known(self, prefixes: KeyArray) -> int:
        """How many of them are held: of a held one all before are, so halving finds the last."""
        low, high = 0, len(prefixes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int(prefixes[middle]) in self._seen else (low, middle)
        return low

    def _prefixes(self, tokens: Int32Array, tenant: str) -> KeyArray:
        """[full blocks] uint64: one number for each block and all before it."""
        blocks = len(tokens) // self._block_size
        words = tokens[: blocks * self._block_size].astype(np.uint64).reshape(blocks, self._block_size)
        # A token is mixed before it is weighed: sums of plain ids would meet by chance.
        hashes = (draws.mix(words + np.uint64(1)) * self._weights).sum(axis=1, dtype=np.uint64)
        placed = draws.noise(hashes, np.arange(blocks) + (zlib.crc32(tenant.encode()) << 24))
        return np.cumsum(placed, dtype=np.uint64)


def infinite_share(prompts: Iterable[Int32Array], block_size: int) -> float:
    """Hit tokens of all prompt tokens, 0 to 1, for prompts [tokens] int32 in arrival order; answers are not held."""
    cache = InfiniteCache(block_size)
    for prompt in prompts:
        cache.look_up(prompt)
    return cache.share
