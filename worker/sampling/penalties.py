"""What shifts logits before the draw: logit biases, and penalties for tokens that were there before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.messages import Int32Array
from worker.device.device import Device

NO_ROW = -1
ROWS_AT_FIRST = 4


class PenaltyCounts:
    """How often each token occurred, for the slots that have a penalty.

    A table [rows, vocab] int32 on the device: twice the count in the answer, plus 1 where the prompt holds the token.
    It starts when the first such slot does, doubles when its rows run out, and never has more than slots_max: at most
    4 * slots_max * vocab bytes (256 slots of 151,936 tokens: 156 MB). A row is free again when its slot begins a
    request without penalties; the coordinator reuses the slots that were freed last, so that few are ever in use.
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
        """Which of the slots have a penalty: [n] bool."""
        return np.asarray(self._row[slots] != NO_ROW)

    def begin(self, slot: int, prompt: Int32Array, generated: Int32Array) -> None:
        """The slot starts with these tokens behind it. Errors: whatever torch raises where memory runs out."""
        if self._row[slot] == NO_ROW:
            if not self._free:
                self._grow()
            self._row[slot] = self._free.pop()
        assert self._table is not None
        occurred = 2 * np.bincount(generated, minlength=self._vocab_size)
        occurred[prompt] |= 1  # numpy writes a place that is named twice once
        self._table[int(self._row[slot])] = self._device.upload(occurred.astype(np.int32))

    def forget(self, slot: int) -> None:
        """The slot has no penalty any more."""
        if self._row[slot] != NO_ROW:
            self._free.append(int(self._row[slot]))
            self._row[slot] = NO_ROW

    def add(self, slots: npt.NDArray[np.integer], tokens: torch.Tensor, good: torch.Tensor) -> None:
        """Each of the slots sampled a token. tokens: [n] int64 device; good: [n] bool device, False: it did not."""
        held = np.flatnonzero(self.holds(slots))
        if len(held):
            assert self._table is not None
            of = self._device.upload(held)
            rows = self._device.upload(self._row[slots[held]])
            at = tokens[of].clamp(max=self._vocab_size - 1)
            self._table[rows, at] += 2 * good[of].int()

    def apply(
        self, scores: torch.Tensor, slots: npt.NDArray[np.integer], of: torch.Tensor, penalties: torch.Tensor
    ) -> None:
        """Penalises rows of scores in place: repetition first, then presence and frequency.

        scores: [n, vocab] float64 device. slots: [m] host, which have a penalty. of: [m] int64 device, their rows of
        scores. penalties: [m, 3] float64 device, repetition, presence and frequency.
        """
        assert self._table is not None
        width = min(self._vocab_size, scores.shape[1])
        occurred = self._table[self._device.upload(self._row[slots])][:, :width]
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
    """The biases of each slot that has any: token ids and what is added to their logits."""

    def __init__(self, slots_max: int, device: Device) -> None:
        self._device = device
        self._has = np.zeros(slots_max, np.bool_)
        self._of: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}

    def holds(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of the slots have biases: [n] bool."""
        return self._has[slots]

    def begin(self, slot: int, pairs: Sequence[tuple[int, float]]) -> None:
        """The slot starts with these (token id, value) pairs, whose ids are distinct."""
        self._has[slot] = bool(pairs)
        self._of.pop(slot, None)
        if pairs:
            self._of[slot] = (np.array([t for t, _ in pairs], np.int64), np.array([v for _, v in pairs], np.float64))

    def apply(self, scores: torch.Tensor, slots: npt.NDArray[np.integer]) -> None:
        """Adds each slot's biases to its row, in place. scores: [n, vocab] float64 device. slots: [n] host."""
        rows = np.flatnonzero(self.holds(slots))
        parts = [self._of[int(slot)] for slot in slots[rows]]
        ids = np.concatenate([tokens for tokens, _ in parts])
        values = np.concatenate([values for _, values in parts])
        row = np.repeat(rows, [len(tokens) for tokens, _ in parts])
        inside = ids < scores.shape[1]
        at = (self._device.upload(row[inside]), self._device.upload(ids[inside]))
        scores[at] += self._device.upload(values[inside])  # the places are distinct
