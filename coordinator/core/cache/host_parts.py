"""Parts of host entries: window blocks and checkpoints, which hang on the entry of a KV block as they do in a pool.

Each block of a part is a node of its own behind the node of the KV block. Its tag follows from the chained hash of that
block and from the number of the part, so that a block of another position or of another kind has another tag. In place
of tokens, it has one negative number.
"""

from __future__ import annotations

import numpy as np

CHECKPOINT = 1 << 20  # the number of a checkpoint's first block; those of window blocks begin with 0
_WORD = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64, Steele et al., 2014


def part_value(value: int, number: int) -> int:
    """Return the hash of a part of the entry with a chained hash, both unsigned 64 bit."""
    x = (value + (number + 1) * _STEP) & _WORD
    x = ((x ^ x >> 30) * _FIRST) & _WORD
    x = ((x ^ x >> 27) * _SECOND) & _WORD
    return x ^ x >> 31


def part_tokens(number: int) -> bytes:
    """Return what the node of a part has in place of tokens."""
    return np.int32(-1 - number).tobytes()


def part_number(tokens: bytes) -> int:
    """Return the number of a part by what its node has in place of tokens; -1 for tokens of a KV block."""
    return max(-1, -1 - int(np.frombuffer(tokens[:4], np.int32)[0]))
