"""Q, K and V of few tokens in codes of 4 bits on Hopper: `stored_project_kernel` with the sums of `stored_hopper`."""

# No `from __future__ import annotations`, as in `stored_hopper`.
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvforge.worker.attention import KvLayer
from kvforge.worker.attention.write import rotated_pair
from kvforge.worker.device.overlap import launch_options

from .launching import Launching
from .stored import Codes
from .stored_hopper import (
    HALF_ROWS,
    REGISTERS,
    ROWS,
    Sizes,
    allocate,
    copy_first_weight,
    copy_rest,
    described,
    exchange_halves,
    exchange_layout,
    halves_layout,
    rolled_step,
    sum_steps,
)


@gluon.jit
def _copy(words, scales, zeros, x, head, first_pair, rolled, buffers, sizes, OVERLAP: gl.constexpr):
    place = (0, head * 2, first_pair, 0, 0)
    copy_first_weight((words, scales, zeros), place, rolled, buffers, sizes)
    if OVERLAP:
        gdc_wait()
    copy_rest((words, scales, zeros), x, place, rolled, buffers, sizes)


@gluon.jit
def _angles(angles, at, inside):
    return gl.load(angles + at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _store(place, first, second, wanted, HALF: gl.constexpr):
    dtype: gl.constexpr = place.dtype.element_ty
    gl.store(place, first.to(dtype), mask=wanted)
    gl.store(place + HALF, second.to(dtype), mask=wanted)


@gluon.jit
def _compute(
    bias, cosines, sines, slots, query, keys, values, exchange, tokens, heads, kv_heads, head, first_pair, buffers,
    sizes, HAS_BIAS: gl.constexpr, HEAD_SIZE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = HEAD_SIZE // 2
    LAYOUT: gl.constexpr = halves_layout()
    total = sum_steps(buffers, sizes)
    if OVERLAP:
        gdc_launch_dependents()
    if HAS_BIAS:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, sizes.SUMS))
        rows = head * HEAD_SIZE + i // HALF_ROWS * HALF + first_pair + i % HALF_ROWS
        total += gl.load(bias + rows).to(gl.float32)[:, None]
    # Rounded like a separate product.
    first, second = exchange_halves(total.to(query.dtype.element_ty).to(gl.float32), exchange, LAYOUT)
    pair = (first_pair + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, LAYOUT)))[:, None]
    column = gl.arange(0, sizes.TOKENS, gl.SliceLayout(0, LAYOUT))
    inside = (column < tokens)[None, :]
    if head < heads + kv_heads:
        at = column[None, :] * HEAD_SIZE + pair
        cosine_first, cosine_second = _angles(cosines, at, inside), _angles(cosines, at + HALF, inside)
        sine_first, sine_second = _angles(sines, at, inside), _angles(sines, at + HALF, inside)
        first, second = rotated_pair(first, second, cosine_first, cosine_second, sine_first, sine_second)
    if head < heads:
        place = (column.to(gl.int64) * heads + head)[None, :] * HEAD_SIZE + pair
        _store(query + place, first, second, inside, HALF)
    else:
        slot = gl.load(slots + column, mask=column < tokens, other=-1).to(gl.int64)[None, :]
        if head < heads + kv_heads:
            _store(keys + (slot * kv_heads + head - heads) * HEAD_SIZE + pair, first, second, slot >= 0, HALF)
        else:
            kv_head = head - heads - kv_heads
            _store(values + (slot * kv_heads + kv_head) * HEAD_SIZE + pair, first, second, slot >= 0, HALF)


@gluon.jit(do_not_specialize=["tokens", "heads", "kv_heads"], do_not_specialize_on_alignment=["slots"])
def project_hopper_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    cosines,
    sines,
    slots,
    query,
    keys,
    values,
    tokens,
    heads,
    kv_heads,
    CODE: gl.constexpr,
    UNITS: gl.constexpr,
    ZEROS: gl.constexpr,
    STEPS: gl.constexpr,
    TOGETHER: gl.constexpr,
    TURNS: gl.constexpr,
    TOKENS: gl.constexpr,
    HALF: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    OVERLAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Project, rotate and store. Grid: [(heads + 2 kv_heads) x HEAD_SIZE / ROWS]. num_warps: 4.

    x: [k / 64, tokens, 64]. words: [spans, two halves of each head, HEAD_SIZE / 2, words of a span]. scales, zeros:
    [groups, two halves of each head, HEAD_SIZE / 2]. Others: see `project_kernel` and `stored_hopper_kernel`.
    """
    TILES: gl.constexpr = HEAD_SIZE // ROWS  # of a head
    sizes = Sizes(CODE, UNITS, ZEROS, STEPS, TOGETHER, TURNS, TOKENS, HALF)
    buffers = allocate(sizes)
    exchange = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], exchange_layout())
    head = gl.program_id(0) // TILES
    first_pair = gl.program_id(0) % TILES * HALF_ROWS
    rolled = rolled_step(head * TILES, sizes)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    bias, cosines, sines, slots, query, keys, values, exchange, tokens, heads, kv_heads, head,
                    first_pair, buffers, sizes, HAS_BIAS, HEAD_SIZE, OVERLAP,
                ),
            ),
            (_copy, (words, scales, zeros, x, head, first_pair, rolled, buffers, sizes, OVERLAP)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


def project_few(
    launch: Launching,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: KvLayer,
    slots: torch.Tensor,
    query: torch.Tensor,
    steps: int,
) -> None:
    """Compute what `project_codes` does, of shapes that `can_sum` accepts.

    Args:
        launch: How to launch it.
        x: [tokens, k], columns in the order of the codes.
        codes: The weight [n, k].
        bias: [n] or None.
        cos: [tokens, head_size].
        sin: As `cos`.
        layer: Where K and V are stored.
        slots: [tokens] int32; -1: do not store.
        query: [tokens, heads, head_size], receives Q.
        steps: Steps of a sum.
    """
    (tokens, heads, head_size), kv_heads = query.shape, layer.keys.shape[2]
    pairs, programs = head_size // 2, codes.shape[-2] // ROWS.value
    of = described(x, codes, codes.shape[-2] // pairs, 2, steps, programs, launch.target)
    project_hopper_kernel[(programs,)](
        of.x,
        of.words,
        of.scales,
        of.zeros,
        x if bias is None else bias,
        cos,
        sin,
        slots,
        query,
        layer.keys,
        layer.values,
        tokens,
        heads,
        kv_heads,
        CODE=codes.code,
        UNITS=of.units,
        ZEROS=codes.zeros is not None,
        STEPS=steps,
        TOGETHER=of.together,
        TURNS=of.turns,
        TOKENS=of.tokens,
        HALF=x.dtype == torch.float16,
        REGISTERS=of.registers,
        HAS_BIAS=bias is not None,
        HEAD_SIZE=head_size,
        num_warps=4,
        **(launch_options(launch.overlap) | {"maxnreg": REGISTERS}),
    )
