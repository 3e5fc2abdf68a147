"""How the decodes of a step are cut into parts of work: planned on the host once a step, shared by all its layers.

A row is cut into *parts*, spans of its keys. A part times a KV head is what one program of the kernel does; where a row
has several parts, the last program to finish merges them, in their order. So where a row is cut decides in which order
its sums are rounded. A *steady* planner cuts a row by its own length alone: into equal parts of STEADY_MIN keys at
least, and no more than STEADY_PARTS. Any other one cuts by all the rows of a step, in one of two ways:

- equal parts, all of them at work at once (one wave): where rows are few and such parts come out nearly equal;
- else rows go longest first, and each part may be as long as a share of the work that is still left (guided
  self-scheduling: Polychronopoulos and Kuck, IEEE Transactions on Computers C-36, 1987), but no longer than an equal
  share of all work. Most rows stay whole, and the last ones to start are cut finely enough that all multiprocessors
  finish together.

Either way the parts with the most keys are started first. The array has a size that depends on rows_max only, so that a
captured graph finds a new plan where the old one was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plan_items import DECODE_HEAD, DECODE_PART, FIELDS, Int32Array, named

EQUAL_MIN = 128  # keys of equal parts at least: a part costs about as much as reading that many
GUIDED_MIN = 384  # keys of the smallest parts of the guided way; see benchmarks/NOTES.md
GUIDED_SHARE = 2.0  # a part's greatest share of the work left, in equal shares of it
UNEVEN_MAX = 1.15  # equal parts are taken if the longest is no more than this times the average program's work
WAVES_MORE = 3  # parts beyond one for each row, in multiples of the programs that run at once
STEADY_MIN, STEADY_PARTS = 384, 16  # see benchmarks/NOTES.md


@dataclass(frozen=True)
class DecodePlanner:
    """Plans for one shape of attention on one device.

    rows_max: rows of the batch, padding included. programs: that run at once for one part index, the device's resident
    programs divided by what a part needs (KV heads x slices of query heads). key_tile: keys of one step of the
    kernel's loop; parts are cut at multiples of it. window: see AttentionOptions. steady: see `Device.steady`.
    """

    rows_max: int
    programs: int
    key_tile: int
    window: int = 0
    steady: bool = False

    def __post_init__(self) -> None:
        for name in ("rows_max", "programs", "key_tile"):
            assert getattr(self, name) >= 1, name

    @property
    def items_max(self) -> int:
        """Parts of one plan at most."""
        if self.steady:
            return self.rows_max * STEADY_PARTS
        return self.rows_max + self.programs * (WAVES_MORE if self.rows_max > 1 else 1)

    @property
    def size(self) -> int:
        """Length of the plan's array."""
        return FIELDS * (1 + self.items_max)

    def plan(self, lengths: npt.NDArray[np.integer]) -> Int32Array:
        """lengths: [rows <= rows_max] tokens of each row, the new one included; 0: padding, nothing is done for it.

        Returns [size] int32: `plan_items.DECODE_HEAD`, then `DECODE_PART`s, those with the most keys first, then zeros.
        """
        assert len(lengths) <= self.rows_max
        ends = lengths.astype(np.int64)
        begins = np.maximum(ends - self.window, 0) if self.window else np.zeros_like(ends)
        firsts = begins // self.key_tile
        tiles = -(-ends // self.key_tile) - firsts
        rows = np.argsort(-tiles, kind="stable")[: np.count_nonzero(tiles)]
        parts = self._parts(tiles[rows])
        item_rows = np.repeat(rows, parts)
        first_partials = np.repeat(np.cumsum(parts) - parts, parts)
        part = np.arange(len(item_rows)) - first_partials
        of_row = np.repeat(parts, parts)
        low = firsts[item_rows] + part * tiles[item_rows] // of_row
        high = firsts[item_rows] + (part + 1) * tiles[item_rows] // of_row
        array = np.zeros((1 + self.items_max, FIELDS), np.int32)
        named(array[:1], DECODE_HEAD)["items"] = len(item_rows)
        used = array[1 : 1 + len(item_rows)]
        items = named(used, DECODE_PART)
        items["row"] = item_rows
        items["begin"] = np.maximum(low * self.key_tile, begins[item_rows])
        items["end"] = np.minimum(high * self.key_tile, ends[item_rows])
        items["first_partial"] = first_partials
        items["part"] = part
        items["parts"] = of_row
        used[:] = used[np.argsort(low - high, kind="stable")]
        return array.reshape(-1)

    def _parts(self, tiles: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """tiles: [rows] of each row, descending, none 0 -> parts of each row; their sum is items_max at most."""
        if self.steady:
            return -(-tiles // np.maximum(-(-tiles // STEADY_PARTS), -(-STEADY_MIN // self.key_tile)))
        total = int(tiles.sum())
        if len(tiles) <= self.programs:
            minimum = -(-EQUAL_MIN // self.key_tile)
            cap = self._least_cap(tiles, minimum)
            if len(tiles) <= 1 or cap == minimum or cap * self.programs <= UNEVEN_MAX * total:
                return -(-tiles // cap)
        left = np.cumsum(tiles[::-1])[::-1]
        caps = np.minimum(GUIDED_SHARE * left, total) / self.programs
        minimum = -(-GUIDED_MIN // self.key_tile)
        while True:
            parts = np.ceil(tiles / np.maximum(np.ceil(caps), minimum)).astype(np.int64)
            if parts.sum() <= self.items_max:
                return parts
            minimum *= 2

    def _least_cap(self, tiles: npt.NDArray[np.int64], minimum: int) -> int:
        """Of a part's tiles, so that there are no more parts than programs; `minimum` at least."""
        low, high = minimum, max(minimum, int(tiles.max(initial=0)))
        while low < high:
            middle = (low + high) // 2
            if int((-(-tiles // middle)).sum()) <= self.programs:
                high = middle
            else:
                low = middle + 1
        return low
