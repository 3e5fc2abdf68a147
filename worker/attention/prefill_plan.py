"""Which kernel computes a layer's prefill, and the tiles of a step: planned on the host, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import triton

from kvforge.worker.device.target import PrefillTiles, Target, TileKey, head_class

from .interface import AttentionOptions, KvLayer
from .plan_items import FIELDS, PREFILL_TILE, named
from .prefill_copy import PAGE
from .quantised import is_quantised

PACK_MAX = 16
HOPPER_QUERIES = 128
GLUON_VERSIONS = ((3, 6), (3, 9))  # of Triton, that `prefill_hopper` was compiled with: see `gluon_names`


@dataclass(frozen=True)
class PrefillShape:
    """How one layer's prefill is computed. tokens: of one tile. pack: query heads of one tile.

    hopper: whether by `prefill_hopper`. tiles: sizes for the kernel.
    """

    hopper: bool
    tokens: int
    pack: int
    tiles: PrefillTiles


def prefill_shape(
    heads: int,
    query_dtype: torch.dtype,
    layer: KvLayer,
    options: AttentionOptions,
    target: Target,
    copied: bool = False,
) -> PrefillShape:
    """The choice for one layer; only `tokens` of it matters to the plan.

    copied: as if the rows' K and V were first brought into a workspace. What comes back then is `hopper` only where
    that helps: nowhere else is a workspace of any use.
    """
    _, block_size, kv_heads, head_size = layer.keys.shape
    pack = packed_heads(heads // kv_heads)
    itemsize = 4 if query_dtype == torch.float32 else layer.keys.element_size()  # of the larger operand
    tiles = target.prefill[TileKey(head_class(head_size), itemsize)]
    stored = query_dtype if copied and is_quantised(layer.keys.dtype) else layer.keys.dtype
    block_size = PAGE if copied else block_size
    hopper = not hopper_problem(query_dtype, stored, head_size, block_size, options.window, target)
    if hopper:
        return PrefillShape(True, HOPPER_QUERIES // pack, pack, tiles)
    queries = max(tiles.queries, pack)
    return PrefillShape(False, queries // pack, pack, PrefillTiles(queries, tiles.keys, tiles.warps, tiles.stages))


def hopper_problem(
    query_dtype: torch.dtype, stored: torch.dtype, head_size: int, block_size: int, window: int, target: Target
) -> str:
    """Why `prefill_hopper` is not for such a layer; "" where it is. stored: dtype of K and V as it would read them."""
    if not target.hopper:
        return "this device is no Hopper"
    if problem := gluon_problem():
        return problem
    if stored != query_dtype or query_dtype not in (torch.float16, torch.bfloat16):
        return "the kernel for Hopper reads 16-bit K and V of the model's dtype"
    if head_size % 8 or head_size > 256:
        return f"the kernel for Hopper takes no heads of {head_size}"
    # With a window the row's first and last chunk must differ, and the first be a whole block (see `prefill_hopper`).
    fits_window = window == 0 or (block_size < window and block_size <= hopper_keys(head_size))
    if block_size not in (8, 16, 32, 64, 128) or not fits_window:
        return f"the kernel for Hopper takes no blocks of {block_size}" + f" with a window of {window}" * (window > 0)
    return ""


@lru_cache(maxsize=1)
def gluon_problem(version: str = triton.__version__) -> str:
    """Why this Triton does not take `prefill_hopper`; "" where it does."""
    first, last = (".".join(map(str, each)) for each in GLUON_VERSIONS)
    major, minor = (int(part) for part in version.split(".")[:2])
    if GLUON_VERSIONS[0] <= (major, minor) <= GLUON_VERSIONS[1]:
        return ""
    return f"the kernel for Hopper is written for Triton {first} to {last}, this is {version}"


def packed_heads(group: int) -> int:
    """Query heads that go together, of a group that shares a KV head: a power of two that divides the group."""
    return min(group & -group, PACK_MAX)


def hopper_keys(head_size: int) -> int:
    """Keys of one step of `prefill_hopper`: K and V of two steps and the queries fill the shared memory."""
    return 128 if head_size <= 128 else 64


def plan_prefill(
    starts: npt.NDArray[np.integer],
    counts: npt.NDArray[np.integer],
    query_starts: npt.NDArray[np.integer],
    tokens: int,
    rows: npt.NDArray[np.integer] | None = None,
) -> npt.NDArray[np.int32]:
    """The tiles of a step, those with most keys first: [tiles, FIELDS] int32, see `plan_items.PREFILL_TILE`.

    starts, counts: [rows]; query_starts: [rows + 1] int host, as in PagedBatch. tokens: of one tile. rows: [n] rows to
    do (None: all).
    """
    rows = np.arange(len(counts)) if rows is None else rows
    counts = np.asarray(counts, np.int64)[rows]
    starts = np.asarray(starts, np.int64)[rows]
    tiles = -(-counts // tokens)
    of = np.repeat(np.arange(len(rows)), tiles)
    first = (np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    array = np.zeros((len(of), FIELDS), np.int32)
    items = named(array, PREFILL_TILE)
    items["row"] = np.asarray(rows)[of]
    items["first_token"] = np.asarray(query_starts)[rows][of] + first
    items["position"] = starts[of] + first
    items["tokens"] = np.minimum(counts[of] - first, tokens)
    items["row_start"] = starts[of]
    items["row_length"] = (starts + counts)[of]
    pages = -(-(starts + counts) // PAGE)
    items["first_page"] = (np.cumsum(pages) - pages)[of]
    return array[np.argsort(-(items["position"] + items["tokens"]), kind="stable")]
