"""The step of Mamba 2's state spaces as Triton kernels: one token of each row, with the states in the pool's pages.

A program advances some lines of a head's state: each line is read and written once, and its sum depends on its own
numbers alone. A second kernel normalises the groups, which have several heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.attention.states import ALIGNMENT, StateRows
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching
from .recurrent_kernels import _lines, _paged, _silu
from .state_space import StateSpace, StateSpaceInputs

PROGRAM_NUMBERS = 4096  # of a state, in the registers of a program
NORM_NUMBERS = 4096  # of a group, at a time
THREAD_NUMBERS = 16


@triton.jit
def _softplus(x):
    """Return log(1 + e^x), also where e^x is small beside 1."""
    power = tl.exp(tl.minimum(x, 20.0))
    sum_ = 1.0 + power
    found = tl.where(sum_ == 1.0, power, tl.log(sum_) * (power / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.where(x > 20.0, x, found)


@triton.jit(
    do_not_specialize=[
        "heads",
        "groups",
        "mixed_stride",
        "gate_stride",
        "steps_stride",
        "page_numbers",
        "page_count",
    ]
)
def state_space_kernel(
    mixed,
    gate,
    steps,
    rates,
    biases,
    skips,
    target,
    state,
    pages,
    lines,
    heads,
    groups,
    head_size,
    state_size,
    mixed_stride,
    gate_stride,
    steps_stride,
    page_numbers,
    page_count,
    LINES: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [rows, heads, blocks of lines]. See `StateSpace`, and `convolve_kernel` for the pages.

    target: [rows, heads x head_size], y silu(gate), in float32 if a norm follows. LINES: of a block. NUMBERS: a power
    of two that holds a line. ALIGNED: whether lines begin at multiples of 16 bytes.
    """
    let_next_start(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = mixed.dtype.element_ty
    kept: tl.constexpr = state.dtype.element_ty
    along = tl.program_id(2) * LINES + tl.arange(0, LINES)
    across = tl.arange(0, NUMBERS)
    in_head, in_line = along < head_size, across < state_size
    rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
    size = heads * head_size
    shared = mixed + row * mixed_stride + size + (head // (heads // groups)) * state_size + across
    wait_for_inputs(OVERLAP)
    x = tl.load(mixed + row * mixed_stride + head * head_size + along, mask=in_head, other=0.0).to(tl.float32)
    b = tl.load(shared, mask=in_line, other=0.0).to(tl.float32)
    c = tl.load(shared + groups * state_size, mask=in_line, other=0.0).to(tl.float32)
    step = _softplus(tl.load(steps + row * steps_stride + head).to(tl.float32) + bias)
    item: tl.constexpr = kept.primitive_bitwidth // 8
    multiple: tl.constexpr = 16 // item if ALIGNED else 1
    first = lines + 2 * head * head_size
    line = _lines(first, pages + row * page_count, along, in_head, page_numbers, item, multiple)
    inside = in_head[:, None] & in_line[None, :]
    place = state + line[:, None] + across[None, :]
    held = tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.exp(rate * step)
    held += (step * x)[:, None] * b[None, :]
    tl.store(place, held.to(kept), mask=inside)
    found = (tl.sum(held * c[None, :], axis=1) + skip * x).to(dtype).to(tl.float32)
    own = head * head_size + along
    opened = tl.load(gate + row * gate_stride + own, mask=in_head, other=0.0).to(tl.float32)
    tl.store(target + row * size + own, (found * _silu(opened)).to(target.dtype.element_ty), mask=in_head)


@triton.jit(do_not_specialize=["groups"])
def group_norm_kernel(
    source,
    weight,
    target,
    groups,
    size,
    epsilon,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [rows, groups]. Normalise groups of `size` float32 numbers by their root mean square."""
    let_next_start(OVERLAP)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = target.dtype.element_ty
    begin = (row * groups + group) * size
    squares = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs(OVERLAP)
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(source + begin + columns, mask=columns < size, other=0.0)
        squares += x * x
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + epsilon)
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < size
        normed = (tl.load(source + begin + columns, mask=inside, other=0.0) * scale).to(dtype).to(tl.float32)
        factors = tl.load(weight + group * size + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + begin + columns, (normed * factors).to(dtype), mask=inside)


def can_advance_state_space(states: StateRows, space: StateSpace) -> bool:
    """Return whether `advance_state_space` finds the lines of these states, and a program holds one."""
    return states.lines is not None and triton.next_power_of_2(space.state_size) <= PROGRAM_NUMBERS


def advance_state_space(
    launch: Launching, inputs: StateSpaceInputs, states: StateRows, space: StateSpace
) -> torch.Tensor:
    """Implement `StateOperations.advance_state_space`, if `can_advance_state_space`."""
    lines, mixed = states.lines, inputs.mixed
    assert lines is not None, "can_advance_state_space is false"
    rows, heads, head_size = len(mixed), space.heads, space.head_size
    gated = torch.empty((rows, len(space.weight)), dtype=gated_dtype(space, mixed.dtype), device=mixed.device)
    numbers = triton.next_power_of_2(space.state_size)
    together = min(triton.next_power_of_2(head_size), PROGRAM_NUMBERS // numbers)
    warp = THREAD_NUMBERS * launch.target.warp_size
    state_space_kernel[(rows, heads, ceil_div(head_size, together))](
        mixed,
        inputs.gate,
        inputs.time_steps,
        space.rates,
        space.biases,
        space.skips,
        gated,
        *_paged(states),
        lines,
        heads,
        space.groups,
        head_size,
        space.state_size,
        *(each.stride(0) for each in (mixed, inputs.gate, inputs.time_steps)),
        states.memory.shape[1] // states.tensor.stored.itemsize,
        states.pages.shape[1],
        LINES=together,
        NUMBERS=numbers,
        ALIGNED=space.state_size * states.tensor.stored.itemsize % ALIGNMENT == 0,
        num_warps=max(1, together * numbers // warp),
        **launch_options(launch.overlap),
    )
    return norm_groups(launch, gated, space, mixed.dtype) if space.normalises else gated


def gated_dtype(space: StateSpace, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of y silu(gate) in a model of `dtype`: float32 if a norm follows."""
    return torch.float32 if space.normalises else dtype


def norm_groups(launch: Launching, gated: torch.Tensor, space: StateSpace, dtype: torch.dtype) -> torch.Tensor:
    """Normalise the groups of heads.

    Args:
        launch: How to launch.
        gated: [tokens, heads x head_size] float32, contiguous.
        space: Has the weight.
        dtype: Of the result.

    Returns:
        The shape of `gated`.
    """
    target, group_size = torch.empty_like(gated, dtype=dtype), len(space.weight) // space.groups
    block = min(NORM_NUMBERS, triton.next_power_of_2(group_size))
    group_norm_kernel[(len(gated), space.groups)](
        gated,
        space.weight,
        target,
        space.groups,
        group_size,
        space.epsilon,
        BLOCK=block,
        num_warps=max(1, block // (THREAD_NUMBERS * launch.target.warp_size)),
        **launch_options(launch.overlap),
    )
    return target
