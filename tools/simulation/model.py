"""The simulated language model: the next token is a hash of every token before it.

A worker computes it from what its own KV memory really holds; the oracle computes it from the prompt alone. One wrong
token anywhere in the context gives another continuation, so any corruption of a block shows as wrong tokens.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import accumulate
from operator import mul

MASK = (1 << 64) - 1
CONTEXT_MAX = 1024
_WEIGHTS: list[int] = [
    weight | 1 for (weight,) in struct.iter_unpack("<Q", hashlib.shake_256(b"simulated model").digest(8 * CONTEXT_MAX))
]
_SUMS = [0, *accumulate(_WEIGHTS)]


def fingerprint_of(tokens: list[int]) -> int:
    """What stands for a context: the sum of each token plus 1, by the weight of its place."""
    return int(sum(map(mul, tokens, _WEIGHTS)) + _SUMS[len(tokens)]) & MASK


def choose(fingerprint: int, seed: int, generated: int, vocabulary: int) -> int:
    """The token after a context, by its fingerprint. Never the last of the vocabulary: that one is poison."""
    x = (fingerprint ^ (seed * 0x9E3779B97F4A7C15) ^ ((generated + 1) * 0xD1B54A32D192ED03)) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) % (vocabulary - 1)


def tops_of(token: int, count: int, vocabulary: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens where `token` was chosen, with their log-probabilities."""
    return [((token + i) % vocabulary, -float(i)) for i in range(count)]


def poison(vocabulary: int) -> int:
    """The token that makes a worker fail the row whose context contains it; two of them kill it in a deadly world."""
    return vocabulary - 1


DEADLY = 2


class Oracle:
    """What one request must generate, whatever happens to it.

    tokens: all that it could generate up to max_tokens; `answer_size` of them until the first stop token. kept: the
    same as workers see them.
    mark: what workers see of a generated token beside its id; those of the prompt have theirs.
    """

    def __init__(
        self, prompt: list[int], seed: int, max_tokens: int, stops: tuple[int, ...], vocabulary: int, mark: int = 0
    ) -> None:
        self.prompt, self.seed, self.max_tokens = prompt, seed, max_tokens
        self.poisoned = poison(vocabulary) in prompt
        self.deadly = prompt.count(poison(vocabulary)) >= DEADLY
        self.tokens: list[int] = []
        self.fingerprints = [0]
        total = 0
        for position, token in enumerate(prompt):
            total = (total + (token + 1) * _WEIGHTS[position]) & MASK
            self.fingerprints.append(total)
        for generated in range(max_tokens):
            token = choose(total, seed, generated, vocabulary)
            self.tokens.append(token)
            total = (total + (token + mark + 1) * _WEIGHTS[len(prompt) + generated]) & MASK
            self.fingerprints.append(total)
        self.kept = [token + mark for token in self.tokens]
        stop_at = next((i for i, token in enumerate(self.tokens) if token in stops), None)
        self.answer_size = max_tokens if stop_at is None else stop_at + 1
        self.reason = "length" if stop_at is None else "stop"

    def fingerprint(self, length: int) -> int:
        """Of the first `length` tokens of prompt and continuation."""
        return self.fingerprints[length]
