"""The passes of a draft model or of heads: each computes the next greedy token of all rows.

The step has written the draft model's K and V of the tokens before, and the hidden states that heads read. A pass
writes the K and V of the token that it is fed behind them: in the row's last block, and then in scratch blocks that
follow the row's own in this table alone. Nothing reads what lies behind a row's accepted tokens but later passes of the
same proposal, and the next step overwrites it. Hidden states go from pass to pass and are not stored: a step in flight
may have stored those of the model already.

The tokens go from pass to pass on the device, so that a proposal waits for the device once. Passes run from captured
graphs where the decodes of the model do. These run all rows to the longest proposal, for which scratch blocks suffice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from kvforge.worker.attention.geometry import DRAFT_ROWS_MAX, DRAFT_TOKENS_MAX
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.capture import GraphMemory
from kvforge.worker.drafts.model import DraftRow
from kvforge.worker.loading.beside import DraftSource

from .draft_graphs import DraftGraphs

log = logging.getLogger("worker")


class DraftPasses:
    """Continues rows by a draft model; see `drafts.model.DraftModel`.

    Args:
        draft: The draft model or the heads.
        pool: The pool of the model that it drafts for.
        vocab_size: The size of that model's vocabulary; either may be padded further than the other.
        before: Called before passes are queued.

    Attributes:
        graphs: Its captured passes; None: all run eagerly.
    """

    graphs: DraftGraphs | None = None

    def __init__(
        self, draft: DraftSource, pool: KvPool, vocab_size: int, before: Callable[[], None] = lambda: None
    ) -> None:
        assert pool.beside is not None, "the pool was made without the draft model"
        self._draft, self._pool = draft, pool.beside
        self._scratch = pool.geometry.scratch_per_row
        scratch = np.arange(DRAFT_ROWS_MAX * self._scratch, dtype=np.int32).reshape(DRAFT_ROWS_MAX, self._scratch)
        self._scratch_blocks = pool.blocks + scratch  # [rows, scratch_per_row]
        self.name, self.context_tokens_max = draft.info.name, draft.info.context_tokens_max
        self.rows_max, self.tokens_max = DRAFT_ROWS_MAX, DRAFT_TOKENS_MAX
        self.device_bytes, self.block_bytes = draft.bytes + pool.beside.bytes, draft.geometry.bytes_per_block
        self._before, self._failed, self.took_ns, self.step_ns = before, False, 0, 0
        self._tokens = min(vocab_size, draft.vocab_size)

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
        """Return the greedy tokens behind each row; none if the device failed, which the next step will report."""
        self._before()
        started_ns = time.monotonic_ns()
        try:
            return self._continue(rows)
        except Exception as error:  # noqa: BLE001 - without drafts answers are the same
            if not self._failed:
                log.warning("drafts: the draft model failed: %s: %s", type(error).__name__, error)
            self._failed = True
            with suppress(RuntimeError):  # the device is lost
                self._draft.device.release_cached()
            return []
        finally:
            self.took_ns = time.monotonic_ns() - started_ns

    @torch.inference_mode()
    def _continue(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        assert len(rows) <= self.rows_max, "more rows than there are scratch blocks for"
        order = sorted(range(len(rows)), key=lambda row: -rows[row].count)  # the longest first: others leave behind
        ordered = [rows[row] for row in order]
        tables = self._tables(ordered)
        counts = np.array([row.count for row in ordered])
        positions = np.array([row.position for row in ordered], np.int32)
        upload = self._draft.device.upload
        first = np.minimum(np.array([row.token for row in ordered], np.int32), self._draft.vocab_size - 1)
        if self.graphs is not None and self.graphs.can_run(len(rows), tables.shape[1]):
            chosen = self.graphs.run(first, positions, tables, int(counts[0])).cpu()[:, : len(rows)].T.tolist()
            kept = [tokens[:count] for tokens, count in zip(chosen, counts.tolist(), strict=True)]
            return [tokens for _, tokens in sorted(zip(order, kept, strict=True))]
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
        drafted: list[list[int]] = [[] for _ in rows]
        ends = np.cumsum([len(each) for each in found])
        for part in np.split(tokens, ends[:-1]):  # the tokens of each pass
            for row, token in zip(order, part.tolist(), strict=False):
                drafted[row].append(token)
        return drafted

    def _tables(self, rows: Sequence[DraftRow]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Return the block tables of rows, each followed by its scratch blocks: [rows, width] int32."""
        width = max(len(row.table) for row in rows) + self._scratch
        tables = np.zeros((len(rows), width), np.int32)
        for number, row in enumerate(rows):
            own = len(row.table)
            tables[number, :own] = row.table
            tables[number, own : own + self._scratch] = self._scratch_blocks[number]
        return tables
