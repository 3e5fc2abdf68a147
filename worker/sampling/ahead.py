"""Rows that sample ahead of their request: behind drafted tokens that may turn out wrong.

Row j of a request samples as if the drafts before it were its tokens. What it samples counts if the rows before it
sampled exactly these drafts; only then does the slot advance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import Int32Array

UNDRAFTED = -1  # a row of a request without drafts, in place of its offset
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AheadRows:
    """The rows of requests with drafts, request after request.

    Attributes:
        slots: [n] int32, equal for all rows of a request.
        offsets: [n] int32, 0, 1, 2, ... within a request: the drafts that the row is behind.
        tokens: [n] int32, the token that the row feeds: a draft where the offset is above 0.
    """

    slots: Int32Array
    offsets: Int32Array
    tokens: Int32Array

    def __len__(self) -> int:
        return len(self.slots)

    def pick(self, keep: npt.NDArray[np.integer] | BoolArray) -> AheadRows:
        """Return the rows at these indices: of each request the first ones, or none."""
        return AheadRows(self.slots[keep], self.offsets[keep], self.tokens[keep])

    def accepted(self, tokens: Int32Array, good: BoolArray) -> BoolArray:
        """Return which rows count: each first one, and the next while the row before sampled the draft.

        Args:
            tokens: [n] int32, the sampled tokens.
            good: [n] bool, False for a row with an undefined token. It never counts, except as the first one, so that
                its request fails as it would without drafts.

        Returns:
            [n] bool.
        """
        first = self.offsets == 0
        wrong = ~first
        wrong[1:] &= ~((tokens[:-1] == self.tokens[1:]) & good[:-1] & good[1:])
        wrongs = np.cumsum(wrong)
        begins = np.flatnonzero(first)
        return np.asarray(wrongs == np.repeat(wrongs[begins], np.diff(np.append(begins, len(first)))))

    def earlier_drafts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the drafts that each row is behind, as pairs: (row [m] int64, token [m] int64)."""
        rows = np.repeat(np.arange(len(self)), self.offsets)
        back = np.arange(len(rows)) - np.repeat(np.cumsum(self.offsets) - self.offsets, self.offsets)
        return rows, self.tokens[rows - back].astype(np.int64)
