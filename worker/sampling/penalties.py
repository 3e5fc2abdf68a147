"""Adjustments of logits before the draw: logit biases, and penalties for earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.messages import Int32Array
from kvforge.worker.device.device import Device

from .ahead import AheadRows

NO_ROW = -1
ROWS_AT_FIRST = 4


class PenaltyCounts:
    """Occurrences of each token, for the slots that have a penalty.

    The table [rows, vocab] int32 on the device holds twice the count in the answer, plus 1 if the prompt has the
    token. It is allocated with the first such slot and doubles when its rows run out, up to slots_max rows: at most
    4 * slots_max * vocab bytes (256 slots of 151,936 tokens: 156 MB). A row is freed when its slot begins a request
    without penalties. The coordinator reuses the slots that were freed last, so few rows are ever in use.
    """

    def __init__(self, slots_max: int, vocab_size: int, device: Device) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._row = np.full(slots_max, NO_ROW, np.int64)
        self._free: list[int] = []
        self._table: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return 0 if self._table is None else len(self._table)

    def holds(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return a mask [n] of the slots that have a penalty."""
        return np.asarray(self._row[slots] != NO_ROW)

    def begin(self, slot: int, prompt: Int32Array, generated: Int32Array) -> None:
        """Start a slot with earlier tokens.

        Args:
            slot: The slot.
            prompt: Tokens of the prompt.
            generated: Tokens of the answer so far.

        Raises:
            RuntimeError: torch is out of memory.
        """
        if self._row[slot] == NO_ROW:
            if not self._free:
                self._grow()
            self._row[slot] = self._free.pop()
        assert self._table is not None
        occurred = 2 * np.bincount(generated, minlength=self._vocab_size)
        occurred[prompt] |= 1  # numpy applies repeated indices once
        self._table[int(self._row[slot])] = self._device.upload(occurred.astype(np.int32))

    def forget(self, slot: int) -> None:
        """Free the row of a slot without penalties."""
        if self._row[slot] != NO_ROW:
            self._free.append(int(self._row[slot]))
            self._row[slot] = NO_ROW

    def add(self, slots: npt.NDArray[np.integer], tokens: torch.Tensor, good: torch.Tensor) -> None:
        """Count sampled tokens. tokens: [n] int64 on the device. good: [n] bool on the device, False to skip a slot."""
        held = np.flatnonzero(self.holds(slots))
        if len(held):
            assert self._table is not None
            of = self._device.upload(held)
            rows = self._device.upload(self._row[slots[held]])
            at = tokens[of].clamp(max=self._vocab_size - 1)
            self._table[rows, at] += 2 * good[of].int()

    def add_accepted(self, slots: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer]) -> None:
        """Count tokens of the host. slots, tokens: [n] on the host; slots without a penalty are ignored."""
        held = self.holds(slots)
        if held.any():
            assert self._table is not None
            at = (self._device.upload(self._row[slots[held]]), self._device.upload(tokens[held].astype(np.int64)))
            self._table.index_put_(at, torch.full_like(at[0], 2, dtype=torch.int32), accumulate=True)

    def apply(
        self,
        scores: torch.Tensor,
        slots: npt.NDArray[np.integer],
        of: torch.Tensor,
        penalties: torch.Tensor,
        ahead: AheadRows | None = None,
    ) -> None:
        """Penalise rows of scores in place: repetition first, then presence and frequency.

        Args:
            scores: [n, vocab] float64 on the device.
            slots: [m] on the host, the slots with a penalty.
            of: [m] int64 on the device, their rows of scores.
            penalties: [m, 3] float64 on the device: repetition, presence and frequency.
            ahead: The m rows, if they sample behind drafts, which then count too.
        """
        assert self._table is not None
        width = min(self._vocab_size, scores.shape[1])
        occurred = self._table[self._device.upload(self._row[slots])][:, :width]
        if ahead is not None:
            rows, drafts = ahead.earlier_drafts()
            at = (self._device.upload(rows), self._device.upload(drafts.clip(max=width - 1)))
            occurred.index_put_(at, torch.full_like(at[0], 2, dtype=torch.int32), accumulate=True)
        repetition, presence, frequency = (column[:, None] for column in penalties.unbind(dim=1))
        mine = scores[of, :width]
        repeated = torch.where(mine > 0, mine / repetition, mine * repetition)
        mine = torch.where(occurred > 0, repeated, mine)
        times = occurred >> 1
        mine -= times * frequency + (times > 0) * presence
        scores[of, :width] = mine

    def _grow(self) -> None:
        rows = self.rows
        more = min(max(ROWS_AT_FIRST, 2 * rows), len(self._row))
        assert more > rows, "every slot has a row"
        table = torch.zeros((more, self._vocab_size), dtype=torch.int32, device=self._device.torch_device)
        if self._table is not None:
            table[:rows] = self._table
        self._table = table
        self._free += range(more - 1, rows - 1, -1)


class LogitBias:
    """Logit biases of the slots: token ids, and the values added to their logits."""

    def __init__(self, slots_max: int, device: Device) -> None:
        self._device = device
        self._has = np.zeros(slots_max, np.bool_)
        self._of: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}

    def holds(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return a mask [n] of the slots that have biases."""
        return self._has[slots]

    def begin(self, slot: int, pairs: Sequence[tuple[int, float]]) -> None:
        """Start a slot with (token id, value) pairs; the ids are distinct."""
        self._has[slot] = bool(pairs)
        self._of.pop(slot, None)
        if pairs:
            self._of[slot] = (np.array([t for t, _ in pairs], np.int64), np.array([v for _, v in pairs], np.float64))

    def apply(self, scores: torch.Tensor, slots: npt.NDArray[np.integer]) -> None:
        """Add each slot's biases to its row in place. scores: [n, vocab] float64, device. slots: [n], host."""
        rows = np.flatnonzero(self.holds(slots))
        parts = [self._of[int(slot)] for slot in slots[rows]]
        ids = np.concatenate([tokens for tokens, _ in parts])
        values = np.concatenate([values for _, values in parts])
        row = np.repeat(rows, [len(tokens) for tokens, _ in parts])
        inside = ids < scores.shape[1]
        at = (self._device.upload(row[inside]), self._device.upload(ids[inside]))
        scores[at] += self._device.upload(values[inside])  # the indices are distinct
