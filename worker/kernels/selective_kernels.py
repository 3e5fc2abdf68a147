"""The step of Mamba 1's state spaces as a Triton kernel: one token of each row, with the states in the pool's pages.

A program advances some channels. A channel's sum depends on its own numbers alone.
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
from .selective import SelectiveInputs, SelectiveSpace
from .state_space_kernels import _softplus

PROGRAM_NUMBERS = 1024  # of a state, in the registers of a program: few, so that many programs read at once
THREAD_NUMBERS = 8


@triton.jit
def _advance_selective(held, x, time_step, b, c, rates, bias, skip):
    """Return the states behind a token, and its results before the gate. All float32."""
    step = _softplus(time_step + bias)
    held = held * tl.exp(rates * step[:, None]) + (step * x)[:, None] * b[None, :]
    return held, tl.sum(held * c[None, :], axis=1) + skip * x


@triton.jit(
    do_not_specialize=[
        "channels",
        "x_stride",
        "gate_stride",
        "steps_stride",
        "b_stride",
        "c_stride",
        "page_numbers",
        "page_count",
    ],
    do_not_specialize_on_alignment=["b", "c"],  # parts of rows of any size
)
def selective_kernel(
    x,
    gate,
    steps,
    b,
    c,
    rates,
    biases,
    skips,
    target,
    state,
    pages,
    lines,
    channels,
    state_size,
    x_stride,
    gate_stride,
    steps_stride,
    b_stride,
    c_stride,
    page_numbers,
    page_count,
    CHANNELS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [rows, blocks of CHANNELS]. See `SelectiveSpace`, and `convolve_kernel` for the pages.

    NUMBERS: a power of two that holds a line. ALIGNED: whether lines begin at multiples of 16 bytes.
    """
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    along, across = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, NUMBERS)
    kept: tl.constexpr = state.dtype.element_ty
    item: tl.constexpr = kept.primitive_bitwidth // 8
    multiple: tl.constexpr = 16 // item if ALIGNED else 1
    in_block, in_line = along < channels, across < state_size
    inside = in_block[:, None] & in_line[None, :]
    decays = tl.load(rates + along[:, None] * state_size + across[None, :], mask=inside, other=0.0)
    bias = tl.load(biases + along, mask=in_block, other=0.0)
    skip = tl.load(skips + along, mask=in_block, other=0.0)
    wait_for_inputs(OVERLAP)
    line = _lines(lines, pages + row * page_count, along, in_block, page_numbers, item, multiple)
    place = state + line[:, None] + across[None, :]
    held = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(x + row * x_stride + along, mask=in_block, other=0.0).to(tl.float32)
    step = tl.load(steps + row * steps_stride + along, mask=in_block, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + along, mask=in_block, other=0.0).to(tl.float32)
    key = tl.load(b + row * b_stride + across, mask=in_line, other=0.0).to(tl.float32)
    query = tl.load(c + row * c_stride + across, mask=in_line, other=0.0).to(tl.float32)
    held, found = _advance_selective(held, given, step, key, query, decays, bias, skip)
    tl.store(place, held.to(kept), mask=inside)
    tl.store(target + row * channels + along, (found * _silu(opened)).to(target.dtype.element_ty), mask=in_block)


def can_advance_selective(states: StateRows, space: SelectiveSpace) -> bool:
    """Return whether the kernels find the lines of these states, and a program holds one."""
    return states.lines is not None and triton.next_power_of_2(space.state_size) <= PROGRAM_NUMBERS


def tile_of(space: SelectiveSpace) -> tuple[int, int]:
    """Return the channels of a program, and the power of two that holds a line."""
    numbers = triton.next_power_of_2(space.state_size)
    return min(triton.next_power_of_2(space.channels), PROGRAM_NUMBERS // numbers), numbers


def advance_selective(
    launch: Launching, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace
) -> torch.Tensor:
    """Implement `StateOperations.advance_selective`, if `can_advance_selective`."""
    lines = states.lines
    assert lines is not None, "can_advance_selective is false"
    target = torch.empty((len(inputs.x), space.channels), dtype=inputs.x.dtype, device=inputs.x.device)
    channels, numbers = tile_of(space)
    selective_kernel[(len(inputs.x), ceil_div(space.channels, channels))](
        *inputs.parts,
        space.rates,
        space.biases,
        space.skips,
        target,
        *_paged(states),
        lines,
        space.channels,
        space.state_size,
        *(each.stride(0) for each in inputs.parts),
        states.memory.shape[1] // states.tensor.stored.itemsize,
        states.pages.shape[1],
        CHANNELS=channels,
        NUMBERS=numbers,
        ALIGNED=space.state_size * states.tensor.stored.itemsize % ALIGNMENT == 0,
        num_warps=max(1, channels * numbers // (THREAD_NUMBERS * launch.target.warp_size)),
        **launch_options(launch.overlap),
    )
    return target
