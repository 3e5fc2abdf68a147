"""Prefill attention for NVIDIA's Hopper, in Gluon (Triton's lower level), for 16-bit K and V.

Three groups of warps of a program work at the same time, after FlashAttention-3 (Shah et al., arXiv 2407.08608,
sections 3.1 and 3.2):

- One warp copies Q of a tile, then K and V, 128 keys at a time, through the block table with the tensor copy engine
  (TMA) into two stages of shared memory. It runs ahead, into the program's next tile too.
- Two groups of four warps compute 64 rows of the tile each. They alternate: while one computes its softmax on the
  ordinary units, the matrix units run the other's products. Within a group the product P V of one step is in flight
  during the softmax of the next.

One program runs on each multiprocessor and takes tiles from the plan (see `prefill.plan_prefill`), which is sorted by
work, alternately forwards and backwards, so that long and short tiles balance.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvforge.worker.device.target import in_units

from .gluon_names import thread_barrier
from .interface import AttentionOptions, KvLayer
from .prefill_hopper_products import await_sums, multiply_keys, multiply_values, scale_sums, store_sums
from .prefill_hopper_work import Buffers, Sizes, Work, box_layout, constants, copy_tiles
from .sinks import sinks_of

ROWS = 128  # rows of a tile: tokens times query heads of one pack; each computing group of warps has half
LOG2_E = gl.constexpr(1.4426950408889634)
NOWHERE = gl.constexpr(2147483647)  # position of a place that holds no token: after every query


@gluon.jit
def _mask(scores, step, queries, first_key, length, window, sizes):
    """Set scores to -inf where a query does not see a key. queries: [64] positions."""
    key = step * sizes.KEYS + gl.arange(0, sizes.KEYS, gl.SliceLayout(0, sizes.SCORES))
    if sizes.PAGED:
        last = (length - 1) // sizes.CHUNK * sizes.CHUNK  # the last chunk: its tokens lie at its end
        shift = last + sizes.CHUNK - length
        if (shift > 0) & (last < (step + 1) * sizes.KEYS):
            key = gl.where(key < last, key, gl.where(key - shift >= last, key - shift, NOWHERE))
    if sizes.WINDOW and sizes.PAGED:
        front = first_key // sizes.CHUNK * sizes.CHUNK  # the first one: at its beginning
        moved = key + (first_key - front)
        in_front = (first_key > 0) & (key >= front) & (key < front + sizes.CHUNK)
        key = gl.where(in_front, gl.where(moved < front + sizes.CHUNK, moved, NOWHERE), key)
    seen = key[None, :] <= queries[:, None]
    if sizes.WINDOW:
        seen = seen & (key[None, :] > queries[:, None] - window)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _softmax(scores, largest, total, scale, cap, step, queries, first_key, length, window, sizes, MASKED: gl.constexpr):
    """Return the step's weights [64, KEYS] float32, the new scaled maximum and total [64], the old sums' factor."""
    if sizes.SOFTCAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * cap) + 1.0)  # tanh(x) = 1 - 2 / (e^2x + 1)
    if MASKED:
        scores = _mask(scores, step, queries, first_key, length, window, sizes)
    # Rounded here, so that a factor of 1 leaves the sums unchanged: depending on neighbouring queries, a query may or
    # may not process steps of keys that it does not see.
    new_largest = gl.maximum(largest, gl.max(scores, axis=1) * scale)
    base = new_largest
    if MASKED:
        base = gl.where(new_largest == float("-inf"), 0.0, base)  # the query has seen no key yet
    weights = gl.exp2(scores * scale - base[:, None])
    fade = gl.exp2(largest - base)
    return weights, new_largest, total * fade + _sum(weights), fade


@gluon.jit
def _sum(weights):
    """Sum each row in whole steps of 2 ** -23, so that the order does not matter.

    The keys of a row's last chunk move once the row has grown. (The matrix instructions add 16 keys at once, in no
    order.) No weight exceeds 1, and the loss is far below that of rounding a weight to 16 bits.
    """
    ONE: gl.constexpr = 0x3F800000  # the bits of 1.0; those of 1 + x are x / 2 ** -23 more
    steps = gl.sum((weights + 1.0).to(gl.int32, bitcast=True) - ONE, axis=1)
    return steps.to(gl.float32) * 1.1920928955078125e-07


@gluon.jit
def _await_turn(buffers, turn, WHICH: gl.constexpr):
    mbarrier.wait(buffers.turns.index(WHICH), turn & 1)


@gluon.jit
def _arrive(barrier):
    """Signal that every warp of the group has arrived. Without the first line a late warp could miss a phase."""
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _advance(
    step, state, at, turn, scale, cap, queries, first_key, length, window, buffers, sizes,
    WHICH: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute scores and weights of `step`, while the previous step's weights multiply V. at: steps done so far."""
    sums, sums_rest, weights, largest, total = state
    slot = at % sizes.STAGES
    before = (at - 1) % sizes.STAGES
    mbarrier.wait(buffers.k_ready.index(slot), (at // sizes.STAGES) & 1)
    _await_turn(buffers, turn, WHICH)
    scores = multiply_keys(slot, buffers, sizes, WHICH)
    mbarrier.wait(buffers.v_ready.index(before), ((at - 1) // sizes.STAGES) & 1)
    sums, sums_rest = multiply_values(weights, before, sums, sums_rest, buffers, sizes)
    _arrive(buffers.turns.index(1 - WHICH))
    scores = warpgroup_mma_wait(sizes.PRODUCTS, deps=(scores,))
    _arrive(buffers.k_empty.index(slot))
    weights, largest, total, fade = _softmax(
        scores, largest, total, scale, cap, step, queries, first_key, length, window, sizes, MASKED
    )
    sums, sums_rest = await_sums(sums, sums_rest, sizes)
    _arrive(buffers.v_empty.index(before))
    sums, sums_rest = scale_sums(sums, sums_rest, fade, sizes)
    return sums, sums_rest, weights, largest, total


@gluon.jit
def _begin(at, step, turn, scale, cap, queries, first_key, length, window, buffers, sizes, WHICH: gl.constexpr):
    """Compute the first step of a tile: its last keys."""
    slot = at % sizes.STAGES
    mbarrier.wait(buffers.k_ready.index(slot), (at // sizes.STAGES) & 1)
    _await_turn(buffers, turn, WHICH)
    scores = multiply_keys(slot, buffers, sizes, WHICH)
    _arrive(buffers.turns.index(1 - WHICH))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _arrive(buffers.k_empty.index(slot))
    largest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, sizes.SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, sizes.SCORES))
    weights, largest, total, _ = _softmax(
        scores, largest, total, scale, cap, step, queries, first_key, length, window, sizes, True
    )
    sums = gl.zeros([64, sizes.HEAD_TILE], gl.float32, sizes.SUMS)
    sums_rest = gl.zeros([64, sizes.REST_TILE], gl.float32, sizes.SUMS_REST)
    return sums, sums_rest, weights, largest, total


@gluon.jit
def _end(at, state, sinks, buffers, sizes):
    """Compute the last product with V, divided by the total of the weights: [64, HEAD_TILE] and the rest, float32.

    sinks: [64] addresses of the rows' sinks.
    """
    sums, sums_rest, weights, largest, total = state
    before = (at - 1) % sizes.STAGES
    mbarrier.wait(buffers.v_ready.index(before), ((at - 1) // sizes.STAGES) & 1)
    sums, sums_rest = multiply_values(weights, before, sums, sums_rest, buffers, sizes)
    sink = gl.load(sinks) * LOG2_E
    new_largest = gl.maximum(largest, sink)
    fade = gl.exp2(largest - new_largest)
    inverse = fade / (total * fade + gl.exp2(sink - new_largest))
    sums, sums_rest = await_sums(sums, sums_rest, sizes)
    _arrive(buffers.v_empty.index(before))
    return scale_sums(sums, sums_rest, inverse, sizes)


@gluon.jit
def _compute(WHICH: gl.constexpr, sinks, output, token_stride, head_stride, scale, cap, work, buffers, sizes):
    """Run one computing group: rows from WHICH x 64 on of every tile. Loops take the same steps in both groups."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16] if sizes.HEAD_TILE >= 128 else [4, 8], [4, 1], [1, 0])
    STORE_REST: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, sizes.SCORES))
    at = 0
    turn = 0
    if WHICH == 1:
        _arrive(buffers.turns.index(0))
    for index in range(work.count):
        pack, _, token, position, count, start, length, _ = work.tile(index, sizes)
        low, inside, causal, last = work.steps(position, length, sizes)
        first_key = start - work.window + 1
        queries = position + rows // sizes.PACK
        mbarrier.wait(buffers.q_ready.index(WHICH), index & 1)
        state = _begin(at, last - 1, turn, scale, cap, queries, first_key, length, work.window, buffers, sizes, WHICH)
        at += 1
        turn += 1
        for i in range(last - 1 - causal):
            state = _advance(
                last - 2 - i, state, at, turn, scale, cap, queries, first_key, length, work.window, buffers, sizes,
                WHICH, True,
            )  # fmt: skip
            at += 1
            turn += 1
        for i in range(causal - inside):
            state = _advance(
                causal - 1 - i, state, at, turn, scale, cap, queries, first_key, length, work.window, buffers, sizes,
                WHICH, False,
            )  # fmt: skip
            at += 1
            turn += 1
        if sizes.WINDOW:
            for i in range(inside - low):
                state = _advance(
                    inside - 1 - i, state, at, turn, scale, cap, queries, first_key, length, work.window, buffers,
                    sizes, WHICH, True,
                )  # fmt: skip
                at += 1
                turn += 1
        _arrive(buffers.q_empty.index(WHICH))
        addresses = sinks + (pack * sizes.PACK + rows % sizes.PACK)
        sums, sums_rest = _end(at, state, addresses, buffers, sizes)
        strides = (token_stride, head_stride)
        store_sums(sums, 0, token, pack, count, output, strides, sizes, WHICH, STORE)
        if sizes.REST:
            store_sums(sums_rest, sizes.HEAD_TILE, token, pack, count, output, strides, sizes, WHICH, STORE_REST)


@gluon.jit(
    do_not_specialize=["output_token_stride", "output_head_stride", "table_stride", "n_items", "window", "blocks"],
    do_not_specialize_on_alignment=["sinks"],
)
def prefill_hopper(
    q_desc,
    k_desc,
    v_desc,
    sinks,
    output,
    output_token_stride,
    output_head_stride,
    tables,
    table_stride,
    items,
    n_items,
    scale,
    cap,
    window,
    blocks,
    PACKS: gl.constexpr,
    PACK: gl.constexpr,
    SHARE: gl.constexpr,
    BLOCK: gl.constexpr,
    CHUNK: gl.constexpr,
    KEYS: gl.constexpr,
    HEAD: gl.constexpr,
    HEAD_TILE: gl.constexpr,
    REST: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    PAGED: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Compute tiles. Grid: [multiprocessors, or fewer for less work]. n_items: tiles x PACKS. num_warps: 4.

    q_desc: [tokens, PACKS, PACK, head_size]; k_desc, v_desc: [blocks, block_size, kv_heads, head_size]. sinks: [PACKS x
    PACK] float32, -inf: none. scale, cap: see `prefill.exponents`. Strides of the output: in units of HEAD_UNIT
    numbers. CHUNK: slots per copy, a block or a part of one. HEAD_TILE, REST: see `head_tiles`. COLUMNS: see
    `constants`.
    """
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    sizes = Sizes(
        PACKS, PACK, SHARE, BLOCK, CHUNK, KEYS, HEAD, HEAD_TILE, REST, COLUMNS, STAGES, WINDOW, SOFTCAP, PAGED
    )
    q = gl.allocate_shared_memory(dtype, [2, 64, HEAD_TILE], layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_TILE], layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_TILE], layout)
    q_rest = q
    k_rest = k
    v_rest = v
    if REST:
        q_rest = gl.allocate_shared_memory(dtype, [2, 64, REST], layout)
        k_rest = gl.allocate_shared_memory(dtype, [STAGES, KEYS, REST], layout)
        v_rest = gl.allocate_shared_memory(dtype, [STAGES, KEYS, REST], layout)
    buffers = Buffers(
        q,
        k,
        v,
        q_rest,
        k_rest,
        v_rest,
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
    )
    for i in gl.static_range(2):
        mbarrier.init(buffers.q_ready.index(i), count=1)
        mbarrier.init(buffers.q_empty.index(i), count=1)
        mbarrier.init(buffers.turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(buffers.k_ready.index(i), count=1)
        mbarrier.init(buffers.v_ready.index(i), count=1)
        mbarrier.init(buffers.k_empty.index(i), count=2)
        mbarrier.init(buffers.v_empty.index(i), count=2)
    fence_async_shared()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    whole = n_items // programs
    place = gl.where(whole % 2 == 0, program, programs - 1 - program)
    count = whole + gl.where(place < n_items - whole * programs, 1, 0)
    work = Work(items, count, programs, window)
    gl.warp_specialize(
        [
            (_compute, (0, sinks, output, output_token_stride, output_head_stride, scale, cap, work, buffers, sizes)),
            (_compute, (1, sinks, output, output_token_stride, output_head_stride, scale, cap, work, buffers, sizes)),
            (copy_tiles, (q_desc, k_desc, v_desc, tables, table_stride, blocks, work, buffers, sizes)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )


def launch(
    query: torch.Tensor,
    layer: KvLayer,
    tables: torch.Tensor,
    items: torch.Tensor,
    output: torch.Tensor,
    options: AttentionOptions,
    pack: int,
    exponents: tuple[float, float],
    multiprocessors: int,
    paged: bool = True,
) -> None:
    """Launch the kernel for shapes that `prefill.prefill_shape` sends here; arguments as in `prefill.paged_prefill`.

    paged: whether `layer` is the pool rather than a workspace filled by `prefill_copy.copy_rows`.
    """
    tokens, heads, head_size = query.shape
    numbers = constants(heads, layer.keys.shape, pack, options, paged)
    queries = query.view(tokens, heads // pack, pack, head_size)
    columns = numbers["COLUMNS"]
    layout = box_layout(columns)

    def descriptor(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)

    work = items.shape[0] * (heads // pack)
    prefill_hopper[(min(work, multiprocessors),)](
        descriptor(queries, [ROWS // 2 // pack, 1, pack, columns]),
        descriptor(layer.keys, [1, numbers["CHUNK"], 1, columns]),
        descriptor(layer.values, [1, numbers["CHUNK"], 1, columns]),
        sinks_of(options, heads, query.device),
        output,
        *in_units(output.stride(0), output.stride(1)),
        tables,
        tables.stride(0),
        items,
        work,
        *exponents,
        options.window,
        layer.keys.shape[0],
        **numbers,
        num_warps=4,
    )
