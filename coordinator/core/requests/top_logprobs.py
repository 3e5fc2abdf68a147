"""Top log-probabilities: the most likely tokens at each position of an answer, for requests that ask for them.

They are streamed as they arrive and kept with the request like its tokens, so clients can resume and preemption loses
nothing. A request has at most max_tokens x 20 pairs of 8 bytes.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, TOP_LOGPROBS_MAX


class TopLogprobs(msgspec.Struct, frozen=True, eq=False):
    """Tokens with log-probabilities for each of n rows, row after row.

    Attributes:
        counts: Pairs of each row, [n] int32.
        tokens: Token ids, [sum(counts)] int32.
        logprobs: Log-probabilities in nats, [sum(counts)] float32.
    """

    counts: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def none(cls, rows: int) -> TopLogprobs:
        """Return rows without any pairs."""
        return cls(np.zeros(rows, np.int32), NO_INT32, NO_FLOAT32)

    def check(self, rows: int, vocabulary: int) -> None:
        """Validate values from a worker for `rows` rows.

        Raises:
            ProtocolError: The arrays are inconsistent or out of range.
        """
        counts, tokens = self.counts, self.tokens
        if counts.size != rows or (rows and not 0 <= int(counts.min()) <= int(counts.max()) <= TOP_LOGPROBS_MAX):
            raise ProtocolError(f"step_result: top_counts must be {rows} numbers of 0 to {TOP_LOGPROBS_MAX}")
        if not int(counts.sum()) == tokens.size == self.logprobs.size:
            raise ProtocolError("step_result: top_tokens and top_logprobs must have sum(top_counts) entries")
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ProtocolError(f"step_result: a top token outside the vocabulary of {vocabulary}")

    def pick(self, rows: npt.NDArray[np.integer]) -> TopLogprobs:
        """Return the given rows, in this order; -1 gives a row without pairs."""
        ends = np.append(np.cumsum(self.counts), 0)
        counts = np.append(self.counts, 0)[rows].astype(np.int32)
        starts = ends[rows] - counts
        at = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
        return TopLogprobs(counts, self.tokens[at], self.logprobs[at])

    @classmethod
    def joined(cls, parts: list[TopLogprobs]) -> TopLogprobs:
        """Concatenate the rows of all parts."""
        return cls(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
        )


class TopLogprobsRecord:
    """The top log-probabilities of one request's answer: up to `width` pairs for each token. Grows by doubling."""

    def __init__(self, width: int) -> None:
        self.size = 0
        self._counts = np.zeros(0, np.int32)
        self._tokens = np.zeros((0, width), np.int32)
        self._logprobs = np.zeros((0, width), np.float32)

    def add(self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
        """Append the pairs of the next generated token, at most `width`."""
        if self.size == self._counts.size:
            self._resize(max(16, 2 * self.size))
        count = min(tokens.size, self._tokens.shape[1])
        self._counts[self.size] = count
        self._tokens[self.size, :count] = tokens[:count]
        self._logprobs[self.size, :count] = logprobs[:count]
        self.size += 1

    def extend(self, tops: TopLogprobs) -> None:
        """Append the pairs of the next tokens, at most `width` for each."""
        end, width = self.size + tops.counts.size, self._tokens.shape[1]
        if end > self._counts.size:
            self._resize(max(16, end, 2 * self.size))
        counts = np.minimum(tops.counts, width)
        held = np.arange(width) < counts[:, None]
        first = np.cumsum(tops.counts) - tops.counts
        places = (first[:, None] + np.arange(width))[held]
        self._counts[self.size : end] = counts
        self._tokens[self.size : end][held] = tops.tokens[places]
        self._logprobs[self.size : end][held] = tops.logprobs[places]
        self.size = end

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return int(self._counts.nbytes + self._tokens.nbytes + self._logprobs.nbytes)

    def cut(self, size: int) -> None:
        """Keep the first `size` tokens and release the rest."""
        self.size = min(size, self.size)
        self._resize(self.size)

    def top_logprobs(self, first: int = 0) -> TopLogprobs:
        """Return the pairs of the generated tokens from `first` on, one row for each token."""
        counts = self._counts[first : self.size].copy()
        held = np.arange(self._tokens.shape[1]) < counts[:, None]
        return TopLogprobs(counts, self._tokens[first : self.size][held], self._logprobs[first : self.size][held])

    def _resize(self, size: int) -> None:
        for name in ("_counts", "_tokens", "_logprobs"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[: self.size] = old[: self.size]
            setattr(self, name, new)
