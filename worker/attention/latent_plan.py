"""Plans of decodes over latents: divides a step's rows among programs, on the host, once for all layers.

A row is divided by its own length only: into *parts* of PART_MIN tokens or more, and these into *groups* of consecutive
parts. The kernels compute each part by itself, add the parts of a group in order, and then the groups. Only the size
of the work items depends on the other rows of a step: a program takes a whole group, or one part where more programs
would be idle. Either has the same bits (see `latent_decode_kernel`).

Small items fill the device when there are few rows. They cost time where it is full: each stores sums that take about
as long to write and read as ITEM_TOKENS tokens. The size of the array depends on rows_max only, so that a captured
graph finds each new plan at the same address.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plan_items import FIELDS, LATENT_HEAD, LATENT_MERGE, LATENT_PART, Int32Array, named

PART_MIN, PARTS_MAX = 128, 128  # fewest tokens of a part; most parts of a row
GROUP_MIN, GROUPS_MAX = 4, 8  # fewest parts of a group; most groups of a row (see benchmarks/NOTES.md)
ITEM_TOKENS = 64
ITEMS_MIN = 2  # items that every plan has room for, in multiples of the concurrent programs

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LatentPlanner:
    """Makes plans for one shape of attention on one device.

    Attributes:
        rows_max: Rows of the batch, with padding.
        programs: Concurrent programs per item: the device's resident programs divided by tiles of query heads.
        folds: Whether a program can compute several parts; otherwise a group is one part.
    """

    rows_max: int
    programs: int
    folds: bool = True

    def __post_init__(self) -> None:
        for name in ("rows_max", "programs"):
            assert getattr(self, name) >= 1, name

    @property
    def items_max(self) -> int:
        """Most items of a plan, and most results that it stores."""
        return max(self.rows_max * GROUPS_MAX, self.programs * ITEMS_MIN)

    @property
    def size(self) -> int:
        """Length of a plan's array."""
        return FIELDS * (1 + self.items_max + self.rows_max)

    @property
    def merges(self) -> int:
        """Index of the merges in a plan's array."""
        return FIELDS * (1 + self.items_max)

    def plan(self, lengths: npt.NDArray[np.integer]) -> Int32Array:
        """Make the plan of a step.

        Args:
            lengths: [rows <= rows_max] tokens of each row, with the new one; 0: padding, skipped.

        Returns:
            [size] int32: `plan_items.LATENT_HEAD`, then `LATENT_PART` entries, most tokens first, then zeros; from
            `merges` on a `LATENT_MERGE` entry for each row.
        """
        assert len(lengths) <= self.rows_max
        rows = np.flatnonzero(lengths)
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        ends = lengths[rows].astype(np.int64)
        part_tokens, group_parts = self._divisions(ends)
        sizes = np.where(self._split_rows(ends, part_tokens, group_parts), part_tokens, part_tokens * group_parts)
        counts = -(-ends // sizes)
        of = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = np.where(counts > 1, counts, 0)
        first_slots = np.cumsum(slots) - slots

        array = np.zeros((1 + self.items_max + self.rows_max, FIELDS), np.int32)
        named(array[:1], LATENT_HEAD)["items"] = len(of)
        used = array[1 : 1 + len(of)]
        items = named(used, LATENT_PART)
        items["row"] = rows[of]
        items["begin"] = number * sizes[of]
        items["end"] = np.minimum((number + 1) * sizes[of], ends[of])
        items["part_tokens"] = part_tokens[of]
        items["slot"] = np.where(slots[of] > 0, first_slots[of] + number, -1)
        used[:] = used[np.argsort(items["begin"] - items["end"], kind="stable")]
        merges = named(array[1 + self.items_max :], LATENT_MERGE)
        merges["first_slot"][rows] = first_slots
        merges["slots"][rows] = slots
        merges["group"][rows] = np.where(sizes == part_tokens, group_parts, 1)
        return array.reshape(-1)

    def _divisions(self, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return tokens of a part and parts of a group, for each row of `ends` tokens."""
        units = -(-ends // PART_MIN)
        part_units = -(-units // PARTS_MAX)
        parts = -(-units // part_units)
        group_parts = np.maximum(-(-parts // GROUPS_MAX), GROUP_MIN)
        if self.folds:
            return part_units * PART_MIN, group_parts
        return part_units * group_parts * PART_MIN, np.ones_like(group_parts)

    def _split_rows(self, ends: Int64Array, part_tokens: Int64Array, group_parts: Int64Array) -> npt.NDArray[np.bool_]:
        """Return the rows with parts that are items of their own: [rows], the longest ones."""
        order = np.arange(len(ends))
        best, least = order < 0, np.inf
        if not self.folds:
            return best
        for share in (0, 1, 2, 4):
            fine = order < len(ends) * share // 4
            sizes = np.where(fine, part_tokens, part_tokens * group_parts)
            counts = -(-ends // sizes)
            if int(counts.sum()) > self.items_max:
                break
            items = np.sort(np.repeat(np.minimum(sizes, ends), counts))[::-1]
            busiest = int((items[:: self.programs] + ITEM_TOKENS).sum())
            if busiest < least:
                best, least = fine, busiest
        return best
