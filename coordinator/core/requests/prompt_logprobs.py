"""Log-probabilities of a prompt: of each token but the first, given those before it.

They are recorded in the order of the prompt as its chunks are computed. Known log-probabilities stay known when the
request is preempted or its worker is lost. A request shares cached blocks only up to there: each other position
is computed, and no log-probability depends on what the cache holds.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import ProtocolError

from .top_logprobs import TopLogprobs, TopLogprobsRecord

PAIR_BYTES, POSITION_BYTES = 8, 16


class ScoredTokens(msgspec.Struct, frozen=True, eq=False):
    """Log-probabilities of m prompt tokens.

    Attributes:
        logprobs: In nats, [m] float32.
        ranks: The rank of each token in its place, from 1, [m] int32.
        tops: The most likely tokens in the place of each, m rows.
    """

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    tops: TopLogprobs

    def check(self, count: int, vocabulary: int) -> None:
        """Validate values from a worker for `count` tokens.

        Raises:
            ProtocolError: The arrays are inconsistent or out of range.
        """
        if not self.logprobs.size == self.ranks.size == count:
            raise ProtocolError(f"step_result: prompt_logprobs and prompt_ranks must have {count} entries")
        if count and not 1 <= int(self.ranks.min()) <= int(self.ranks.max()) <= vocabulary:
            raise ProtocolError(f"step_result: prompt_ranks must be 1 to {vocabulary}")
        if np.isnan(self.logprobs).any():
            raise ProtocolError("step_result: prompt_logprobs holds NaN")
        self.tops.check(count, vocabulary)

    def pick(self, rows: npt.NDArray[np.integer]) -> ScoredTokens:
        """Return the given rows, in this order."""
        return ScoredTokens(self.logprobs[rows], self.ranks[rows], self.tops.pick(rows))


class PromptLogprobs:
    """The log-probabilities of one prompt, up to `width` most likely tokens for each of its tokens but the first.

    Attributes:
        prompt: The prompt, [n] int32.
        size: How many log-probabilities are known: those of the tokens 1 to `size`.
    """

    def __init__(self, prompt: npt.NDArray[np.int32], width: int) -> None:
        self.prompt = prompt
        self.size = 0
        self._logprobs = np.zeros(0, np.float32)
        self._ranks = np.zeros(0, np.int32)
        self._tops = TopLogprobsRecord(width)

    @property
    def total(self) -> int:
        """How many log-probabilities there will be."""
        return int(self.prompt.size) - 1

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return int(self.prompt.nbytes + self._logprobs.nbytes + self._ranks.nbytes) + self._tops.bytes

    def add(self, scored: ScoredTokens) -> None:
        """Append the log-probabilities of the next tokens."""
        end = self.size + scored.logprobs.size
        assert end <= self.total, "more log-probabilities than prompt tokens"
        if end > self._logprobs.size:
            room = min(self.total, max(16, end, 2 * self.size))
            self._logprobs = np.concatenate([self._logprobs[: self.size], np.zeros(room - self.size, np.float32)])
            self._ranks = np.concatenate([self._ranks[: self.size], np.zeros(room - self.size, np.int32)])
        self._logprobs[self.size : end] = scored.logprobs
        self._ranks[self.size : end] = scored.ranks
        self._tops.extend(scored.tops)
        self.size = end

    def known(self, first: int = 0) -> tuple[npt.NDArray[np.int32], ScoredTokens]:
        """Return the tokens with known log-probabilities but the first `first` ones, and these."""
        scored = ScoredTokens(
            self._logprobs[first : self.size].copy(),
            self._ranks[first : self.size].copy(),
            self._tops.top_logprobs(first),
        )
        return self.prompt[first + 1 : self.size + 1], scored


def bytes_of(prompt_tokens: int, width: int) -> int:
    """Return an upper bound of the size of a record, in bytes."""
    return prompt_tokens * (POSITION_BYTES + PAIR_BYTES * width)
