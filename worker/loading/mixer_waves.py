"""The order in which a step's rows run through mixers.

A sequence that is computed again has several rows in one step: its prompt, and each generated token. Each goes
on with the state that the one before it left. Rows are therefore cut into waves, with one row of each sequence at most.
Almost every step is one wave. Drafted tokens are rows of their own too. Each begins with a copy of the state before it,
in pages of its own.
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
        copied: Pages of states to copy before these rows run, from and to: [n, pages of a state] int32 on the device
            each. None: each row goes on in its pages.
        chosen: [rows, 1] int32 on the device, of a graph whose rows all run in each wave: 1 for those of this wave,
            whose results count. The others run in the spare page. None: all rows count.
    """

    alone: list[int]
    stepping: list[int] | None
    tokens: torch.Tensor | None
    pages: torch.Tensor
    copied: tuple[torch.Tensor, torch.Tensor] | None = None
    chosen: torch.Tensor | None = None

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
        every = list(range(len(batch.state_pages)))
        if batch.depth:
            return [_chained(batch, every, place) for place in range(batch.depth)]
        return [Wave([], every, None, batch.state_pages)]
    assert batch.states is not None, "a step without the pages of its rows' states"
    together = batch.generated & (batch.starts > 0) & steps
    upload, found = batch.device.upload, []
    sources = batch.states if batch.sources is None else batch.sources
    for rows in _one_of_each(sources[:, 0].tolist(), batch.states[:, 0].tolist()):
        (stepping,) = np.nonzero(together[rows])
        indices = rows[stepping]
        is_whole = len(indices) == len(batch.counts)
        tokens = None if is_whole else upload(batch.query_starts[indices])
        pages = upload(batch.states[indices])
        copied = None
        if batch.sources is not None:
            others = rows[sources[rows, 0] != batch.states[rows, 0]]
            if len(others):
                copied = upload(sources[others]), upload(batch.states[others])
        found.append(Wave(rows[~together[rows]].tolist(), indices.tolist() or None, tokens, pages, copied))
    return found


def _chained(batch: PagedBatch, rows: list[int], place: int) -> Wave:
    """Return a wave of a graph with drafts: the rows that are behind `place` others of their sequence."""

    def pages_of(states: np.ndarray | None, filled: PagedBatch) -> np.ndarray:
        assert states is not None and filled.behind is not None, "a batch without drafts"
        return np.where((filled.behind == place)[:, None], states, filled.spare).astype(np.int32)

    def chosen_of(filled: PagedBatch) -> np.ndarray:
        assert filled.behind is not None, "a batch without drafts"
        return np.asarray(filled.behind == place, np.int32)

    count = len(rows)
    array = batch.device_array
    pages = array(("pages of a wave", place), lambda filled: pages_of(filled.states, filled)).view(count, -1)
    if not place:
        return Wave([], rows, None, pages)
    sources = array(("sources of a wave", place), lambda filled: pages_of(filled.sources, filled)).view(count, -1)
    return Wave([], rows, None, pages, (sources, pages), array(("rows of a wave", place), chosen_of).view(count, 1))


def _one_of_each(sources: list[int], states: list[int]) -> list[np.ndarray]:
    """Cut the indices of rows so that each row is in a part behind that of the row that left its state.

    Args:
        sources: The first page of the state that each row goes on with.
        states: The first page of the state that it leaves.
    """
    last: dict[int, int] = {}  # by the first page of a state: the part of the row that left it
    parts: list[list[int]] = []
    for row, (source, state) in enumerate(zip(sources, states, strict=True)):
        number = last[state] = last.get(source, -1) + 1
        if number == len(parts):
            parts.append([])
        parts[number].append(row)
    return [np.array(part) for part in parts]
