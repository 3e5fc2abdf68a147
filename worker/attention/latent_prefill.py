"""Paged prefill attention over latents, in the absorbed form: rows with several new tokens each.

A step is split into tiles as in `prefill`: new tokens of one row times query heads, which all share the latents. One
program computes a tile with the steps of `latent_step`, in the order of the row's tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.target import HEAD_UNIT, Target, in_units

from .latent_decode import LOG2_E
from .latent_step import attend, inverse, load_latents, load_queries
from .latent_tiles import ROPE_MAX, latent_class, prefill_tiles
from .plan_items import FIELDS, PREFILL_TILE, place
from .quantised import as_bytes

_UNIT = tl.constexpr(HEAD_UNIT)
_FIELDS = tl.constexpr(FIELDS)
_ROW, _FIRST_TOKEN, _POSITION, _TOKENS, _ROW_LENGTH = (
    tl.constexpr(place(PREFILL_TILE, name)) for name in ("row", "first_token", "position", "tokens", "row_length")
)


# As in `decode_kernel`, specialising on these arguments gains nothing.
@triton.jit(do_not_specialize=["query_stride", "table_stride"], do_not_specialize_on_alignment=["tables"])
def latent_prefill_kernel(
    query,
    cache,
    scales,
    tables,
    items,
    output,
    scale,
    query_stride,
    table_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    QUANTISED: tl.constexpr,
    BITWISE: tl.constexpr,
    E4M3: tl.constexpr,
):
    """Compute one tile: QUERIES / HEAD_TILE tokens times HEAD_TILE query heads. Grid: [tiles x tiles of heads].

    query: [tokens, HEADS, LATENT + ROPE]. output: [tokens, HEADS, LATENT]. items: [tiles, FIELDS] int32, see
    `plan_items.PREFILL_TILE`. The other arguments: see `latent_decode_kernel`.
    """
    dtype: tl.constexpr = output.dtype.element_ty if QUANTISED else cache.dtype.element_ty
    UNITS: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    program = tl.program_id(0)
    item = items + program // UNITS * _FIELDS
    row = tl.load(item + _ROW)
    token = tl.load(item + _FIRST_TOKEN)
    position = tl.load(item + _POSITION)
    count = tl.load(item + _TOKENS)
    length = tl.load(item + _ROW_LENGTH)
    table = tables + row.to(tl.int64) * table_stride

    column = tl.arange(0, QUERIES)
    of_token = column // HEAD_TILE
    head = program % UNITS * HEAD_TILE + column % HEAD_TILE
    inside = (head < HEADS) & (of_token < count)
    tokens = (token + of_token).to(tl.int64)
    positions = tl.minimum(position + of_token, length - 1)
    q, q_rope = load_queries(
        query + tokens * (query_stride * _UNIT) + head * (LATENT + ROPE), inside, dtype, LATENT, ROPE,
        LATENT_TILE, ROPE_TILE, WIDEN,
    )  # fmt: skip
    greatest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([LATENT_TILE, QUERIES], tl.float32)
    end = tl.minimum(position + QUERIES // HEAD_TILE, length)
    # A step whose tokens a query does not see changes no bit of its state: the masks need no loop of their own.
    for first in tl.range(0, end, TOKENS, num_stages=STAGES):
        c, k, factors = load_latents(
            cache, scales, table, first, end, dtype, LATENT, ROPE, BLOCK_SIZE, LATENT_TILE, ROPE_TILE, TOKENS,
            WIDEN, QUANTISED, BITWISE, E4M3,
        )  # fmt: skip
        seen = (first + tl.arange(0, TOKENS))[:, None] <= positions[None, :]
        greatest, total, sums = attend(greatest, total, sums, c, k, factors, q, q_rope, scale, seen, QUANTISED)
    d = tl.arange(0, LATENT_TILE)
    at = output + (tokens * (HEADS * LATENT) + head * LATENT)[None, :] + d[:, None]
    result = (sums * inverse(total)[None, :]).to(output.dtype.element_ty)
    tl.store(at, result, mask=(d < LATENT)[:, None] & inside[None, :])


def latent_prefill_tokens(heads: int, latent: int, dtype: torch.dtype, target: Target) -> int:
    """Return the tokens of a tile, for `prefill_plan.plan_prefill`. dtype: dtype of the query."""
    tiles = prefill_tiles(heads, latent, dtype, target)
    return tiles.queries // tiles.heads


def latent_prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    items: torch.Tensor,
    output: torch.Tensor,
    scaling: float,
    target: Target,
    scales: torch.Tensor | None = None,
) -> None:
    """Compute causal attention of the planned rows' new tokens to their rows' tokens so far.

    Other rows of `output` are unchanged.

    Args:
        query: [tokens, heads, latent + rotary key] float on the device, in the space of the latents; each token's heads
            are contiguous.
        cache: [blocks, block_size, 1, latent + rotary key], contiguous: `KvLayer.keys` of a layer with latents.
        tables: [rows, width] int32 on the device, contiguous along width.
        items: [tiles, FIELDS] int32 on the device, from `plan_prefill` with `latent_prefill_tokens`.
        output: [tokens, heads, latent], contiguous.
        scaling: Factor of q.k.
        target: The architecture.
        scales: `KvLayer.key_scales`, of quantised latents.
    """
    if not len(items):
        return
    heads, latent, rope = query.shape[1], output.shape[2], query.shape[2] - output.shape[2]
    tiles = prefill_tiles(heads, latent, query.dtype, target, quantised=scales is not None)
    bitwise = cache.dtype in target.bitwise
    latent_prefill_kernel[(items.shape[0] * ceil_div(heads, tiles.heads),)](
        query,
        as_bytes(cache) if bitwise else cache,
        cache if scales is None else scales,
        tables,
        items,
        output,
        scaling * LOG2_E,
        *in_units(query.stride(0)),
        tables.stride(0),
        HEADS=heads,
        LATENT=latent,
        ROPE=rope,
        BLOCK_SIZE=cache.shape[1],
        LATENT_TILE=latent_class(latent),
        ROPE_TILE=ROPE_MAX,
        HEAD_TILE=tiles.heads,
        QUERIES=tiles.queries,
        TOKENS=tiles.tokens,
        STAGES=tiles.stages,
        WIDEN=target.widens,
        QUANTISED=scales is not None,
        BITWISE=bitwise,
        E4M3=cache.dtype == torch.float8_e4m3fn,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
