"""Experts of one token in codes of 4 bits on Hopper: `stored_experts_kernel` with the sums of `stored_hopper`."""

# No `from __future__ import annotations`, as in `stored_hopper`.
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvforge.worker.device.overlap import launch_options

from .activation import activate, activated
from .expert_sort import Blocks
from .grouped import Gating
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
def _copy(
    words, scales, zeros, x, chosen, pair, tile, buffers, sizes, DOWN: gl.constexpr, GATED: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    NUMBERS: gl.constexpr = HALF_ROWS if GATED else ROWS
    rolled = rolled_step(tile, sizes)
    if OVERLAP and not DOWN:
        gdc_wait()
    # With DOWN the experts are known: the kernel before has waited for them.
    first = gl.load(chosen + pair) * sizes.STEPS
    place = (first, 0, tile * NUMBERS, 0, pair if DOWN else 0)
    copy_first_weight((words, scales, zeros), place, rolled, buffers, sizes)
    if OVERLAP and DOWN:
        gdc_wait()
    copy_rest((words, scales, zeros), x, place, rolled, buffers, sizes)


@gluon.jit
def _compute(
    chosen, bias, factors, output, exchange, pair, tile, results, alpha, limit, buffers, sizes, DOWN: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    NUMBERS: gl.constexpr = HALF_ROWS if GATED else ROWS
    narrow: gl.constexpr = output.dtype.element_ty
    total = sum_steps(buffers, sizes)
    if OVERLAP:
        gdc_launch_dependents()
    if HAS_BIAS:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, sizes.SUMS))
        rows = tile * NUMBERS + i % NUMBERS + i // NUMBERS * results
        expert = gl.maximum(gl.load(chosen + pair), 0).to(gl.int64)
        of_expert = expert * (2 * results if GATED else results)
        total += gl.load(bias + of_expert + rows).to(gl.float32)[:, None]
    total = total.to(narrow).to(gl.float32)
    LAYOUT: gl.constexpr = halves_layout() if GATED else sizes.SUMS
    if GATED:
        gate, up = exchange_halves(total, exchange, LAYOUT)
        total = activated(gate, up, alpha, limit, KIND, narrow)
    elif KIND != "":
        total = activate(total, KIND)
    if DOWN:
        total = total * gl.load(factors + pair)
    number = tile * NUMBERS + gl.arange(0, NUMBERS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, sizes.TOKENS, gl.SliceLayout(0, LAYOUT))
    at = output + pair.to(gl.int64) * results + number[:, None] + column[None, :] * 0
    gl.store(at, total.to(narrow), mask=(number < results)[:, None] & (column == 0)[None, :])


@gluon.jit(do_not_specialize=["pairs"])
def experts_hopper_kernel(
    x,
    words,
    scales,
    zeros,
    chosen,
    bias,
    factors,
    output,
    pairs,
    results,
    alpha,
    limit,
    CODE: gl.constexpr,
    UNITS: gl.constexpr,
    ZEROS: gl.constexpr,
    STEPS: gl.constexpr,
    TOGETHER: gl.constexpr,
    TURNS: gl.constexpr,
    TOKENS: gl.constexpr,
    HALF: gl.constexpr,
    DOWN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    KIND: gl.constexpr,
    OVERLAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Multiply one token by its experts. Grid: [pairs x blocks of results, pairs first]. num_warps: 4.

    x: [k / 64, 1, 64], or [k / 64, pairs, 64] if DOWN. words: [experts x spans, halves, n / halves, words of a span],
    halves: 2 if GATED. scales, zeros: [experts x groups, halves, n / halves]. chosen: [pairs] int32, the experts;
    AWAY lies outside of the weights, where the copy engine writes zeros.
    output: [pairs, results]. Others: see `stored_experts_kernel` and `stored_hopper_kernel`.
    """
    sizes = Sizes(CODE, UNITS, ZEROS, STEPS, TOGETHER, TURNS, TOKENS, HALF)
    buffers = allocate(sizes)
    exchange = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], exchange_layout())
    pair = gl.program_id(0) % pairs
    tile = gl.program_id(0) // pairs
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    chosen, bias, factors, output, exchange, pair, tile, results, alpha, limit, buffers, sizes, DOWN,
                    HAS_BIAS, GATED, KIND, OVERLAP,
                ),
            ),
            (_copy, (words, scales, zeros, x, chosen, pair, tile, buffers, sizes, DOWN, GATED, OVERLAP)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


def multiply_alone(
    launch: Launching,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
    gating: Gating | None,
    pairs: Blocks,
    output: torch.Tensor,
    steps: int,
) -> None:
    """Compute the product of one token with its experts, of shapes that `can_sum` accepts.

    Args:
        launch: How to launch it.
        x: [1, k]; [pairs, k] without `gating`.
        codes: The weights [experts, n, k].
        bias: [experts, n] or None.
        factors: [1, pairs] float32, factors of the output without `gating`.
        gating: How the product becomes the input of the next one; None: it is the last one.
        pairs: The pairs.
        output: pairs.count x results numbers, contiguous, receives the result.
        steps: Steps of a sum.
    """
    results, gated = output.shape[-1], gating is not None and gating.gated
    tile = HALF_ROWS.value if gated else ROWS.value
    halves, programs = 2 if gated else 1, pairs.count * (results // tile)
    of = described(x, codes, halves, halves, steps, programs, launch.target, alone=True)
    experts_hopper_kernel[(programs,)](
        of.x,
        of.words,
        of.scales,
        of.zeros,
        pairs.blocks,
        x if bias is None else bias,
        codes.scales if factors is None else factors,
        output,
        pairs.count,
        results,
        0.0 if gating is None else gating.activation.alpha,
        0.0 if gating is None else gating.activation.limit,
        CODE=codes.code,
        UNITS=of.units,
        ZEROS=codes.zeros is not None,
        STEPS=steps,
        TOGETHER=of.together,
        TURNS=of.turns,
        TOKENS=of.tokens,
        HALF=x.dtype == torch.float16,
        REGISTERS=of.registers,
        DOWN=gating is None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        KIND="" if gating is None else gating.activation.kind,
        num_warps=4,
        **(launch_options(launch.overlap) | {"maxnreg": REGISTERS}),
    )
