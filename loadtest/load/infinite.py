"""The hits of an unlimited prefix cache: an upper bound for a server's hits.

As in any prefix cache, a block is identified by all tokens from the start of the prompt to its end: by a 64-bit number,
the sum of the hashes of its blocks, each mixed with its position. Two different prefixes collide with a probability of
2^-64.
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
    """Counts hits in arrival order. Tenants share nothing.

    Args:
        block_size: Tokens per block.

    Attributes:
        hit_tokens, prompt_tokens: Totals over all prompts so far.

    Raises:
        InvalidRequest: The block size is below 1.
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
        """Hit tokens per prompt token, 0 to 1; 0 before the first prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def look_up(self, prompt: Int32Array, tenant: str = "") -> int:
        """Return how many leading tokens of a prompt are cached, in whole blocks, and cache the prompt.

        Args:
            prompt: [tokens] int32.
            tenant: Its tenant.
        """
        prefixes = self._prefixes(prompt, tenant)
        known = self._known(prefixes)
        self._seen.update(prefixes[known:].tolist())
        self.hit_tokens += known * self._block_size
        self.prompt_tokens += len(prompt)
        return known * self._block_size

    def hold(self, tokens: Int32Array, tenant: str = "") -> None:
        """Cache a sequence [tokens] int32, such as a prompt with its answer, without counting."""
        prefixes = self._prefixes(tokens, tenant)
        self._seen.update(prefixes[self._known(prefixes) :].tolist())

    def _known(self, prefixes: KeyArray) -> int:
        """Return how many leading prefixes are cached, by bisection: a cached prefix implies all shorter ones."""
        low, high = 0, len(prefixes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int(prefixes[middle]) in self._seen else (low, middle)
        return low

    def _prefixes(self, tokens: Int32Array, tenant: str) -> KeyArray:
        """Return [full blocks] uint64: a number for each block and everything before it."""
        blocks = len(tokens) // self._block_size
        words = tokens[: blocks * self._block_size].astype(np.uint64).reshape(blocks, self._block_size)
        # Tokens are mixed before the weighted sum: sums of plain ids would collide.
        hashes = (draws.mix(words + np.uint64(1)) * self._weights).sum(axis=1, dtype=np.uint64)
        placed = draws.noise(hashes, np.arange(blocks) + (zlib.crc32(tenant.encode()) << 24))
        return np.cumsum(placed, dtype=np.uint64)


def infinite_share(prompts: Iterable[Int32Array], block_size: int) -> float:
    """Return hit tokens per prompt token, 0 to 1. Answers are not cached.

    Args:
        prompts: [tokens] int32 each, in arrival order.
        block_size: Tokens per block.
    """
    cache = InfiniteCache(block_size)
    for prompt in prompts:
        cache.look_up(prompt)
    return cache.share
