"""The model runner: executes one step, from the coordinator's arrays to sampled tokens.

Order of a step:

1. Blocks that come from another tenant are zeroed.
2. Slots are assigned to new requests (`begins`).
3. Blocks are copied.
4. One forward pass writes K and V of the new tokens and runs attention.
5. Rows with sample = 1 sample a token.

`launch` queues all of this on the device without waiting. The next step may be launched before `finish` has returned
the tokens, because a sampled token stays on the device for the row that is fed -1.

A poison row fails alone. Rows that fail a check are left out of the batch. If the pass itself fails, rows run again one
by one (writing K and V twice gives the same bytes), and only those that fail alone are reported. The state of a slot
changes only when its token is sampled. A row with non-finite logits fails, and so does its row in the next step, which
was queued with that missing token.

A pass over recurrent states cannot run again, because it has advanced some of them: if it fails, the worker ends.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidRequest, KvforgeError, WorkerError
from kvforge.protocol.messages import Int32Array, RowStart, Step
from kvforge.text.grammar_helper import TrialLimits
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool, require_positive
from kvforge.worker.attention.windows import WindowTables
from kvforge.worker.device.device import as_worker_error
from kvforge.worker.device.queue import AsyncCopy, DeviceEvent, Staging
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.sampler import NO_TOKEN, HostRows, SamplingState
from kvforge.worker.sampling.scoring import FINITE_COLUMN, ScoredPart, score, tokens_at_a_time, unpacked

from .checks import BoolArray, Rows, Scoring, StepLimits, bad_copies, check_rows, find_malformed
from .graphs import DecodeGraphs
from .meter import Meter
from .pending import DeferredRows, PendingStep, Sampled, StepOutcome, joined
from .row_start_checks import Histories, problem_of, split_history
from .shaping import GrammarMasks
from .token_kinds import split_by_kind, split_marks, split_passes

STEPS_UNDER_WAY_MAX = 2
NOT_FINITE = "the model returned logits that are not finite"

__all__ = ["STEPS_UNDER_WAY_MAX", "PendingStep", "ModelRunner", "StepOutcome"]


class FatalStepError(WorkerError):
    """A step failed in a way that no later one can make good: the worker must end, and its rows be recomputed."""


class RankDesyncError(FatalStepError):
    """A rank failed a step that other ranks completed: all ranks must restart."""


class StateLostError(FatalStepError):
    """A pass over recurrent states failed half-way: they are neither before nor behind it."""


class ModelRunner:
    """Runs steps of one model over one pool. Not thread-safe: a worker has one thread.

    Args:
        model: The loaded model.
        pool: Its KV pool.
        slots_max: Slots are [0, slots_max).
        step_tokens_max: Most tokens of a step.
        step_rows_max: Most rows of a step.
        table_width: Most blocks of a row; 0: as many as the context needs.
        graph_rows_max: Largest decode step, in rows, that runs from a captured graph; 0: none.
        trials: Limits of grammars.

    Raises:
        InvalidConfiguration: Names the invalid limit.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        *,
        slots_max: int,
        step_tokens_max: int,
        step_rows_max: int,
        table_width: int = 0,
        graph_rows_max: int = 0,
        trials: TrialLimits | None = None,
    ) -> None:
        limits = {"slots_max": slots_max, "step_tokens_max": step_tokens_max, "step_rows_max": step_rows_max}
        for field, value in limits.items():
            require_positive(field, value)
        assert pool.geometry == model.geometry, "the pool was made for another model"
        self.model, self.pool, self.meter = model, pool, Meter()
        self.limits = StepLimits(
            slots_max=slots_max,
            step_tokens_max=step_tokens_max,
            step_rows_max=step_rows_max,
            context_tokens_max=model.info.context_tokens_max,
            vocab_size=model.vocab_size,
            blocks=pool.blocks,
            block_size=pool.block_size,
            state_blocks=pool.geometry.state_blocks,
            window=pool.geometry.window,
            window_pages=pool.geometry.window_pages,
        )
        self._state = SamplingState(slots_max, model.vocab_size, model.device)
        # Tokens, positions and slots of a step, then the indices of the tokens to sample after.
        self.shaping = GrammarMasks(model, slots_max, step_rows_max, trials or TrialLimits())
        self._inputs = Staging(model.device, 3 * step_tokens_max + step_rows_max)
        # Slot state that the host needs without asking the device.
        self._has_sampled = np.zeros(slots_max, np.bool_)
        self._sampled_in = np.zeros(slots_max, np.int64)  # number of the step that sampled last
        self._prompt_tops = np.zeros(slots_max, np.int32)  # top tokens that a slot wants for each prompt token
        self._refused: dict[int, KvforgeError] = {}  # slots with an invalid start, until a valid one comes
        self._under_way: deque[PendingStep] = deque()
        self._unzeroed = np.zeros(0, np.int32)  # blocks that still have to be zeroed
        self._launched = 0
        self._finished_ns = 0
        self.graphs: DecodeGraphs | None = None
        if graph_rows_max and model.can_be_captured:
            rows = min(graph_rows_max, step_rows_max)
            context_width = -(-model.info.context_tokens_max // pool.block_size)
            width = min(table_width or context_width, context_width)
            self.graphs = DecodeGraphs(model, pool, self._state, rows, width)

    def run(
        self,
        step: Step,
        tables: npt.NDArray[np.int32],
        states: npt.NDArray[np.int32] | None = None,
        windows: WindowTables | None = None,
    ) -> StepOutcome:
        """Launch and finish a step."""
        return self.finish(self.launch(step, tables, states, windows))

    @torch.inference_mode()
    def launch(
        self,
        step: Step,
        tables: npt.NDArray[np.int32],
        states: npt.NDArray[np.int32] | None = None,
        windows: WindowTables | None = None,
    ) -> PendingStep:
        """Queue one step on the device.

        Invalid contents of a step never raise: each fault becomes the RowError of its rows. At most STEPS_UNDER_WAY_MAX
        steps may be in flight.

        Args:
            step: The step, with pool-local block ids in `copies` and `zeros`.
            tables: [rows, width] int32, the block table of each row, pool-local ids. Entries past a row's tokens are
                not read.
            states: [rows, state blocks] int32, the pages of each row's recurrent state in order, pool-local ids; None
                for a model without one.
            windows: The pages of layers that keep a window, pool-local ids; None for a model without such layers.

        Returns:
            The step in flight.

        Raises:
            RankDesyncError: The pass failed on this rank of several: no rank can continue.
            StateLostError: The pass failed on a model with recurrent states.
        """
        assert len(self._under_way) < STEPS_UNDER_WAY_MAX, "finish a step before launching another"
        started_ns = time.monotonic_ns()
        self._launched += 1
        pending = PendingStep(
            number=self._launched,
            slots=np.ravel(step.slots),
            fed=frozenset(),
            begun=frozenset(start.slot for start in step.begins),
            errors={},
            sampled=[],
            started_ns=started_ns,
            queued_behind=any(not earlier.done() for earlier in self._under_way),
        )
        fault = find_malformed(step, tables, self.limits, states, windows)
        if fault is not None:
            pending.errors.update((slot, fault) for slot in pending.slots.tolist())
        try:
            if fault is None or fault.field != "zeros":
                self._zero(step.zeros)
            if fault is None:
                self._carry_out(step, tables, pending, states, windows)
        except FatalStepError:
            raise
        except Exception as error:  # noqa: BLE001 - no memory for the step's own arrays, or the device is lost
            self._lost(pending, error)
        if not pending.waiting or self.shaping.ready(pending):
            self._complete(pending)
        self._under_way.append(pending)
        self.meter.launched(len(pending.slots), time.monotonic_ns() - started_ns)
        return pending

    def _carry_out(
        self,
        step: Step,
        tables: npt.NDArray[np.int32],
        pending: PendingStep,
        states: npt.NDArray[np.int32] | None,
        windows: WindowTables | None,
    ) -> None:
        tokens, generated = split_marks(step.tokens, step.counts, self.model.wants_kinds)
        rows = Rows(
            *(step.slots, step.starts, step.counts, step.samples, tokens, tables, generated, Scoring.of(step)),
            *(states, windows),
        )
        if step.begins:
            self._begin(step.begins, split_history(step), pending.errors)
        rows = self._checked(rows, step.copies.reshape(-1, 3), pending.errors)
        if not len(rows):
            return
        if rows.scoring is not None:
            width = int(self._prompt_tops[rows.slots].max())
            rows = replace(rows, scoring=replace(rows.scoring, top_width=width))
        absent = rows.tokens == NO_TOKEN
        if absent.any():
            pending.fed = frozenset(np.repeat(rows.slots, rows.counts)[absent].tolist())
        self.shaping.submit(pending)
        self._queue(rows, pending)
        self._compile(pending)

    def _compile(self, pending: PendingStep) -> None:
        """Compile the grammars of rows that have begun, while the device computes."""
        problems = self.shaping.compile(pending)
        if problems:
            pending.errors.update(problems)
            self._refused |= problems

    def _complete(self, pending: PendingStep) -> None:
        """Queue the remaining sampling, and record the end of the step's work."""
        for waiting in pending.waiting:
            try:
                self._choose_shaped(waiting, pending)
            except Exception as error:  # noqa: BLE001 - no memory for the masks, or the device is lost
                failure = as_worker_error(error, "masks", self.model.device)
                pending.errors.update((slot, failure) for slot in waiting.slots.tolist())
        pending.waiting = []
        for sampled in pending.sampled:
            self._has_sampled[sampled.slots] = True
            self._sampled_in[sampled.slots] = pending.number
        self._end(pending)

    @torch.inference_mode()
    def _choose_shaped(self, waiting: DeferredRows, pending: PendingStep) -> None:
        chosen, masks = self.shaping.masked(waiting, pending)
        if len(chosen.slots):
            self._sample(chosen.logits, chosen.slots, pending, masks)

    def _zero(self, blocks: Int32Array) -> None:
        """Zero blocks before the rest of the step, even if the rest is invalid.

        If it fails, the step fails, and so does each later one until these blocks are zeroed: their new tenant must
        not see the data of the previous one.
        """
        if not blocks.size and not self._unzeroed.size:
            return
        self._unzeroed = np.union1d(self._unzeroed, blocks)
        self.pool.zero_blocks(self._unzeroed)
        self._unzeroed = self._unzeroed[:0]

    def _end(self, pending: PendingStep) -> None:
        """Record a device event at the end of the step's work."""
        try:
            pending.end = DeviceEvent(self.model.device)
        except RuntimeError as error:
            self._lost(pending, error)

    def reset(self) -> None:
        """Forget every slot for another coordinator. Wait for the steps in flight and drop them."""
        while self._under_way:
            self.finish(self._under_way[0])
        self._has_sampled[:] = False
        self._refused.clear()
        self.shaping.grammars.forget()

    def close(self) -> None:
        """Drop the captured graphs. The caller keeps the pool."""
        self.reset()
        if self.graphs is not None:
            self.graphs.close()

    # ------------------------------------------------------------------------------------------------------ beginning

    def _begin(
        self, begins: tuple[RowStart, ...], histories: Histories | None, errors: dict[int, KvforgeError]
    ) -> None:
        assert histories is not None, "a malformed step begins nothing"
        for start, history in zip(begins, histories, strict=True):
            limits = self.limits
            problem: KvforgeError | None = problem_of(start, history, limits.slots_max, limits.vocab_size)
            if problem is None:
                try:
                    self._state.begin(start, *history)
                    self.shaping.begin(start, history[1])
                except Exception as error:  # noqa: BLE001 - no memory for its penalties: the other rows go on
                    problem = as_worker_error(error, "starting a row", self.model.device)
            if problem is not None:
                errors[start.slot] = self._refused[start.slot] = problem
            else:
                self._refused.pop(start.slot, None)
                self._prompt_tops[start.slot] = min(start.sampling.prompt_logprobs or 0, self.model.vocab_size)
                self._has_sampled[start.slot] = False
        try:
            self._state.upload_starts()
        except Exception as error:
            self._refused |= {
                start.slot: as_worker_error(error, "starting a row", self.model.device) for start in begins
            }
            raise

    def _checked(self, rows: Rows, copies: npt.NDArray[np.int32], errors: dict[int, KvforgeError]) -> Rows:
        """Make the valid copies, and return the rows that may run. Record an error for the others."""
        bad_targets: frozenset[int] = frozenset()
        if len(copies):
            bad = bad_copies(copies, self.limits)
            bad_targets = frozenset(copies[bad, 1].tolist())
            self.pool.copy_blocks(copies[~bad])
        if self._refused:
            for slot in rows.slots.tolist():
                if slot in self._refused:
                    errors.setdefault(slot, self._refused[slot])
        return rows.pick(check_rows(rows, self._has_sampled, bad_targets, self.limits, errors))

    # --------------------------------------------------------------------------------------------------------- queueing

    def _queue(self, rows: Rows, pending: PendingStep) -> None:
        """Queue the rows: from a graph if they are all decodes and fit one, else as a pass."""
        eager = rows.scoring is not None or not rows.generated.all()
        if self.graphs is None or eager or not self.graphs.can_run(rows):
            self._queue_pass(rows, pending)
            return
        try:
            launched = self.graphs.launch(rows)
        except Exception as error:  # noqa: BLE001 - queued work cannot be rolled back
            self._require_repeatable(error)
            failure = as_worker_error(error, "a decode graph", self.model.device)
            pending.errors.update((slot, failure) for slot in rows.slots.tolist())
            return
        pending.busy = launched.busy
        if launched.sampled is not None:
            pending.sampled.append(launched.sampled)
        if len(launched.others):
            self._sample(self.graphs.logits_of(launched.others), rows.slots[launched.others], pending)

    def _queue_pass(self, rows: Rows, pending: PendingStep) -> None:
        """Queue the rows together. If that fails, queue them one by one, so that only the faulty ones fail."""
        try:
            logits, sampled, scored = self._forward(rows)
        except Exception as error:  # noqa: BLE001 - any failure of foreign model code must spare the other rows
            self._require_repeatable(error)
            device = self.model.device
            if len(rows) == 1 or not device.survives():
                failure = (
                    error if isinstance(error, KvforgeError) else as_worker_error(error, "the forward pass", device)
                )
                pending.errors.update((slot, failure) for slot in rows.slots.tolist())
                return
            device.release_cached()
            for row in range(len(rows)):
                self._queue_pass(rows.pick(np.arange(len(rows)) == row), pending)
            return
        pending.scored += scored
        if len(sampled):
            self._sample(logits, sampled, pending)

    def _require_repeatable(self, error: Exception) -> None:
        """Raise FatalStepError if a failed pass must not be made again.

        With several ranks, one that skipped a pass would exchange the wrong numbers. Recurrent states would be advanced
        twice.
        """
        ranks, text = self.model.ranks, f"{type(error).__name__}: {error}"
        if ranks is not None:
            raise RankDesyncError(f"rank {ranks.rank} of {ranks.count} failed its part of a step: {text}") from error
        if self.model.geometry.states:
            raise StateLostError(f"a step over recurrent states failed half-way: {text}") from error

    def _forward(self, rows: Rows) -> tuple[torch.Tensor, Int32Array, list[ScoredPart]]:
        """Return logits [sampled, vocab] float32 on the device, their slots [sampled] int32, and scored tokens."""
        found = [self._pass(*part) for part in split_passes(*split_by_kind(rows))]
        if len(found) == 1:
            return found[0]
        scored = [part for _, _, parts in found for part in parts]
        return torch.cat([logits for logits, *_ in found]), np.concatenate([slots for _, slots, _ in found]), scored

    def _pass(self, rows: Rows, generated: BoolArray) -> tuple[torch.Tensor, Int32Array, list[ScoredPart]]:
        """Run one pass over rows. generated: [rows] bool, the rows that are decodes. Return as `_forward` does."""
        batch = self.pool.batch(rows.tables, rows.starts, rows.counts, generated, rows.states, rows.windows)
        samples = rows.samples == 1
        count, wanted = len(rows.tokens), int(samples.sum())
        ends = np.cumsum(rows.counts)
        packed = self._inputs.host()
        tokens, positions, owners = packed[: 3 * count].reshape(3, count)
        tokens[:] = rows.tokens
        positions[:] = np.arange(count) - np.repeat(ends - rows.counts - rows.starts, rows.counts)
        owners[:] = np.repeat(rows.slots, rows.counts)
        packed[3 * count : 3 * count + wanted] = ends[samples] - 1
        self._inputs.send(3 * count + wanted)
        inputs = self._inputs.on_device[: 3 * count + wanted].long()
        token_ids, places, slots = inputs[: 3 * count].view(3, count).unbind()
        if (rows.tokens == NO_TOKEN).any():
            # A failed step may have left NO_TOKEN. Clamp it: the row fails once the failure is known.
            token_ids = torch.where(token_ids == NO_TOKEN, self._state.last_token[slots].clamp_(min=0), token_ids)
        if rows.scoring is not None and (rows.scoring.places >= 0).any():
            logits, scored = self._pass_and_score(token_ids, places, inputs[3 * count :], batch, rows)
            return logits, rows.slots[samples], scored
        return self.model.forward(token_ids, places, inputs[3 * count :], batch, self.pool), rows.slots[samples], []

    def _pass_and_score(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        batch: PagedBatch,
        rows: Rows,
    ) -> tuple[torch.Tensor, list[ScoredPart]]:
        """Run one pass, score prompt tokens part by part, and return the logits of `logit_tokens`."""
        scoring = rows.scoring
        assert scoring is not None
        device, most = self.model.device, tokens_at_a_time(self.model.vocab_size)
        (where,) = np.nonzero(scoring.places >= 0)
        places = scoring.places[where]
        slots = np.repeat(rows.slots, rows.counts)[where]
        counts = self._prompt_tops[slots]
        wanted = device.upload(where.astype(np.int64))
        following = device.upload(scoring.following[places].astype(np.int64))
        parts = [*wanted.split(most), logit_tokens]
        scored: list[torch.Tensor] = []
        for logits in self.model.forward_by_parts(token_ids, positions, parts, batch, self.pool):
            if len(scored) < len(parts) - 1:
                begin = len(scored) * most
                scored.append(score(logits, following[begin : begin + most], scoring.top_width))
        packed = AsyncCopy(device, torch.cat(scored))
        return logits, [ScoredPart(slots, places, counts, packed)]

    def _sample(
        self, logits: torch.Tensor, slots: Int32Array, pending: PendingStep, masks: torch.Tensor | None = None
    ) -> None:
        """Queue the sampling of all rows, or of single rows if that fails. Rows with a grammar wait for masks.

        Args:
            logits: [n, vocab].
            slots: [n] on the host.
            pending: The step.
            masks: [n, words] int32 on the device, if all rows have a grammar.
        """
        device, state = self.model.device, self._state
        if masks is None and self.shaping.grammars:
            shaped = self.shaping.grammars.holds(slots)
            if shaped.any():
                part, rest = np.flatnonzero(shaped), np.flatnonzero(~shaped)
                self.shaping.wait(pending, logits[device.upload(part)] if len(rest) else logits, slots[part])
                if len(rest):
                    self._sample(logits[device.upload(rest)], slots[rest], pending)
                return
        simple = (state.simple(slots) if masks is None else state.plain(slots)) & state.splits
        if simple.any() and not simple.all():
            for part in (np.flatnonzero(simple), np.flatnonzero(~simple)):
                on_device = device.upload(part)
                some = None if masks is None else masks[on_device]
                self._sample(logits[on_device], slots[part], pending, some)
            return
        try:
            choose = self._choose_simple if simple.all() else self._choose
            pending.sampled.append(choose(logits, slots, masks))
        except Exception as error:  # noqa: BLE001 - no memory for a few rows' filters: the others go on
            if len(slots) == 1 or not device.survives():
                failure = as_worker_error(error, "sampling", device)
                pending.errors.update((slot, failure) for slot in slots.tolist())
                return
            device.release_cached()
            for row in range(len(slots)):
                one = slice(row, row + 1)
                self._sample(logits[one], slots[one], pending, None if masks is None else masks[one])

    def _choose(self, logits: torch.Tensor, slots: Int32Array, masks: torch.Tensor | None) -> Sampled:
        chosen = self._state.sample(logits, slots, masks)
        return Sampled(slots, AsyncCopy(self.model.device, chosen.packed()), chosen.top_counts)

    def _choose_simple(self, logits: torch.Tensor, slots: Int32Array, masks: torch.Tensor | None) -> Sampled:
        device = self.model.device
        on_device = device.upload(slots.astype(np.int64))
        packed = torch.empty(3 * len(slots), dtype=torch.int32, device=device.torch_device)
        self._state.sample_simple(logits, on_device, torch.ones_like(on_device), packed, masks)
        return Sampled(slots, AsyncCopy(device, packed), np.zeros(len(slots), np.int32))

    # -------------------------------------------------------------------------------------------------------- finishing

    def finish(self, pending: PendingStep) -> StepOutcome:
        """Wait for the oldest step in flight, and return its outcome. Row and device failures do not raise."""
        assert self._under_way[0] is pending, "finish steps in the order of their launch"
        waiting_ns = time.monotonic_ns()
        try:
            if pending.end is not None:
                pending.end.wait()
        except RuntimeError as error:
            self._lost(pending, error)
        read: list[tuple[Int32Array, HostRows]] = []
        for sampled in pending.sampled:
            rows = sampled.rows()
            read.append((sampled.slots, rows))
            if rows.banned.any():
                problem = InvalidRequest("sampling.logit_bias", "bans every token that may be sampled")
                pending.errors.update((slot, problem) for slot in sampled.slots[rows.banned].tolist())
            if not rows.finite.all():
                broken = WorkerError(NOT_FINITE)
                pending.errors.update((slot, broken) for slot in sampled.slots[~rows.finite].tolist())
        scored = [(part, part.rows()) for part in pending.scored]
        for part, values in scored:
            broken_slots = part.slots[values[:, FINITE_COLUMN] == 0].tolist()
            pending.errors.update((slot, WorkerError(NOT_FINITE)) for slot in broken_slots)
        for slot, spoiled in pending.spoiled.items():
            pending.errors.setdefault(slot, spoiled)
        arrived_ns = time.monotonic_ns()
        self._under_way.popleft()
        if pending.errors:
            self._fail_dependents(pending)
        if pending.shaped:
            self.shaping.known(pending, _tokens_of(read, pending))
        if self._under_way and self._under_way[0].waiting:
            self._complete(self._under_way[0])
        before_ns, self._finished_ns = self._finished_ns, arrived_ns
        outcome = joined(read, pending, (arrived_ns - max(pending.started_ns, before_ns)) // 1000)
        if scored:
            outcome = replace(outcome, prompts=unpacked(scored, pending.errors))
        self.meter.finished(pending, arrived_ns - waiting_ns, time.monotonic_ns() - arrived_ns)
        return outcome

    def _lost(self, pending: PendingStep, error: Exception) -> None:
        """Fail all rows of a step after a failure that cannot be attributed to one row."""
        failure = as_worker_error(error, "a step", self.model.device)
        for slot in pending.slots.tolist():
            pending.errors.setdefault(slot, failure)
        pending.sampled, pending.waiting, pending.scored = [], [], []

    def _fail_dependents(self, pending: PendingStep) -> None:
        """Fail the rows of later steps that were fed a token of a failed row of this step."""
        for slot in pending.errors:
            if 0 <= slot < len(self._has_sampled) and self._sampled_in[slot] == pending.number:
                self._has_sampled[slot] = False
        for later in self._under_way:
            for slot, error in pending.errors.items():
                if slot in later.fed and slot not in later.begun and slot not in later.errors:
                    later.spoiled[slot] = error


def _tokens_of(read: list[tuple[Int32Array, HostRows]], pending: PendingStep) -> dict[int, int]:
    """Return the sampled token of each slot that did not fail."""
    chosen: dict[int, int] = {}
    for slots, rows in read:
        chosen.update(zip(slots.tolist(), rows.tokens.tolist(), strict=True))
    return {slot: token for slot, token in chosen.items() if slot not in pending.errors}
