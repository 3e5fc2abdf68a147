"""Sums of few tokens with weights in codes of 4 bits for NVIDIA's Hopper, in Gluon (Triton's lower level).

`stored_sum` computes the same, with the same bits. There each step waits for its scales, because the compiler moves
what was loaded ahead to other registers, and the inputs' wait lets only a few weights come early. Here one warp copies
the codes and the scales of a turn, and the columns of x, with the tensor copy engine (TMA) into shared memory, several
turns ahead. The codes of the first turns come before the inputs are ready. Four other warps unpack and multiply.

A step has the columns of a group, one unit or two. A turn has one step or two: no bit depends on that.
"""

# No `from __future__ import annotations`: the annotations of an aggregate are looked at.
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from kvforge.worker.attention.gluon_names import as_boxes, copy_box, thread_barrier
from kvforge.worker.device.target import Target

from .code_tables import WORDS
from .hopper_codes import TILE, UNIT_COLUMNS
from .stored import Codes
from .stored_sum import TURNED
from .stored_unpack import unpack_four

REGISTERS = 64  # registers per thread of a program, on average
# Registers of the copying warp, by the units of a step. More for two units make products wait for each other.
COPY_REGISTERS = {1: 32, 2: 24}
# Turns in shared memory, by the units of a step and the tokens of a tile. One less for many programs of 8 tokens.
TURNS = {(2, 8): 3, (2, 16): 4, (1, 8): 4, (1, 16): 4}
ROWS = gl.constexpr(TILE)
HALF_ROWS = gl.constexpr(TILE // 2)
UNIT = gl.constexpr(UNIT_COLUMNS)
_WORDS, _TURNED = gl.constexpr(WORDS), gl.constexpr(TURNED)


@aggregate
class Sizes:
    """Compile-time numbers.

    CODE: of the weight. UNITS: of a step. ZEROS: whether groups have codes of 0. STEPS: of a sum. TOGETHER: steps of a
    turn. TURNS: turns in shared memory. TOKENS: of a tile. HALF: whether x is float16. COLUMNS: words of a row's step.
    FIRST_TURNS: turns that are copied before any is read.
    """

    CODE: gl.constexpr
    UNITS: gl.constexpr
    ZEROS: gl.constexpr
    STEPS: gl.constexpr
    TOGETHER: gl.constexpr
    TURNS: gl.constexpr
    TOKENS: gl.constexpr
    HALF: gl.constexpr
    COLUMNS: gl.constexpr
    FIRST_TURNS: gl.constexpr
    NARROW: gl.constexpr
    FIRST: gl.constexpr
    SUMS: gl.constexpr
    LEFT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, CODE, UNITS, ZEROS, STEPS, TOGETHER, TURNS, TOKENS, HALF):
        self.CODE, self.UNITS, self.ZEROS = gl.constexpr(CODE), gl.constexpr(UNITS), gl.constexpr(ZEROS)
        self.STEPS, self.TOGETHER, self.TURNS = gl.constexpr(STEPS), gl.constexpr(TOGETHER), gl.constexpr(TURNS)
        self.TOKENS, self.HALF = gl.constexpr(TOKENS), gl.constexpr(HALF)
        self.COLUMNS = gl.constexpr(UNITS * WORDS)
        self.FIRST_TURNS = gl.constexpr(min(TURNS, STEPS // TOGETHER))
        self.NARROW = gl.constexpr(gl.float16 if HALF else gl.bfloat16)
        self.FIRST = gl.constexpr(1024 if HALF else 128)  # see `unpack_four`
        sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
        self.SUMS = gl.constexpr(sums)
        self.LEFT = gl.constexpr(gl.DotOperandLayout(0, sums, 2))


@aggregate
class Buffers:
    """Shared memory, with barriers that signal that a turn is filled (ready) or was read (empty).

    words: [steps, ROWS, COLUMNS]. scales: [steps, 1, ROWS]. zeros: [steps, 1, 2 ROWS], the second half unused, so that
    boxes are aligned. x: [steps, UNITS x TOKENS, UNIT]. Layouts without a swizzle have one row, because Triton takes
    several rows for another order than the copy engine writes.
    """

    words: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    zeros: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    words_ready: gl.shared_memory_descriptor
    x_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, words, scales, zeros, x, words_ready, x_ready, empty):
        self.words, self.scales, self.zeros, self.x = words, scales, zeros, x
        self.words_ready, self.x_ready, self.empty = words_ready, x_ready, empty


@gluon.jit
def allocate(sizes):
    """Return the buffers of a program. All barriers are ready for use."""
    STEPS: gl.constexpr = sizes.TOGETHER * sizes.TURNS
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    words = gl.allocate_shared_memory(
        gl.int16, [STEPS, ROWS, sizes.COLUMNS], gl.NVMMASharedLayout(2 * sizes.COLUMNS, 16, 2)
    )
    scales = gl.allocate_shared_memory(gl.float32, [STEPS, 1, ROWS], gl.NVMMASharedLayout(0, 32, 2))
    zeros = scales
    if sizes.ZEROS:
        zeros = gl.allocate_shared_memory(gl.uint8, [STEPS, 1, 2 * ROWS], gl.NVMMASharedLayout(0, 8, 2))
    x = gl.allocate_shared_memory(
        sizes.NARROW, [STEPS, sizes.UNITS * sizes.TOKENS, UNIT], gl.NVMMASharedLayout(128, 16, 2)
    )
    buffers = Buffers(
        words,
        scales,
        zeros,
        x,
        gl.allocate_shared_memory(gl.int64, [sizes.TURNS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [sizes.TURNS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [sizes.TURNS, 1], barrier),
    )
    for turn in gl.static_range(sizes.TURNS):
        mbarrier.init(buffers.words_ready.index(turn), count=1)
        mbarrier.init(buffers.x_ready.index(turn), count=1)
        mbarrier.init(buffers.empty.index(turn), count=1)
    fence_async_shared()
    return buffers


@gluon.jit
def _wrapped(step, sizes):
    return gl.where(step < sizes.STEPS, step, step - sizes.STEPS)


@gluon.jit
def rolled_step(tile, sizes):
    """Return the step with which a tile begins its sum, as `stored_sum` does. tile: of ROWS rows of the weight."""
    return tile * ROWS // _TURNED % sizes.STEPS


@gluon.jit
def _box_of_zeros(buffer, zeros):
    # The unused half is a second box.
    BOXES: gl.constexpr = [2, zeros.block_shape[1], zeros.block_shape[2]]
    return as_boxes(buffer, BOXES, zeros.layout).slice(0, 1, dim=0)


@gluon.jit
def _copy_weight(sources, place, start, slot, buffers, sizes):
    """Begin to copy words, scales and zeros of the turn from step `start` on."""
    words, scales, zeros = sources
    span, half, row, _, _ = place
    ready = buffers.words_ready.index(slot)
    mbarrier.expect(ready, sizes.TOGETHER * ROWS * (2 * sizes.COLUMNS + 4 + (1 if sizes.ZEROS else 0)))
    for ahead in gl.static_range(sizes.TOGETHER):
        at = slot * sizes.TOGETHER + ahead
        step = span + _wrapped(start + ahead, sizes)
        copy_box(words, [step, half, row, 0], ready, as_boxes(buffers.words.index(at), words.block_shape, words.layout))
        box = as_boxes(buffers.scales.index(at), scales.block_shape, scales.layout)
        copy_box(scales, [step, half, row], ready, box)
        if sizes.ZEROS:
            copy_box(zeros, [step, half, row], ready, _box_of_zeros(buffers.zeros.index(at), zeros))


@gluon.jit
def _copy_x(x, place, start, slot, buffers, sizes):
    """Begin to copy the columns of x of the turn from step `start` on."""
    _, _, _, first, token = place
    ready = buffers.x_ready.index(slot)
    mbarrier.expect(ready, sizes.TOGETHER * sizes.TOKENS * sizes.UNITS * UNIT * 2)
    for ahead in gl.static_range(sizes.TOGETHER):
        box = as_boxes(buffers.x.index(slot * sizes.TOGETHER + ahead), x.block_shape, x.layout)
        copy_box(x, [(first + _wrapped(start + ahead, sizes)) * sizes.UNITS, token, 0], ready, box)


@gluon.jit
def copy_first_weight(sources, place, rolled, buffers, sizes):
    """Begin to copy the weight of as many turns as there are buffers for.

    sources: descriptors of words, scales and zeros. place: the span of the sum's first step, the half and the row of
    its tile's first row (see `described`), the sum's first step of x, and the first token. rolled: see `rolled_step`.
    """
    for turn in range(sizes.FIRST_TURNS):
        _copy_weight(sources, place, _wrapped(rolled + turn * sizes.TOGETHER, sizes), turn, buffers, sizes)


@gluon.jit
def copy_rest(sources, x, place, rolled, buffers, sizes):
    """Copy everything behind `copy_first_weight`."""
    for turn in range(sizes.FIRST_TURNS):
        _copy_x(x, place, _wrapped(rolled + turn * sizes.TOGETHER, sizes), turn, buffers, sizes)
    slot = 0
    phase = 0
    start = _wrapped(rolled + sizes.FIRST_TURNS * sizes.TOGETHER, sizes)
    for _ in range(sizes.FIRST_TURNS, sizes.STEPS // sizes.TOGETHER):
        mbarrier.wait(buffers.empty.index(slot), phase)
        _copy_weight(sources, place, start, slot, buffers, sizes)
        _copy_x(x, place, start, slot, buffers, sizes)
        start = _wrapped(start + sizes.TOGETHER, sizes)
        slot += 1
        if slot == sizes.TURNS:
            slot = 0
            phase ^= 1


@gluon.jit
def _by_unit(at, buffers, sizes):
    """Return the numbers of a step without scales, [ROWS, UNIT] of each unit, in the order of the columns."""
    if sizes.ZEROS:
        zero = buffers.zeros.index(at).slice(0, ROWS, dim=1).permute((1, 0)).load(sizes.LEFT)
        zero = (zero.to(gl.int32) + sizes.FIRST).to(gl.float32).to(sizes.NARROW)
        zero, _ = gl.broadcast(zero, gl.full([ROWS, sizes.COLUMNS], 0.0, sizes.NARROW, sizes.LEFT))
    else:
        zero = gl.full([ROWS, sizes.COLUMNS], sizes.FIRST + 8, sizes.NARROW, sizes.LEFT)
    a, b, c, d = unpack_four(buffers.words.index(at).load(sizes.LEFT), zero, sizes.CODE, sizes.HALF, True)
    # [rows, units, sets, words of a unit]: none moves between threads.
    every = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [ROWS, sizes.UNITS, _WORDS, 4])
    every = gl.permute(every, (0, 1, 3, 2))
    if sizes.UNITS == 1:
        return (_as_left(gl.reshape(every, [ROWS, UNIT]), sizes),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(every, [ROWS, 2, UNIT]), (0, 2, 1)))
        return _as_left(low, sizes), _as_left(high, sizes)


@gluon.jit
def _as_left(numbers, sizes):
    return gl.convert_layout(numbers, sizes.LEFT, assert_trivial=True)


@gluon.jit
def _multiply(at, buffers, sizes):
    """Begin the product of a step."""
    nothing = gl.zeros([ROWS, sizes.TOKENS], gl.float32, sizes.SUMS)
    units = _by_unit(at, buffers, sizes)
    x = buffers.x.index(at)
    right = x.slice(0, sizes.TOKENS, dim=0).permute((1, 0))
    product = warpgroup_mma(units[0], right, nothing, use_acc=False, is_async=True)
    for unit in gl.static_range(1, sizes.UNITS):
        right = x.slice(unit * sizes.TOKENS, sizes.TOKENS, dim=0).permute((1, 0))
        product = warpgroup_mma(units[unit], right, product, is_async=True)
    return product


@gluon.jit
def sum_steps(buffers, sizes):
    """Return the sums [ROWS, TOKENS] float32, in the layout SUMS."""
    total = gl.zeros([ROWS, sizes.TOKENS], gl.float32, sizes.SUMS)
    slot = 0
    phase = 0
    for _ in range(sizes.STEPS // sizes.TOGETHER):
        mbarrier.wait(buffers.words_ready.index(slot), phase)
        mbarrier.wait(buffers.x_ready.index(slot), phase)
        products = ()
        for ahead in gl.static_range(sizes.TOGETHER):
            product = _multiply(slot * sizes.TOGETHER + ahead, buffers, sizes)
            products = products + (product,)  # type: ignore[assignment]  # noqa: RUF005
        for ahead in gl.static_range(sizes.TOGETHER):
            product = warpgroup_mma_wait(sizes.UNITS * (sizes.TOGETHER - 1 - ahead), deps=(products[ahead],))
            scale = buffers.scales.index(slot * sizes.TOGETHER + ahead).permute((1, 0)).load(sizes.SUMS)
            total += product * scale
        thread_barrier()  # without it a late warp could miss a phase
        mbarrier.arrive(buffers.empty.index(slot), count=1)
        slot += 1
        if slot == sizes.TURNS:
            slot = 0
            phase ^= 1
    return total


@gluon.jit
def exchange_halves(total, exchange, HALVES: gl.constexpr):
    """Return the upper and the lower half of the rows of `total`, [HALF_ROWS, TOKENS] each in the layout HALVES."""
    exchange.store(total)
    thread_barrier()
    upper = exchange.slice(0, HALF_ROWS, dim=0).load(HALVES)
    return upper, exchange.slice(HALF_ROWS, HALF_ROWS, dim=0).load(HALVES)


@gluon.constexpr_function
def halves_layout():
    """Return the layout of `exchange_halves`: the rows are neighbouring threads."""
    return gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])


@gluon.constexpr_function
def exchange_layout():
    """Return the layout of the shared memory of `exchange_halves`, [ROWS, TOKENS]."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0, 1])


@dataclass(frozen=True)
class Described:
    """What a launch needs of a weight and of x: tensor descriptors, and constants; for these see `Sizes`.

    registers: of the copying warp.
    """

    words: TensorDescriptor
    scales: TensorDescriptor
    zeros: TensorDescriptor
    x: TensorDescriptor
    units: int
    together: int
    turns: int
    tokens: int
    registers: int


def described(
    x: torch.Tensor,
    codes: Codes,
    halves: int,
    rows: int,
    steps: int,
    programs: int,
    target: Target,
    alone: bool = False,
) -> Described:
    """Describe a weight and x for a launch.

    Args:
        x: [tokens, k].
        codes: The weight.
        halves: Rows of the weight are [halves, any number]: 1, or what a tile has two of, each in two halves.
        rows: Halves of a tile: 1 or 2.
        steps: Steps of a sum.
        programs: Programs of the launch.
        target: The GPU.
        alone: Whether a tile has one token, whatever x has.
    """
    tokens, k = x.shape
    n, narrow, units = codes.shape[-2], 8 if tokens <= 8 or alone else 16, codes.group // UNIT_COLUMNS
    box = [1, rows, ROWS.value // rows]
    scales = codes.scales.view(-1, halves, n // halves)
    of_scales = TensorDescriptor.from_tensor(scales, box, gl.NVMMASharedLayout(0, 32, 3))
    of_zeros = of_scales
    if codes.zeros is not None:
        zeros = codes.zeros.view(-1, halves, n // halves)
        of_zeros = TensorDescriptor.from_tensor(zeros, box, gl.NVMMASharedLayout(0, 8, 3))
    stride = x.stride(0) if tokens > 1 else k
    of_x = x.as_strided((k // UNIT_COLUMNS, tokens, UNIT_COLUMNS), (UNIT_COLUMNS, stride, 1))
    together = 2 if steps % 2 == 0 and units * narrow <= 16 else 1
    is_many = programs > 2 * target.multiprocessors
    words = codes.words.view(-1, halves, n // halves, units * WORDS)
    return Described(
        words=TensorDescriptor.from_tensor(
            words, [*box, units * WORDS], gl.NVMMASharedLayout(2 * units * WORDS, 16, 4)
        ),
        scales=of_scales,
        zeros=of_zeros,
        x=TensorDescriptor.from_tensor(of_x, [units, narrow, UNIT_COLUMNS], gl.NVMMASharedLayout(128, 16, 3)),
        units=units,
        together=together,
        turns=TURNS[units, narrow] - (is_many and narrow == 8),
        tokens=narrow,
        registers=COPY_REGISTERS[units],
    )
