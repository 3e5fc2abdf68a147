"""Plans of decodes with common parts: which parts are computed once for several rows, and which for each row alone.

Rows share a part if their block tables agree up to its end, and if its borders are the same. A steady planner cuts a
row by its own length (see `decode_plan`), so rows with as many tiles of keys have the same borders; other
ones share the parts before their borders part. The last part of a row, which holds its own token, is never shared.

The bits do not depend on what is shared, so the choice is free: a step shares where that saves enough reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from kvforge.worker.device.target import Target

from .batch import IntArray
from .decode_plan import STEADY_PARTS, DecodePlanner
from .plan_items import DECODE_HEAD, DECODE_PART, FIELDS, SHARED_HEAD, SHARED_PART, SHARED_ROW, Int32Array, named
from .shared_prefixes import rows_alike

AnyTables = IntArray | Int32Array
MANY_ROWS = 128  # of a launch: from here on, Hopper's programs take twice as many queries. See benchmarks/NOTES.md
SAVED_BYTES_MIN = 64 << 20  # of a layer's K and V, which need not be read again; see benchmarks/NOTES.md
# Where shared parts were seen to have the bits of decodes alone, on a device (`test_full_grid`): head size and dtype of
# K and V. Elsewhere they were only interpreted and compiled.
SIXTEEN_BITS_OR_LESS = (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
MEASURED = {"sm_90": set(product((64, 80, 96, 128, 256), SIXTEEN_BITS_OR_LESS))}


def was_measured(target: Target, head_size: int, dtype: torch.dtype) -> bool:
    """Return whether layers may share reads on a target: where that was measured, and in Triton's interpreter."""
    return target.backend == "cpu" or (head_size, dtype) in MEASURED.get(target.name, ())


@dataclass(frozen=True)
class SharedPlans:
    """Plans of a step that shares reads.

    Attributes:
        shared: [SharedPlanner.size] int32, of `shared_decode_kernel`.
        own: [DecodePlanner.size] int32, of `decode_kernel`: the other parts.
    """

    shared: Int32Array
    own: Int32Array


@dataclass(frozen=True)
class SharedPlanner:
    """Makes plans for one shape of attention on one device.

    Attributes:
        decode: The planner of decodes, a steady one without a window.
        rows: Most rows of a program, at least 2.
        token_bytes: Bytes of K and V of a token of a layer.
    """

    decode: DecodePlanner
    rows: int
    token_bytes: int

    def __post_init__(self) -> None:
        assert self.decode.steady and not self.decode.window, "parts have equal borders by their own lengths alone"
        assert self.rows >= 2, "nothing is shared by one row"

    @property
    def items_max(self) -> int:
        """Most parts of a plan: each is one of two rows or more."""
        return self.decode.items_max // 2

    @property
    def size(self) -> int:
        """Length of the array of a plan of shared parts."""
        return FIELDS * (1 + self.items_max + self.decode.rows_max)

    def plan(
        self, tables: AnyTables, lengths: AnyTables, block_size: int, saved_bytes_min: int = SAVED_BYTES_MIN
    ) -> SharedPlans | None:
        """Make the plans of a step; None if too little is saved.

        Args:
            tables: [rows, width], block tables.
            lengths: [rows] tokens of each row, with the new one; 0: padding.
            block_size: Tokens per block.
            saved_bytes_min: Fewest bytes of K and V that need not be read again.
        """
        saved_bytes_min = max(1, saved_bytes_min)
        first = tables[lengths > 0, :1]
        if (len(first) - np.unique(first).size) * int(lengths.max(initial=0)) * self.token_bytes < saved_bytes_min:
            return None  # whatever these rows share
        own = self.decode.plan(lengths)
        count = int(named(own[:FIELDS], DECODE_HEAD)["items"][0])
        items = named(own[FIELDS : FIELDS * (1 + count)], DECODE_PART)
        ends = np.zeros((len(lengths), STEADY_PARTS), np.int64)
        inner = items[items["part"] + 1 < items["parts"]]
        ends[inner["row"], inner["part"]] = inner["end"]
        first_partials = np.zeros(len(lengths), np.int64)
        first_partials[items["row"]] = items["first_partial"]
        sets = [(some, parts) for rows, parts in rows_alike(tables, ends, block_size) for some in self._split(rows)]
        saved = sum((len(rows) - 1) * int(ends[rows[0], parts - 1]) for rows, parts in sets)
        if saved * self.token_bytes < saved_bytes_min:
            return None
        return SharedPlans(self._shared(sets, ends, first_partials), _without(own, items, sets, len(lengths)))

    def _split(self, rows: IntArray) -> list[IntArray]:
        """Divide rows among programs, each of two rows or more."""
        return [some for some in np.array_split(rows, -(-len(rows) // self.rows)) if len(some) > 1]

    def _shared(self, sets: list[tuple[IntArray, int]], ends: IntArray, first_partials: IntArray) -> Int32Array:
        """Return the plan of the shared parts.

        Sets that share the same part follow each other, so that they find its keys in the cache.
        """
        array = np.zeros((1 + self.items_max + self.decode.rows_max, FIELDS), np.int32)
        rows = named(array[1 + self.items_max :], SHARED_ROW)
        items, used = list[tuple[int, ...]](), 0
        for number, (members, parts) in enumerate(sets):
            rows["row"][used : used + len(members)] = members
            rows["first_partial"][used : used + len(members)] = first_partials[members]
            borders = [0, *ends[members[0], :parts].tolist()]
            first = 1 + self.items_max + used
            items += [(number, borders[part], borders[part + 1], part, first, len(members)) for part in range(parts)]
            used += len(members)
        fields = np.array(items, np.int64)
        found = fields[np.lexsort((fields[:, 0], fields[:, 3]))]
        named(array[:1], SHARED_HEAD)["items"] = len(found)
        parts_of_plan = named(array[1 : 1 + len(found)], SHARED_PART)
        for place, name in enumerate(("begin", "end", "part", "first", "rows"), 1):
            parts_of_plan[name] = found[:, place]
        return array.reshape(-1)


def may_share(tables: AnyTables, lengths: AnyTables) -> bool:
    """Return whether any two rows have the same first block. tables: [rows, width]. lengths: [rows], 0: padding."""
    first = tables[lengths > 0, :1]
    return len(first) > 1 and np.unique(first).size < len(first)


def _without(own: Int32Array, items: np.ndarray, sets: list[tuple[IntArray, int]], rows: int) -> Int32Array:
    """Return a plan of decodes without the parts of `sets`. items: all of its parts."""
    shared = np.zeros(rows, np.int64)
    for members, parts in sets:
        shared[members] = parts
    (left,) = (items["part"] >= shared[items["row"]]).nonzero()
    array = np.zeros((len(own) // FIELDS, FIELDS), np.int32)
    named(array[:1], DECODE_HEAD)["items"] = len(left)
    array[1 : 1 + len(left)] = own.reshape(-1, FIELDS)[1 + left]
    named(array[1 : 1 + len(left)], DECODE_PART)["own"] -= shared[items["row"][left]]
    return array.reshape(-1)
