"""Rows under a grammar (guided decoding): the work of each step beside the device's.

A token mask depends on the previous token, which only the device knows while its step runs. The forward pass of such a
row is queued like any other, but its sampling waits until the previous step has been finished; the host computes masks
while the device runs. Rows without a grammar are sampled right after the pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Int32Array, RowStart
from kvforge.text.grammar_helper import TrialLimits
from kvforge.worker.device.queue import Staging
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.ahead import AheadRows
from kvforge.worker.sampling.grammar import GrammarRow, Grammars
from kvforge.worker.sampling.grammar_tokens import grammar_tokens

from .pending import DeferredRows, PendingStep

ALONE_WAIT_S = 0.05


class GrammarMasks:
    """The grammars of a runner's slots, and the buffer of their token masks."""

    def __init__(self, model: LoadedModel, slots_max: int, step_rows_max: int, trials: TrialLimits) -> None:
        info = model.info
        tokens = partial(grammar_tokens, info.source, model.vocab_size, info.eos_tokens, trials)
        self._device, self._rows_max, self._ranks = model.device, step_rows_max, model.ranks
        agree = None if model.ranks is None else self._as_rank_0
        self.grammars = Grammars(slots_max, model.vocab_size, tokens, agree)
        self._masks: Staging | None = None

    def begin(self, start: RowStart, generated: Int32Array) -> None:
        """Assign a slot to a new request."""
        if self.grammars or start.sampling.grammar is not None:
            self.grammars.begin(start.slot, start.sampling.grammar, generated)

    def wait(
        self, pending: PendingStep, logits: torch.Tensor, slots: Int32Array, ahead: AheadRows | None = None
    ) -> None:
        """Defer the sampling of rows with a grammar. Call `ready` and `masked` once the whole step is queued."""
        rows = tuple(self.grammars.row(slot) for slot in slots.tolist())
        pending.waiting.append(DeferredRows(logits, slots, rows, ahead))

    def ready(self, pending: PendingStep) -> bool:
        """Return whether the tokens before those that the step samples are known."""
        return not any(row.awaited for waiting in pending.waiting for row in waiting.rows)

    def masked(self, waiting: DeferredRows, pending: PendingStep) -> tuple[DeferredRows, torch.Tensor]:
        """Compute masks for the deferred rows, and record an error for rows that fail.

        Returns:
            The rows that can sample, and their masks: [n, words] int32 on the device.
        """
        lost = pending.errors.keys() | pending.spoiled.keys()
        kept = [place for place, slot in enumerate(waiting.slots.tolist()) if slot not in lost]
        if len(kept) < len(waiting.rows):
            waiting = waiting.pick(kept, self._device.upload(np.array(kept, np.int64)))
        if waiting.ahead is not None:
            waiting = self._behind_drafts(waiting, waiting.ahead)
        words = self.grammars.words
        if self._masks is None:
            self._masks = Staging(self._device, self._rows_max * words)
        host = self._masks.host()[: len(kept) * words].reshape(-1, words)
        problems = self.grammars.fill(waiting.rows, host)
        if problems:
            kept = _sound(waiting, problems, pending.errors)
            host[: len(kept)] = host[kept]
            waiting = waiting.pick(kept, self._device.upload(np.array(kept, np.int64)))
        count = len(waiting.rows) * words
        if count:
            self._masks.send(count)
        for place, (slot, row) in enumerate(zip(waiting.slots.tolist(), waiting.rows, strict=True)):
            if waiting.ahead is None or waiting.ahead.offsets[place] == 0:
                row.awaited += 1
                pending.shaped[slot] = row
        return waiting, self._masks.on_device[:count].view(-1, words)

    @staticmethod
    def known(pending: PendingStep, tokens: dict[int, list[int]]) -> None:
        """Advance the grammars after a step. tokens: accepted tokens by slot, without rows that failed."""
        for slot, row in pending.shaped.items():
            row.awaited -= 1
            for token in tokens.get(slot, ()):
                row.accept(token)

    def submit(self, pending: PendingStep) -> None:
        """Start the trial of new grammars in another process while the step is queued."""
        if self.grammars:
            self.grammars.submit(pending.slots.tolist())

    def compile(self, pending: PendingStep) -> dict[int, KvforgeError]:
        """Compile the grammars of rows that have begun, and return the errors of bad grammars by slot."""
        if not self.grammars:
            return {}
        slots = pending.slots.tolist()
        choosing = {slot for waiting in pending.waiting for slot in waiting.slots.tolist()}
        if len(choosing) == len(slots) and self.grammars.untried(slots):
            self.grammars.wait(ALONE_WAIT_S)  # no other row waits with them
        return self.grammars.compile(slots, choosing)

    def _behind_drafts(self, waiting: DeferredRows, ahead: AheadRows) -> DeferredRows:
        """Give each row behind drafts a grammar of its own, and leave out the rows behind drafts that it refuses."""
        rows: list[GrammarRow | None] = []
        for row, offset, token in zip(waiting.rows, ahead.offsets.tolist(), ahead.tokens.tolist(), strict=True):
            before = rows[-1] if offset else None
            rows.append(row if not offset else None if before is None else before.behind(token))
        kept = [place for place, row in enumerate(rows) if row is not None]
        waiting = replace(waiting, rows=tuple(row or waiting.rows[place] for place, row in enumerate(rows)))
        if len(kept) == len(rows):
            return waiting
        return waiting.pick(kept, self._device.upload(np.array(kept, np.int64)))

    def _as_rank_0(self, verdicts: list[int]) -> list[int]:
        assert self._ranks is not None
        mine = torch.tensor(verdicts, dtype=torch.int32, device=self._device.torch_device)
        return [int(each) for each in self._ranks.gather(mine)[0].tolist()]


def _sound(waiting: DeferredRows, problems: dict[int, KvforgeError], errors: dict[int, KvforgeError]) -> list[int]:
    """Return the places of rows that can sample.

    Args:
        waiting: The rows.
        problems: Errors by place.
        errors: Receives the errors by slot. A row behind drafts that cannot sample is left out with those behind it:
            its request fails when its own turn comes, as it would without drafts.
    """
    kept: list[int] = []
    stopped = False
    for place, slot in enumerate(waiting.slots.tolist()):
        first = waiting.ahead is None or waiting.ahead.offsets[place] == 0
        stopped = place in problems or (stopped and not first)
        if place in problems and first:
            errors[slot] = problems[place]
        if not stopped:
            kept.append(place)
    return kept
