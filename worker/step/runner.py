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

A poison row fails alone. Rows that fail a check are left out of the batch, and rows of a failed pass run again one by
one (`row_launcher`). The state of a slot changes only when its token is sampled. A row with non-finite logits fails,
and so does its row in the next step, which was queued with that missing token.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import ANY_ROWS, Step
from kvforge.text.grammar_helper import TrialLimits
from kvforge.worker.attention.pool import KvPool, require_positive
from kvforge.worker.attention.windows import WindowTables
from kvforge.worker.device.device import as_worker_error
from kvforge.worker.device.queue import DeviceEvent
from kvforge.worker.drafts.drafter import Drafter
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.sampler import NO_TOKEN, SamplingState
from kvforge.worker.sampling.scoring import unpacked

from .checks import Rows, Scoring, StepLimits, bad_copies, check_rows, find_malformed
from .device_pauses import DevicePauses
from .draft_checks import drafts_possible
from .draft_graphs import DraftGraphs
from .draft_states import draft_pages
from .forward_passes import ForwardPasses
from .graphs import DecodeGraphs
from .host_copies import load_blocks, save_blocks, settle_copies
from .host_transfers import HostTransfers, bad_host_copies, uses_host
from .meter import Meter
from .pending import PendingStep, StepOutcome, joined
from .prompt_graphs import PromptGraphs
from .row_launcher import RowLauncher
from .row_sampler import RowSampler
from .row_start_checks import split_history
from .row_starter import RowStarter
from .shaping import GrammarMasks
from .slot_records import SlotRecords
from .step_drafts import StepDrafts, refuse_unsettled
from .step_failures import FatalStepError, fail_dependents, fail_step
from .step_results import read_results, tokens_of
from .token_kinds import split_marks
from .zeroing import BlockZeroer

STEPS_UNDER_WAY_MAX = 2

__all__ = ["STEPS_UNDER_WAY_MAX", "PendingStep", "ModelRunner", "StepOutcome"]


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
        self.shaping = GrammarMasks(model, slots_max, step_rows_max, trials or TrialLimits())
        self._sampler = RowSampler(model.device, self._state, self.shaping)
        self._drafts = StepDrafts(model, pool, self.limits, self._sampler, draft_rows_max)
        self._records = SlotRecords(slots_max)
        self._starter = RowStarter(
            model.device, self.limits, self._state, self.shaping, self._records, self._drafts.drafter
        )
        passes = ForwardPasses(model, pool, self._state, self._records, step_tokens_max, step_rows_max)
        self._launcher = RowLauncher(model, passes, self._sampler)
        self._under_way: deque[PendingStep] = deque()
        self._zeroer = BlockZeroer(pool)
        self._launched = 0
        self._finished_ns = 0
        self._pauses = DevicePauses(is_measured=self._drafts.passes is None)
        if graph_rows_max and model.can_be_captured:
            self._use_graphs(min(graph_rows_max, step_rows_max), table_width)

    def _use_graphs(self, rows: int, table_width: int) -> None:
        """Prepare captured steps of at most so many rows. table_width: as for the class."""
        pool = self.pool
        context_width = -(-self.model.info.context_tokens_max // pool.block_size)
        width = min(table_width or context_width, context_width)
        memory = self._launcher.use_graphs(pool, self._state, rows, self.limits.step_tokens_max, width)
        if self._drafts.passes is not None:
            self._drafts.passes.use_graphs(rows, width, memory)

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Captured decode steps; None: decodes run as passes."""
        return self._launcher.graphs

    @property
    def prompt_graphs(self) -> PromptGraphs | None:
        """Captured steps with few prompt tokens; None: these run as passes."""
        return self._launcher.prompt_graphs

    @property
    def draft_graphs(self) -> DraftGraphs | None:
        """Captured passes of a draft model or of heads; None: all run eagerly, or there is none."""
        return self._drafts.passes.graphs if self._drafts.passes is not None else None

    @property
    def drafter(self) -> Drafter | None:
        """Proposes drafts for the next steps; None: nothing does."""
        return self._drafts.drafter

    @property
    def model_drafts(self) -> int:
        """The most tokens that a draft model proposes for a row; 0: there is none."""
        return self._drafts.model_tokens_max

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
        host = self.host if fault is None and uses else None  # a malformed step copies nothing
        if host is not None:
            save_blocks(host, step, pending)
        try:
            if fault is None or fault.field != "zeros":
                self._zeroer.zero(step.zeros)
            if fault is None:
                if host is not None:
                    load_blocks(host, step, pending, self.pool)
                self._carry_out(step, tables, pending, states, windows)
        except FatalStepError:
            raise
        except Exception as error:  # noqa: BLE001 - no memory for the step's own arrays, or the device is lost
            fail_step(pending, error, self.model.device)
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
        drafts = step.drafts if step.drafts.any() else None
        tokens, generated = split_marks(step.tokens, step.counts, self.model.wants_kinds, drafts)
        rows = Rows(
            *(step.slots, step.starts, step.counts, step.samples, tokens, tables, generated, Scoring.of(step)),
            *(states, windows, drafts),
        )
        refuse_unsettled(rows, pending, self._under_way)
        if step.begins:
            self._starter.begin(step.begins, split_history(step), pending.errors)
        rows = pending.rows = self._checked(rows, step.copies.reshape(-1, 3), pending.errors)
        if not len(rows):
            return
        if rows.scoring is not None:
            width = int(self._records.prompt_tops[rows.slots].max())
            rows = replace(rows, scoring=replace(rows.scoring, top_width=width))
        if rows.drafts is not None and rows.states is not None:
            rows = pending.rows = replace(rows, draft_states=draft_pages(self.pool, int(rows.drafts.sum())))
        if rows.drafts is not None:
            pending.drafted = frozenset(rows.slots[rows.drafts > 0].tolist())
        absent = rows.tokens == NO_TOKEN
        if absent.any():
            pending.fed = frozenset(np.repeat(rows.slots, rows.counts)[absent].tolist())
        self.shaping.submit(pending)
        self._drafts.note_rows(rows)
        self._launcher.launch(rows, pending)
        self._compile(pending)

    def _checked(self, rows: Rows, copies: npt.NDArray[np.int32], errors: dict[int, KvforgeError]) -> Rows:
        """Make the valid copies, and return the rows that may run. Record an error for the others."""
        bad_targets: frozenset[int] = frozenset()
        if len(copies):
            bad = bad_copies(copies, self.limits)
            bad_targets = frozenset(copies[bad, 1].tolist())
            self.pool.copy_blocks(copies[~bad])
        refused = self._records.refused
        if refused:
            for slot in rows.slots.tolist():
                if slot in refused:
                    errors.setdefault(slot, refused[slot])
        return rows.pick(check_rows(rows, self._records.has_sampled, bad_targets, self.limits, errors))

    def _compile(self, pending: PendingStep) -> None:
        """Compile the grammars of rows that have begun, while the device computes."""
        problems = self.shaping.compile(pending)
        if problems:
            pending.errors.update(problems)
            self._records.refused |= problems

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
            self._records.note_sampled(sampled.slots, pending.number)
        self._end(pending)

    def _end(self, pending: PendingStep) -> None:
        """Record a device event at the end of the step's work."""
        try:
            pending.end = DeviceEvent(self.model.device, timed=True)
        except RuntimeError as error:
            fail_step(pending, error, self.model.device)

    def finish(self, pending: PendingStep) -> StepOutcome:
        """Wait for the oldest step in flight, and return its outcome. Row and device failures do not raise.

        Raises:
            HostCopyError: A copy from or to the host failed.
        """
        assert self._under_way[0] is pending, "finish steps in the order of their launch"
        waiting_ns = time.monotonic_ns()
        try:
            if pending.end is not None:
                self._drafts.prepare(pending, pending.end)
                pending.end.wait()
        except RuntimeError as error:
            fail_step(pending, error, self.model.device)
        settle_copies(pending)
        read, scored = read_results(pending, self._sampler)
        arrived_ns = time.monotonic_ns()
        self._under_way.popleft()
        begun = frozenset(slot for later in self._under_way for slot in later.begun)
        if pending.drafted:
            self._drafts.note_finished(read, pending, begun)
        if pending.errors:
            self._records.withdraw_failed(pending)
            fail_dependents(pending, self._under_way)
        chosen = tokens_of(read, pending) if pending.shaped or self.drafter is not None else {}
        if pending.shaped:
            self.shaping.known(pending, chosen)
        if self._under_way and self._under_way[0].waiting:
            self._complete(self._under_way[0])
        before_ns, self._finished_ns = self._finished_ns, arrived_ns
        pending.idle_us = self._pauses.idle_us(pending)
        took_ns = arrived_ns - max(pending.started_ns, before_ns)
        outcome = joined(read, pending, took_ns // 1000)
        if scored:
            outcome = replace(outcome, prompts=unpacked(scored, pending.errors))
        if self.drafter is not None:
            proposals = self._drafts.propose(pending, chosen, begun, is_last=not self._under_way)
            outcome = replace(outcome, proposals=proposals)
        self.meter.finished(pending, arrived_ns - waiting_ns, time.monotonic_ns() - arrived_ns)
        return outcome

    def accept_drafts(self) -> None:
        """Advance the slots of finished steps by their accepted drafts, on the device.

        The next launch does it otherwise. Called once the outcome of `finish` is sent, it delays nothing: a step with
        drafts is in flight alone. A slot that cannot be advanced fails in its next step.
        """
        self._drafts.accept(self._records.refused)

    def reset(self) -> None:
        """Forget every slot for another coordinator. Wait for the steps in flight and drop them."""
        while self._under_way:
            self.finish(self._under_way[0])
        self._pauses.forget()
        self._records.forget()
        self._drafts.forget()
        self.shaping.grammars.forget()

    def close(self) -> None:
        """Drop the captured graphs. The caller keeps the pool."""
        self.reset()
        for graphs in (self.graphs, self.prompt_graphs, self.draft_graphs):
            if graphs is not None:
                graphs.close()
