"""Plans of decodes: splits a step's rows into parts of work, on the host, once for all layers.

A row is split into *parts*, spans of its keys. One program of the kernel handles a part and a KV head. The last program
of a row to finish merges its parts in order, so the split determines the order of rounding. A *steady* planner splits a
row by its own length only: into at most STEADY_PARTS equal parts of at least STEADY_MIN keys. Any other planner
considers all rows of a step, in one of two ways:

- Equal parts that all run at once (one wave), if there are few rows and such parts are nearly equal.
- Otherwise guided self-scheduling (Polychronopoulos and Kuck, IEEE Transactions on Computers C-36, 1987): rows go
  longest first, and a part may be as long as a share of the remaining work, but no longer than an equal share of all
  work. Most rows stay whole, and the last rows are split finely enough for all multiprocessors to finish together.

In both cases the parts with the most keys start first. The size of the array depends on rows_max only, so that a
captured graph finds each new plan at the same address.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plan_items import DECODE_HEAD, DECODE_PART, FIELDS, Int32Array, named

EQUAL_MIN = 128  # fewest keys of equal parts: a part costs about as much as reading that many
GUIDED_MIN = 384  # fewest keys of guided parts; see benchmarks/NOTES.md
GUIDED_SHARE = 2.0  # a guided part's limit, in equal shares of the remaining work
UNEVEN_MAX = 1.15  # limit of the longest equal part, relative to the average program's work
WAVES_MORE = 3  # parts beyond one per row, in multiples of the concurrent programs
STEADY_MIN, STEADY_PARTS = 384, 16  # see benchmarks/NOTES.md


@dataclass(frozen=True)
class DecodePlanner:
    """Makes plans for one shape of attention on one device.

    Attributes:
        rows_max: Rows of the batch, with padding.
        programs: Concurrent programs per part: the device's resident programs divided by KV heads x slices of query
            heads.
        key_tile: Keys of one step of the kernel's loop; parts are split at multiples.
        window: See AttentionOptions.
        steady: See `Device.steady`.
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
        """Most parts of a plan."""
        if self.steady:
            return self.rows_max * STEADY_PARTS
        return self.rows_max + self.programs * (WAVES_MORE if self.rows_max > 1 else 1)

    @property
    def size(self) -> int:
        """Length of a plan's array."""
        return FIELDS * (1 + self.items_max)

    def plan(self, lengths: npt.NDArray[np.integer]) -> Int32Array:
        """Make the plan of a step.

        Args:
            lengths: [rows <= rows_max] tokens of each row, with the new one; 0: padding, skipped.

        Returns:
            [size] int32: `plan_items.DECODE_HEAD`, then `DECODE_PART` entries, most keys first, then zeros.
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
        items["parts"] = items["own"] = of_row
        used[:] = used[np.argsort(low - high, kind="stable")]
        return array.reshape(-1)

    def plan_after(
        self, before: npt.NDArray[np.integer], made: Int32Array, lengths: npt.NDArray[np.integer]
    ) -> Int32Array:
        """Make the plan of a step as `plan` does, in less time if rows only grew within their last tiles.

        Args:
            before: [rows] the lengths of an earlier step.
            made: Its plan.
            lengths: See `plan`.
        """
        tiles = self.key_tile
        if self.window or not np.array_equal((before + (tiles - 1)) // tiles, (lengths + (tiles - 1)) // tiles):
            return self.plan(lengths)
        array = made.copy()
        head, parts = array[:FIELDS], array[FIELDS:]
        items = named(parts[: FIELDS * int(named(head, DECODE_HEAD)["items"][0])], DECODE_PART)
        (last,) = np.nonzero(items["part"] == items["parts"] - 1)
        items["end"][last] = lengths[items["row"][last]]
        return array

    def _parts(self, tiles: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the parts of each row, at most items_max in total. tiles: [rows], descending, without zeros."""
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
        """Return the least limit of a part's tiles, at least `minimum`, that gives no more parts than programs."""
        low, high = minimum, max(minimum, int(tiles.max(initial=0)))
        while low < high:
            middle = (low + high) // 2
            if int((-(-tiles // middle)).sum()) <= self.programs:
                high = middle
            else:
                low = middle + 1
        return low
