"""The most likely tokens at each place of an answer, for requests that ask for them.

They are streamed as they come and kept with the request until it is forgotten, like its tokens: what was not streamed
live is told at the end, and a preemption loses nothing. At most max_tokens x 20 pairs of 8 bytes a request.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, TOP_LOGPROBS_MAX


class Tops(msgspec.Struct, frozen=True, eq=False):
    """For each of n rows some tokens with log-probabilities, row after row.

    counts: [n] int32; tokens: [sum(counts)] int32; logprobs: [sum(counts)] float32, nats.
    """

    counts: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def none(cls, rows: int) -> Tops:
        """Rows without any."""
        return cls(np.zeros(rows, np.int32), NO_INT32, NO_FLOAT32)

    def check(self, rows: int, vocabulary: int) -> None:
        """Raises ProtocolError where a worker cannot have meant this for `rows` rows."""
        counts, tokens = self.counts, self.tokens
        if counts.size != rows or (rows and not 0 <= int(counts.min()) <= int(counts.max()) <= TOP_LOGPROBS_MAX):
            raise ProtocolError(f"step_result: top_counts must be {rows} numbers of 0 to {TOP_LOGPROBS_MAX}")
        if not int(counts.sum()) == tokens.size == self.logprobs.size:
            raise ProtocolError("step_result: top_tokens and top_logprobs are not as long as top_counts says")
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ProtocolError(f"step_result: a top token outside the vocabulary of {vocabulary}")

    def pick(self, rows: npt.NDArray[np.integer]) -> Tops:
        """These rows, in this order; -1 stands for a row without any."""
        ends = np.append(np.cumsum(self.counts), 0)
        counts = np.append(self.counts, 0)[rows].astype(np.int32)
        starts = ends[rows] - counts
        at = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
        return Tops(counts, self.tokens[at], self.logprobs[at])

    @classmethod
    def joined(cls, parts: list[Tops]) -> Tops:
        """All rows of the parts."""
        return cls(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
        )


class TopRecord:
    """The tops of one request's answer so far. Grows by doubling; `width` pairs a token."""

    def __init__(self, width: int) -> None:
        self.size = 0
        self._counts = np.zeros(0, np.int32)
        self._tokens = np.zeros((0, width), np.int32)
        self._logprobs = np.zeros((0, width), np.float32)

    def add(self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
        """Those of the next generated token; what is beyond `width` is left out."""
        if self.size == self._counts.size:
            self._resize(max(16, 2 * self.size))
        count = min(tokens.size, self._tokens.shape[1])
        self._counts[self.size] = count
        self._tokens[self.size, :count] = tokens[:count]
        self._logprobs[self.size, :count] = logprobs[:count]
        self.size += 1

    @property
    def bytes(self) -> int:
        """What it takes."""
        return int(self._counts.nbytes + self._tokens.nbytes + self._logprobs.nbytes)

    def cut(self, size: int) -> None:
        """Only those of the first `size` tokens stay, and no memory for more."""
        self.size = min(size, self.size)
        self._resize(self.size)

    def tops(self, first: int = 0) -> Tops:
        """Those of the generated tokens from `first` on, a row for each."""
        counts = self._counts[first : self.size].copy()
        held = np.arange(self._tokens.shape[1]) < counts[:, None]
        return Tops(counts, self._tokens[first : self.size][held], self._logprobs[first : self.size][held])

    def _resize(self, size: int) -> None:
        for name in ("_counts", "_tokens", "_logprobs"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[: self.size] = old[: self.size]
            setattr(self, name, new)
