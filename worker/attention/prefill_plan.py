"""Plans of prefills: the kernel of a layer's prefill, and the tiles of a step, made on the host for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import triton

from kvforge.worker.device.target import PrefillTiles, Target, TileKey, head_class

from .interface import AttentionOptions, KvLayer
from .mixed_batch import MixedSize
from .plan_items import FIELDS, PREFILL_TILE, named
from .prefill_copy import PAGE
from .quantised import is_quantised

PACK_MAX = 16
HOPPER_QUERIES = 128
GLUON_VERSIONS = ((3, 6), (3, 9))  # Triton versions that compile `prefill_hopper`: see `gluon_names`


@dataclass(frozen=True)
class PrefillShape:
    """The kernel and the tile sizes of a layer's prefill.

    Attributes:
        hopper: Whether `prefill_hopper` computes it.
        tokens: Tokens of one tile.
        pack: Query heads of one tile.
        tiles: Sizes for the kernel.
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
    """Choose the kernel and tiles for one layer; the plan depends on `tokens` only.

    Args:
        heads: Query heads.
        query_dtype: Dtype of the query.
        layer: The layer's cache.
        options: The layer's options.
        target: The architecture.
        copied: Whether K and V are copied into a workspace first. The result is `hopper` only if that helps; otherwise
            a workspace is useless.

    Returns:
        The choice.
    """
    _, block_size, kv_heads, head_size = layer.keys.shape
    pack = packed_heads(heads // kv_heads)
    itemsize = 4 if query_dtype == torch.float32 else layer.keys.element_size()  # size of the larger operand
    tiles = target.prefill[TileKey(head_class(head_size), itemsize)]
    stored = query_dtype if copied and is_quantised(layer.keys.dtype) else layer.keys.dtype
    block_size = PAGE if copied else block_size
    hopper = not hopper_problem(query_dtype, stored, head_size, block_size, options, target)
    if hopper:
        return PrefillShape(True, HOPPER_QUERIES // pack, pack, tiles)
    queries = max(tiles.queries, pack)
    return PrefillShape(False, queries // pack, pack, PrefillTiles(queries, tiles.keys, tiles.warps, tiles.stages))


def hopper_problem(
    query_dtype: torch.dtype,
    stored: torch.dtype,
    head_size: int,
    block_size: int,
    options: AttentionOptions,
    target: Target,
) -> str:
    """Return why `prefill_hopper` cannot serve a layer; "" if it can. stored: dtype of K and V as it reads them."""
    window = options.window
    if not target.hopper:
        return "this device is not a Hopper GPU"
    if problem := gluon_problem():
        return problem
    if stored != query_dtype or query_dtype not in (torch.float16, torch.bfloat16):
        return "the Hopper kernel reads 16-bit K and V of the model's dtype"
    if head_size % 8 or head_size > 256:
        return f"the Hopper kernel cannot read heads of {head_size}"
    # With a window the row's first and last chunk must differ, and the first be a whole block (see `prefill_hopper`).
    fits_window = window == 0 or (block_size < window and block_size <= hopper_keys(head_size))
    if block_size not in (8, 16, 32, 64, 128) or not fits_window:
        return f"the Hopper kernel cannot read blocks of {block_size}" + f" with a window of {window}" * (window > 0)
    return ""


@lru_cache(maxsize=1)
def gluon_problem(version: str = triton.__version__) -> str:
    """Return why this Triton cannot compile `prefill_hopper`; "" if it can."""
    first, last = (".".join(map(str, each)) for each in GLUON_VERSIONS)
    major, minor = (int(part) for part in version.split(".")[:2])
    if GLUON_VERSIONS[0] <= (major, minor) <= GLUON_VERSIONS[1]:
        return ""
    return f"the Hopper kernel needs Triton {first} to {last}, this is {version}"


def packed_heads(group: int) -> int:
    """Return the query heads of a pack: a power of two that divides the group of a KV head."""
    return min(group & -group, PACK_MAX)


def hopper_keys(head_size: int) -> int:
    """Return the keys of one step of `prefill_hopper`: K and V of two steps and the queries fill the shared memory."""
    return 128 if head_size <= 128 else 64


def plan_prefill(
    starts: npt.NDArray[np.integer],
    counts: npt.NDArray[np.integer],
    query_starts: npt.NDArray[np.integer],
    tokens: int,
    rows: npt.NDArray[np.integer] | None = None,
) -> npt.NDArray[np.int32]:
    """Plan the tiles of a step, those with the most keys first.

    Args:
        starts: [rows] int on the host, as in PagedBatch.
        counts: [rows] int on the host.
        query_starts: [rows + 1] int on the host.
        tokens: Tokens of one tile.
        rows: [n] rows to plan (None: all).

    Returns:
        [tiles, FIELDS] int32, see `plan_items.PREFILL_TILE`.
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


def padded_tiles(tiles: npt.NDArray[np.int32], size: MixedSize, tokens: int) -> npt.NDArray[np.int32]:
    """Append tiles without a token, so that the number of tiles follows from the sizes of a static batch.

    Such a tile reads the first key of the first row, which lies in the pool, and stores nothing.

    Args:
        tiles: [tiles, FIELDS] int32.
        size: The sizes of the batch.
        tokens: Tokens of one tile.

    Returns:
        [most tiles of such a batch, FIELDS] int32.
    """
    most = size.prompts + size.prompt_tokens // tokens
    padded = np.zeros((most, FIELDS), np.int32)
    named(padded, PREFILL_TILE)["row_length"] = 1
    padded[: len(tiles)] = tiles
    return padded
