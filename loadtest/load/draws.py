"""Counter-based random numbers: a seed, a stream and an index determine a number, in any order of access.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as a function of a key and a counter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import Int32Array

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]

# The streams of a seed.
ARRIVALS, INPUTS, OUTPUTS, PROMPTS, PREFIX, TENANTS, BLOCKS, TICKS, PLACES = range(9)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(words: KeyArray) -> KeyArray:
    """Mix each 64-bit word; a bijection."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key(*parts: int) -> int:
    """Return a 64-bit key of several numbers, in their order."""
    made = 0
    for part in parts:
        # As `mix`, without the overhead of an array.
        made = (made + part + 1) * _GOLDEN & _MASK
        made = (made ^ made >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        made = (made ^ made >> 27) * 0x94D049BB133111EB & _MASK
        made ^= made >> 31
    return made


def noise(of: int | KeyArray, counters: IntArray) -> KeyArray:
    """Return [n] uint64: number `counters[i]` of the key `of` (one key, or one for each)."""
    return mix(counters.astype(np.uint64) * np.uint64(_GOLDEN) + (np.uint64(of) if isinstance(of, int) else of))


def uniform(of: int, count: int) -> FloatArray:
    """Return [count] float64 in [0, 1)."""
    return (noise(of, np.arange(count)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_ids(of: int | KeyArray, counters: IntArray, vocab: int) -> Int32Array:
    """Return [n] int32 in [0, vocab): token `counters[i]` of the key `of` (one key, or one for each)."""
    return ((noise(of, counters) >> np.uint64(32)) * np.uint64(vocab) >> np.uint64(32)).astype(np.int32)
