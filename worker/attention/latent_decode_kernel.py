"""The kernels of decode attention over latents: one new token per row, split over the row's tokens and merged exactly.

A token's latent and rotary key are read once, for the keys and the values of all query heads of a program (multi-head
latent attention in its absorbed form: DeepSeek-V2, arXiv 2405.04434, section 2.1). Scores and sums are transposed,
[tokens, heads] and [latent, heads]: the large operand of both products is then the tile of tokens in shared memory, and
the few heads are the short side of a matrix instruction.

A row is a tree: steps of TOKENS tokens form *parts*, parts form *groups* (see `latent_plan`). The online softmax starts
anew in each part, and `_fold` adds parts to their group and groups to their row, in order. A program computes a part or
a whole group, with the same bits: a plan may choose either, by the company of a row.

Scores are in units of log2, so that exp2 needs no factor. Tokens beyond the ends are replaced by the nearest one with
weight 0, so unreachable slots, which may hold NaN, are never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvforge.worker.device.target import HEAD_UNIT

from .latent_step import attend, inverse, load_latents, load_queries
from .plan_items import FIELDS, LATENT_HEAD, LATENT_MERGE, LATENT_PART, place

_UNIT = tl.constexpr(HEAD_UNIT)
_FIELDS = tl.constexpr(FIELDS)
_ITEMS = tl.constexpr(place(LATENT_HEAD, "items"))
_ROW, _BEGIN, _END, _PART_TOKENS, _SLOT = (
    tl.constexpr(place(LATENT_PART, name)) for name in ("row", "begin", "end", "part_tokens", "slot")
)
_FIRST_SLOT, _SLOTS, _GROUP = (tl.constexpr(place(LATENT_MERGE, name)) for name in ("first_slot", "slots", "group"))


@triton.jit
def _fold(greatest, total, sums, new_greatest, new_total, new_sums):
    """Add a state of the online softmax to another one, of which `greatest` may be -inf.

    greatest, total: [heads] float32. sums: [numbers, heads] float32. Explicit fused multiply-adds fix the rounding,
    which must be the same wherever two states meet.
    """
    top = tl.maximum(greatest, new_greatest)
    shrink = tl.exp2(greatest - top)
    new_shrink = tl.exp2(new_greatest - top)
    total = tl.fma(total, shrink, new_total * new_shrink)
    shrinks = tl.broadcast_to(shrink[None, :], sums.shape)
    return top, total, tl.fma(sums, shrinks, new_sums * new_shrink[None, :])


# As in `decode_kernel`, specialising on these arguments gains nothing.
@triton.jit(do_not_specialize=["query_stride", "table_stride"], do_not_specialize_on_alignment=["tables"])
def latent_decode_kernel(
    query,
    cache,
    scales,
    tables,
    plan,
    output,
    partials,
    sizes,
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
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FOLDS: tl.constexpr,
    WIDEN: tl.constexpr,
    CHAINED: tl.constexpr,
    QUANTISED: tl.constexpr,
    BITWISE: tl.constexpr,
    E4M3: tl.constexpr,
):
    """Compute parts or groups of rows, each for HEAD_TILE query heads. Grid: [any number].

    query: [rows, HEADS, LATENT + ROPE]. cache: [blocks, BLOCK_SIZE, LATENT + ROPE]. scales: [blocks, BLOCK_SIZE]
    float32, if QUANTISED; see `prefill_portable._convert` for BITWISE and E4M3. tables: [rows, table_stride] int32.
    plan: see LatentPlanner.plan. output: [rows, HEADS, LATENT], of rows of a single group.
    partials: [slots, HEADS, LATENT] float32, sums; sizes: [slots, HEADS, 2] float32, the greatest score and the sum of
    the weights.

    scale: factor of scores, giving units of log2. query_stride: in units of HEAD_UNIT numbers. FOLDS: whether a group
    may have several parts. WIDEN: multiply float32 (for the interpreter). CHAINED: launched before the previous kernel
    has ended (programmatic dependent launch).
    """
    dtype: tl.constexpr = output.dtype.element_ty if QUANTISED else cache.dtype.element_ty
    UNITS: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    n_units = tl.load(plan + _ITEMS) * UNITS
    if CHAINED:
        tl.extra.cuda.gdc_wait()  # wait for the previous kernel, which does not write the plan
    for unit in range(tl.program_id(0), n_units, tl.num_programs(0)):
        item = plan + _FIELDS * (1 + unit // UNITS)
        row = tl.load(item + _ROW).to(tl.int64)
        begin = tl.load(item + _BEGIN)
        end = tl.load(item + _END)
        part_tokens = tl.load(item + _PART_TOKENS)
        slot = tl.load(item + _SLOT)

        head = unit % UNITS * HEAD_TILE + tl.arange(0, HEAD_TILE)
        inside = head < HEADS
        q, q_rope = load_queries(
            query + row * (query_stride * _UNIT) + head * (LATENT + ROPE), inside, dtype, LATENT, ROPE,
            LATENT_TILE, ROPE_TILE, WIDEN,
        )  # fmt: skip
        table = tables + row * table_stride
        greatest = tl.full([HEAD_TILE], float("-inf"), tl.float32)
        total = tl.zeros([HEAD_TILE], tl.float32)
        sums = tl.zeros([LATENT_TILE, HEAD_TILE], tl.float32)
        group_greatest = greatest
        group_total = total
        group_sums = sums
        for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
            if FOLDS:
                # The state of the part before goes to the group; within a part, nothing does. Not a branch, which
                # would end the overlap of loads with the products.
                is_new = (first > begin) & ((first - begin) % part_tokens == 0)
                top = tl.where(is_new, tl.maximum(group_greatest, greatest), 0.0)
                shrink = tl.exp2(tl.where(is_new, group_greatest - top, 0.0))
                new_shrink = tl.exp2(tl.where(is_new, greatest - top, float("-inf")))
                group_total = tl.fma(group_total, shrink, total * new_shrink)
                shrinks = tl.broadcast_to(shrink[None, :], sums.shape)
                group_sums = tl.fma(group_sums, shrinks, sums * new_shrink[None, :])
                group_greatest = tl.where(is_new, top, group_greatest)
                greatest = tl.where(is_new, float("-inf"), greatest)
            c, k, factors = load_latents(
                cache, scales, table, first, end, dtype, LATENT, ROPE, BLOCK_SIZE, LATENT_TILE, ROPE_TILE, TOKENS,
                WIDEN, QUANTISED, BITWISE, E4M3,
            )  # fmt: skip
            seen = (first + tl.arange(0, TOKENS) < end)[:, None]
            greatest, total, sums = attend(greatest, total, sums, c, k, factors, q, q_rope, scale, seen, QUANTISED)
        if CHAINED:  # noqa: SIM102 - a compile-time condition
            if unit + tl.num_programs(0) >= n_units:
                tl.extra.cuda.gdc_launch_dependents()
        if FOLDS:
            greatest, total, sums = _fold(group_greatest, group_total, group_sums, greatest, total, sums)
        d = tl.arange(0, LATENT_TILE)
        mask = (d < LATENT)[:, None] & inside[None, :]
        if slot < 0:
            at = output + row * (HEADS * LATENT) + head[None, :] * LATENT + d[:, None]
            tl.store(at, (sums * inverse(total)[None, :]).to(output.dtype.element_ty), mask=mask)
        else:
            place = slot.to(tl.int64) * HEADS + head
            tl.store(partials + place[None, :] * LATENT + d[:, None], sums, mask=mask)
            tl.store(sizes + place * 2, greatest, mask=inside)
            tl.store(sizes + place * 2 + 1, total, mask=inside)


@triton.jit
def latent_merge_kernel(
    plan,
    partials,
    sizes,
    output,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Merge the parts of a row, for COLUMNS numbers of one head. Grid: [rows x HEADS x spans of COLUMNS].

    plan: [rows, FIELDS] int32, see `plan_items.LATENT_MERGE`. The other arguments: see `latent_decode_kernel`.
    """
    SPANS: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = program // (HEADS * SPANS)
    head = program // SPANS % HEADS
    d = program % SPANS * COLUMNS + tl.arange(0, COLUMNS)
    item = plan + row * _FIELDS
    first = tl.load(item + _FIRST_SLOT)
    slots = tl.load(item + _SLOTS)
    parts = tl.load(item + _GROUP)
    if CHAINED:
        # All programs wait, so that a kernel after this one also comes after the kernel before it.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if slots > 0:
        greatest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([COLUMNS, 1], tl.float32)
        group_greatest = greatest
        group_total = total
        group_sums = sums
        numbers = (partials + d)[:, None]
        column = tl.arange(0, 1)
        for at in tl.range(0, slots, num_stages=STAGES):
            place = (first + at).to(tl.int64) * HEADS + head + column
            size = tl.load(sizes + place * 2)
            weight = tl.load(sizes + place * 2 + 1)
            part = tl.load(numbers + (place * LATENT)[None, :], mask=(d < LATENT)[:, None], other=0.0)
            is_new = at % parts == 0
            if is_new:
                if at > 0:
                    greatest, total, sums = _fold(greatest, total, sums, group_greatest, group_total, group_sums)
                group_greatest = tl.full([1], float("-inf"), tl.float32)
                group_total = tl.zeros([1], tl.float32)
                group_sums = tl.zeros([COLUMNS, 1], tl.float32)
            group_greatest, group_total, group_sums = _fold(group_greatest, group_total, group_sums, size, weight, part)
        greatest, total, sums = _fold(greatest, total, sums, group_greatest, group_total, group_sums)
        result = (sums * inverse(total)[None, :]).to(output.dtype.element_ty)
        at = output + row.to(tl.int64) * (HEADS * LATENT) + head * LATENT + d
        tl.store(at[:, None] + column[None, :], result, mask=(d < LATENT)[:, None])
