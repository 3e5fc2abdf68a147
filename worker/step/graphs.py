"""Decode steps from captured graphs: every row feeds one token, and the whole step is one call for the host.

A graph is captured for each of a few numbers of rows (buckets); a step runs in the smallest that holds it, and the
rows left over are padding: length 0, no token wanted, and a slot of their own that nobody reads. From the embedding to
the chosen token everything is inside; rows that are filtered, penalised, biased or want other tokens told are sampled
behind the graph from the logits that it leaves.

All graphs read the same places, filled before each replay with one copy: the static batch's, with tokens, slots,
positions and flags before the structure. They share the memory of their intermediate results, so only one may be under
way at a time; the device's queue sees to that.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from worker.attention import PagedBatch
from worker.attention.pool import KvPool
from worker.device.capture import Captured
from worker.device.queue import Landing, Mark
from worker.loading.model import LoadedModel
from worker.sampling.sampler import SamplingState

from .checks import Rows
from .pending import Sampled

ROWS_MAX = 512  # larger batches run as they come: there the host has time enough
INPUTS = 4  # numbers of a row beside its structure: see _Bucket
CAPTURE_S = 60.0  # what is not captured by then is captured when it is first needed
log = logging.getLogger("worker")


def bucket_sizes(rows_max: int) -> tuple[int, ...]:
    """Numbers of rows to capture, rising: 1, 2, 4, then every 8 up to 256, then every 32; `rows_max` is the last."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, ROWS_MAX + 1, 32)}
    largest = min(rows_max, ROWS_MAX)
    return (*sorted(size for size in sizes if size < largest), largest)


@dataclass(frozen=True)
class Launched:
    """A decode step that was queued. sampled: its simple rows' tokens, None where it has none. others: [n] int64, rows
    that are still to be sampled. busy: before the graph, behind it."""

    sampled: Sampled | None
    others: npt.NDArray[np.int64]
    busy: tuple[Mark, Mark]


@dataclass(frozen=True)
class _Bucket:
    """batch: its extra numbers are [4, rows]: token (-1: the slot's last), slot, position, wanted. results: [3 * rows]
    int32. logits: [rows, vocab] float32 of the last replay.
    """

    rows: int
    batch: PagedBatch
    results: torch.Tensor
    captured: Captured
    logits: Callable[[], torch.Tensor]


class DecodeGraphs:
    """The captured graphs of one model over one pool."""

    def __init__(self, model: LoadedModel, pool: KvPool, state: SamplingState, rows_max: int, width: int) -> None:
        """rows_max: of a step; width: most blocks of a row. Errors: what torch raises without memory."""
        self._model, self._pool, self._state, self._width = model, pool, state, width
        self._sizes = list(bucket_sizes(rows_max))
        self._buckets: dict[int, _Bucket] = {}
        self._memory = model.device.graph_memory()
        self._places: PagedBatch | None = PagedBatch.static(
            self._sizes[-1], width, pool.block_size, model.device, extra=INPUTS
        )
        self._landing = Landing(model.device, 3 * self._sizes[-1])
        self._logits: torch.Tensor | None = None  # of the last launch

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that graphs are, or may be, captured for."""
        return tuple(self._sizes)

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._buckets)

    def size_for(self, rows: int) -> int:
        """The least of `sizes` that holds so many rows, which is at most the last one."""
        return self._sizes[bisect_left(self._sizes, rows)]

    @torch.inference_mode()
    def capture(self, seconds: float = CAPTURE_S) -> None:
        """Captures all, the largest first, for at most about `seconds`. What fails is told in the log, and left out."""
        deadline = time.monotonic() + seconds
        for size in reversed(self.sizes):
            if not self._agreed(time.monotonic() <= deadline):
                log.info(
                    "%d of %d decode graphs are left for later", len(self._sizes) - self.captured, len(self._sizes)
                )
                return
            if size in self._sizes:  # none are, once it is known that decodes run without
                self._bucket(size)

    @torch.inference_mode()
    def capture_one(self, size: int) -> bool:
        """Captures the graph of `size` rows, one of `sizes`. False where that fails."""
        return self._bucket(size) is not None

    def can_run(self, rows: Rows) -> bool:
        """Whether `launch` can run these rows. Captures what is missing."""
        if len(rows.tokens) != len(rows) or int(rows.starts.max()) >= self._width * self._pool.block_size:
            return False
        while self._sizes and len(rows) <= self._sizes[-1]:
            if self._bucket(self.size_for(len(rows))) is not None:
                return True
        return False

    def launch(self, rows: Rows) -> Launched:
        """Queues a step that `can_run` was asked about. Errors: what torch raises."""
        device, count = self._model.device, len(rows)
        bucket = self._buckets[self.size_for(count)]
        simple = (rows.samples == 1) & self._state.simple(rows.slots)
        self._fill(bucket, rows, simple)
        begin = Mark(device, timed=True)
        bucket.captured.replay()
        self._logits = bucket.logits()
        busy = (begin, Mark(device, timed=True))
        chosen = np.flatnonzero(simple)
        sampled = None
        if len(chosen):
            fetched = self._landing.fetch(bucket.results)
            sampled = Sampled(rows.slots[chosen], fetched, np.zeros(len(chosen), np.int32), bucket.rows, chosen)
        return Launched(sampled, np.flatnonzero((rows.samples == 1) & ~simple), busy)

    def logits_of(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Raw logits of these rows of the last `launch`: [n, vocab] float32 device, for what is queued right now."""
        assert self._logits is not None, "nothing was launched"
        if len(rows) == rows[-1] + 1:
            return self._logits[: len(rows)]
        return self._logits[self._model.device.upload(rows)]

    def close(self) -> None:
        """Drops all graphs and their memory."""
        self._model.device.synchronize()
        self._sizes, self._buckets = [], {}
        self._memory = self._logits = self._places = None
        self._model.device.release_cached()

    # ------------------------------------------------------------------------------------------------------ capturing

    def _bucket(self, size: int) -> _Bucket | None:
        """The bucket, captured now if it was not. None where that fails: its size is then left out from now on."""
        if size in self._buckets:
            return self._buckets[size]
        bucket = self._try_to_capture(size)
        if self._agreed(bucket is not None):
            assert bucket is not None
            self._buckets[size] = bucket
            return bucket
        if size in self._sizes:
            self._sizes.remove(size)  # another rank has none
        if not self._agreed(bool(self._sizes)):
            self._sizes.clear()  # one of them runs without graphs, and rows that fill one up would be its alone
        return None

    def _agreed(self, mine: bool) -> bool:
        """Whether all ranks say so: each runs the same graphs, or none of them would meet the others."""
        ranks = self._model.ranks
        return mine if ranks is None else ranks.agreed(mine)

    def _try_to_capture(self, size: int) -> _Bucket | None:
        try:
            return self._capture(size)
        except Exception as error:  # noqa: BLE001 - models are foreign code, and some wait for the device
            # The driver's own lack of memory, for the graph itself, comes as another class.
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                self._sizes.remove(size)
                self._model.device.release_cached()
                log.warning("no memory for the graph of %d decodes: they run without, or in a larger one", size)
            else:
                log.warning("decodes run without graphs: capturing failed: %s: %s", type(error).__name__, error)
                self._sizes.clear()
        return None

    def _capture(self, size: int) -> _Bucket:
        model, state, device = self._model, self._state, self._model.device
        batch = PagedBatch.static(size, self._width, self._pool.block_size, device, self._places, INPUTS)
        results = torch.zeros(3 * size, dtype=torch.int32, device=device.torch_device)
        left: list[torch.Tensor] = []  # the logits

        def run() -> None:
            tokens, slots, positions, wanted = state.feed(batch.extra_on_device.view(INPUTS, size)).unbind()
            left[:] = [model.decode(tokens, positions, batch, self._pool)]
            state.sample_simple(left[0], slots, wanted, results)

        nothing = np.zeros(0, np.int32)
        none = Rows(nothing, nothing, nothing, nothing, nothing, np.zeros((0, 1), np.int32), np.zeros(0, np.bool_))
        bucket = _Bucket(size, batch, results, Captured(run, None), lambda: left[0])
        self._fill(bucket, none, np.zeros(0, np.bool_))  # the trial run writes nothing that anyone reads
        captured = device.capture(run, self._memory)
        # The last thing in the graph's memory: the next graph may use the place again, no later part of this one.
        left[:] = [device.alias(left[0])]
        return replace(bucket, captured=captured)

    def _fill(self, bucket: _Bucket, rows: Rows, wanted: npt.NDArray[np.bool_]) -> None:
        """Queues the copies of what the graph reads. wanted: [rows] bool, those that the graph samples."""
        count = len(rows)
        packed = np.zeros((INPUTS, bucket.rows), np.int32)
        packed[1, count:] = self._state.slots_max
        packed[:, :count] = rows.tokens, rows.slots, rows.starts, wanted
        bucket.batch.fill(rows.tables, rows.starts + 1, packed.reshape(-1))
