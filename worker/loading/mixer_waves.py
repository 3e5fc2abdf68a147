"""The order in which a step's rows run through mixers.

A sequence that is computed again has several rows in one step: its prompt, and each generated token. Each goes
on with the state that the one before it left. Rows are therefore cut into waves, with one row of each sequence at most.
Almost every step is one wave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.mixed_batch import MixedBatch


@dataclass(frozen=True)
class Wave:
    """Rows of different sequences.

    Attributes:
        alone: Indices of the rows that the mixer computes, one after the other.
        stepping: Indices of those that its step computes together: generated tokens behind a state. None: none.
        tokens: The indices of these rows' tokens, [rows] int64 on the device; None: they are all tokens of the batch.
        pages: [rows, pages of a state] int32 on the device, of these rows.
    """

    alone: list[int]
    stepping: list[int] | None
    tokens: torch.Tensor | None
    pages: torch.Tensor

    def pick(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the stepping rows, of [tokens, n]."""
        return numbers if self.tokens is None else numbers.index_select(0, self.tokens)


def waves(batch: PagedBatch, steps: bool) -> list[Wave]:
    """Return the waves of a batch in order.

    Args:
        batch: The batch.
        steps: Whether generated tokens run through a step.
    """
    key = ("waves of mixers", steps)
    if key not in batch.plans:
        batch.plans[key] = _waves(batch, steps)
    found: list[Wave] = batch.plans[key]
    return found


def _waves(batch: PagedBatch, steps: bool) -> list[Wave]:
    if batch.state_pages is not None:  # a graph reads them as they will be
        assert steps, "a graph of a mixer that runs row by row"
        if isinstance(batch, MixedBatch):
            prompts = batch.size.prompts
            decodes = list(range(prompts, batch.size.rows))
            return [Wave(list(range(prompts)), decodes or None, None, batch.state_pages[prompts:])]
        return [Wave([], list(range(len(batch.state_pages))), None, batch.state_pages)]
    assert batch.states is not None, "a step without the pages of its rows' states"
    together = batch.generated & (batch.starts > 0) & steps
    upload, found = batch.device.upload, []
    for rows in _one_of_each(batch.states[:, 0].tolist()):
        (stepping,) = np.nonzero(together[rows])
        indices = rows[stepping]
        is_whole = len(indices) == len(batch.counts)
        tokens = None if is_whole else upload(batch.query_starts[indices])
        pages = upload(batch.states[indices])
        found.append(Wave(rows[~together[rows]].tolist(), indices.tolist() or None, tokens, pages))
    return found


def _one_of_each(sequences: list[int]) -> list[np.ndarray]:
    """Cut the indices of rows so that each part has one row of a sequence at most, and a sequence's rows keep order."""
    earlier: dict[int, int] = {}
    parts: list[list[int]] = []
    for row, sequence in enumerate(sequences):
        number = earlier[sequence] = earlier.get(sequence, -1) + 1
        if number == len(parts):
            parts.append([])
        parts[number].append(row)
    return [np.array(part) for part in parts]
