"""Paged decode attention: launches of `decode_kernel`, its tile sizes, and its workspace.

`decode_planner(...).plan(lengths)` makes a step's plan on the host; every layer's launch reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from kvforge.worker.device.target import DecodeTiles, Target, TileKey, head_class, head_tiles, in_units

from .decode_kernel import decode_kernel
from .decode_plan import STEADY_PARTS, DecodePlanner
from .interface import AttentionOptions, KvLayer
from .plan_items import FIELDS
from .sinks import sinks_of

ROWS_MIN = 16  # query heads of a program: rows of a matrix instruction
# Numbers in a program's tiles of outputs and scores; more would not fit its registers. Half as many outputs if K and V
# are converted or split first.
OUTPUTS_MAX = 64 * 128
SCORES_MAX = 32 * 128
MERGE_PARTS = 16  # parts that the merge loads at once
LOG2_E = 1.4426950408889634
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # 0: every other dtype


@dataclass(frozen=True)
class DecodeWorkspace:
    """Memory that a launch needs beyond its arguments. Consecutive launches share it.

    Attributes:
        partials: [items, heads, head_size] float32.
        sizes: [items, heads] float32.
        counters: int32, all zeros.
    """

    partials: torch.Tensor
    sizes: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(cls, planner: DecodePlanner, heads: int, head_size: int, device: torch.device) -> DecodeWorkspace:
        """Allocate a workspace for a planner and a shape."""
        partials = torch.empty((planner.items_max, heads, head_size), dtype=torch.float32, device=device)
        sizes = torch.empty((planner.items_max, heads), dtype=torch.float32, device=device)
        counters = torch.zeros(planner.rows_max * heads, dtype=torch.int32, device=device)
        return cls(partials, sizes, counters)


def decode_planner(
    rows_max: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, window: int, target: Target
) -> DecodePlanner:
    """Return the planner of `paged_decode` for these shapes. dtype: dtype of K and V."""
    units = _units(heads, kv_heads, head_size, dtype, target)
    tiles = decode_tiles(head_size, dtype, target, is_few(rows_max, heads, kv_heads, head_size, dtype, target))
    programs = max(1, target.multiprocessors * tiles.waves_per_block // units)
    return DecodePlanner(rows_max, programs, tiles.keys, window, target.steady)


def is_few(rows: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, target: Target) -> bool:
    """Return whether each program can have a multiprocessor to itself, and so may use other tiles.

    Bits depend on the keys of a tile. A steady target has as many in both, and is asked for the most parts of a row.

    dtype: dtype of K and V.
    """
    programs = rows * _units(heads, kv_heads, head_size, dtype, target)
    return programs * (STEADY_PARTS if target.steady else 1) <= target.multiprocessors


def decode_tiles(head_size: int, dtype: torch.dtype, target: Target, few: bool = False) -> DecodeTiles:
    """Return the tiles for a head size. dtype: dtype of K and V. few: see `is_few`."""
    tiles = (target.decode_few if few else target.decode)[TileKey(head_class(head_size), dtype.itemsize)]
    if few or not divided_head(head_size, dtype, target)[1]:
        return tiles
    # The compiler would take 255 registers, which leave room for two programs of a multiprocessor, not three.
    return replace(tiles, registers=168)


def divided_head(head_size: int, dtype: torch.dtype, target: Target) -> tuple[int, int]:
    """Return the sizes of the tiles that hold a head; the second is 0 if there is one. dtype: dtype of K and V.

    Registers and shared memory for two tiles were looked at on Hopper alone.
    """
    return head_tiles(head_size) if target.hopper and dtype.itemsize == 2 else (head_class(head_size), 0)


def _units(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, target: Target) -> int:
    """Return the programs of one part of one row."""
    group = heads // kv_heads
    return kv_heads * -(-group // tile_rows(group, head_size, dtype, target))


def tile_rows(group: int, head_size: int, dtype: torch.dtype, target: Target) -> int:
    """Return the query heads of one program, with padding. group: those of a KV head. dtype: dtype of K and V."""
    fitting = OUTPUTS_MAX // head_class(head_size) // (1 if dtype.itemsize == 2 else 2)
    return int(max(ROWS_MIN, min(triton.next_power_of_2(group), fitting, target.decode_rows)))


def key_tile(tiles: DecodeTiles, rows: int, dtype: torch.dtype) -> int:
    """Return the keys of one step of the kernel's loop, for `rows` query heads. dtype: dtype of K and V.

    Converting or splitting numbers takes registers too, as measured for Hopper, which has the largest tiles.
    """
    scores_max = SCORES_MAX // 4 if dtype.itemsize == 4 else SCORES_MAX
    if dtype.itemsize == 1 and rows > 32:
        scores_max //= 2
    return min(tiles.keys, scores_max // rows)


def paged_decode(
    query: torch.Tensor,
    layer: KvLayer,
    tables: torch.Tensor,
    plan: torch.Tensor,
    output: torch.Tensor,
    workspace: DecodeWorkspace,
    options: AttentionOptions,
    target: Target,
) -> None:
    """Compute attention of one new token of each row to its row. Rows without a plan keep the contents of output.

    Args:
        query: [rows, heads, head_size] float on the device; each row's heads are contiguous.
        layer: The KV cache of the layer.
        tables: [rows, width] int32 on the device, rows contiguous.
        plan: [size] int32 on the device, from `decode_planner` with the same shapes, window and target.
        output: [rows, heads, head_size], contiguous.
        workspace: For that planner, or a larger one.
        options: Attention options of the layer.
        target: The architecture.
    """
    rows, heads, head_size = query.shape
    _, block_size, kv_heads, _ = layer.keys.shape
    dtype = layer.keys.dtype
    keys, values = layer.keys, layer.values
    if dtype in KINDS:
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    few = is_few(rows, heads, kv_heads, head_size, dtype, target)
    tiles = decode_tiles(head_size, dtype, target, few)
    group = heads // kv_heads
    group_rows = tile_rows(group, head_size, dtype, target)
    head_tile, rest = divided_head(head_size, dtype, target)
    if group_rows > ROWS_MIN:  # registers hold no second tile of so many rows
        head_tile, rest = head_class(head_size), 0
    units = (plan.shape[0] // FIELDS - 1) * kv_heads * -(-group // group_rows)
    # Steady plans have room for more parts than most steps need, and idle programs cost time too.
    programs = min(units, target.multiprocessors * tiles.waves_per_block) if target.steady else units
    decode_kernel[(programs,)](
        query,
        keys,
        values,
        layer.key_scales,
        layer.value_scales,
        sinks_of(options, heads, query.device),
        tables,
        plan,
        output,
        workspace.partials,
        workspace.sizes,
        workspace.counters,
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
        ROWS=group_rows,
        KEYS=key_tile(tiles, group_rows, dtype),
        STAGES=tiles.stages,
        KIND=KINDS.get(dtype, 0),
        SOFTCAP=2 if target.asks_softcap else int(options.softcap > 0),
        ASSEMBLY=dtype in target.packed,
        MERGE_ROWS=min(ROWS_MIN, max(1, 128 * tiles.warps // head_class(head_size))),
        MERGE_PARTS=MERGE_PARTS,
        CHAINED=target.chained,
        PRECISION=target.float32_products if dtype == torch.float32 else "ieee",
        FLUSHED=not target.barrier_waits,
        WIDEN=target.widens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **({"launch_pdl": True} if target.chained else {}),
        **({"maxnreg": tiles.registers} if rest and tiles.registers else {}),
    )
