"""Reading a finished step: its sampled rows and scored prompt tokens, and the errors that only these show."""

from __future__ import annotations

from kvforge.protocol.errors import InvalidRequest, WorkerError
from kvforge.protocol.messages import Int32Array
from kvforge.worker.sampling.sampler import HostRows
from kvforge.worker.sampling.scoring import FINITE_COLUMN, ScoredPart

from .pending import PendingStep
from .row_sampler import RowSampler

NOT_FINITE = "the model returned logits that are not finite"
SampledParts = list[tuple[Int32Array, HostRows]]  # slots [n] int32 and rows of each of `PendingStep.sampled`
ScoredParts = list[tuple[ScoredPart, Int32Array]]  # with `ScoredPart.rows`


def read_results(pending: PendingStep, sampler: RowSampler) -> tuple[SampledParts, ScoredParts]:
    """Read what a step has sampled and scored. Add the errors of rows that failed, and of those that depend on others.

    Args:
        pending: The step; its end has passed.
        sampler: Selects the tokens that count.
    """
    read: SampledParts = []
    for sampled in pending.sampled:
        slots, rows = sampler.read(sampled)
        read.append((slots, rows))
        if rows.banned.any():
            problem = InvalidRequest("sampling.logit_bias", "bans every token that may be sampled")
            pending.errors.update((slot, problem) for slot in slots[rows.banned].tolist())
        if not rows.finite.all():
            broken = WorkerError(NOT_FINITE)
            pending.errors.update((slot, broken) for slot in slots[~rows.finite].tolist())
    scored = [(part, part.rows()) for part in pending.scored]
    for part, values in scored:
        broken_slots = part.slots[values[:, FINITE_COLUMN] == 0].tolist()
        pending.errors.update((slot, WorkerError(NOT_FINITE)) for slot in broken_slots)
    for slot, spoiled in pending.spoiled.items():
        pending.errors.setdefault(slot, spoiled)
    return read, scored


def tokens_of(read: SampledParts, pending: PendingStep) -> dict[int, list[int]]:
    """Return the sampled tokens of each slot that did not fail."""
    chosen: dict[int, list[int]] = {}
    for slots, rows in read:
        for slot, token in zip(slots.tolist(), rows.tokens.tolist(), strict=True):
            if slot not in pending.errors:
                chosen.setdefault(slot, []).append(token)
    return chosen
