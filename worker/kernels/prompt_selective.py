"""The state spaces of Mamba 1 over prompt tokens as a Triton kernel.

Every number of a state has a decay of its own, so a chunk is no matrix product. A program carries the states of some
channels from token to token, with the operations of a step. A state is rounded to the dtype of its pages behind each
token, as a step rounds it: a prompt may be cut anywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.attention.states import ALIGNMENT, StateRows
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching
from .prompt_rows import PromptRows
from .recurrent_kernels import _lines, _paged, _silu
from .selective import SelectiveInputs, SelectiveSpace
from .selective_kernels import THREAD_NUMBERS, _advance_selective, tile_of


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
def selective_scan_kernel(
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
    rows,
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
    """Grid: [blocks of CHANNELS, rows]. See `selective_kernels.selective_kernel`, and `PromptRows.rows`."""
    let_next_start(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    along, across = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, NUMBERS)
    kept: tl.constexpr = state.dtype.element_ty
    item: tl.constexpr = kept.primitive_bitwidth // 8
    multiple: tl.constexpr = 16 // item if ALIGNED else 1
    in_block, in_line = along < channels, across < state_size
    inside = in_block[:, None] & in_line[None, :]
    decays = tl.load(rates + along[:, None] * state_size + across[None, :], mask=inside, other=0.0)
    bias = tl.load(biases + along, mask=in_block, other=0.0)
    skip = tl.load(skips + along, mask=in_block, other=0.0)
    wait_for_inputs(OVERLAP)
    start, first, count = tl.load(rows + 3 * row), tl.load(rows + 3 * row + 1), tl.load(rows + 3 * row + 2)
    line = _lines(lines, pages + row * page_count, along, in_block, page_numbers, item, multiple)
    place = state + line[:, None] + across[None, :]
    held = tl.load(place, mask=inside & (start > 0) & (count > 0), other=0.0).to(tl.float32)
    for index in tl.range(0, count):
        token = (first + index).to(tl.int64)
        given = tl.load(x + token * x_stride + along, mask=in_block, other=0.0).to(tl.float32)
        step = tl.load(steps + token * steps_stride + along, mask=in_block, other=0.0).to(tl.float32)
        opened = tl.load(gate + token * gate_stride + along, mask=in_block, other=0.0).to(tl.float32)
        key = tl.load(b + token * b_stride + across, mask=in_line, other=0.0).to(tl.float32)
        query = tl.load(c + token * c_stride + across, mask=in_line, other=0.0).to(tl.float32)
        held, found = _advance_selective(held, given, step, key, query, decays, bias, skip)
        if kept != tl.float32:
            held = held.to(kept).to(tl.float32)
        found_at = target + token * channels + along
        tl.store(found_at, (found * _silu(opened)).to(target.dtype.element_ty), mask=in_block)
    tl.store(place, held.to(kept), mask=inside & (count > 0))


def advance_selective_prompts(
    launch: Launching, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace, rows: PromptRows
) -> torch.Tensor:
    """Compute `StateOperations.advance_selective` of prompt rows, if `can_advance_selective`.

    Args:
        launch: How to launch.
        inputs: The inputs of all tokens of the step.
        states: The states of the rows.
        space: The state spaces.
        rows: The rows.

    Returns:
        [tokens, channels], undefined for tokens outside the rows.
    """
    lines = states.lines
    assert lines is not None, "can_advance_selective is false"
    target = torch.empty((len(inputs.x), space.channels), dtype=inputs.x.dtype, device=inputs.x.device)
    channels, numbers = tile_of(space)
    selective_scan_kernel[(ceil_div(space.channels, channels), len(rows.starts))](
        *inputs.parts,
        space.rates,
        space.biases,
        space.skips,
        target,
        *_paged(states),
        lines,
        rows.rows,
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
