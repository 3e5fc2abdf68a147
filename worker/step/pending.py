"""A step that was queued on the device, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, ErrorInfo, Float32Array, Int32Array, RowError
from worker.device.queue import Fetched, Mark
from worker.sampling.grammar import GrammarUntried, Shaped
from worker.sampling.sampler import HostRows


@dataclass(frozen=True)
class StepOutcome:
    """slots, tokens: [sampled] int32; logprobs: [sampled] float32, nats; all host, in the step's row order.

    top_counts [sampled] (empty where no row wants any), top_tokens, top_logprobs: as in StepResult, in the same order.
    errors: one for each row that failed. duration_us: from `launch`, or the end of the step before it where that was
    later, to the end of `finish`; on the monotonic clock.
    """

    slots: Int32Array
    tokens: Int32Array
    logprobs: Float32Array
    errors: tuple[RowError, ...]
    duration_us: int
    top_counts: Int32Array
    top_tokens: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True)
class Sampled:
    """Sampled rows on their way to the host. slots: [n] int32. top_counts: [n] int32.

    fetched: [any] int32, as SampledRows.packed. bucket: how many rows it holds, n or more. chosen: [n] int64, which of
    them are ours; None: all.
    """

    slots: Int32Array
    fetched: Fetched
    top_counts: Int32Array
    bucket: int = 0
    chosen: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    def rows(self) -> HostRows:
        """Call it once the step's end has been passed."""
        packed = self.fetched.array()
        if self.chosen is not None:
            packed = packed.reshape(3, self.bucket)[:, self.chosen].reshape(-1)
        return HostRows.unpacked(packed, self.top_counts)


@dataclass(frozen=True)
class Waiting:
    """Rows that are to choose. logits: [n, vocab] float32 device. slots: [n] int32. rows: of the slots."""

    logits: torch.Tensor
    slots: Int32Array
    rows: tuple[Shaped, ...]

    def pick(self, keep: list[int], device_index: torch.Tensor) -> Waiting:
        """Those at these places, which are also on the device."""
        return Waiting(self.logits[device_index], self.slots[keep], tuple(self.rows[place] for place in keep))


@dataclass(eq=False)
class PendingStep:
    """A step under way. Steps are finished in the order of their launch.

    slots: [rows] int32, of all the step's rows. fed: those whose tokens hold -1. begun: those that changed hands.
    errors: by slot, known so far. spoiled: rows fed with a token that turned out not to be there. end: where all of its
    work on the device is done. busy: where a decode graph begins and ends. queued_behind: launched before the one
    before it had ended. waiting: rows that choose when it is known what a grammar allows them. shaped: those of them
    that have chosen, by slot.
    """

    number: int
    slots: Int32Array
    fed: frozenset[int]
    begun: frozenset[int]
    errors: dict[int, KvforgeError]
    sampled: list[Sampled]
    started_ns: int
    end: Mark | None = None
    busy: tuple[Mark, Mark] | None = None
    queued_behind: bool = False
    spoiled: dict[int, KvforgeError] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    shaped: dict[int, Shaped] = field(default_factory=dict)

    def done(self) -> bool:
        """True once `Runner.finish` will not wait."""
        if self.waiting:
            return False
        try:
            return self.end is None or self.end.passed()
        except RuntimeError:  # `Runner.finish` says what failed
            return True


def joined(sampled: list[tuple[Int32Array, HostRows]], pending: PendingStep, duration_us: int) -> StepOutcome:
    """What was sampled (slots and rows) as one, in row order, without the rows that failed."""
    errors = tuple(RowError(slot, ErrorInfo.of(error), _again_ms(error)) for slot, error in pending.errors.items())
    if not sampled:
        return StepOutcome(NO_INT32, NO_INT32, NO_FLOAT32, errors, duration_us, NO_INT32, NO_INT32, NO_FLOAT32)
    slots = np.concatenate([slots for slots, _ in sampled])
    rows = HostRows.joined([rows for _, rows in sampled])
    kept = np.arange(len(slots))
    if len(sampled) > 1:  # what was sampled together is in order
        order = {slot: place for place, slot in enumerate(pending.slots.tolist())}
        kept = np.argsort([order[slot] for slot in slots.tolist()], kind="stable")
    if errors:
        kept = kept[~np.isin(slots[kept], np.fromiter(pending.errors, np.int64, len(pending.errors)))]
    tops = rows.tops_of(kept)
    return StepOutcome(slots[kept], rows.tokens[kept], rows.logprobs[kept], errors, duration_us, *tops)


def _again_ms(error: KvforgeError) -> int:
    return error.again_ms if isinstance(error, GrammarUntried) else 0
