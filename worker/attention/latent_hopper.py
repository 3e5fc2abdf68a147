"""Decode attention over latents for NVIDIA's Hopper, in Gluon (Triton's lower level), for 16 heads.

It computes what `latent_decode_kernel` does, from the same plans. Triton's own pipeline begins to load a tile after the
products with the tile before have ended. Here the load of a tile begins before them, into the other of two buffers, and
goes on into the program's next item: the memory is never idle.

Quantised latents come as they are stored, in pieces of 64 numbers of 64 tokens. They are widened to 16 bits, exactly,
in a buffer of their own before the products; scales multiply the scores, and the weights of values.
"""

# No `from __future__ import annotations`, as in `prefill_hopper_work`.
from typing import Protocol

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvforge.worker.device.target import HEAD_UNIT, in_units

from .gluon_names import thread_barrier
from .plan_items import FIELDS, LATENT_HEAD, LATENT_PART, place

UNIT = gl.constexpr(HEAD_UNIT)
ITEM_FIELDS = gl.constexpr(FIELDS)
ITEMS = gl.constexpr(place(LATENT_HEAD, "items"))
ROW, BEGIN, END, PART_TOKENS, SLOT = (
    gl.constexpr(place(LATENT_PART, name)) for name in ("row", "begin", "end", "part_tokens", "slot")
)


@gluon.jit
def _slots(table, first, end, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr):
    """Return the slots of the tokens from `first` on: [64] int64; after `end` the last one."""
    position = gl.minimum(first + gl.arange(0, 64, ROWS), end - 1).to(gl.uint32)
    block = gl.load(table + position // BLOCK_SIZE).to(gl.uint32)
    return (block * BLOCK_SIZE + position % BLOCK_SIZE).to(gl.int64)


@gluon.jit
def _copy(
    cache,
    slots,
    c,
    k,
    buffer,
    LATENT_TILE: gl.constexpr,
    ROPE_TILE: gl.constexpr,
    TILE: gl.constexpr,
    QUANTISED: gl.constexpr,
):
    """Begin to copy the tokens of `slots`.

    c: [2, 64, LATENT_TILE], k: [2, 64, ROPE_TILE]. QUANTISED: c is [2 x pieces, 64, 64], of latents, then rotary keys.
    """
    rows = (cache + slots * (LATENT_TILE + ROPE_TILE))[:, None]
    e = gl.arange(0, ROPE_TILE, gl.SliceLayout(0, TILE))
    if QUANTISED:
        PIECES: gl.constexpr = (LATENT_TILE + ROPE_TILE) // 64
        for piece in gl.static_range(PIECES):
            async_copy.async_copy_global_to_shared(c.index(buffer * PIECES + piece), rows + (64 * piece + e)[None, :])
    else:
        d = gl.arange(0, LATENT_TILE, gl.SliceLayout(0, TILE))
        async_copy.async_copy_global_to_shared(c.index(buffer), rows + d[None, :])
        async_copy.async_copy_global_to_shared(k.index(buffer), rows + (LATENT_TILE + e)[None, :])


# Four codes of a register to two registers of bfloat16. The bits of a float of 8 bits are moved to their place, and the
# number is multiplied by the difference of the exponents' biases, 2 ** 120. An integer is 128 + its lower seven bits,
# less 128 or, with its sign, 256, all exact.
_E4M3 = gl.constexpr("""{
.reg .b32 a, b, c, d, f;
mov.b32 f, 0x7b807b80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 c, a, 0x80008000, c, 0xea;
lop3.b32 d, b, 0x80008000, d, 0xea;
mul.bf16x2 $0, c, f;
mul.bf16x2 $1, d, f;
}""")
_INT8 = gl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 c, a, 0x007f007f, 0x43004300, 0xea;
lop3.b32 d, b, 0x007f007f, 0x43004300, 0xea;
lop3.b32 a, a, 0x00800080, 0x43004300, 0xea;
lop3.b32 b, b, 0x00800080, 0x43004300, 0xea;
sub.bf16x2 $0, c, a;
sub.bf16x2 $1, d, b;
}""")


@gluon.jit
def _widened(codes, dtype: gl.constexpr):
    """Return codes of int8 or fp8 as numbers of `dtype`, exactly."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            _INT8 if codes.dtype == gl.int8 else _E4M3,
            "=&r,=&r,r",
            [codes.to(gl.int8, bitcast=True)],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return codes.to(dtype)


@gluon.jit
def _widen(codes, buffer, c, k, LATENT_TILE: gl.constexpr, ROPE_TILE: gl.constexpr, TILE: gl.constexpr):
    """Widen the codes of a buffer (see `_copy`) to c [64, LATENT_TILE] and k [64, ROPE_TILE]."""
    LATENTS: gl.constexpr = LATENT_TILE // 64
    PIECES: gl.constexpr = LATENTS + ROPE_TILE // 64
    for piece in gl.static_range(LATENTS):
        numbers = _widened(codes.index(buffer * PIECES + piece).load(TILE), c.dtype)
        c.slice(64 * piece, 64, dim=1).store(numbers)
    k.store(_widened(codes.index(buffer * PIECES + LATENTS).load(TILE), k.dtype))


@gluon.jit
def _fold(greatest, total, sums, new_greatest, new_total, new_sums, SUMS: gl.constexpr):
    """As `latent_decode_kernel._fold`, with the same rounding."""
    top = gl.maximum(greatest, new_greatest)
    shrink = gl.exp2(greatest - top)
    new_shrink = gl.exp2(new_greatest - top)
    total = gl.fma(total, shrink, new_total * new_shrink)
    zeros = gl.zeros(sums.shape, gl.float32, SUMS)
    return top, total, gl.fma(sums, zeros + shrink[None, :], new_sums * new_shrink[None, :])


@gluon.jit(
    do_not_specialize=["query_stride", "table_stride"], do_not_specialize_on_alignment=["tables"]
)  # as `latent_decode_kernel`
def latent_hopper_kernel(
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
    HEADS: gl.constexpr,
    LATENT_TILE: gl.constexpr,
    ROPE_TILE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    QUANTISED: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """Compute parts or groups of rows. Grid: [any number]. num_warps: 4, or 8 if QUANTISED.

    Arguments: see `latent_decode_kernel`.
    """
    WIDTH: gl.constexpr = LATENT_TILE + ROPE_TILE
    # Two groups of four warps for quantised latents, with half of the heads each: both widen.
    GROUPS: gl.constexpr = 2 if QUANTISED else 1
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, 16 // GROUPS, 16])
    OF_HEADS: gl.constexpr = gl.SliceLayout(0, SUMS)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(1, SUMS)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    dtype: gl.constexpr = output.dtype.element_ty if QUANTISED else cache.dtype.element_ty
    BUFFERS: gl.constexpr = 1 if QUANTISED else 2
    c = gl.allocate_shared_memory(dtype, [BUFFERS, 64, LATENT_TILE], WIDE)
    k = gl.allocate_shared_memory(dtype, [BUFFERS, 64, ROPE_TILE], WIDE)
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4 * GROUPS, 1], [1, 0])
    COPIED: gl.constexpr = BYTES if QUANTISED else TILE
    COPIED_ROWS: gl.constexpr = gl.SliceLayout(1, COPIED)
    if QUANTISED:
        narrow: gl.constexpr = cache.dtype.element_ty
        codes = gl.allocate_shared_memory(narrow, [2 * WIDTH // 64, 64, 64], gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
    else:
        codes = c
    q = gl.allocate_shared_memory(dtype, [16, LATENT_TILE], WIDE)
    q_rope = gl.allocate_shared_memory(dtype, [16, ROPE_TILE], WIDE)
    shares = gl.allocate_shared_memory(dtype, [64, 16], NARROW)

    items = gl.load(plan + ITEMS)
    if CHAINED:
        gdc_wait()  # wait for the previous kernel, which does not write the plan
    number = gl.program_id(0)
    programs = gl.num_programs(0)
    # The next tile to load: its item, and where its tokens lie.
    item = plan + ITEM_FIELDS * (1 + gl.minimum(number, items - 1))
    next_first = gl.load(item + BEGIN)
    next_end = gl.load(item + END)
    next_table = tables + gl.load(item + ROW).to(gl.int64) * table_stride
    next_number = number
    buffer = 0
    slots = gl.zeros([64], gl.int64, COPIED_ROWS)
    next_factors = gl.zeros([64], gl.float32, COPIED_ROWS)
    if number < items:
        slots = _slots(next_table, next_first, next_end, BLOCK_SIZE, COPIED_ROWS)
        _copy(cache, slots, codes, k, 0, LATENT_TILE, ROPE_TILE, COPIED, QUANTISED)
        if QUANTISED:
            next_factors = gl.load(scales + slots)
    async_copy.commit_group()
    next_first += 64
    if next_first >= next_end:
        next_number += programs
        item = plan + ITEM_FIELDS * (1 + gl.minimum(next_number, items - 1))
        next_first = gl.load(item + BEGIN)
        next_end = gl.load(item + END)
        next_table = tables + gl.load(item + ROW).to(gl.int64) * table_stride
    if next_number < items:
        slots = _slots(next_table, next_first, next_end, BLOCK_SIZE, COPIED_ROWS)

    for number in range(gl.program_id(0), items, programs):
        item = plan + ITEM_FIELDS * (1 + number)
        row = gl.load(item + ROW).to(gl.int64)
        begin = gl.load(item + BEGIN)
        end = gl.load(item + END)
        part_tokens = gl.load(item + PART_TOKENS)
        slot = gl.load(item + SLOT)

        head = gl.arange(0, 16, ROWS)
        d = gl.arange(0, LATENT_TILE, gl.SliceLayout(0, TILE))
        e = gl.arange(0, ROPE_TILE, gl.SliceLayout(0, TILE))
        place = (query + row * (query_stride * UNIT) + head * WIDTH)[:, None]
        mask = (head < HEADS)[:, None]
        numbers = gl.load(place + d[None, :], mask=mask, other=0.0).to(dtype)
        numbers_rope = gl.load(place + (LATENT_TILE + e)[None, :], mask=mask, other=0.0).to(dtype)
        thread_barrier()  # the products of the previous item have ended in all warps
        q.store(numbers)
        q_rope.store(numbers_rope)

        greatest = gl.full([16], float("-inf"), gl.float32, OF_HEADS)
        total = gl.zeros([16], gl.float32, OF_HEADS)
        sums = gl.zeros([LATENT_TILE, 16], gl.float32, SUMS)
        group_greatest = greatest
        group_total = total
        group_sums = sums
        for first in range(begin, end, 64):
            async_copy.wait_group(0)
            fence_async_shared()
            thread_barrier()
            # All warps have finished with the other buffer.
            factors = next_factors
            if next_number < items:
                _copy(cache, slots, codes, k, 1 - buffer, LATENT_TILE, ROPE_TILE, COPIED, QUANTISED)
                if QUANTISED:
                    next_factors = gl.load(scales + slots)
            async_copy.commit_group()
            next_first += 64
            if next_first >= next_end:
                next_number += programs
                item = plan + ITEM_FIELDS * (1 + gl.minimum(next_number, items - 1))
                next_first = gl.load(item + BEGIN)
                next_end = gl.load(item + END)
                next_table = tables + gl.load(item + ROW).to(gl.int64) * table_stride
            if next_number < items:
                slots = _slots(next_table, next_first, next_end, BLOCK_SIZE, COPIED_ROWS)

            wide = buffer
            if QUANTISED:
                _widen(codes, buffer, c.index(0), k.index(0), LATENT_TILE, ROPE_TILE, BYTES)
                wide = 0
                fence_async_shared()
                thread_barrier()
            if (first > begin) & ((first - begin) % part_tokens == 0):
                group_greatest, group_total, group_sums = _fold(
                    group_greatest, group_total, group_sums, greatest, total, sums, SUMS
                )
                greatest = gl.full([16], float("-inf"), gl.float32, OF_HEADS)
            scores = gl.zeros([64, 16], gl.float32, SUMS)
            scores = warpgroup_mma(c.index(wide), q.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(k.index(wide), q_rope.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            token = first + gl.arange(0, 64, OF_TOKENS)
            if QUANTISED:
                of_token = gl.convert_layout(factors, OF_TOKENS)
                scores = scores * of_token[:, None]
            scores = gl.where((token < end)[:, None], scores * scale, float("-inf"))
            new_greatest = gl.maximum(greatest, gl.max(scores, 0))
            shrink = gl.exp2(greatest - new_greatest)  # 0 in the first step of a part
            weights = gl.exp2(scores - new_greatest[None, :])
            greatest = new_greatest
            if QUANTISED:
                shares.store((weights * of_token[:, None]).to(dtype))
            else:
                shares.store(weights.to(dtype))
            fence_async_shared()
            thread_barrier()
            sums = sums * shrink[None, :]
            sums = warpgroup_mma(c.index(wide).permute((1, 0)), shares, sums, is_async=True)
            total = gl.fma(total, shrink, gl.sum(weights, 0))
            sums = warpgroup_mma_wait(0, deps=(sums,))
            buffer = 1 - buffer
        if CHAINED:  # noqa: SIM102 - a compile-time condition
            if number + programs >= items:
                gdc_launch_dependents()
        greatest, total, sums = _fold(group_greatest, group_total, group_sums, greatest, total, sums, SUMS)
        column = gl.arange(0, 16, OF_HEADS)
        inside = (column < HEADS)[None, :]
        at = gl.arange(0, LATENT_TILE, gl.SliceLayout(1, SUMS))
        if slot < 0:
            result = sums * gl.div_rn(gl.full([16], 1.0, gl.float32, OF_HEADS), total)[None, :]
            row_output = output + row * (HEADS * LATENT_TILE)
            gl.store(
                row_output + (column * LATENT_TILE)[None, :] + at[:, None],
                result.to(output.dtype.element_ty),
                mask=inside,
            )
        else:
            of_slot = slot.to(gl.int64) * HEADS
            gl.store(
                partials + of_slot * LATENT_TILE + (column * LATENT_TILE)[None, :] + at[:, None], sums, mask=inside
            )
            gl.store(sizes + of_slot * 2 + column * 2, greatest, mask=column < HEADS)
            gl.store(sizes + of_slot * 2 + column * 2 + 1, total, mask=column < HEADS)


class Workspace(Protocol):
    """What the kernel needs of `latent_decode.LatentWorkspace`."""

    @property
    def partials(self) -> torch.Tensor:
        """See there."""

    @property
    def sizes(self) -> torch.Tensor:
        """See there."""


def launch(
    query: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    tables: torch.Tensor,
    plan: torch.Tensor,
    output: torch.Tensor,
    workspace: Workspace,
    scale: float,
    programs: int,
    chained: bool,
) -> None:
    """Launch the kernel for shapes that `latent_tiles.hopper_problem` accepts; arguments as in `latent_decode`.

    scale: factor of scores, giving units of log2. chained: see `Target.chained`.
    """
    _, heads, latent = output.shape
    latent_hopper_kernel[(programs,)](
        query,
        cache,
        cache if scales is None else scales,
        tables,
        plan,
        output,
        workspace.partials,
        workspace.sizes,
        scale,
        *in_units(query.stride(0)),
        tables.stride(0),
        HEADS=heads,
        LATENT_TILE=latent,
        ROPE_TILE=query.shape[2] - latent,
        BLOCK_SIZE=cache.shape[1],
        QUANTISED=scales is not None,
        CHAINED=chained,
        num_warps=4 if scales is None else 8,
        **({"launch_pdl": True} if chained else {}),
    )
