"""The numbers of a plan's items by name: what the host fills in and the kernels read, declared once for both.

A plan is an array of items on the device, each FIELDS int32. The host sees it through `named`, a kernel adds `place` to
an item's address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FIELDS = 8  # int32 of one item of every plan
Int32Array = npt.NDArray[np.int32]


def _item(*names: str) -> np.dtype[np.void]:
    unused = (f"unused_{place}" for place in range(len(names), FIELDS))
    return np.dtype([(name, np.int32) for name in (*names, *unused)])


# How many parts follow.
DECODE_HEAD = _item("items")
# A part of a row's keys, from `begin` to before `end`. The results of a row's `parts` go to the places of the workspace
# from `first_partial` on.
DECODE_PART = _item("row", "begin", "end", "first_partial", "part", "parts")
# `tokens` new tokens of a row from `first_token` of the flat batch on, which is at `position`. row_start: position of
# the row's first new token. row_length: with all of them. first_page: of the row in a workspace, where it has one.
PREFILL_TILE = _item("row", "first_token", "position", "tokens", "row_start", "row_length", "first_page")
# A page of a row, copied into a workspace: from the position `first_token` of the row on. row_start, row_length: as of
# a tile.
PAGE_COPY = _item("row", "first_token", "row_length", "page", "row_start")


def place(item: np.dtype[np.void], name: str) -> int:
    """Which of an item's int32 it is: for kernels."""
    assert item.fields is not None
    return int(item.fields[name][1]) // np.dtype(np.int32).itemsize


def named(numbers: Int32Array, item: np.dtype[np.void]) -> npt.NDArray[Any]:
    """The same memory as items: [n]; each field is [n] int32. numbers: [n x FIELDS] or [n, FIELDS], contiguous."""
    items: npt.NDArray[Any] = numbers.reshape(-1).view(item)
    return items
