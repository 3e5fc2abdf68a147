"""Sequences over a pool with windows: the pages that a coordinator would give them and take back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.windows import WindowLimits, WindowTables, ring_columns, seen_blocks

UNDEFINED = 2**30  # in cells of blocks that are not held


class PagedRows:
    """Block tables of some sequences, in random places. Pages that are taken back are filled with NaN."""

    def __init__(self, pool: KvPool, rows: int, width: int, ahead: int, seed: int = 0) -> None:
        self.pool, geometry = pool, pool.geometry
        self._free = np.random.default_rng(seed).permutation(pool.blocks).tolist()
        self.tables = np.full((rows, width), UNDEFINED, np.int32)
        self.held = [0] * rows
        self._window, self._size = geometry.window, geometry.block_size
        ring = WindowLimits(ahead, width, 0).ring_blocks(self._window, self._size)
        self.cells = np.full((rows, ring, geometry.window_pages), UNDEFINED, np.int32)
        self._of_block: list[dict[int, list[int]]] = [{} for _ in range(rows)]
        self.break_pages(np.arange(pool.blocks))

    def break_pages(self, pages: npt.NDArray[np.integer]) -> None:
        """Fill pages with NaN, or with the largest numbers of int8."""
        for memory in self.pool.tensors():
            if memory.itemsize == 1:
                memory.view(torch.int8)[pages.tolist()] = 127
            else:
                memory[pages.tolist()] = float("nan") if memory.is_floating_point() else 127

    def reserve(self, row: int, start: int, count: int) -> None:
        """Give a row the blocks that a step writes."""
        first, last = (int(each[0]) for each in seen_blocks(*_ends(start, count), self._window or 1, self._size))
        while self.held[row] <= last:
            self.tables[row, self.held[row]] = self._free.pop()
            self.held[row] += 1
        for block in range(first, last + 1) if self._window else ():
            if block not in self._of_block[row]:
                assert (block + 1) * self._size > start, "the step sees a block that was taken back"
                pages = [self._free.pop() for _ in range(self.pool.geometry.window_pages)]
                self._of_block[row][block] = pages
                self.cells[row, block % self.cells.shape[1]] = pages

    def release(self, row: int, computed: int) -> None:
        """Take back the blocks that no query from position `computed` on can see."""
        for block in [each for each in self._of_block[row] if (each + 1) * self._size <= computed - self._window]:
            pages = self._of_block[row].pop(block)
            self.cells[row, block % self.cells.shape[1]] = UNDEFINED
            self.break_pages(np.array(pages))
            self._free[:0] = pages

    def give_back(self, row: int, tokens: int) -> None:
        """Take back the blocks behind the first `tokens` tokens, which a step reserved for drafts."""
        keep = -(-tokens // self._size)
        while self.held[row] > keep:
            self.held[row] -= 1
            pages = [int(self.tables[row, self.held[row]]), *self._of_block[row].pop(self.held[row], [])]
            self.tables[row, self.held[row]] = UNDEFINED
            self.cells[row, self.held[row] % self.cells.shape[1]] = UNDEFINED
            self.break_pages(np.array(pages))
            self._free[:0] = pages

    def windows(self, rows: list[int], starts: list[int], counts: list[int]) -> WindowTables | None:
        """Return the window tables of rows of a step."""
        if not self._window:
            return None
        ring = self._window, self._size, self.cells.shape[1]
        first, columns = ring_columns(np.array(starts), np.add(starts, counts), *ring)
        return WindowTables(first, self.cells[np.array(rows)[:, None], columns])


def _ends(start: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return np.array([start]), np.array([start + count])
