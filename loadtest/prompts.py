"""What each request asks for: random token ids and a number of tokens to generate, from a seed and an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array

LENGTH_MAX = 1 << 24
PREFIX_STREAM, PROMPT_STREAM = 1, 2


@dataclass(frozen=True)
class Lengths:
    """A number of tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= LENGTH_MAX:
            raise InvalidRequest("length", f"{self} is not N or LOW:HIGH with 1 <= LOW <= HIGH <= {LENGTH_MAX}")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `128` or `64:512`. Raises InvalidRequest."""
        low, colon, high = text.partition(":")
        try:
            return cls(int(low), int(high) if colon else int(low))
        except ValueError:
            raise InvalidRequest("length", f"{text!r} is neither a number of tokens nor LOW:HIGH") from None

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        return int(rng.integers(self.low, self.high, endpoint=True))


class Prompts:
    """The requests of one run. Request `index` is the same whatever else is asked for, and in whatever order.

    vocab: token ids are drawn from [0, vocab). prefix: so many tokens at the front of every prompt are the same in all
    of them (they count towards its length). Raises InvalidRequest naming the argument.
    """

    def __init__(self, *, seed: int, vocab: int, input: Lengths, output: Lengths, prefix: int = 0) -> None:  # noqa: A002
        if vocab < 1:
            raise InvalidRequest("vocab", f"is {vocab}; it must be at least 1")
        if not 0 <= prefix <= input.low:
            raise InvalidRequest("prefix", f"is {prefix}; it must be 0 to the shortest input, {input.low}")
        self._seed, self._vocab, self._input, self._output = seed, vocab, input, output
        self._prefix = np.random.default_rng((seed, PREFIX_STREAM)).integers(0, vocab, prefix, np.int32)

    def make(self, index: int) -> tuple[Int32Array, int]:
        """The prompt [prompt_tokens] int32 and the number of tokens to generate."""
        rng = np.random.default_rng((self._seed, PROMPT_STREAM, index))
        length, output = self._input.draw(rng), self._output.draw(rng)
        prompt = rng.integers(0, self._vocab, length, np.int32)
        prompt[: self._prefix.size] = self._prefix
        return prompt, output
