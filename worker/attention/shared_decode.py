"""Decode attention that reads common parts of rows once: launches of `shared_decode_kernel`, and where it serves.

`shared_planner(...).plan(tables, lengths, block_size)` makes a step's plans on the host. Every layer launches
`shared_decode` and then `paged_decode`, over one workspace.
"""

from __future__ import annotations

import torch

from kvforge.worker.device.target import Target, head_class, in_units

from .decode import KINDS, LOG2_E, ROWS_MIN, DecodeWorkspace, decode_planner, decode_tiles, key_tile
from .interface import AttentionOptions, KvLayer
from .quantised import is_quantised
from .shared_decode_kernel import shared_decode_kernel
from .shared_plan import SharedPlanner
from .sinks import sinks_of


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
    rows = ROWS_MIN // group * _tiles(head_size, dtype, target)
    if not target.steady or window or rows < 2:
        return None
    planner = decode_planner(rows_max, heads, kv_heads, head_size, dtype, window, target)
    scales = 4 if is_quantised(dtype) else 0
    return SharedPlanner(planner, rows, 2 * kv_heads * (head_size * dtype.itemsize + scales))


def _tiles(head_size: int, dtype: torch.dtype, target: Target) -> int:
    """Return the tiles of queries of a program. dtype: dtype of K and V."""
    return 2 if head_size <= 128 and dtype.itemsize in target.two_tiles else 1


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
    _, heads, head_size = query.shape
    _, block_size, kv_heads, _ = layer.keys.shape
    dtype = layer.keys.dtype
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
        HEAD_TILE=head_class(head_size),
        ROWS=ROWS_MIN,
        TILES=_tiles(head_size, dtype, target),
        KEYS=key_tile(tiles, ROWS_MIN, dtype),
        STAGES=tiles.stages,
        KIND=KINDS.get(dtype, 0),
        SOFTCAP=2 if target.asks_softcap else int(options.softcap > 0),
        ASSEMBLY=dtype in target.packed,
        WIDEN=target.widens,
        CHAINED=target.chained,
        PRECISION=target.float32_products if dtype == torch.float32 else "ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **({"launch_pdl": True} if target.chained else {}),
    )
