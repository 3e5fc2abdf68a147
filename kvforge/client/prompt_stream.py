"""The log-probabilities of a prompt as they arrive. Gateways read them too."""

from __future__ import annotations

from typing import Any


class PromptStream:
    """The log-probabilities of a prompt of `total` + 1 tokens: those of its tokens but the first, as they arrive.

    Attributes:
        tokens: The tokens with known log-probabilities, from the second one on.
        logprobs: Their log-probabilities, in nats.
        ranks: Their ranks among all tokens, from 1.
        top_logprobs: The most likely tokens in their places, as (token id, log-probability).
    """

    __slots__ = ("logprobs", "ranks", "tokens", "top_logprobs", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []

    @property
    def lacking(self) -> int:
        """Return how many log-probabilities have not arrived."""
        return self.total - len(self.tokens)

    def settle(self) -> None:
        """Drop a partly stored row, which a signal handler may have interrupted."""
        columns: tuple[list[Any], ...] = (self.tokens, self.logprobs, self.ranks, self.top_logprobs)
        whole = min(map(len, columns))
        for column in columns:
            del column[whole:]
