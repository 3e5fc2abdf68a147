"""Captured passes of a draft model or of heads: the host launches a pass of all rows with one call, as it does steps.

A graph covers one pass, from the embedding to the greedy token, and is replayed for each drafted token. It feeds the
first pass of a proposal the tokens that the host sends, and each later one the tokens of the pass before, which stay on
the device, as the hidden states of heads do. Graphs are captured for few row counts, at the start; a pass runs in the
smallest that holds its rows. The first pass may have more rows than later ones: tokens that lack K and V until then
(see `draft_passes`). Without graphs, passes run eagerly. They share the memory of their intermediate results with the
graphs of decodes.

Positions, slots and plans of all passes are known beforehand. While the device computes the first pass, the host makes
those of the others and sends them with one copy. Between two passes the device copies those of the next one to where
the graph reads them, and the host neither plans nor waits.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.draft_backlog import stored_tokens
from kvforge.worker.attention.geometry import DRAFT_ROWS_MAX, DRAFT_TOKENS_MAX
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.capture import Captured, GraphMemory
from kvforge.worker.device.queue import Staging
from kvforge.worker.loading.beside import DraftSource
from kvforge.worker.sampling.sampler import NO_TOKEN

SIZES = (1, 2, 4, 8, 16, 32, DRAFT_ROWS_MAX)
STORED_TOKEN = -2  # stands for the token that is stored in the slot of a row's position
INPUTS = 3  # int32 values per row beside its structure: see _Graph
log = logging.getLogger("worker")


@dataclass(frozen=True)
class _Graph:
    """A captured pass.

    Attributes:
        batch: Static batch over the draft model's pool. Its extra inputs are [3, rows]: token (NO_TOKEN: that of the
            pass before), position, and the number of the pass.
        captured: The graph. It leaves the greedy tokens in `DraftGraphs.chosen`, and in the row of the pass in
            `DraftGraphs.drafted`.
    """

    batch: PagedBatch
    captured: Captured


class DraftGraphs:
    """The captured passes of a draft model.

    Args:
        draft: The draft model or the heads.
        pool: Its pool, with the scratch blocks.
        tokens: Drafted tokens are [0, tokens).
        rows_max: The most rows of a proposal.
        width: The most blocks of a row, scratch blocks included.
        memory: Memory of graphs, as of the decode graphs; None on a CPU.

    Attributes:
        chosen: [rows_max] int64 on the device, the tokens of the last pass.
        drafted: [DRAFT_TOKENS_MAX, rows_max] int64 on the device, the tokens of each pass of the last proposal.
    """

    def __init__(
        self, draft: DraftSource, pool: KvPool, tokens: int, rows_max: int, width: int, memory: GraphMemory | None
    ) -> None:
        self._draft, self._pool, self._tokens, self._memory = draft, pool, tokens, memory
        self._sizes = [*(size for size in SIZES if size < rows_max), min(rows_max, SIZES[-1])]
        self._graphs: dict[int, _Graph] = {}
        self._width = width
        device = draft.device.torch_device
        self._places: PagedBatch | None = pool.static_batch(self._sizes[-1], width, extra=INPUTS)
        self.chosen = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        self._hidden: torch.Tensor | None = None  # of the last pass, [rows, hidden], if it reads hidden states
        self.drafted = torch.zeros((DRAFT_TOKENS_MAX, self._sizes[-1]), dtype=torch.int64, device=device)
        self._later: Staging | None = None  # packed batches of the passes behind the first

    @property
    def sizes(self) -> tuple[int, ...]:
        """Row counts of the graphs that are, or may be, captured."""
        return tuple(self._sizes)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first. After a failure, which is logged, passes run eagerly."""
        for size in reversed(self.sizes):
            if size in self._sizes:  # a failure drops all
                self.capture_one(size)

    @torch.inference_mode()
    def capture_one(self, size: int) -> bool:
        """Capture the graph of `size` rows, one of `sizes`; return whether it succeeded."""
        try:
            self._graphs[size] = self._capture(size)
            self._make_room(self._graphs[size].batch)
        except Exception as error:  # noqa: BLE001 - foreign model code may synchronise or fail in any way
            log.warning("drafts run without graphs: capturing failed: %s: %s", type(error).__name__, error)
            self.close()
            return False
        return True

    def can_run(self, rows: int, width: int) -> bool:
        """Return whether a graph holds so many rows of so many blocks."""
        return bool(self._graphs) and rows <= max(self._graphs) and width <= self._width

    @torch.inference_mode()
    def run(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
        passes: int,
    ) -> torch.Tensor:
        """Queue the passes of a proposal that `can_run` accepted.

        Args:
            tokens: [n] int32, the last token of each row, and then STORED_TOKEN for each token that lacks K and V.
            positions: [n] int32, their positions.
            tables: [n, width] int32, with scratch blocks.
            passes: Tokens to draft, 1 to DRAFT_TOKENS_MAX.

        Returns:
            [passes, rows_max] int64 on the device, with the tokens of the rows first. The next call overwrites it.

        Raises:
            RuntimeError: torch failed to replay a graph.
        """
        rows, graph = int(np.count_nonzero(tokens != STORED_TOKEN)), self._holding(len(tokens))
        self._fill(graph, tokens, positions, tables, passes)
        if rows < len(tokens):
            batch, late = graph.batch, slice(rows, len(tokens))
            slots = batch.kv_slots_on_device[late].long()
            assert self._pool.tokens is not None, "a pool of another geometry"
            batch.extra_on_device[late].copy_(stored_tokens(self._pool.tokens, slots, self._draft.vocab_size))
        graph.captured.replay()
        if passes > 1:
            graph = self._holding(rows)
            graph.batch.tables = tables[:rows].astype(np.int64)  # those on the device are of all graphs
            self._run_later(graph, positions[:rows], passes)
        return self.drafted[:passes]

    def _holding(self, rows: int) -> _Graph:
        """Return the smallest graph that holds so many rows."""
        captured = sorted(self._graphs)
        return self._graphs[captured[bisect_left(captured, rows)]]

    def _run_later(self, graph: _Graph, positions: npt.NDArray[np.int32], passes: int) -> None:
        """Queue the passes behind the first. positions: [rows] int32, those of the first."""
        batch, later, rows = graph.batch, self._later, len(positions)
        assert later is not None, "there is no room before a graph is captured"
        fed, read = np.full(rows, NO_TOKEN, np.int32), batch.packed_on_device
        size = read.numel()
        packed = later.host()[: (passes - 1) * size].reshape(passes - 1, size)
        for number in range(1, passes):
            at = positions + np.int32(number)
            batch.lengthen(at + np.int32(1))
            batch.pack(packed[number - 1], self._extra(graph, fed, at, number))
        later.send(packed.size)
        waiting = later.on_device[: packed.size].view(packed.shape)
        for number in range(1, passes):
            if self._draft.device.computes_on_cores:  # attention reads the batch on the host
                batch.lengthen(positions + np.int32(number + 1))
            read.copy_(waiting[number - 1])
            graph.captured.replay()

    def close(self) -> None:
        """Drop all graphs and their memory."""
        self._draft.device.synchronize()
        self._sizes, self._graphs = [], {}
        self._memory = self._places = self._later = None
        self._draft.device.release_cached()

    def _capture(self, size: int) -> _Graph:
        draft, device, pool = self._draft, self._draft.device, self._pool
        batch = self._pool.static_batch(size, self._width, self._places, INPUTS)

        def run() -> None:
            sent, positions, number = batch.extra_on_device.view(INPUTS, size).long().unbind()
            fed, before = torch.where(sent == NO_TOKEN, self.chosen[:size], sent), draft.hidden_before(batch, pool)
            if before is not None:
                before = torch.where((sent == NO_TOKEN)[:, None], self._hidden_like(before)[:size], before)
            chosen, hidden = draft.next_tokens(fed, positions, before, self._tokens, batch, pool)
            self.chosen[:size].copy_(chosen)
            self.drafted[:, :size].index_copy_(0, number[:1], chosen[None])
            if hidden is not None:
                self._hidden_like(hidden)[:size].copy_(hidden)

        graph = _Graph(batch, Captured(run, None))
        nothing = np.zeros(0, np.int32)
        self._fill(graph, nothing, nothing, np.zeros((0, 1), np.int32), 1)  # padding rows write nothing
        return replace(graph, captured=device.capture(run, self._memory))

    def _hidden_like(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return where hidden states stay from pass to pass, allocated before the first capture records."""
        if self._hidden is None:
            self._hidden = hidden.new_zeros((len(self.chosen), hidden.shape[1]))
        return self._hidden

    def _make_room(self, batch: PagedBatch) -> None:
        """Make room for the packed batches of a proposal's later passes."""
        numbers = (DRAFT_TOKENS_MAX - 1) * batch.packed_on_device.numel()
        if self._later is None or self._later.on_device.numel() < numbers:
            self._later = Staging(self._draft.device, numbers)

    def _fill(
        self,
        graph: _Graph,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
        passes: int,
    ) -> None:
        """Queue the copies of the inputs of the first pass of so many."""
        lengths = positions + np.int32(1)
        longest = int(lengths.max(initial=0)) + passes - 1
        self._pool.fill(graph.batch, tables, lengths, self._extra(graph, tokens, positions, 0), length_max=longest)

    def _extra(
        self, graph: _Graph, tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], number: int
    ) -> npt.NDArray[np.int32]:
        """Return the extra inputs of a pass, [3 x rows of the graph] int32."""
        extra = np.zeros((INPUTS, len(graph.batch.counts)), np.int32)
        extra[0, : len(tokens)] = tokens
        # A row with a shorter proposal than others may run beyond the context; what it drafts there is dropped.
        np.minimum(positions, self._draft.info.context_tokens_max - 1, out=extra[1, : len(tokens)])
        extra[2] = number
        return extra.reshape(-1)
