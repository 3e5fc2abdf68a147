"""The model runner: executes one step, from the coordinator's arrays to sampled tokens.

Order of a step:

0. Blocks that were evicted are copied to the host.
1. Blocks that come from another tenant are zeroed. Then blocks are filled from the host.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidRequest, KvforgeError, WorkerError
from kvforge.protocol.messages import ANY_ROWS, Int32Array, RowStart, Step
from kvforge.text.grammar_helper import TrialLimits
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool, require_positive
from kvforge.worker.attention.windows import WindowTables
from kvforge.worker.device.device import as_worker_error
from kvforge.worker.device.queue import AsyncCopy, DeviceEvent, Staging
from kvforge.worker.drafts.drafter import NO_ENDS, NO_PROPOSALS, Drafter, Proposals
from kvforge.worker.drafts.lookup import LookupDrafter
from kvforge.worker.drafts.model import ModelDrafter
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.sampler import NO_TOKEN, HostRows, SamplingState
from kvforge.worker.sampling.scoring import FINITE_COLUMN, ScoredPart, score, tokens_at_a_time, unpacked

from .checks import BoolArray, Rows, Scoring, StepLimits, bad_copies, check_rows, find_malformed
from .draft_checks import drafts_possible
from .draft_graphs import DraftGraphs
from .draft_passes import DraftPasses
from .draft_states import accept_states, draft_pages
from .graphs import DecodeGraphs
from .host_transfers import COPY_NUMBERS, HostTransfers, HostWork, bad_host_copies, copied_blocks, uses_host
from .meter import Meter
from .pending import PendingStep, StepOutcome, joined
from .prompt_graphs import PromptGraphs, can_capture
from .row_ends import row_ends
from .row_sampler import RowSampler, drafts_before
from .row_start_checks import Histories, problem_of, split_history
from .shaping import GrammarMasks
from .token_kinds import split_by_kind, split_drafts, split_marks, split_passes

STEPS_UNDER_WAY_MAX = 2
NOT_FINITE = "the model returned logits that are not finite"

__all__ = ["STEPS_UNDER_WAY_MAX", "PendingStep", "ModelRunner", "StepOutcome"]


class FatalStepError(WorkerError):
    """A step failed in a way that no later one can make good: the worker must end, and its rows be recomputed."""


class RankDesyncError(FatalStepError):
    """A rank failed a step that other ranks completed: all ranks must restart."""


class HostCopyError(FatalStepError):
    """A copy from or to the host failed: later steps depend on it."""


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
        drafts_max: The most drafted tokens of a row; 0: none. For a model with recurrent states, a step has at most
            `KvGeometry.draft_states` in all.
        draft_rows_max: The most rows of a step, drafts included: steps of as many rows look nothing up.

    Attributes:
        host: Makes the copies from and to the host file; None without one.

    Raises:
        InvalidConfiguration: Names the invalid limit.
    """

    host: HostTransfers | None = None

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
        drafts_max: int = 0,
        draft_rows_max: int = ANY_ROWS,
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
            drafts_max=min(drafts_max, drafts_possible(model, min(step_rows_max, slots_max))),
            draft_states=pool.geometry.draft_states,
        )
        self._state = SamplingState(slots_max, model.vocab_size, model.device)
        # Tokens, positions and slots of a step, then the indices of the tokens to sample after.
        self.shaping = GrammarMasks(model, slots_max, step_rows_max, trials or TrialLimits())
        self._sampler = RowSampler(model.device, self._state, self.shaping)
        context = model.info.context_tokens_max
        self.drafter: Drafter | None = LookupDrafter(slots_max, context) if self.limits.drafts_max else None
        self._draft_passes: DraftPasses | None = None
        if model.draft is not None and self.drafter is not None:
            self._draft_passes = DraftPasses(model.draft, pool, model.vocab_size, step_tokens_max)
            self.drafter = ModelDrafter(LookupDrafter(slots_max, context), self._draft_passes)
        self._draft_rows_max = draft_rows_max
        self._inputs = Staging(model.device, 3 * step_tokens_max + step_rows_max)
        # Slot state that the host needs without asking the device.
        self._has_sampled = np.zeros(slots_max, np.bool_)
        self._sampled_in = np.zeros(slots_max, np.int64)  # number of the step that sampled last
        self._prompt_tops = np.zeros(slots_max, np.int32)  # top tokens that a slot wants for each prompt token
        self._refused: dict[int, KvforgeError] = {}  # slots with an invalid start or state, until a valid start comes
        # Finished steps whose slots are still to be advanced: see `accept_drafts`.
        self._unaccepted: list[tuple[list[tuple[Int32Array, HostRows]], PendingStep, frozenset[int]]] = []
        self._under_way: deque[PendingStep] = deque()
        self._unzeroed = np.zeros(0, np.int32)  # blocks that still have to be zeroed
        self._launched = 0
        self._finished_ns = 0
        self._last_end: DeviceEvent | None = None  # of the step that was finished last
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.draft_graphs: DraftGraphs | None = None
        if graph_rows_max and model.can_be_captured:
            rows = min(graph_rows_max, step_rows_max)
            context_width = -(-model.info.context_tokens_max // pool.block_size)
            width = min(table_width or context_width, context_width)
            self.graphs = DecodeGraphs(model, pool, self._state, rows, width)
            if can_capture(model, pool):
                self.prompt_graphs = PromptGraphs(
                    model, pool, self._state, rows, step_tokens_max, width, self.graphs.memory
                )
            if self._draft_passes is not None:
                self.draft_graphs = self._draft_passes.use_graphs(rows, width, self.graphs.memory)

    @property
    def model_drafts(self) -> int:
        """The most tokens that a draft model proposes for a row; 0: there is none."""
        return min(self._draft_passes.tokens_max, self.limits.drafts_max) if self._draft_passes is not None else 0

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
            HostCopyError: A copy from or to the host failed.
        """
        assert len(self._under_way) < STEPS_UNDER_WAY_MAX, "finish a step before launching another"
        started_ns = time.monotonic_ns()
        self._launched += 1
        self.accept_drafts()
        pending = PendingStep(
            number=self._launched,
            slots=np.ravel(step.slots),
            fed=frozenset(),
            begun=frozenset(start.slot for start in step.begins),
            errors={},
            sampled=[],
            started_ns=started_ns,
            propose=step.propose,
            queued_behind=any(not earlier.done() for earlier in self._under_way),
        )
        fault = find_malformed(step, tables, self.limits, states, windows)
        uses = uses_host(step)
        if fault is None and uses:
            fault = bad_host_copies(step, self.limits.blocks, self.host.file.blocks if self.host is not None else 0)
        if fault is not None:
            pending.errors.update((slot, fault) for slot in pending.slots.tolist())
        copies = fault is None and uses
        if copies:
            self._save(step, pending)
        try:
            if fault is None or fault.field != "zeros":
                self._zero(step.zeros)
            if fault is None:
                if copies:
                    self._load(step, pending)
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

    def _save(self, step: Step, pending: PendingStep) -> None:
        """Wipe host blocks, and queue a step's copies to the host."""
        assert self.host is not None, "a malformed step copies nothing"
        with _host_copies():
            if step.host_wipes.size:
                self.host.wipe(step.host_wipes)
            pending.host = HostWork(self.host.save(step.host_writes) if step.host_writes.size else None)

    def _load(self, step: Step, pending: PendingStep) -> None:
        """Queue a step's copies from the host."""
        assert self.host is not None and pending.host is not None
        with _host_copies():
            if step.host_reads.size:
                pending.host.loaded = self.host.load(step.host_reads)
                if self.pool.beside is not None and self.pool.beside.backlog is not None:
                    self.pool.beside.backlog.load(step.host_reads[::COPY_NUMBERS])
        pending.host_copied = copied_blocks(step)

    def _carry_out(
        self,
        step: Step,
        tables: npt.NDArray[np.int32],
        pending: PendingStep,
        states: npt.NDArray[np.int32] | None,
        windows: WindowTables | None,
    ) -> None:
        drafts = step.drafts if step.drafts.any() else None
        tokens, generated = split_marks(step.tokens, step.counts, self.model.wants_kinds, drafts)
        rows = Rows(
            *(step.slots, step.starts, step.counts, step.samples, tokens, tables, generated, Scoring.of(step)),
            *(states, windows, drafts),
        )
        self._refuse_unsettled(rows, pending)
        if step.begins:
            self._begin(step.begins, split_history(step), pending.errors)
        rows = pending.rows = self._checked(rows, step.copies.reshape(-1, 3), pending.errors)
        if not len(rows):
            return
        if rows.scoring is not None:
            width = int(self._prompt_tops[rows.slots].max())
            rows = replace(rows, scoring=replace(rows.scoring, top_width=width))
        if rows.drafts is not None and rows.states is not None:
            rows = pending.rows = replace(rows, draft_states=draft_pages(self.pool, int(rows.drafts.sum())))
        if rows.drafts is not None:
            pending.drafted = frozenset(rows.slots[rows.drafts > 0].tolist())
        absent = rows.tokens == NO_TOKEN
        if absent.any():
            pending.fed = frozenset(np.repeat(rows.slots, rows.counts)[absent].tolist())
        self.shaping.submit(pending)
        self._note_drafter(rows)
        self._queue(rows, pending)
        self._compile(pending)

    def _note_drafter(self, rows: Rows) -> None:
        """Note which tokens of a step will lack the drafter's K and V, and catch up before prompts that need them."""
        if self.pool.beside is None or self.pool.beside.backlog is None:
            return
        if self._draft_passes is not None and not rows.generated.all() and not self._draft_passes.reads_hidden:
            self._draft_passes.complete(rows.tables, rows.starts)
        self.pool.beside.backlog.write(rows.tables, rows.starts, rows.counts, rows.generated)

    def _refuse_unsettled(self, rows: Rows, pending: PendingStep) -> None:
        """Record an error for rows of slots with drafts in flight: how far these advance is not known yet."""
        for earlier in self._under_way:
            if not earlier.drafted:
                continue
            for slot in earlier.drafted.intersection(rows.slots.tolist()) - pending.begun:
                problem = f"slot {slot} has drafts in flight; send its next row after their result"
                pending.errors[slot] = InvalidRequest("slots", problem)

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
                self._sampler.sample_deferred(waiting, pending)
            except Exception as error:  # noqa: BLE001 - no memory for the masks, or the device is lost
                failure = as_worker_error(error, "masks", self.model.device)
                pending.errors.update((slot, failure) for slot in waiting.slots.tolist())
        pending.waiting = []
        for sampled in pending.sampled:
            self._has_sampled[sampled.slots] = True
            self._sampled_in[sampled.slots] = pending.number
        self._end(pending)

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
            pending.end = DeviceEvent(self.model.device, timed=True)
        except RuntimeError as error:
            self._lost(pending, error)

    def reset(self) -> None:
        """Forget every slot for another coordinator. Wait for the steps in flight and drop them."""
        while self._under_way:
            self.finish(self._under_way[0])
        self._has_sampled[:] = False
        self._last_end = None
        self._refused.clear()
        self._unaccepted.clear()
        if self.drafter is not None:
            self.drafter.forget()
        self.shaping.grammars.forget()

    def close(self) -> None:
        """Drop the captured graphs. The caller keeps the pool."""
        self.reset()
        for graphs in (self.graphs, self.prompt_graphs, self.draft_graphs):
            if graphs is not None:
                graphs.close()

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
                if self.drafter is not None:
                    most = min(start.drafts, self.limits.drafts_max)
                    self.drafter.begin(start.slot, *history, most, start.shared_drafts)
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
        """Queue the rows: from a graph if they fit one, else as a pass."""
        if not rows.generated.all():
            if self.prompt_graphs is not None and self.prompt_graphs.can_run(rows):
                self._queue_prompts(self.prompt_graphs, rows, pending)
            else:
                self._queue_pass(rows, pending)
            return
        single = None if self.graphs is None or rows.scoring is not None else split_drafts(rows)
        if self.graphs is None or single is None or not self.graphs.can_run(single):
            self._queue_pass(rows, pending)
            return
        try:
            launched = self.graphs.launch(single, drafts_before(rows))
        except Exception as error:  # noqa: BLE001 - queued work cannot be rolled back
            self._fail_graph(error, "a decode graph", rows, pending)
            return
        pending.begin, pending.busy, pending.started_ns = launched.busy[0], launched.busy, launched.started_ns
        pending.sampled += launched.sampled
        if len(launched.others):
            self._sampler.sample_others(self.graphs.logits_of(launched.others), rows, launched.others, pending)

    def _queue_prompts(self, graphs: PromptGraphs, rows: Rows, pending: PendingStep) -> None:
        """Queue rows that `PromptGraphs.can_run` accepted."""
        try:
            launched = graphs.launch(rows)
        except Exception as error:  # noqa: BLE001 - queued work cannot be rolled back
            self._fail_graph(error, "a graph of prompt tokens", rows, pending)
            return
        pending.begin = launched.begin
        if launched.sampled is not None:
            pending.sampled.append(launched.sampled)
        if launched.logits is not None:
            self._sampler.sample(launched.logits, rows.slots[launched.others], pending)

    def _fail_graph(self, error: Exception, what: str, rows: Rows, pending: PendingStep) -> None:
        """Fail the rows of a graph that could not be launched."""
        self._require_repeatable(error)
        failure = as_worker_error(error, what, self.model.device)
        pending.errors.update((slot, failure) for slot in rows.slots.tolist())

    def _queue_pass(self, rows: Rows, pending: PendingStep) -> None:
        """Queue the rows together. If that fails, queue them one by one, so that only the faulty ones fail."""
        try:
            if pending.begin is None:
                pending.begin = DeviceEvent(self.model.device, timed=True)
            logits, scored = self._forward(rows)
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
        self._sampler.sample_step(logits, rows, pending)

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

    def _forward(self, rows: Rows) -> tuple[torch.Tensor, list[ScoredPart]]:
        """Return logits [sampled, vocab] float32 on the device, as `sampling_rows` orders them, and scored tokens."""
        found = [self._pass(*part) for part in split_passes(*split_by_kind(rows))]
        if len(found) == 1:
            return found[0]
        return torch.cat([logits for logits, _ in found]), [part for _, parts in found for part in parts]

    def _pass(self, rows: Rows, generated: BoolArray) -> tuple[torch.Tensor, list[ScoredPart]]:
        """Run one pass over rows. generated: [rows] bool, the rows that are decodes. Return as `_forward` does."""
        states = rows.states, rows.windows, rows.sources
        batch = self.pool.batch(rows.tables, rows.starts, rows.counts, generated, *states)
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
            return self._pass_and_score(token_ids, places, inputs[3 * count :], batch, rows)
        return self.model.forward(token_ids, places, inputs[3 * count :], batch, self.pool), []

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

    # -------------------------------------------------------------------------------------------------------- finishing

    def finish(self, pending: PendingStep) -> StepOutcome:
        """Wait for the oldest step in flight, and return its outcome. Row and device failures do not raise.

        Raises:
            HostCopyError: A copy from or to the host failed.
        """
        assert self._under_way[0] is pending, "finish steps in the order of their launch"
        waiting_ns = time.monotonic_ns()
        try:
            if pending.end is not None:
                self._prepare_drafts(pending, pending.end)
                pending.end.wait()
        except RuntimeError as error:
            self._lost(pending, error)
        if pending.host is not None:
            with _host_copies():
                pending.host_missed = pending.host.settle()
                pending.host_us = pending.host.took_us()
        read: list[tuple[Int32Array, HostRows]] = []
        for sampled in pending.sampled:
            slots, rows = self._sampler.read(sampled)
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
        arrived_ns = time.monotonic_ns()
        self._under_way.popleft()
        begun = frozenset(slot for later in self._under_way for slot in later.begun)
        if pending.drafted:
            self._unaccepted.append((read, pending, begun))
        if pending.errors:
            self._fail_dependents(pending)
        chosen = _tokens_of(read, pending) if pending.shaped or self.drafter is not None else {}
        if pending.shaped:
            self.shaping.known(pending, chosen)
        if self._under_way and self._under_way[0].waiting:
            self._complete(self._under_way[0])
        before_ns, self._finished_ns = self._finished_ns, arrived_ns
        pending.idle_us = self._idle_us(pending)
        took_ns = arrived_ns - max(pending.started_ns, before_ns)
        outcome = joined(read, pending, took_ns // 1000)
        if scored:
            outcome = replace(outcome, prompts=unpacked(scored, pending.errors))
        if self.drafter is not None:
            outcome = replace(outcome, proposals=self._proposals(self.drafter, pending, chosen, begun))
        self.meter.finished(pending, arrived_ns - waiting_ns, time.monotonic_ns() - arrived_ns)
        return outcome

    def _idle_us(self, pending: PendingStep) -> int:
        """Return how long the device had nothing to do before a step that has ended; -1: not measured.

        Passes of a draft model are between steps, and are no pause.
        """
        last, self._last_end = self._last_end, pending.end
        if last is None or pending.begin is None or pending.errors or self._draft_passes is not None:
            return -1
        return max(0, round(1000 * pending.begin.ms_since(last)))

    def accept_drafts(self) -> None:
        """Advance the slots of finished steps by their accepted drafts, on the device.

        The next launch does it otherwise. Called once the outcome of `finish` is sent, it delays nothing: a step with
        drafts is in flight alone. A slot that cannot be advanced fails in its next step.
        """
        for read, pending, begun in self._unaccepted:
            self._refused |= self._sampler.advance(read, pending, begun)
            if self.pool.states is not None:
                self._accept_states(read, pending, begun)
        self._unaccepted.clear()

    def _accept_states(
        self, read: list[tuple[Int32Array, HostRows]], pending: PendingStep, begun: frozenset[int]
    ) -> None:
        """Take the recurrent states of a finished step to the last accepted drafts.

        Raises:
            StateLostError: The copies failed.
        """
        try:
            accept_states(self.pool, pending, _tokens_of(read, pending), begun)
        except Exception as error:
            raise StateLostError(f"accepting drafts over recurrent states failed: {error}") from error

    def _prepare_drafts(self, pending: PendingStep, end: DeviceEvent) -> None:
        """Let the drafter prepare while the device computes a step behind which it may propose. end: of the step."""
        if self.drafter is not None and len(pending.slots) < self._draft_rows_max:
            self.drafter.prepare(pending.slots.tolist(), end.passed)

    def _proposals(
        self, drafter: Drafter, pending: PendingStep, chosen: dict[int, list[int]], begun: frozenset[int]
    ) -> Proposals:
        """Add the tokens that a step sampled, by slot, to the drafter, and return what it proposes for these slots."""
        slots = [slot for slot in chosen if slot not in begun]
        for slot in slots:
            drafter.append(slot, chosen[slot])
        if len(pending.slots) >= self._draft_rows_max and not pending.propose:
            return NO_PROPOSALS  # there is no room for drafts
        ends = NO_ENDS
        if pending.propose and self._draft_passes is not None and not self._under_way:
            ends = row_ends(pending, chosen, self.pool.block_size)
        return drafter.propose(slots, ends, pending.propose)

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


@contextmanager
def _host_copies() -> Iterator[None]:
    """Convert failures of copies from and to the host."""
    try:
        yield
    except (KvforgeError, RuntimeError, OSError, MemoryError) as error:
        raise HostCopyError(f"a copy from or to the host failed: {error}") from error


def _tokens_of(read: list[tuple[Int32Array, HostRows]], pending: PendingStep) -> dict[int, list[int]]:
    """Return the sampled tokens of each slot that did not fail."""
    chosen: dict[int, list[int]] = {}
    for slots, rows in read:
        for slot, token in zip(slots.tolist(), rows.tokens.tolist(), strict=True):
            if slot not in pending.errors:
                chosen.setdefault(slot, []).append(token)
    return chosen
