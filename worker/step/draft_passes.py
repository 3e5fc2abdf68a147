"""The passes of a draft model or of heads: each computes the next greedy token of all rows.

Steps have written the draft model's K and V of prompt tokens, and the hidden states that heads read. Those of the
generated tokens since the last proposal come first. Where a graph has room, these tokens are rows of their own in the
first pass, each with its own length. Many take passes that compute K and V alone, with at most `CAUGHT_UP_MAX` tokens
in a proposal: the rows with the fewest go first, and one that is not finished gets no drafts.

A pass writes the K and V of the token that it is fed behind them: in the row's last block, and then in scratch blocks
that follow the row's own in this table alone. Nothing reads what lies behind a row's accepted tokens but later passes
of the same proposal, and the next step overwrites it. Hidden states go from pass to pass and are not stored. No step is
in flight meanwhile.

The tokens go from pass to pass on the device, so that a proposal waits for the device once. Passes run from captured
graphs where the decodes of the model do. These run all rows to the longest proposal, for which scratch blocks suffice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from kvforge.worker.attention.draft_backlog import stored_tokens
from kvforge.worker.attention.geometry import DRAFT_ROWS_MAX, DRAFT_TOKENS_MAX
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.capture import GraphMemory
from kvforge.worker.drafts.model import DraftRow
from kvforge.worker.loading.beside import DraftSource

from .draft_graphs import STORED_TOKEN, DraftGraphs

CAUGHT_UP_MAX = 2048  # tokens of a proposal, and of a pass; a smaller one gets less out of the device
Tables = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
log = logging.getLogger("worker")


class DraftPasses:
    """Continues rows by a draft model; see `drafts.model.DraftModel`.

    Args:
        draft: The draft model or the heads.
        pool: The pool of the model that it drafts for.
        vocab_size: The size of that model's vocabulary; either may be padded further than the other.
        step_tokens_max: Most tokens of a step, for which there is memory.

    Attributes:
        graphs: Its captured passes; None: all run eagerly.
        reads_hidden: See `beside.DraftSource`.
    """

    graphs: DraftGraphs | None = None

    def __init__(self, draft: DraftSource, pool: KvPool, vocab_size: int, step_tokens_max: int = CAUGHT_UP_MAX) -> None:
        assert pool.beside is not None, "the pool was made without the draft model"
        assert pool.beside.tokens is not None and pool.beside.backlog is not None, "a pool of another geometry"
        self._draft, self._pool = draft, pool.beside
        self._stored, self._backlog = pool.beside.tokens, pool.beside.backlog
        self._scratch = pool.geometry.scratch_per_row
        scratch = np.arange(DRAFT_ROWS_MAX * self._scratch, dtype=np.int32).reshape(DRAFT_ROWS_MAX, self._scratch)
        self._scratch_blocks = pool.blocks + scratch  # [rows, scratch_per_row]
        self.name, self.context_tokens_max = draft.info.name, draft.info.context_tokens_max
        self.rows_max, self.tokens_max = DRAFT_ROWS_MAX, DRAFT_TOKENS_MAX
        self.device_bytes, self.block_bytes = draft.bytes + pool.beside.bytes, pool.beside.geometry.bytes_per_block
        self.reads_hidden = draft.reads_hidden
        self._failed, self.took_ns = False, 0
        self._tokens = min(vocab_size, draft.vocab_size)
        self._caught_up_max = min(CAUGHT_UP_MAX, step_tokens_max)

    def use_graphs(self, rows_max: int, width: int, memory: GraphMemory | None) -> DraftGraphs:
        """Prepare captured passes.

        Args:
            rows_max: The most rows of a step.
            width: The most blocks of a row.
            memory: Memory of graphs; None on a CPU.
        """
        rows, width = min(rows_max, self.rows_max), width + self._scratch
        self.graphs = DraftGraphs(self._draft, self._pool, self._tokens, rows, width, memory)
        return self.graphs

    def continue_rows(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return the greedy tokens behind each row; none if the device failed, which the next step will report.

        A row for which there is too much to catch up has none either.
        """
        started_ns = time.monotonic_ns()
        try:
            return self._continue(rows)
        except Exception as error:  # noqa: BLE001 - without drafts answers are the same
            self._note_failure(error)
            return []
        finally:
            self.took_ns = time.monotonic_ns() - started_ns

    def complete(self, tables: Tables, ends: npt.NDArray[np.int32]) -> None:
        """Queue the passes for all tokens below the ends of rows: prompt tokens behind them will attend to these.

        Args:
            tables: [rows, width] int32. Entries past a row's end are not read.
            ends: [rows] int32.
        """
        try:
            owners, places = self._backlog.find(tables, ends)
            if len(owners):
                width = int(-(-ends.max() // self._pool.block_size))
                self._catch_up(tables[:, :width], owners, places)
        except Exception as error:  # noqa: BLE001 - drafts get worse, and answers are the same
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        if not self._failed:
            log.warning("drafts: the draft model failed: %s: %s", type(error).__name__, error)
        self._failed = True
        with suppress(RuntimeError):  # the device is lost
            self._draft.device.release_cached()

    @torch.inference_mode()
    def _continue(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        assert len(rows) <= self.rows_max, "more rows than there are scratch blocks for"
        drafted: list[list[int]] = [[] for _ in rows]
        order = sorted(range(len(rows)), key=lambda row: -rows[row].count)  # the longest first: others leave behind
        tables = self._tables([rows[row] for row in order])
        positions = np.array([rows[row].position for row in order], np.int32)
        owners, places = self._backlog.find(tables, positions)
        late = self._slots(tables, owners, places)
        if len(late) > self._caught_up_max:
            taken, ready = self._choose(owners, late, len(rows))
            self._catch_up(tables, owners[taken], places[taken])
            if not ready.any():
                self._draft.device.synchronize()  # what it takes counts
                return drafted
            order = [row for row, is_ready in zip(order, ready.tolist(), strict=True) if is_ready]
            tables, positions, owners = tables[ready], positions[ready], owners[:0]
        counts = np.array([rows[row].count for row in order])
        first = np.minimum(np.array([rows[row].token for row in order], np.int32), self._draft.vocab_size - 1)
        graphs = self.graphs
        if len(owners) and (graphs is None or not graphs.can_run(len(order) + len(owners), tables.shape[1])):
            self._catch_up(tables, owners, places)
            owners = owners[:0]
        if graphs is not None and graphs.can_run(len(order) + len(owners), tables.shape[1]):
            fed = np.concatenate([first, np.full(len(owners), STORED_TOKEN, np.int32)])
            at = np.concatenate([positions, places[: len(owners)].astype(np.int32)])
            with_late = np.concatenate([tables, tables[owners]])
            chosen = graphs.run(fed, at, with_late, int(counts[0])).cpu()[:, : len(order)].T.tolist()
            for row, tokens, count in zip(order, chosen, counts.tolist(), strict=True):
                drafted[row] = tokens[:count]
            self._backlog.settle(late[: len(owners)])
        else:
            self._run_eagerly(first, positions, tables, counts, order, drafted)
        self._backlog.settle(self._slots(tables, np.arange(len(order)), positions.astype(np.int64)))
        return drafted

    def _run_eagerly(
        self,
        first: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        tables: Tables,
        counts: Indices,
        order: Sequence[int],
        drafted: list[list[int]],
    ) -> None:
        """Run the passes one by one, and append the tokens of the rows in `order` to `drafted`."""
        upload = self._draft.device.upload
        fed, found, hidden = upload(first.astype(np.int64)), list[torch.Tensor](), None
        for number in range(int(counts[0])):
            live = int(np.count_nonzero(counts > number))
            at = positions[:live] + np.int32(number)
            batch = self._pool.batch(tables[:live], at, np.ones(live, np.int32))
            before = self._draft.hidden_before(batch, self._pool) if hidden is None else hidden[:live]
            places = upload(at.astype(np.int64))
            fed, hidden = self._draft.next_tokens(fed[:live], places, before, self._tokens, batch, self._pool)
            found.append(fed)
        tokens = torch.cat(found).cpu().numpy()
        ends = np.cumsum([len(each) for each in found])
        for part in np.split(tokens, ends[:-1]):  # the tokens of each pass
            for row, token in zip(order, part.tolist(), strict=False):
                drafted[row].append(token)

    def _choose(self, owners: Indices, late: Indices, rows: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Choose what to catch up in a proposal: the tokens of one pass, those of the rows with the fewest first.

        Args:
            owners: [n] int64, the row of each token that lacks K and V.
            late: [n] int64, its slot. Rows may have blocks in common.
            rows: How many rows there are.

        Returns:
            The chosen tokens, [m] int64, and a mask [rows] of the rows that lack none behind these.
        """
        fewest = np.argsort(np.bincount(owners, minlength=rows)[owners], kind="stable")
        _, firsts = np.unique(late[fewest], return_index=True)
        taken = np.sort(fewest[np.sort(firsts)[: self._caught_up_max]])
        ready = np.ones(rows, np.bool_)
        ready[owners[~np.isin(late, late[taken])]] = False
        return taken, ready

    @torch.inference_mode()
    def _catch_up(self, tables: Tables, owners: Indices, places: Indices) -> None:
        """Queue passes for the K and V of generated tokens.

        Args:
            tables: [rows, width] int32, the tables of the rows.
            owners: [n] int64, the row of each token, ascending.
            places: [n] int64, its position, ascending within a row.
        """
        upload = self._draft.device.upload
        slots = self._slots(tables, owners, places)
        _, firsts = np.unique(slots, return_index=True)  # rows may have blocks in common
        firsts.sort()
        owners, places, slots = owners[firsts], places[firsts], slots[firsts]
        for begin in range(0, len(owners), self._caught_up_max):
            part = slice(begin, begin + self._caught_up_max)
            of, at, where = owners[part], places[part], slots[part]
            breaks = np.flatnonzero((np.diff(of, prepend=-1) != 0) | (np.diff(at, prepend=-1) != 1))
            counts = np.diff(np.append(breaks, len(of))).astype(np.int32)
            batch = self._pool.batch(tables[of[breaks]], at[breaks].astype(np.int32), counts)
            positions = np.minimum(at, self.context_tokens_max - 1)  # nothing is drafted beyond
            tokens = stored_tokens(self._stored, upload(where), self._draft.vocab_size).long()
            self._draft.feed(tokens, upload(positions), batch, self._pool)
            self._backlog.settle(where)

    def _slots(self, tables: Tables, owners: Indices, places: Indices) -> Indices:
        """Return the slots of positions [n] of rows [n] in the pool, [n] int64."""
        blocks = tables[owners, places // self._pool.block_size].astype(np.int64)
        return blocks * self._pool.block_size + places % self._pool.block_size

    def _tables(self, rows: Sequence[DraftRow]) -> Tables:
        """Return the block tables of rows, each followed by its scratch blocks: [rows, width] int32."""
        width = max(len(row.table) for row in rows) + self._scratch
        tables = np.zeros((len(rows), width), np.int32)
        for number, row in enumerate(rows):
            own = len(row.table)
            tables[number, :own] = row.table
            tables[number, own : own + self._scratch] = self._scratch_blocks[number]
        return tables
