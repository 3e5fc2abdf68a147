"""Per-row scheduler state of running sequences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..cache.sequences import Slots
from ..limits import Bounds
from ..requests.request import Request

EOS_TOKENS_MAX = 16
BATCH_PRIORITY = -100  # the lowest


class RunningRows:
    """Struct-of-arrays indexed by slot.

    Attributes:
        reader: The client that the row's tokens are streamed to, 0 for none.
        fresh: The row has no token of this run yet.
        fresh_count: Number of such rows, mostly 0.
        token_us: Arrival time of the request's latest token, -1 before the first.
        readers_changed: How often the reader of a running row has changed.
        score_first: The first position with a successor that gets its log-probability in this run.
        score_end: Behind the last such position; 0 for none.
        scores: The row's request wants log-probabilities of its prompt.
        scores_count: Number of such rows, mostly 0.
        batch: The row's request has the lowest priority, as those of batches have.
        batch_count: Number of such rows, mostly 0.
        stops_most: The most stop tokens that any row has had, mostly few.
    """

    def __init__(self, bounds: Bounds) -> None:
        slots = bounds.sequences_max
        self.limit = np.zeros(slots, np.int64)
        self.base = np.zeros(slots, np.int64)
        self.order = np.zeros(slots, np.int64)
        self.run = np.zeros(slots, np.int64)
        self.reader = np.zeros(slots, np.int64)
        self.token_us = np.full(slots, -1, np.int64)
        self.tops = np.zeros(slots, np.bool_)
        self.score_first = np.zeros(slots, np.int64)
        self.score_end = np.zeros(slots, np.int64)
        self.scores = np.zeros(slots, np.bool_)
        self.scores_count = 0
        self.batch = np.zeros(slots, np.bool_)
        self.batch_count = 0
        self.fresh = np.zeros(slots, np.bool_)
        self.fresh_count = 0
        self.stops = np.full((slots, bounds.stop_tokens_max + EOS_TOKENS_MAX), -1, np.int32)
        self._runs = self.stops_most = 0
        self.readers_changed = 0

    def start(self, slot: int, request: Request, eos: tuple[int, ...]) -> None:
        """Start a run of the request in the slot."""
        self._runs += 1
        self.run[slot] = self._runs
        self.base[slot] = request.prompt_tokens
        self.limit[slot] = request.prompt_tokens + request.max_tokens
        self.order[slot] = request.admitted_order
        self._set_batch(slot, request.priority == BATCH_PRIORITY)
        self.reader[slot] = request.client if request.stream and not request.paused else 0
        self.tops[slot] = request.tops is not None
        self.token_us[slot] = request.token_us
        record = request.prompt_logprobs
        self._set_scores(slot, record is not None)
        if record is not None:
            self.score_first[slot], self.score_end[slot] = record.size, record.total
        self.set_fresh(slot, True)
        stops = request.sampling.stop_tokens + (() if request.sampling.ignore_eos else eos)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        self.stops_most = max(self.stops_most, len(stops))

    def run_idle(self, slots: Slots) -> None:
        """Number a run of each of [n] idle slots, in which their last tokens are computed."""
        self.run[slots] = self._runs + 1 + np.arange(slots.size)
        self._runs += slots.size

    def leave(self, slot: int) -> None:
        """End the run in the slot."""
        self.run[slot] = self.score_first[slot] = self.score_end[slot] = 0
        self._set_scores(slot, False)
        self._set_batch(slot, False)
        self.set_fresh(slot, False)

    def set_reader(self, slot: int, client: int) -> None:
        """Set the client that the tokens of a running row are streamed to, 0 for none."""
        self.reader[slot] = client
        self.readers_changed += 1

    def set_fresh(self, slot: int, fresh: bool) -> None:
        """Set whether the row's next token is the first of its run."""
        self.fresh_count += fresh - int(self.fresh[slot])
        self.fresh[slot] = fresh

    def _set_batch(self, slot: int, batch: bool) -> None:
        self.batch_count += batch - int(self.batch[slot])
        self.batch[slot] = batch

    def _set_scores(self, slot: int, scores: bool) -> None:
        self.scores_count += scores - int(self.scores[slot])
        self.scores[slot] = scores

    def only_scores(self, rows: Slots) -> npt.NDArray[np.bool_]:
        """Return which of the rows generate no token: their requests only want log-probabilities of the prompt."""
        only: npt.NDArray[np.bool_] = self.limit[rows] == self.base[rows]
        return only

    def samples(self, rows: Slots, ends: Slots, target: Slots) -> npt.NDArray[np.bool_]:
        """Return which of [n] rows sample a token if their tokens up to `ends` are computed and `target` are known."""
        samples: npt.NDArray[np.bool_] = ends == target
        if self.scores_count:
            samples &= ~self.only_scores(rows)
        return samples

    def stopped(self, rows: Slots, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_] | None:
        """Return which of [n] tokens are stop tokens of their rows, or None if none is.

        Callers skip this while no row has stop tokens (`stops_most` is 0).
        """
        same = self.stops[rows, : self.stops_most] == tokens[:, None]
        if not np.count_nonzero(same):
            return None
        found: npt.NDArray[np.bool_] = same.any(axis=1)
        return found
