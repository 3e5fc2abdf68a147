"""Dequantises K and V of a step's rows into a contiguous 16-bit workspace.

`prefill_hopper` multiplies operands that the copy engine loads into shared memory, so it cannot dequantise on the way.
Dequantising a row once is cheap if many new tokens read it: one byte read and two written per number, against
4 x (new tokens x query heads of a KV head) operations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvforge.worker.device.target import head_class

from .interface import KvLayer
from .plan_items import FIELDS, PAGE_COPY, PREFILL_TILE, named, place

IntArray = npt.NDArray[np.int64]
PAGE = 128  # tokens of a workspace block
TOKENS = 32  # tokens of one program
PAGES_MAX = 512  # pages of a workspace, the limit of a row: 256 MiB for 8 heads of 128 numbers
OPERATIONS_MIN = 192  # new tokens x query heads of a KV head that justify a copy
_FIELDS = tl.constexpr(FIELDS)
_ROW, _FIRST_TOKEN, _ROW_LENGTH, _PAGE, _ROW_START = (
    tl.constexpr(place(PAGE_COPY, name)) for name in ("row", "first_token", "row_length", "page", "row_start")
)


@triton.jit
def _dequantised(cache, scales, rows, inside, columns, HEAD: tl.constexpr):
    mask = inside[:, None] & (columns < HEAD)[None, :]
    stored = tl.load(cache + rows[:, None] * HEAD + columns[None, :], mask=mask, other=0.0)
    return stored.to(tl.float32) * tl.load(scales + rows, mask=inside, other=0.0)[:, None]


@triton.jit(do_not_specialize=["table_stride", "pages", "window"])  # one compilation; `pages` may be 1
def copy_kernel(
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    table_stride,
    copies,
    workspace,
    pages,
    window,
    KV_HEADS: tl.constexpr,
    POOL_BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Dequantise one page per program row. Grid: [copies, PAGE / TOKENS, kv_heads].

    workspace: [2, pages, PAGE, kv_heads, head_size]: K, then V.
    """
    copy = copies + tl.program_id(0) * _FIELDS
    kv_head = tl.program_id(2)
    row = tl.load(copy + _ROW).to(tl.int64)
    offset = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    token = tl.load(copy + _FIRST_TOKEN) + offset
    inside = token < tl.load(copy + _ROW_LENGTH)
    if window > 0:
        inside = inside & (token > tl.load(copy + _ROW_START) - window)  # blocks outside the window may be freed
    page = tl.load(copy + _PAGE).to(tl.int64)
    columns = tl.arange(0, HEAD_PAD)
    block = tl.load(tables + row * table_stride + token // POOL_BLOCK, mask=inside, other=0).to(tl.int64)
    source = (block * POOL_BLOCK + token % POOL_BLOCK) * KV_HEADS + kv_head
    target = (page * PAGE + offset) * KV_HEADS + kv_head
    at = workspace + target[:, None] * HEAD + columns[None, :]
    mask = (columns < HEAD)[None, :]  # zeros beyond the row, where the memory is undefined
    dtype = workspace.dtype.element_ty
    tl.store(at, _dequantised(keys, key_scales, source, inside, columns, HEAD).to(dtype), mask=mask)
    at += pages.to(tl.int64) * PAGE * KV_HEADS * HEAD
    tl.store(at, _dequantised(values, value_scales, source, inside, columns, HEAD).to(dtype), mask=mask)


def copy_groups(
    starts: IntArray, counts: IntArray, group: int, rows: IntArray, steady: bool = False
) -> tuple[IntArray, list[IntArray]]:
    """Split rows into those read in place, and groups to copy first that fit a workspace of PAGES_MAX each.

    The choice for a row depends on that row only.

    Args:
        starts: [all rows] int on the host.
        counts: [all rows] int on the host.
        group: Query heads of one KV head.
        rows: The rows to split.
        steady: Whether the choice must not depend on the row's number of new tokens, if the row fits the workspace.

    Returns:
        The rows read in place, and the groups.
    """
    pages = -(-(starts + counts)[rows] // PAGE)
    copied = pages <= PAGES_MAX
    if not steady:
        copied &= counts[rows] * group >= OPERATIONS_MIN
    groups: list[list[int]] = []
    room = 0
    for row, needed in zip(rows[copied].tolist(), pages[copied].tolist(), strict=True):
        if needed > room:
            groups.append([])
            room = PAGES_MAX
        groups[-1].append(row)
        room -= needed
    return rows[~copied], [np.array(each, np.int64) for each in groups]


def plan_copies(items: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the pages of the rows in `items` (see `prefill_plan.plan_prefill`): [copies, FIELDS] int32."""
    tiles = named(items, PREFILL_TILE)
    rows: npt.NDArray[np.int32] = tiles["row"]  # without the type mypy takes three seconds for the next line
    _, first = np.unique(rows, return_index=True)
    of_rows = tiles[first]
    lengths = of_rows["row_length"]
    pages = -(-lengths // PAGE)
    of = np.repeat(np.arange(len(first)), pages)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pages) - pages, pages)
    array = np.zeros((len(of), FIELDS), np.int32)
    copies = named(array, PAGE_COPY)
    copies["row"] = of_rows["row"][of]
    copies["first_token"] = number * PAGE
    copies["row_length"] = lengths[of]
    copies["page"] = of_rows["first_page"][of] + number
    copies["row_start"] = of_rows["row_start"][of]
    return array


def workspace_for(pages: int, layer: KvLayer, dtype: torch.dtype) -> torch.Tensor:
    """Allocate [2, pages, PAGE, kv_heads, head_size] on the device; all layers of one shape share it."""
    _, _, kv_heads, head_size = layer.keys.shape
    return torch.empty((2, pages, PAGE, kv_heads, head_size), dtype=dtype, device=layer.keys.device)


def copy_rows(
    layer: KvLayer, tables: torch.Tensor, copies: torch.Tensor, workspace: torch.Tensor, window: int
) -> KvLayer:
    """Fill the workspace.

    Args:
        layer: The layer's cache.
        tables: The step's block tables.
        copies: [copies, FIELDS] int32 on the device, from `plan_copies`.
        workspace: From `workspace_for`, with enough pages.
        window: See AttentionOptions.

    Returns:
        The workspace as a layer with blocks of PAGE tokens.
    """
    _, block_size, kv_heads, head_size = layer.keys.shape
    copy_kernel[(len(copies), PAGE // TOKENS, kv_heads)](
        layer.keys,
        layer.values,
        layer.key_scales,
        layer.value_scales,
        tables,
        tables.stride(0),
        copies,
        workspace,
        workspace.shape[1],
        window,
        KV_HEADS=kv_heads,
        POOL_BLOCK=block_size,
        HEAD=head_size,
        HEAD_PAD=head_class(head_size),
        TOKENS=TOKENS,
        PAGE=PAGE,
        num_warps=4,
    )
    return KvLayer(workspace[0], workspace[1])
