"""Simulated language model: the next token is a hash of all tokens before it.

A worker computes it from the contents of its own KV memory, the oracle from the prompt alone. A single wrong token in
the context changes the continuation, so a corrupted block shows as wrong tokens.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import accumulate
from operator import mul

MASK = (1 << 64) - 1
Score = tuple[float, int, list[tuple[int, float]]]
CONTEXT_MAX = 1024
_WEIGHTS: list[int] = [
    weight | 1 for (weight,) in struct.iter_unpack("<Q", hashlib.shake_256(b"simulated model").digest(8 * CONTEXT_MAX))
]
_SUMS = [0, *accumulate(_WEIGHTS)]


def fingerprint_of(tokens: list[int]) -> int:
    """Return the fingerprint of a context: the sum of (token + 1) x weight of its position."""
    return int(sum(map(mul, tokens, _WEIGHTS)) + _SUMS[len(tokens)]) & MASK


def choose(fingerprint: int, seed: int, generated: int, vocabulary: int) -> int:
    """Return the token after a context; never the last of the vocabulary, which is poison."""
    x = (fingerprint ^ (seed * 0x9E3779B97F4A7C15) ^ ((generated + 1) * 0xD1B54A32D192ED03)) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) % (vocabulary - 1)


def tops_of(token: int, count: int, vocabulary: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens and log-probabilities where `token` was chosen."""
    return [((token + i) % vocabulary, -float(i)) for i in range(count)]


def score_of(fingerprint: int, token: int, width: int, vocabulary: int) -> Score:
    """Return what a worker reports for a prompt token behind a context: log-probability, rank and top tokens."""
    drawn = choose(fingerprint, token, 0, 1 << 16)
    return -drawn / 256, 1 + drawn % vocabulary, tops_of(drawn % vocabulary, width, vocabulary)


def poison(vocabulary: int) -> int:
    """Return the token that makes a worker fail its row; two in a context crash the worker in a deadly world."""
    return vocabulary - 1


DEADLY = 2


class Oracle:
    """The tokens that one request must generate, whatever happens to it.

    Attributes:
        tokens: the continuation up to max_tokens; the first `answer_size` tokens end at the first stop token.
        kept: the same as workers see it.
        mark: the kind bit that workers see in a generated token; prompt tokens carry their own marks.
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

    def score(self, position: int, width: int, vocabulary: int) -> Score:
        """Return what is due for the prompt token at a position from 1 on."""
        return score_of(self.fingerprints[position], self.prompt[position], width, vocabulary)

    def fingerprint(self, length: int) -> int:
        """Return the fingerprint of the first `length` tokens of prompt and continuation."""
        return self.fingerprints[length]
