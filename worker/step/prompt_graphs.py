"""Captured graphs of steps with few prompt tokens: the host launches them with one call, as it does decode steps.

A graph is captured for a few numbers of prompt tokens and of decodes (`MixedSize`). A step runs in the smallest
captured graph that holds it; places without a token are padding. The graph covers everything from the embedding to the
sampled token, as in `graphs`, which also describes rows that are sampled behind it.

A start captures those that take a second, by default, with few decodes first; the others follow one by one while the
worker is idle, or at the second step of their size. Until then such a step runs eagerly. A row's bits do not depend on
it.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvforge.worker.attention.mixed_batch import MixedBatch, MixedPlaces, MixedSize
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.capture import Captured, GraphMemory
from kvforge.worker.device.queue import DeviceEvent, HostBuffer
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.sampler import SamplingState

from .checks import Rows
from .pending import Sampled

# Sizes of graphs: prompt rows, their tokens together, and decodes, beside the most rows of a step.
PROMPT_ROWS = 8
PROMPT_TOKENS = (32, 64, 128, 256, 512)
DECODES = (0, 8, 32, 128)
DECODES_MAX = 512
TOKEN_INPUTS, ROW_INPUTS = 4, 3  # int32 values: see _Graph
CAPTURE_USES = 1  # eager steps of a size before its graph is captured, without idle time
START_S = 1.0  # of captures at a start
log = logging.getLogger("worker")


@dataclass(frozen=True)
class PromptLaunch:
    """A step with prompt tokens that was queued.

    Attributes:
        sampled: Tokens of the rows that the graph sampled; None if it sampled none.
        others: [n] int64, rows of the step that are still to be sampled.
        logits: [n, vocab] float32 on the device, theirs. The next replay overwrites them.
        begin: Device event before the graph.
    """

    sampled: Sampled | None
    others: npt.NDArray[np.int64]
    logits: torch.Tensor | None
    begin: DeviceEvent


@dataclass(frozen=True)
class _Graph:
    """A captured graph with its inputs and outputs.

    Attributes:
        batch: Static batch. Its extra inputs are [4, tokens]: token (-1: the slot's last), slot, position, 0; then [3,
            rows]: slot, wanted, the token to sample after; behind them lie the pages of states.
        results: [3 * rows] int32.
        captured: The graph.
        logits: Returns the logits [rows, vocab] float32 of the last replay.
    """

    batch: MixedBatch
    results: torch.Tensor
    captured: Captured
    logits: Callable[[], torch.Tensor]


class PromptGraphs:
    """The captured graphs of one model over one pool; see `can_capture`."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        state: SamplingState,
        rows_max: int,
        tokens_max: int,
        width: int,
        memory: GraphMemory | None,
    ) -> None:
        """Prepare; allocate and capture nothing yet.

        Args:
            model: The model.
            pool: Its KV pool.
            state: Sampling state of the slots.
            rows_max: Most rows of a step.
            tokens_max: Most tokens of a step.
            width: Most blocks of a row.
            memory: Memory of graphs, as of the decode graphs; None on a CPU.
        """
        self._model, self._pool, self._state, self._width = model, pool, state, width
        self._decodes = (*(size for size in DECODES if size < rows_max), min(rows_max, DECODES_MAX))
        self._tokens = tuple(size for size in PROMPT_TOKENS if size < 2 * tokens_max) or PROMPT_TOKENS[:1]
        self._graphs: dict[MixedSize, _Graph] = {}
        self._uses: Counter[MixedSize] = Counter()  # eager steps of a size without a graph
        self._memory = memory
        self._places: MixedPlaces | None = None
        self._landing: HostBuffer | None = None

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    @property
    def sizes(self) -> tuple[MixedSize, ...]:
        """The sizes of the graphs that are, or may still be, captured, the largest last."""
        return tuple(MixedSize(PROMPT_ROWS, tokens, rows) for rows in self._decodes for tokens in self._tokens)

    def can_run(self, rows: Rows) -> bool:
        """Return whether `launch` can run these rows, where some have prompt tokens.

        Otherwise the step is counted, and its graph may be captured now or later.
        """
        if not self._tokens or rows.scoring is not None:
            return False
        decodes = _decodes_of(rows)
        if decodes is None or len(rows) - int(decodes.sum()) > PROMPT_ROWS:
            return False
        if int((rows.starts + rows.counts).max()) > self._width * self._pool.block_size:
            return False
        if rows.states is not None and not _are_apart(rows, decodes):
            return False
        size = self._size_for(len(rows.tokens) - int(decodes.sum()), int(decodes.sum()))
        if size is None:
            return False
        if size in self._graphs:
            return True
        self._uses[size] += 1
        return self._uses[size] > CAPTURE_USES and self.capture_one(size)

    def launch(self, rows: Rows) -> PromptLaunch:
        """Queue a step that `can_run` accepted.

        Raises:
            RuntimeError: torch failed to replay the graph.
        """
        decodes = _decodes_of(rows)
        assert decodes is not None and self._landing is not None, "only for rows that `can_run` accepted"
        count = int(decodes.sum())
        size = self._size_for(len(rows.tokens) - count, count)
        assert size is not None, "only for rows that `can_run` accepted"
        graph = self._graphs[size]
        order = np.argsort(decodes, kind="stable")  # prompt rows first
        places = np.empty(len(rows), np.int64)  # of each row in the graph
        places[order] = graph.batch.row_places(len(rows), count)
        simple = (rows.samples == 1) & self._state.simple(rows.slots)
        self._fill(graph, rows, order, count, simple)
        begin = DeviceEvent(self._model.device, timed=True)
        graph.captured.replay()
        sampled = None
        if simple.any():
            chosen = np.flatnonzero(simple)
            fetched = self._landing.fetch(graph.results)
            nothing = np.zeros(len(chosen), np.int32)
            sampled = Sampled(rows.slots[chosen], fetched, nothing, size.rows, places[chosen])
        others = np.flatnonzero((rows.samples == 1) & ~simple)
        logits = graph.logits()[self._model.device.upload(places[others])] if len(others) else None
        return PromptLaunch(sampled, others, logits, begin)

    @torch.inference_mode()
    def capture_one(self, size: MixedSize) -> bool:
        """Capture the graph of a size, one of `sizes`; return whether it succeeded.

        If it lacks memory, or another rank fails, neither it nor a larger one is captured later; after another failure
        none is.
        """
        graph, problem = None, "another rank failed"
        left = [each for each in self._tokens if each < size.prompt_tokens]
        try:
            graph = self._capture(size)
        except Exception as error:  # noqa: BLE001 - the driver raises another class when it lacks memory for a graph
            problem = f"{type(error).__name__}: {error}"
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in problem:
                left = []
        if self._agreed(graph is not None):
            assert graph is not None
            self._graphs[size] = graph
            return True
        del graph
        if not self._agreed(bool(left)):
            left = []
        self._tokens = tuple(left)
        self._model.device.release_cached()
        held = f"up to {left[-1]}" if left else "no"
        log.warning("graphs hold %s prompt tokens: capturing %d failed: %s", held, size.prompt_tokens, problem)
        return False

    def capture(self, seconds: float) -> None:
        """Capture graphs, the smallest first, for about `seconds` at most. Failures are logged and left out."""
        deadline = time.monotonic() + seconds
        for size in self.sizes:
            if size not in self.sizes:
                continue  # a failure has dropped it
            if not self._agreed(time.monotonic() <= deadline):
                return
            self.capture_one(size)

    def capture_missing(self) -> bool:
        """Capture one of the missing graphs, the one that was missing most often; return whether one was missing.

        Ranks must not call it: they are idle at different times.
        """
        assert self._model.ranks is None, "ranks capture the same graphs at the same steps"
        missing = [size for size in self.sizes if size not in self._graphs]
        if missing:
            self.capture_one(max(missing, key=lambda size: self._uses[size]))
        return bool(missing)

    def _agreed(self, mine: bool) -> bool:
        """Return whether all ranks agree: ranks must run the same graphs, or their exchanges would not match."""
        ranks = self._model.ranks
        return mine if ranks is None else ranks.agreed(mine)

    def close(self) -> None:
        """Drop all graphs and their memory."""
        self._model.device.synchronize()
        self._tokens, self._graphs = (), {}
        self._memory = self._places = self._landing = None
        self._model.device.release_cached()

    def _size_for(self, tokens: int, decodes: int) -> MixedSize | None:
        if tokens > self._tokens[-1] or decodes > self._decodes[-1]:
            return None
        prompt_tokens = self._tokens[bisect_left(self._tokens, tokens)]
        return MixedSize(PROMPT_ROWS, prompt_tokens, self._decodes[bisect_left(self._decodes, decodes)])

    def _capture(self, size: MixedSize) -> _Graph:
        model, state, device = self._model, self._state, self._model.device
        assert model.fused is not None, "can_capture is false"
        if self._places is None:
            largest = self.sizes[-1]
            self._places = self._pool.mixed_places(largest, self._width, _extra(largest))
            self._landing = HostBuffer(device, 3 * largest.rows)
        batch = self._pool.mixed_batch(size, self._places, _extra(size))
        results = torch.zeros(3 * size.rows, dtype=torch.int32, device=device.torch_device)
        left: list[torch.Tensor] = []  # the logits
        tokens_end, rows_end = TOKEN_INPUTS * size.tokens, _extra(size)

        def run() -> None:
            inputs = batch.extra_on_device
            fed = state.feed(inputs[:tokens_end].view(TOKEN_INPUTS, size.tokens))
            slots, wanted, ends = inputs[tokens_end:rows_end].view(ROW_INPUTS, size.rows).long().unbind()
            model.write_draft(fed[0], fed[2], batch, self._pool)
            left[:] = [model.run_fused(fed[0], fed[2], ends, batch, self._pool)]
            state.sample_simple(left[0], slots, wanted, results)

        graph = _Graph(batch, results, Captured(run, None), lambda: left[0])
        self._fill(graph, _NO_ROWS, np.zeros(0, np.int64), 0, np.zeros(0, np.bool_))  # writes to no live slot
        captured = device.capture(run, self._memory)
        left[:] = [device.alias(left[0])]  # as in `graphs`: they lie last in the graph's memory
        return replace(graph, captured=captured)

    def _fill(
        self,
        graph: _Graph,
        rows: Rows,
        order: npt.NDArray[np.int64],
        decodes: int,
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Queue the copies of the graph's inputs.

        Args:
            graph: The graph.
            rows: The rows of the step.
            order: [rows] int64, their indices, prompt rows first.
            decodes: Number of decodes among them.
            wanted: [rows] bool, the rows that the graph samples.
        """
        batch = graph.batch
        size, spare = batch.size, self._state.slots_max
        extra = np.zeros(_extra(size), np.int32)
        of_tokens = extra[: TOKEN_INPUTS * size.tokens].reshape(TOKEN_INPUTS, size.tokens)
        of_rows = extra[TOKEN_INPUTS * size.tokens :].reshape(ROW_INPUTS, size.rows)
        of_tokens[1] = of_rows[0] = spare
        starts, counts, slots = rows.starts[order], rows.counts[order], rows.slots[order]
        firsts = (np.cumsum(rows.counts) - rows.counts)[order]  # where each row begins among the step's tokens
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        at = batch.token_places(counts, decodes)
        of_tokens[0, at] = rows.tokens[np.repeat(firsts, counts) + offsets]
        of_tokens[1, at] = np.repeat(slots, counts)
        of_tokens[2, at] = np.repeat(starts, counts) + offsets
        places = batch.row_places(len(order), decodes)
        of_rows[0, places], of_rows[1, places] = slots, wanted[order]
        of_rows[2, places] = at[np.cumsum(counts) - 1]
        states = None if rows.states is None else rows.states[order]
        windows = None if rows.windows is None else rows.windows.pick(order)
        self._pool.refill_mixed(batch, rows.tables[order], starts, counts, decodes, extra, states, windows)


def can_capture(model: LoadedModel, pool: KvPool) -> bool:
    """Return whether steps with prompt tokens of a model may run from graphs.

    Not yet: latents, and quantised K and V, which some prefills copy first, as the lengths of rows say. Layers with a
    recurrent state need kernels for prompts.
    """
    geometry, fused = pool.geometry, model.fused
    if fused is None or not model.can_be_captured:
        return False
    if geometry.dtype.scale_bytes or any(shape.latent for shape in geometry.layers):
        return False
    draft = model.draft  # heads write K and V alone, which any graph may do
    if isinstance(draft, LoadedModel) and (pool.beside is None or not can_capture(draft, pool.beside)):
        return False
    return all(layer.mixer is None or layer.mixer.runs_prompts(fused.operations, model.dtype) for layer in fused.layers)


_NOTHING = np.zeros(0, np.int32)
_NO_ROWS = Rows(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, np.zeros((0, 1), np.int32), np.zeros(0, np.bool_))


def _extra(size: MixedSize) -> int:
    return TOKEN_INPUTS * size.tokens + ROW_INPUTS * size.rows


def _decodes_of(rows: Rows) -> npt.NDArray[np.bool_] | None:
    """Return which rows are decodes; None if a row has both prompt tokens and generated ones, or several of these."""
    ends = np.cumsum(rows.counts)
    generated = np.add.reduceat(rows.generated.astype(np.int64), ends - rows.counts)
    decodes = (rows.counts == 1) & (generated == 1)
    return decodes if (decodes | (generated == 0)).all() else None


def _are_apart(rows: Rows, decodes: npt.NDArray[np.bool_]) -> bool:
    """Return whether no two rows have the same recurrent state, and decodes have one to go on with."""
    assert rows.states is not None, "rows without states"
    return bool((rows.starts[decodes] > 0).all()) and len(np.unique(rows.states[:, 0])) == len(rows)
