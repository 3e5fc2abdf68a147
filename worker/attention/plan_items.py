"""Field names of plan items, shared by the host, which fills them in, and the kernels, which read them.

A plan is an array of items on the device, each FIELDS int32. The host accesses it through `named`; a kernel adds
`place` to an item's address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FIELDS = 8  # int32 numbers of an item
Int32Array = npt.NDArray[np.int32]


def _item(*names: str) -> np.dtype[np.void]:
    unused = (f"unused_{place}" for place in range(len(names), FIELDS))
    return np.dtype([(name, np.int32) for name in (*names, *unused)])


# Number of parts that follow.
DECODE_HEAD = _item("items")
# A part of a row's keys, [begin, end). The results of a row's `parts` are stored in the workspace from `first_partial`
# on. own: how many of them this plan has; the others are there before it runs.
DECODE_PART = _item("row", "begin", "end", "first_partial", "part", "parts", "own")
# Number of parts that follow.
SHARED_HEAD = _item("items")
# Part number `part`, keys [begin, end), of `rows` rows that have it in common. They are described from item `first` on.
SHARED_PART = _item("begin", "end", "part", "first", "rows")
# One of these rows; its parts are stored in the workspace from `first_partial` on.
SHARED_ROW = _item("row", "first_partial")
# `tokens` new tokens of a row, from `first_token` in the flat batch, at `position`. row_start: position of the row's
# first new token. row_length: length with all new tokens. first_page: the row's first page in a workspace, if any.
PREFILL_TILE = _item("row", "first_token", "position", "tokens", "row_start", "row_length", "first_page")
# A page of a row to copy into a workspace, from position `first_token` of the row. row_start, row_length: as in a tile.
PAGE_COPY = _item("row", "first_token", "row_length", "page", "row_start")

# Numbers of parts that follow.
LATENT_HEAD = _item("items")
# Tokens [begin, end) of a row with latents, in parts of `part_tokens`. slot: where the result is stored for the merge;
# -1: it is the row's result.
LATENT_PART = _item("row", "begin", "end", "part_tokens", "slot")
# Of each row: its results from `first_slot` on, `group` of them (or fewer, the last ones) to a group. slots: 0 in rows
# without a merge.
LATENT_MERGE = _item("first_slot", "slots", "group")


def place(item: np.dtype[np.void], name: str) -> int:
    """Return the index of a field within an item, for kernels."""
    assert item.fields is not None
    return int(item.fields[name][1]) // np.dtype(np.int32).itemsize


def named(numbers: Int32Array, item: np.dtype[np.void]) -> npt.NDArray[Any]:
    """Return a view as items [n] with fields of [n] int32. numbers: [n x FIELDS] or [n, FIELDS], contiguous."""
    items: npt.NDArray[Any] = numbers.reshape(-1).view(item)
    return items
