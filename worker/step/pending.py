"""A step that was queued on the device, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, ErrorInfo, Float32Array, Int32Array, RowError
from kvforge.worker.device.queue import AsyncCopy, DeviceEvent
from kvforge.worker.drafts.drafter import NO_PROPOSALS, Proposals
from kvforge.worker.sampling.ahead import AheadRows
from kvforge.worker.sampling.grammar import GrammarRow, GrammarUntried
from kvforge.worker.sampling.sampler import HostRows
from kvforge.worker.sampling.scoring import NO_SCORES, PromptScores, ScoredPart

from .checks import Rows
from .host_transfers import HostWork


@dataclass(frozen=True)
class StepOutcome:
    """The results of a step, on the host, in the step's row order. A row with drafts has one or more entries.

    Attributes:
        slots: [sampled] int32.
        tokens: [sampled] int32.
        logprobs: [sampled] float32, nats.
        errors: One for each failed row.
        duration_us: Time from `launch`, or from the end of the step before if that was later, to the end of `finish`.
        top_counts: [sampled] int32; empty if no row wants top log-probabilities.
        top_tokens: As in StepResult.
        top_logprobs: As in StepResult.
        prompts: Log-probabilities of prompt tokens.
        proposals: Drafts for the next step.
    """

    slots: Int32Array
    tokens: Int32Array
    logprobs: Float32Array
    errors: tuple[RowError, ...]
    duration_us: int
    top_counts: Int32Array
    top_tokens: Int32Array
    top_logprobs: Float32Array
    prompts: PromptScores = NO_SCORES
    proposals: Proposals = NO_PROPOSALS


@dataclass(frozen=True)
class Sampled:
    """Sampled rows on their way to the host.

    Attributes:
        slots: [n] int32.
        fetched: [any] int32 in the format of SampledRows.packed.
        top_counts: [n] int32.
        bucket: Rows in `fetched`, n or more.
        chosen: [n] int64, indices of our rows in `fetched`; None: all.
        ahead: The rows, if they sampled behind drafts; None: none did.
    """

    slots: Int32Array
    fetched: AsyncCopy
    top_counts: Int32Array
    bucket: int = 0
    chosen: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    ahead: AheadRows | None = None

    def rows(self) -> HostRows:
        """Return the rows. Call it after the step's end has passed."""
        packed = self.fetched.array()
        if self.chosen is not None:
            packed = packed.reshape(3, self.bucket)[:, self.chosen].reshape(-1)
        return HostRows.unpacked(packed, self.top_counts)


@dataclass(frozen=True)
class DeferredRows:
    """Rows that wait to sample.

    Attributes:
        logits: [n, vocab] float32 on the device.
        slots: [n] int32.
        rows: Grammar state of each slot.
        ahead: The rows, if they sample behind drafts; None: none does.
    """

    logits: torch.Tensor
    slots: Int32Array
    rows: tuple[GrammarRow, ...]
    ahead: AheadRows | None = None

    def pick(self, keep: list[int], device_index: torch.Tensor) -> DeferredRows:
        """Return the rows at these indices, given on the host and on the device."""
        rows, ahead = tuple(self.rows[place] for place in keep), self.ahead
        picked = None if ahead is None else ahead.pick(np.array(keep, np.int64))
        return DeferredRows(self.logits[device_index], self.slots[keep], rows, picked)


@dataclass(eq=False)
class PendingStep:
    """A step in flight. Steps are finished in the order of their launch.

    Attributes:
        number: Number of the launch.
        slots: [rows] int32, all slots of the step.
        fed: Slots with -1 among their tokens.
        begun: Slots that the step assigns to a new request.
        errors: Errors known so far, by slot.
        sampled: Sampled rows on their way to the host.
        started_ns: Time of the launch on the monotonic clock; of a graph, when the host had prepared it.
        begin: Device event before the step's graph or pass; None: it has none.
        end: Device event after all of the step's work.
        idle_us: How long the device had nothing to do before `begin`; -1: not measured. Known once it is finished.
        busy: Device events before and after a decode graph.
        queued_behind: Whether the step was launched before the one before it had ended.
        spoiled: Rows that were fed a token of a failed row, by slot.
        waiting: Rows that sample once their grammar masks are known.
        shaped: Grammar state of those that have sampled, by slot.
        scored: Scored prompt tokens on their way to the host.
        drafted: Slots of rows with drafts: their state is known once the step is finished.
        propose: The most tokens that a draft model proposes for each row behind it; 0: none.
        rows: The rows that run, without those that failed a check; None before.
        host: The copies from and to the host; None for a step without any.
        host_copied: The host blocks of these copies, as in StepResult.
        host_missed: The host blocks that were not found, as in StepResult; known once the step is finished.
        host_us: How long the copies to the host and those from it took, in microseconds; known then too.
    """

    number: int
    slots: Int32Array
    fed: frozenset[int]
    begun: frozenset[int]
    errors: dict[int, KvforgeError]
    sampled: list[Sampled]
    started_ns: int
    begin: DeviceEvent | None = None
    end: DeviceEvent | None = None
    idle_us: int = -1
    busy: tuple[DeviceEvent, DeviceEvent] | None = None
    queued_behind: bool = False
    spoiled: dict[int, KvforgeError] = field(default_factory=dict)
    waiting: list[DeferredRows] = field(default_factory=list)
    shaped: dict[int, GrammarRow] = field(default_factory=dict)
    scored: list[ScoredPart] = field(default_factory=list)
    drafted: frozenset[int] = frozenset()
    propose: int = 0
    rows: Rows | None = None
    host: HostWork | None = None
    host_copied: Int32Array = field(default_factory=lambda: NO_INT32)
    host_missed: Int32Array = field(default_factory=lambda: NO_INT32)
    host_us: tuple[int, int] = (0, 0)

    def done(self) -> bool:
        """Return True once `ModelRunner.finish` will not wait."""
        if self.waiting:
            return False
        try:
            return (self.end is None or self.end.passed()) and (self.host is None or self.host.done())
        except RuntimeError:  # `ModelRunner.finish` reports the failure
            return True


def joined(sampled: list[tuple[Int32Array, HostRows]], pending: PendingStep, duration_us: int) -> StepOutcome:
    """Join the sampled parts of a step in row order, without the rows that failed.

    Args:
        sampled: Slots and rows of each part.
        pending: The step.
        duration_us: Duration of the step in microseconds.
    """
    errors = tuple(RowError(slot, ErrorInfo.of(error), _again_ms(error)) for slot, error in pending.errors.items())
    if not sampled:
        return StepOutcome(NO_INT32, NO_INT32, NO_FLOAT32, errors, duration_us, NO_INT32, NO_INT32, NO_FLOAT32)
    slots = np.concatenate([slots for slots, _ in sampled])
    rows = HostRows.joined([rows for _, rows in sampled])
    kept = np.arange(len(slots))
    if len(sampled) > 1:  # rows sampled together are in order
        order = {slot: place for place, slot in enumerate(pending.slots.tolist())}
        kept = np.argsort([order[slot] for slot in slots.tolist()], kind="stable")
    if errors:
        kept = kept[~np.isin(slots[kept], np.fromiter(pending.errors, np.int64, len(pending.errors)))]
    top_logprobs = rows.top_logprobs_of(kept)
    return StepOutcome(slots[kept], rows.tokens[kept], rows.logprobs[kept], errors, duration_us, *top_logprobs)


def _again_ms(error: KvforgeError) -> int:
    return error.again_ms if isinstance(error, GrammarUntried) else 0
