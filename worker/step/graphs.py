"""Captured decode graphs: every row feeds one token, and the host launches the whole step with one call.

A graph is captured for each of a few row counts (buckets). A step runs in the smallest captured bucket that holds it.
Spare rows are padding: length 0, no token wanted, and a reserved slot. The graph covers everything from the embedding
to the sampled token. Rows with filters, penalties, biases or top log-probabilities are sampled after the graph, from
the logits that it leaves.

A start captures few buckets, by default (`start_sizes`); they hold every step, at most half of it padding. The others
follow one by one while the worker is idle, or, without idle time, at a step that has run in a larger bucket several
times. No step waits longer than one capture takes. A row's bits do not depend on the bucket.

All graphs read the same input buffers, which one copy fills before each replay: those of the static batch, with tokens,
slots, positions and flags before the structure. The graphs share the memory of their intermediate results, so only one
may run at a time; the device's queue guarantees that.

Where rows begin with the same blocks and attention gains from reading these once (`PagedAttention.gains_from_sharing`),
a step runs in a graph of the same size with the launches that do so, captured when the worker is idle or after several
such steps. All others keep graphs without these launches. A row has the same bits in both. Ranks have no such graphs.

A row with a recurrent state runs in a graph if no other row of the step has the same one. Padding rows have their state
in the pool's spare block, which no sequence has.

Drafted tokens over recurrent states go on with the state of the token before. Steps with such run in graphs of a size
and a depth, the most tokens of a request: there the layers with a state run once for each place behind others, over all
rows, and rows of another place run in the spare block. They are captured after several such steps, which run without.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.messages import Int32Array
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.capture import Captured
from kvforge.worker.device.queue import DeviceEvent, HostBuffer
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.ahead import UNDRAFTED, AheadRows
from kvforge.worker.sampling.sampler import SamplingState
from kvforge.worker.wanted import ADVANCES, AHEAD

from .checks import Rows
from .pending import Sampled

ROWS_MAX = 512  # larger batches keep the device busy without graphs
INPUTS = 4  # int32 values per row beside its structure: see _Bucket
CAPTURE_S = 60.0  # graphs not captured by then are captured later
# A step with drafts is in flight alone, so that the device waits while the host finds what rows have in common: twice
# 20 us for each row. Reading this much less of each layer saves as much. See benchmarks/NOTES.md.
DRAFT_ROW_BYTES = 6 << 20
ASKED_STEPS = 16  # steps of the same slots after which attention is asked again: they have grown by a few tokens
DEPTHS = (2, 3, 5, 9, 17, 33, 65)  # rows of a request in graphs of drafts over recurrent states
CAPTURE_USES = 16  # steps that run in a larger graph before their own is captured, without idle time
log = logging.getLogger("worker")


def bucket_sizes(rows_max: int) -> tuple[int, ...]:
    """Return the row counts to capture: 1, 2, 4, every 8 up to 256, every 32 beyond; `rows_max` is the last."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, ROWS_MAX + 1, 32)}
    largest = min(rows_max, ROWS_MAX)
    return (*sorted(size for size in sizes if size < largest), largest)


def start_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes to capture before anything is served: powers of two, and the largest."""
    return tuple(size for size in sizes if not size & (size - 1) or size == sizes[-1])


@dataclass(frozen=True)
class Launched:
    """A decode step that was queued.

    Attributes:
        sampled: Tokens of the rows that the graph sampled, those of requests with drafts apart.
        others: [n] int64, rows that are still to be sampled.
        busy: Device events before and after the graph.
        started_ns: Time of its launch on the monotonic clock: what the host did before is no time of the device.
    """

    sampled: list[Sampled]
    others: npt.NDArray[np.int64]
    busy: tuple[DeviceEvent, DeviceEvent]
    started_ns: int


@dataclass(frozen=True)
class _Bucket:
    """A captured graph with its inputs and outputs.

    Attributes:
        rows: Rows of the graph.
        batch: Static batch. Its extra inputs are [4, rows]: token (-1: the slot's last), slot, position, wanted; behind
            them lie the pages of states.
        results: [3 * rows] int32.
        captured: The graph.
        logits: Returns the logits [rows, vocab] float32 of the last replay.
    """

    rows: int
    batch: PagedBatch
    results: torch.Tensor
    captured: Captured
    logits: Callable[[], torch.Tensor]


class DecodeGraphs:
    """The captured graphs of one model over one pool.

    Attributes:
        memory: Memory of their intermediate results, for other graphs too that run on the same stream; None on a CPU.
    """

    def __init__(self, model: LoadedModel, pool: KvPool, state: SamplingState, rows_max: int, width: int) -> None:
        """Allocate the shared inputs; capture nothing yet.

        Args:
            model: The model.
            pool: Its KV pool.
            state: Sampling state of the slots.
            rows_max: Most rows of a step.
            width: Most blocks of a row.

        Raises:
            RuntimeError: torch is out of memory.
        """
        self._model, self._pool, self._state, self._width = model, pool, state, width
        self._sizes = list(bucket_sizes(rows_max))
        self._buckets: dict[int, _Bucket] = {}
        self._uses: Counter[int] = Counter()  # steps of a size without a graph that ran in a larger one
        self._sharing: dict[int, _Bucket | None] = {}  # graphs that read common blocks once; None: cannot be captured
        self._sharing_uses: Counter[int] = Counter()  # steps that one of these would have run
        self._chained: dict[tuple[int, int], _Bucket | None] = {}  # by size and depth; None: cannot be captured
        self._chained_uses: Counter[tuple[int, int]] = Counter()
        # Slots of the last step, steps since attention was asked whether sharing gains there, and its answer.
        self._asked = b"", 0, False
        self.memory = model.device.graph_memory()
        self._places: PagedBatch | None = pool.static_batch(self._sizes[-1], width, extra=INPUTS)
        self._landing = HostBuffer(model.device, 3 * self._sizes[-1])
        self._logits: torch.Tensor | None = None  # last launch

    @property
    def sizes(self) -> tuple[int, ...]:
        """Row counts of the graphs that are, or may still be, captured."""
        return tuple(self._sizes)

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        others = (*self._sharing.values(), *self._chained.values())
        return len(self._buckets) + sum(each is not None for each in others)

    def size_for(self, rows: int) -> int:
        """Return the smallest of `sizes` that holds `rows` rows. `rows` must not exceed the largest."""
        return self._sizes[bisect_left(self._sizes, rows)]

    @torch.inference_mode()
    def capture(self, seconds: float = CAPTURE_S, *, few: bool = False) -> None:
        """Capture graphs, the largest first, for about `seconds` at most. Failures are logged and left out.

        Args:
            seconds: The limit.
            few: Capture those of `start_sizes` alone.
        """
        deadline = time.monotonic() + seconds
        for size in reversed(start_sizes(self.sizes) if few else self.sizes):
            if not self._agreed(time.monotonic() <= deadline):
                log.info("%d of %d decode graphs left for later", len(self._sizes) - self.captured, len(self._sizes))
                return
            if size in self._sizes:  # `_bucket` drops sizes, or all, after a failure
                self._bucket(size)

    @torch.inference_mode()
    def capture_one(self, size: int) -> bool:
        """Capture the graph of `size` rows, one of `sizes`; return whether it succeeded."""
        return self._bucket(size) is not None

    @torch.inference_mode()
    def capture_missing(self) -> bool:
        """Capture one of the missing graphs, the one with the most uses; return whether there are more.

        Ranks must not call it: they are idle at different times.
        """
        assert self._model.ranks is None, "ranks capture the same graphs at the same steps"
        missing = [size for size in self._sizes if size not in self._buckets]
        wished = [size for size in self._sharing_uses if size not in self._sharing]
        if wished:
            self._capture_sharing(wished.pop())
        elif missing:
            self._bucket(max(missing, key=lambda size: self._uses[size]))
        return bool(wished) or any(size not in self._buckets for size in self._sizes)

    def can_run(self, rows: Rows) -> bool:
        """Return whether `launch` can run these rows, capturing a graph if none holds them."""
        if len(rows.tokens) != len(rows) or int(rows.starts.max()) >= self._width * self._pool.block_size:
            return False
        if rows.states is not None and not _advance_once(rows):
            return False
        if rows.sources is not None:
            return self._chained_bucket(rows) is not None
        while self._sizes and len(rows) <= self._sizes[-1]:
            size = self.size_for(len(rows))
            if size not in self._buckets and self._can_wait(size):
                return True
            if self._bucket(size) is not None:
                return True
        return False

    def _chained_bucket(self, rows: Rows) -> _Bucket | None:
        """Return the graph of rows with drafts over recurrent states, captured if it is due; None: there is none."""
        depth = int(_behind(rows).max()) + 1
        if not self._sizes or len(rows) > self._sizes[-1] or depth > DEPTHS[-1]:
            return None
        key = self.size_for(len(rows)), next(each for each in DEPTHS if each >= depth)
        if key not in self._chained:
            self._chained_uses[key] += 1
            if self._chained_uses[key] <= CAPTURE_USES:
                return None
            bucket = self._try_chained(*key)
            self._chained[key] = bucket if self._agreed(bucket is not None) else None
        return self._chained[key]

    def _try_chained(self, size: int, depth: int) -> _Bucket | None:
        try:
            return self._capture(size, depth=depth)
        except Exception as error:  # noqa: BLE001 - the driver raises another class when it lacks memory for a graph
            self._model.device.release_cached()
            what = "steps of %d rows with drafts run without a graph: capturing it failed: %s: %s"
            log.warning(what, size, type(error).__name__, error)
            return None

    def _can_wait(self, size: int) -> bool:
        """Count a step of a size without a graph; return whether a larger graph runs it, at most half of it padding."""
        larger = self._captured_for(size)
        self._uses[size] += 1
        return larger is not None and larger.rows <= 2 * size and self._uses[size] <= CAPTURE_USES

    def _captured_for(self, rows: int) -> _Bucket | None:
        """Return the smallest captured bucket that holds `rows` rows."""
        held = [size for size in self._buckets if size >= rows]
        return self._buckets[min(held)] if held else None

    def launch(self, rows: Rows, behind: Int32Array | None = None) -> Launched:
        """Queue a step that `can_run` accepted.

        Args:
            rows: The rows.
            behind: [rows] int32, how many drafts each row of a request with drafts is behind, UNDRAFTED for others.
                The graph advances no slot of such a request. None: no request has drafts.

        Raises:
            RuntimeError: torch failed to replay the graph.
        """
        device, count = self._model.device, len(rows)
        bucket = self._captured_for(count) if rows.sources is None else self._chained_bucket(rows)
        assert bucket is not None, "only for rows that `can_run` accepted"
        if rows.sources is None and self._gains_from_sharing(rows, 0 if behind is None else DRAFT_ROW_BYTES * count):
            bucket = self._sharing_bucket(bucket)
        simple = (rows.samples == 1) & self._state.simple(rows.slots)
        drafted = np.zeros(count, np.bool_) if behind is None else behind != UNDRAFTED
        wanted = np.where(simple, ADVANCES, 0)
        if behind is not None:
            wanted = np.where(simple & drafted, AHEAD + behind, wanted)
        self._fill(bucket, rows, wanted)
        begin, started_ns = DeviceEvent(device, timed=True), time.monotonic_ns()
        bucket.captured.replay()
        self._logits = bucket.logits()
        busy = (begin, DeviceEvent(device, timed=True))
        fetched = self._landing.fetch(bucket.results) if simple.any() else None
        sampled: list[Sampled] = []
        for chosen in (np.flatnonzero(simple & ~drafted), np.flatnonzero(simple & drafted)):
            if fetched is None or not len(chosen):
                continue
            slots, none = rows.slots[chosen], np.zeros(len(chosen), np.int32)
            ahead = None
            if behind is not None and drafted[chosen[0]]:
                ahead = AheadRows(slots, behind[chosen], rows.tokens[chosen])
            sampled.append(Sampled(slots, fetched, none, bucket.rows, chosen, ahead))
        return Launched(sampled, np.flatnonzero((rows.samples == 1) & ~simple), busy, started_ns)

    def _gains_from_sharing(self, rows: Rows, saved_bytes_min: int) -> bool:
        """Return whether these rows should run in a graph that reads common blocks once.

        saved_bytes_min: see `PagedAttention.gains_from_sharing`.
        """
        if self._model.ranks is not None:
            return False
        slots, steps, gains = self._asked
        own = rows.slots.tobytes()
        if slots != own or steps == ASKED_STEPS:
            attention, steps = self._model.context.attention, 0
            lengths = rows.starts + np.int32(1)
            gains = attention.gains_from_sharing(rows.tables, lengths, self._pool.block_size, saved_bytes_min)
        self._asked = own, steps + 1, gains
        return gains

    def _sharing_bucket(self, plain: _Bucket) -> _Bucket:
        """Return the graph of the size of `plain` that reads common blocks once; `plain` while there is none."""
        size = plain.rows
        self._sharing_uses[size] += 1
        if size not in self._sharing and self._sharing_uses[size] > CAPTURE_USES:
            self._capture_sharing(size)
        return self._sharing.get(size) or plain

    def _capture_sharing(self, size: int) -> None:
        """Capture the graph of `size` rows that reads common blocks once. After a failure there will be none."""
        try:
            self._sharing[size] = self._capture(size, shares_reads=True)
        except Exception as error:  # noqa: BLE001 - the driver raises another class when it lacks memory for a graph
            self._sharing[size] = None
            self._model.device.release_cached()
            what = "decodes of %d rows run without shared reads: capturing their graph failed: %s: %s"
            log.warning(what, size, type(error).__name__, error)

    def logits_of(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the raw logits of these rows of the last `launch`: [n, vocab] float32 on the device.

        The next replay overwrites them, so only work that is queued right now may use them.
        """
        assert self._logits is not None, "nothing was launched"
        if len(rows) == rows[-1] + 1:
            return self._logits[: len(rows)]
        return self._logits[self._model.device.upload(rows)]

    def close(self) -> None:
        """Drop all graphs and their memory."""
        self._model.device.synchronize()
        self._sizes, self._buckets, self._sharing, self._chained = [], {}, {}, {}
        self.memory = self._logits = self._places = None
        self._model.device.release_cached()

    # ------------------------------------------------------------------------------------------------------ capturing

    def _bucket(self, size: int) -> _Bucket | None:
        """Return the bucket, capturing it if needed. After a failure return None and drop its size for good."""
        if size in self._buckets:
            return self._buckets[size]
        bucket = self._try_to_capture(size)
        if self._agreed(bucket is not None):
            assert bucket is not None
            self._buckets[size] = bucket
            return bucket
        if size in self._sizes:
            self._sizes.remove(size)  # another rank failed to capture it
        if not self._agreed(bool(self._sizes)):
            self._sizes.clear()  # a rank without graphs would not run the padding rows of the others
        return None

    def _agreed(self, mine: bool) -> bool:
        """Return whether all ranks agree: ranks must run the same graphs, or their collectives would not match."""
        ranks = self._model.ranks
        return mine if ranks is None else ranks.agreed(mine)

    def _try_to_capture(self, size: int) -> _Bucket | None:
        try:
            return self._capture(size)
        except Exception as error:  # noqa: BLE001 - foreign model code may synchronise or fail in any way
            # The driver raises another class when it lacks memory for the graph itself.
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                self._sizes.remove(size)
                self._model.device.release_cached()
                log.warning("no memory for the graph of %d decodes: using a larger graph or none", size)
            else:
                log.warning("decodes run without graphs: capturing failed: %s: %s", type(error).__name__, error)
                self._sizes.clear()
        return None

    def _capture(self, size: int, *, shares_reads: bool = False, depth: int = 0) -> _Bucket:
        model, state, device = self._model, self._state, self._model.device
        batch = self._pool.static_batch(size, self._width, self._places, INPUTS)
        batch.shares_reads, batch.depth = shares_reads, depth
        results = torch.zeros(3 * size, dtype=torch.int32, device=device.torch_device)
        left: list[torch.Tensor] = []  # the logits

        def run() -> None:
            inputs = batch.extra_on_device[: INPUTS * size].view(INPUTS, size)
            tokens, slots, positions, wanted = state.feed(inputs).unbind()
            left[:] = [model.decode(tokens, positions, batch, self._pool)]
            state.sample_simple(left[0], slots, wanted, results)

        nothing = np.zeros(0, np.int32)
        none = Rows(nothing, nothing, nothing, nothing, nothing, np.zeros((0, 1), np.int32), np.zeros(0, np.bool_))
        bucket = _Bucket(size, batch, results, Captured(run, None), lambda: left[0])
        self._fill(bucket, none, nothing)  # padding rows only: the trial run writes to no live slot
        captured = device.capture(run, self.memory)
        # The logits lie last in the graph's memory: the next graph may reuse the place, no later part of this graph
        # does.
        left[:] = [device.alias(left[0])]
        return replace(bucket, captured=captured)

    def _fill(self, bucket: _Bucket, rows: Rows, wanted: npt.NDArray[np.integer]) -> None:
        """Queue the copies of the graph's inputs. wanted: [rows], see `SamplingState.sample_simple`."""
        count = len(rows)
        packed = np.zeros((INPUTS, bucket.rows), np.int32)
        packed[1, count:] = self._state.slots_max
        packed[:, :count] = rows.tokens, rows.slots, rows.starts, wanted
        tables, windows, states = rows.tables, rows.windows, rows.states
        chain = None if rows.sources is None else (rows.sources, _behind(rows))
        self._pool.fill(bucket.batch, tables, rows.starts + 1, packed.reshape(-1), windows, states, chain=chain)


def _behind(rows: Rows) -> Int32Array:
    """Return how many rows of its request each row is behind, [rows] int32; the rows of a request follow each other."""
    assert rows.sources is not None and rows.states is not None, "rows without states of drafts"
    places = np.arange(len(rows), dtype=np.int32)
    first = rows.sources[:, 0] == rows.states[:, 0]
    return places - np.maximum.accumulate(np.where(first, places, 0)).astype(np.int32)


def _advance_once(rows: Rows) -> bool:
    """Return whether all rows have a recurrent state to go on with, and no two rows the same one."""
    assert rows.states is not None, "rows without states"
    return int(rows.starts.min()) > 0 and len(np.unique(rows.states[:, 0])) == len(rows)
