"""Chained hashes of full blocks, in a fixed number of numpy operations for any number of blocks.

The own hash h_i of block i is a multilinear hash of its tokens, passed through a finaliser. The chained hash
identifies the block together with its prefix:

    c_i = c_{i-1} * P + h_i   (mod 2^64),   c_{-1} = salt

P is odd and therefore invertible mod 2^64, so the whole chain is one cumulative sum: c_i = P^(i+1) (salt + sum_j h_j
P^-(j+1)). The multipliers derive from a secret key, so clients cannot construct collisions. A hit also compares the
tokens: a collision causes a miss, never a wrong block. Multilinear hashing: Carter & Wegman, 1979; finaliser:
MurmurHash3's fmix64.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
NO_HASHES: Hashes = np.zeros(0, np.uint64)
_HALF, _FIRST, _SECOND = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


class BlockHasher:
    """Hashes blocks of `block_size` tokens under `key`."""

    def __init__(self, block_size: int, key: bytes, blocks_max: int) -> None:
        self._block_size = block_size
        self._key = key[:64]
        raw = hashlib.shake_256(b"kvforge block multipliers" + key).digest(8 * (block_size + 2))
        words = np.frombuffer(raw, "<u8")
        self._multipliers = words[:block_size] | np.uint64(1)
        self._offset = words[block_size]
        p = int(words[block_size + 1]) | 1
        self._p = np.uint64(p)
        self._powers = np.cumprod(np.full(blocks_max + 1, p, np.uint64))
        self._inverse_powers = np.cumprod(np.full(blocks_max + 1, pow(p, -1, 1 << 64), np.uint64))

    def salt(self, text: str) -> int:
        """Return the chain start for a salt: 62 bits, so that its negative can be a root key."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") >> 2

    def blocks(self, tokens: npt.NDArray[np.int32]) -> Hashes:
        """Return the own hashes of tokens [n, block_size] int32 as [n] uint64."""
        x: Hashes = tokens.astype(np.uint64) @ self._multipliers + self._offset
        x ^= x >> _HALF
        x *= _FIRST
        x ^= x >> _HALF
        x *= _SECOND
        x ^= x >> _HALF
        return x

    def chain(self, start: int, tokens: npt.NDArray[np.int32]) -> Hashes:
        """Return the chained hashes of the full blocks of one sequence.

        Args:
            start: The chain value before the first block.
            tokens: Token ids, [len] int32.

        Returns:
            [len // block_size] uint64.
        """
        count = tokens.size // self._block_size
        if not count:
            return NO_HASHES
        own = self.blocks(tokens[: count * self._block_size].reshape(count, self._block_size))
        total: Hashes = (own * self._inverse_powers[:count]).cumsum(dtype=np.uint64)
        total += np.uint64(start)
        total *= self._powers[:count]
        return total

    def extend(self, chains: Hashes, tokens: npt.NDArray[np.int32]) -> Hashes:
        """Extend n chains by one block: chains [n] uint64, tokens [n, block_size] int32 -> [n] uint64."""
        extended: Hashes = chains * self._p + self.blocks(tokens)
        return extended
