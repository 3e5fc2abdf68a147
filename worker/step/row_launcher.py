"""Queueing of a step's rows: from a captured graph if they fit one, else as a pass.

If a pass fails, its rows run again one by one (writing K and V twice gives the same bytes), and only those that fail
alone are reported. A pass over recurrent states cannot run again, because it has advanced some of them: if it fails,
the worker ends.
"""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import KvforgeError
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.capture import GraphMemory
from kvforge.worker.device.device import as_worker_error
from kvforge.worker.device.queue import DeviceEvent
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.sampler import SamplingState

from .checks import Rows
from .forward_passes import ForwardPasses
from .graphs import DecodeGraphs
from .pending import PendingStep
from .prompt_graphs import PromptGraphs, can_capture
from .row_sampler import RowSampler, drafts_before
from .step_failures import require_repeatable
from .token_kinds import split_drafts


class RowLauncher:
    """Queues rows on the device, and the sampling behind them.

    Args:
        model: The model.
        passes: Its passes outside of graphs.
        sampler: Queues the sampling.

    Attributes:
        passes: The same passes.
        graphs: Captured decode steps; None: decodes run as passes.
        prompt_graphs: Captured steps with few prompt tokens; None: these run as passes.
    """

    graphs: DecodeGraphs | None = None
    prompt_graphs: PromptGraphs | None = None

    def __init__(self, model: LoadedModel, passes: ForwardPasses, sampler: RowSampler) -> None:
        self._model, self.passes, self._sampler = model, passes, sampler

    def use_graphs(
        self, pool: KvPool, state: SamplingState, rows_max: int, step_tokens_max: int, width: int
    ) -> GraphMemory | None:
        """Prepare captured steps.

        Args:
            pool: The pool of the model.
            state: Sampling state of slots.
            rows_max: The most rows of a step from a graph.
            step_tokens_max: Most tokens of a step.
            width: The most blocks of a row.

        Returns:
            The memory of the graphs, for others to share; None on a CPU.
        """
        self.graphs = DecodeGraphs(self._model, pool, state, rows_max, width)
        if can_capture(self._model, pool):
            self.prompt_graphs = PromptGraphs(
                self._model, pool, state, rows_max, step_tokens_max, width, self.graphs.memory
            )
        return self.graphs.memory

    def launch(self, rows: Rows, pending: PendingStep) -> None:
        """Queue the rows: from a graph if they fit one, else as a pass.

        Args:
            rows: The rows, checked.
            pending: Their step; it gets what they sample, and their errors.

        Raises:
            RankDesyncError: A pass failed on this rank of several.
            StateLostError: A pass failed on a model with recurrent states.
        """
        if not rows.generated.all():
            if self.prompt_graphs is not None and self.prompt_graphs.can_run(rows):
                self._launch_prompts(self.prompt_graphs, rows, pending)
            else:
                self._launch_pass(rows, pending)
            return
        single = None if self.graphs is None or rows.scoring is not None else split_drafts(rows)
        if self.graphs is None or single is None or not self.graphs.can_run(single):
            self._launch_pass(rows, pending)
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

    def _launch_prompts(self, graphs: PromptGraphs, rows: Rows, pending: PendingStep) -> None:
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
        require_repeatable(self._model, error)
        failure = as_worker_error(error, what, self._model.device)
        pending.errors.update((slot, failure) for slot in rows.slots.tolist())

    def _launch_pass(self, rows: Rows, pending: PendingStep) -> None:
        """Queue the rows together. If that fails, queue them one by one, so that only the faulty ones fail."""
        device = self._model.device
        try:
            if pending.begin is None:
                pending.begin = DeviceEvent(device, timed=True)
            logits, scored = self.passes.forward(rows)
        except Exception as error:  # noqa: BLE001 - any failure of foreign model code must spare the other rows
            require_repeatable(self._model, error)
            if len(rows) == 1 or not device.survives():
                failure = (
                    error if isinstance(error, KvforgeError) else as_worker_error(error, "the forward pass", device)
                )
                pending.errors.update((slot, failure) for slot in rows.slots.tolist())
                return
            device.release_cached()
            for row in range(len(rows)):
                self._launch_pass(rows.pick(np.arange(len(rows)) == row), pending)
            return
        pending.scored += scored
        self._sampler.sample_step(logits, rows, pending)
