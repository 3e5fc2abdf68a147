"""One step: from the coordinator's arrays to tokens.

Order: blocks that come from another tenant are zeroed, slots change hands (`begins`), blocks are copied, then K and V
of the new tokens are written and attention runs (in one forward pass), then the rows with sample = 1 choose a token.
`launch` queues all of that on the device and does not wait for it; the next step may be launched before `finish` has
told this one's tokens, because the token that a slot samples stays on the device for the row that is fed with -1.

A poison row never takes the others with it. What can be checked beforehand is, and such a row is left out of the
batch; when the pass itself fails, rows are run again one by one (writing K and V twice gives the same bytes) and
those that fail alone are the ones reported. Nothing a slot remembers changes before its token is chosen. A row whose
token turns out to be missing (logits that are not finite) fails, and so does its row in the step behind, which was
queued with a token that never was.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidRequest, KvforgeError, WorkerError
from kvforge.protocol.messages import Int32Array, RowStart, Step
from kvforge.text.grammar_helper import TrialLimits
from worker.attention import PagedBatch
from worker.attention.pool import KvPool, require_positive
from worker.device.device import as_worker_error
from worker.device.queue import Fetched, Mark, Staging
from worker.loading.model import LoadedModel
from worker.sampling.sampler import NO_TOKEN, HostRows, SamplingState

from .checks import BoolArray, Rows, StepLimits, bad_copies, check_rows, malformed
from .graphs import DecodeGraphs
from .kinds import by_kind, passes, told_apart
from .meter import Meter
from .pending import PendingStep, Sampled, StepOutcome, Waiting, joined
from .shaping import Shaping
from .starts import Histories, problem_of, split_history

STEPS_UNDER_WAY_MAX = 2

__all__ = ["STEPS_UNDER_WAY_MAX", "PendingStep", "Runner", "StepOutcome"]


class OutOfStep(WorkerError):
    """One of several ranks failed where the others did not: all of them have to begin anew."""


class Runner:
    """Runs steps of one model over one pool. Not thread-safe: a worker has one thread.

    slots_max: slots are [0, slots_max). step_tokens_max, step_rows_max: limits of one step. table_width: most blocks of
    a row. graph_rows_max: decode steps of up to so many rows run from captured graphs (0: none do).
    trials: limits of grammars. Errors: InvalidConfiguration names the limit.
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
        )
        self._state = SamplingState(slots_max, model.vocab_size, model.device)
        # Tokens, their positions, the slots they belong to; then the places of the tokens that are sampled after.
        self.shaping = Shaping(model, slots_max, step_rows_max, trials or TrialLimits())
        self._inputs = Staging(model.device, 3 * step_tokens_max + step_rows_max)
        # What the host must know of a slot without asking the device.
        self._has_sampled = np.zeros(slots_max, np.bool_)
        self._sampled_in = np.zeros(slots_max, np.int64)  # the number of the step that did last
        self._refused: dict[int, KvforgeError] = {}  # slots whose start was wrong, until a right one comes
        self._under_way: deque[PendingStep] = deque()
        self._unzeroed = np.zeros(0, np.int32)  # blocks of which it is not known that they were
        self._launched = 0
        self._finished_ns = 0
        self.graphs: DecodeGraphs | None = None
        if graph_rows_max:
            rows = min(graph_rows_max, step_rows_max)
            context_width = -(-model.info.context_tokens_max // pool.block_size)
            width = min(table_width or context_width, context_width)
            self.graphs = DecodeGraphs(model, pool, self._state, rows, width)

    def run(self, step: Step, tables: npt.NDArray[np.int32]) -> StepOutcome:
        """`launch` and `finish` in one."""
        return self.finish(self.launch(step, tables))

    @torch.inference_mode()
    def launch(self, step: Step, tables: npt.NDArray[np.int32]) -> PendingStep:
        """Queues one step on the device.

        step: as its docstring says, except that `copies` and `zeros` name pool-local blocks. tables: [rows, width]
        int32, row r the block table of step row r, pool-local ids; entries past a row's tokens are not read.
        Never raises for what a step holds: every fault becomes the RowError of the rows it concerns. Raises OutOfStep
        where several ranks compute together and this one's pass failed: none of them can go on.
        At most STEPS_UNDER_WAY_MAX steps may be launched and not finished.
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
        fault = malformed(step, tables, self.limits)
        if fault is not None:
            pending.errors.update((slot, fault) for slot in pending.slots.tolist())
        try:
            if fault is None or fault.field != "zeros":
                self._zero(step.zeros)
            if fault is None:
                self._carry_out(step, tables, pending)
        except OutOfStep:
            raise
        except Exception as error:  # noqa: BLE001 - no memory for the step's own arrays, or the device is lost
            self._lost(pending, error)
        if not pending.waiting or self.shaping.ready(pending):
            self._complete(pending)
        self._under_way.append(pending)
        self.meter.launched(len(pending.slots), time.monotonic_ns() - started_ns)
        return pending

    def _carry_out(self, step: Step, tables: npt.NDArray[np.int32], pending: PendingStep) -> None:
        tokens, generated = told_apart(step.tokens, step.counts, self.model.wants_kinds)
        rows = Rows(step.slots, step.starts, step.counts, step.samples, tokens, tables, generated)
        if step.begins:
            self._begin(step.begins, split_history(step), pending.errors)
        rows = self._checked(rows, step.copies.reshape(-1, 3), pending.errors)
        if not len(rows):
            return
        absent = rows.tokens == NO_TOKEN
        if absent.any():
            pending.fed = frozenset(np.repeat(rows.slots, rows.counts)[absent].tolist())
        self.shaping.submit(pending)
        self._queue(rows, pending)
        self._compile(pending)

    def _compile(self, pending: PendingStep) -> None:
        """Compiles the grammars of rows that have begun, while the device computes."""
        problems = self.shaping.compile(pending)
        if problems:
            pending.errors.update(problems)
            self._refused |= problems

    def _complete(self, pending: PendingStep) -> None:
        """Queues what is still to be chosen, and marks the end of the step's work."""
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
    def _choose_shaped(self, waiting: Waiting, pending: PendingStep) -> None:
        chosen, masks = self.shaping.masked(waiting, pending)
        if len(chosen.slots):
            self._sample(chosen.logits, chosen.slots, pending, masks)

    def _zero(self, blocks: Int32Array) -> None:
        """Zeroes blocks before anything else of the step, whatever else is wrong with it. If that fails the step does,
        and so does each one after it until these are zeroed too: their tenant may get them again, and is not to see
        what another one left there."""
        if not blocks.size and not self._unzeroed.size:
            return
        self._unzeroed = np.union1d(self._unzeroed, blocks)
        self.pool.zero_blocks(self._unzeroed)
        self._unzeroed = self._unzeroed[:0]

    def _end(self, pending: PendingStep) -> None:
        """Marks the end of the step's work."""
        try:
            pending.end = Mark(self.model.device)
        except RuntimeError as error:
            self._lost(pending, error)

    def reset(self) -> None:
        """Forgets every slot: another coordinator is in charge. Steps under way are waited for and dropped."""
        while self._under_way:
            self.finish(self._under_way[0])
        self._has_sampled[:] = False
        self._refused.clear()
        self.shaping.grammars.forget()

    def close(self) -> None:
        """Gives up what was captured. The pool stays its owner's."""
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
                self._has_sampled[start.slot] = False
        try:
            self._state.upload_starts()
        except Exception as error:
            self._refused |= {
                start.slot: as_worker_error(error, "starting a row", self.model.device) for start in begins
            }
            raise

    def _checked(self, rows: Rows, copies: npt.NDArray[np.int32], errors: dict[int, KvforgeError]) -> Rows:
        """The rows that may run, after the copies that may be made; the others get their error."""
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
        """Queues the rows, from a graph where they are decodes that one takes."""
        if self.graphs is None or not rows.generated.all() or not self.graphs.can_run(rows):
            self._queue_pass(rows, pending)
            return
        try:
            launched = self.graphs.launch(rows)
        except Exception as error:  # noqa: BLE001 - what was queued cannot be taken back
            self._keep_in_step(error)
            failure = as_worker_error(error, "a decode graph", self.model.device)
            pending.errors.update((slot, failure) for slot in rows.slots.tolist())
            return
        pending.busy = launched.busy
        if launched.sampled is not None:
            pending.sampled.append(launched.sampled)
        if len(launched.others):
            self._sample(self.graphs.logits_of(launched.others), rows.slots[launched.others], pending)

    def _queue_pass(self, rows: Rows, pending: PendingStep) -> None:
        """Queues the rows together; if that fails, one by one, so that only the faulty ones fail."""
        try:
            logits, sampled = self._forward(rows)
        except Exception as error:  # noqa: BLE001 - any failure of foreign model code must spare the other rows
            self._keep_in_step(error)
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
        if len(sampled):
            self._sample(logits, sampled, pending)

    def _keep_in_step(self, error: Exception) -> None:
        """A rank that has not made a pass that others have made exchanges other numbers than they do from then on."""
        ranks = self.model.ranks
        if ranks is not None:
            told = f"{type(error).__name__}: {error}"
            raise OutOfStep(f"rank {ranks.rank} of {ranks.count} could not do its part of a step: {told}") from error

    def _forward(self, rows: Rows) -> tuple[torch.Tensor, Int32Array]:
        """Logits [sampled, vocab] float32 device, and the slots [sampled] int32 host they belong to."""
        found = [self._pass(*part) for part in passes(*by_kind(rows))]
        if len(found) == 1:
            return found[0]
        return torch.cat([logits for logits, _ in found]), np.concatenate([slots for _, slots in found])

    def _pass(self, rows: Rows, generated: BoolArray) -> tuple[torch.Tensor, Int32Array]:
        """The same of rows that are decodes where `generated` says so."""
        device = self.model.device
        batch = PagedBatch.build(rows.tables, rows.starts, rows.counts, self.pool.block_size, device, generated)
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
            # What a step that fails left behind may be NO_TOKEN itself: that row fails when the failure is known.
            token_ids = torch.where(token_ids == NO_TOKEN, self._state.last_token[slots].clamp_(min=0), token_ids)
        return self.model.forward(token_ids, places, inputs[3 * count :], batch, self.pool), rows.slots[samples]

    def _sample(
        self, logits: torch.Tensor, slots: Int32Array, pending: PendingStep, masks: torch.Tensor | None = None
    ) -> None:
        """Queues the choice of tokens for all rows; if that fails, one by one. Rows with a grammar wait for masks.

        logits: [n, vocab]; slots: [n] host; masks: [n, words] int32 device, of rows that all have a grammar.
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
        return Sampled(slots, Fetched(self.model.device, chosen.packed()), chosen.top_counts)

    def _choose_simple(self, logits: torch.Tensor, slots: Int32Array, masks: torch.Tensor | None) -> Sampled:
        device = self.model.device
        on_device = device.upload(slots.astype(np.int64))
        packed = torch.empty(3 * len(slots), dtype=torch.int32, device=device.torch_device)
        self._state.sample_simple(logits, on_device, torch.ones_like(on_device), packed, masks)
        return Sampled(slots, Fetched(device, packed), np.zeros(len(slots), np.int32))

    # -------------------------------------------------------------------------------------------------------- finishing

    def finish(self, pending: PendingStep) -> StepOutcome:
        """Waits for the end of the oldest step under way. Never raises for what it holds or what the device does."""
        assert self._under_way[0] is pending, "steps are finished in the order of their launch"
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
                problem = InvalidRequest("sampling.logit_bias", "bans every token that may be chosen")
                pending.errors.update((slot, problem) for slot in sampled.slots[rows.banned].tolist())
            if not rows.finite.all():
                broken = WorkerError("the model gave logits that are not finite")
                pending.errors.update((slot, broken) for slot in sampled.slots[~rows.finite].tolist())
        for slot, spoiled in pending.spoiled.items():
            pending.errors.setdefault(slot, spoiled)
        arrived_ns = time.monotonic_ns()
        self._under_way.popleft()
        if pending.errors:
            self._spoil(pending)
        if pending.shaped:
            self.shaping.known(pending, _tokens_of(read, pending))
        if self._under_way and self._under_way[0].waiting:
            self._complete(self._under_way[0])
        before_ns, self._finished_ns = self._finished_ns, arrived_ns
        outcome = joined(read, pending, (arrived_ns - max(pending.started_ns, before_ns)) // 1000)
        self.meter.finished(pending, arrived_ns - waiting_ns, time.monotonic_ns() - arrived_ns)
        return outcome

    def _lost(self, pending: PendingStep, error: Exception) -> None:
        """Something failed that is no row's own: no row of the step can be told from another."""
        failure = as_worker_error(error, "a step", self.model.device)
        for slot in pending.slots.tolist():
            pending.errors.setdefault(slot, failure)
        pending.sampled, pending.waiting = [], []

    def _spoil(self, pending: PendingStep) -> None:
        """Rows of this step have failed: what was launched behind it and fed with their tokens fails too."""
        for slot in pending.errors:
            if 0 <= slot < len(self._has_sampled) and self._sampled_in[slot] == pending.number:
                self._has_sampled[slot] = False
        for later in self._under_way:
            for slot, error in pending.errors.items():
                if slot in later.fed and slot not in later.begun and slot not in later.errors:
                    later.spoiled[slot] = error


def _tokens_of(read: list[tuple[Int32Array, HostRows]], pending: PendingStep) -> dict[int, int]:
    """What the step's slots have chosen, without those that failed."""
    chosen: dict[int, int] = {}
    for slots, rows in read:
        chosen.update(zip(slots.tolist(), rows.tokens.tolist(), strict=True))
    return {slot: token for slot, token in chosen.items() if slot not in pending.errors}
