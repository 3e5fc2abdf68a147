"""Decode attention that reads common parts of rows once: launches of `shared_decode_kernel`, and where it serves.

`shared_planner(...).plan(tables, lengths, block_size)` makes a step's plans on the host. Every layer launches
`shared_decode` and then `paged_decode`, over one workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kvforge.worker.device.target import Target, in_units

from .decode import KINDS, LOG2_E, ROWS_MIN, DecodeWorkspace, decode_planner, decode_tiles, divided_head, key_tile
from .interface import AttentionOptions, KvLayer
from .quantised import is_quantised
from .shared_decode_kernel import shared_decode_kernel
from .shared_plan import MANY_ROWS, SharedPlanner
from .sinks import sinks_of

# Releases of Triton in which the order of sums that `sum_as_decoded` restores was read and measured.
KNOWN_ORDER = ("3.6.",)


@dataclass(frozen=True)
class Program:
    """What a program of `shared_decode_kernel` computes over each tile of keys.

    Attributes:
        queries: Query heads of a tile.
        tiles: Tiles of query heads.
        warps: Triton's num_warps.
        stages: Stages of the loop over keys.
        sum_warps: Warps of `decode_kernel`, if the order of its sums must be restored; 0: products have that order.
    """

    queries: int
    tiles: int
    warps: int
    stages: int
    sum_warps: int = 0


def shared_planner(
    rows_max: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, window: int, target: Target
) -> SharedPlanner | None:
    """Return the planner of `shared_decode` for these shapes; None where rows are never read together.

    dtype: dtype of K and V.

    These are planners that do not cut a row by its own length, layers with a window, where little is common, KV heads
    with query heads for more than one tile, and float32 on a device: its compilers lay products of two tiles out
    otherwise, and so sum in another order.
    """
    if dtype == torch.float32 and target.backend != "cpu":
        return None
    group = heads // kv_heads
    if not target.steady or window or ROWS_MIN // group < 1:
        return None
    program = choose_program(rows_max, head_size, dtype, target)
    rows = program.queries // group * program.tiles
    if rows < 2:
        return None
    planner = decode_planner(rows_max, heads, kv_heads, head_size, dtype, window, target)
    scales = 4 if is_quantised(dtype) else 0
    return SharedPlanner(planner, rows, 2 * kv_heads * (head_size * dtype.itemsize + scales))


def choose_program(rows_max: int, head_size: int, dtype: torch.dtype, target: Target) -> Program:
    """Return what a program computes, for launches of this many rows. dtype: dtype of K and V.

    A warp group of Hopper multiplies 64 rows at once, K and V are read once for these, and the products have the bits
    of those of 16 rows. Numbers of 8 bits would first be unpacked to shared memory, which takes longer than it saves.
    Another release of Triton may add up in another order, so that all of them but those known have programs of 16.
    """
    tiles = decode_tiles(head_size, dtype, target)
    if target.hopper and dtype.itemsize == 2 and head_size <= 128 and triton.__version__.startswith(KNOWN_ORDER):
        groups = 2 if rows_max >= MANY_ROWS else 1
        return Program(64 * groups, 1, 4 * groups, 2, tiles.warps)
    count = 2 if head_size <= 128 and dtype.itemsize in target.two_tiles else 1
    return Program(ROWS_MIN, count, tiles.warps, tiles.stages)


def shared_decode(
    query: torch.Tensor,
    layer: KvLayer,
    tables: torch.Tensor,
    plan: torch.Tensor,
    workspace: DecodeWorkspace,
    options: AttentionOptions,
    target: Target,
) -> None:
    """Compute the shared parts of rows into the workspace. `paged_decode` must follow, with the plan of the others.

    Args:
        query: [rows, heads, head_size] float on the device; each row's heads are contiguous.
        layer: The KV cache of the layer.
        tables: [rows, width] int32 on the device, rows contiguous.
        plan: [size] int32 on the device, from `shared_planner` with the same shapes and target.
        workspace: For that planner's decodes, or a larger one.
        options: Attention options of the layer, without a window.
        target: The architecture.
    """
    rows, heads, head_size = query.shape
    _, block_size, kv_heads, _ = layer.keys.shape
    dtype = layer.keys.dtype
    program = choose_program(rows, head_size, dtype, target)
    head_tile, rest = divided_head(head_size, dtype, target)
    keys, values = layer.keys, layer.values
    if dtype in KINDS:
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    tiles = decode_tiles(head_size, dtype, target)
    # As many as run at once: a plan has room for more parts than most steps share, and idle programs cost time.
    programs = target.multiprocessors * tiles.waves_per_block
    shared_decode_kernel[(programs,)](
        query,
        keys,
        values,
        layer.key_scales,
        layer.value_scales,
        sinks_of(options, heads, query.device),
        tables,
        plan,
        workspace.partials,
        workspace.sizes,
        options.scaling / options.softcap if options.softcap else options.scaling * LOG2_E,
        options.softcap,
        *in_units(query.stride(0)),
        tables.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        REST=rest,
        ROWS=program.queries,
        TILES=program.tiles,
        KEYS=key_tile(tiles, ROWS_MIN, dtype),
        STAGES=program.stages,
        KIND=KINDS.get(dtype, 0),
        SOFTCAP=2 if target.asks_softcap else int(options.softcap > 0),
        ASSEMBLY=dtype in target.packed,
        WIDEN=target.widens,
        CHAINED=target.chained,
        PRECISION=target.float32_products if dtype == torch.float32 else "ieee",
        SUM_WARPS=program.sum_warps,
        num_warps=program.warps,
        num_stages=program.stages,
        **({"launch_pdl": True} if target.chained else {}),
    )
