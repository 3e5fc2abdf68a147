"""Products of few tokens with codes of 4 bits on Hopper: `stored_kernel` with the sums of `stored_hopper`."""

# No `from __future__ import annotations`, as in `stored_hopper`.
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvforge.worker.device.overlap import launch_options

from .activation import activate, activated
from .activations import Activation
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
def _copy(words, scales, zeros, x, tile, part, buffers, sizes, GATED: gl.constexpr, OVERLAP: gl.constexpr):
    NUMBERS: gl.constexpr = HALF_ROWS if GATED else ROWS
    first = part * sizes.STEPS
    place = (first, 0, tile * NUMBERS, first, 0)
    rolled = rolled_step(tile, sizes)
    copy_first_weight((words, scales, zeros), place, rolled, buffers, sizes)
    if OVERLAP:
        gdc_wait()
    copy_rest((words, scales, zeros), x, place, rolled, buffers, sizes)


@gluon.jit
def _compute(
    bias, output, exchange, tile, part, tokens, results, alpha, limit, buffers, sizes, HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    NUMBERS: gl.constexpr = HALF_ROWS if GATED else ROWS
    narrow: gl.constexpr = output.dtype.element_ty
    total = sum_steps(buffers, sizes)
    if OVERLAP:
        gdc_launch_dependents()
    if HAS_BIAS:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, sizes.SUMS))
        rows = tile * NUMBERS + i % NUMBERS + i // NUMBERS * results
        total += gl.load(bias + rows, mask=i < gl.where(part == 0, ROWS, 0), other=0.0).to(gl.float32)[:, None]
    LAYOUT: gl.constexpr = halves_layout() if GATED else sizes.SUMS
    if GATED:
        gate, up = exchange_halves(total.to(narrow).to(gl.float32), exchange, LAYOUT)
        total = activated(gate, up, alpha, limit, KIND, narrow)
    elif KIND != "":
        total = activate(total.to(narrow).to(gl.float32), KIND)
    number = tile * NUMBERS + gl.arange(0, NUMBERS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, sizes.TOKENS, gl.SliceLayout(0, LAYOUT))
    at = output + (part * tokens + column).to(gl.int64)[None, :] * results + number[:, None]
    gl.store(at, total.to(narrow), mask=(number < results)[:, None] & (column < tokens)[None, :])


@gluon.jit(do_not_specialize=["tokens"])
def stored_hopper_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    output,
    tokens,
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
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    KIND: gl.constexpr,
    OVERLAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Multiply x by a weight. Grid: [blocks of results, parts]. num_warps: 4.

    x: [k / 64, tokens, 64]. words: [spans, halves, n / halves, words of a span], halves: 2 if GATED. scales, zeros:
    [groups, halves, n / halves]. Others: see `stored_kernel` and `Sizes`. REGISTERS: of the copying warp.
    """
    sizes = Sizes(CODE, UNITS, ZEROS, STEPS, TOGETHER, TURNS, TOKENS, HALF)
    buffers = allocate(sizes)
    exchange = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], exchange_layout())
    tile = gl.program_id(0)
    part = gl.program_id(1)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    bias, output, exchange, tile, part, tokens, results, alpha, limit, buffers, sizes, HAS_BIAS, GATED,
                    KIND, OVERLAP,
                ),
            ),
            (_copy, (words, scales, zeros, x, tile, part, buffers, sizes, GATED, OVERLAP)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


def multiply_few(
    launch: Launching,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    activation: Activation | None,
    gated: bool,
    steps: int,
) -> None:
    """Compute what `stored_linear` does, of shapes that `can_sum` accepts.

    Args:
        launch: How to launch it.
        x: [tokens, k], columns in the order of the codes.
        codes: The weight [n, k].
        bias: [n] or None.
        output: [parts, tokens, results], contiguous, receives the result.
        activation: Activation of the result, or of the gate.
        gated: Whether the weight holds gate and up.
        steps: Steps of a part's sum.
    """
    parts, tokens, results = output.shape
    tile = HALF_ROWS.value if gated else ROWS.value
    halves, grid = 2 if gated else 1, (results // tile, parts)
    of = described(x, codes, halves, halves, steps, grid[0] * parts, launch.target)
    stored_hopper_kernel[grid](
        of.x,
        of.words,
        of.scales,
        of.zeros,
        x if bias is None else bias,
        output,
        tokens,
        results,
        0.0 if activation is None else activation.alpha,
        0.0 if activation is None else activation.limit,
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
        GATED=gated,
        KIND="" if activation is None else activation.kind,
        num_warps=4,
        **(launch_options(launch.overlap) | {"maxnreg": REGISTERS}),
    )
