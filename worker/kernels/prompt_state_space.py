"""The state spaces of Mamba 2 over prompt tokens as a Triton kernel.

Tiles: see `prompt_rows`; the form: `prompt_reference.advance_spaces`. A program carries lines of a head's state from
tile to tile, and takes tiles in parts where lines are long. Tiles and parts have one size, and empty places add exact
zeros, so a token's bits do not depend on other rows, nor on how many tokens follow. Products have operands in the
model's dtype, and sums in float32, as in the authors' own kernels; states stay in float32 between products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.attention.states import ALIGNMENT, StateRows
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import Target

from .launching import Launching
from .prompt_delta import choose_tiles
from .prompt_rows import CHUNK, PromptRows
from .recurrent_kernels import _lines, _paged, _silu
from .state_space import StateSpace, StateSpaceInputs
from .state_space_kernels import _softplus, gated_dtype, norm_groups

SIZE_MIN = 16  # of a side of a product
STATE_MAX = 256  # numbers of a line
PROGRAM_NUMBERS = 4096  # of a state, in the registers of a program
NUMBERS_WHOLE = 128  # of a line, with which a tile's B and C fit into registers
THREADS = 256  # of a program


@triton.jit(
    do_not_specialize=[
        "heads",
        "groups",
        "mixed_stride",
        "gate_stride",
        "steps_stride",
        "step_min",
        "step_max",
        "page_numbers",
        "page_count",
    ]
)
def state_space_scan_kernel(
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
    tiles,
    spans,
    rows,
    heads,
    groups,
    head_size,
    state_size,
    mixed_stride,
    gate_stride,
    steps_stride,
    step_min,
    step_max,
    page_numbers,
    page_count,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [blocks of lines, heads, rows]. Advance states over their tiles; store y silu(gate).

    See `state_space_kernels.state_space_kernel` for the pages and the sizes, `prompt_rows.Segment` for tiles and spans.
    target: [tokens, heads x head_size], in float32 if a norm follows. WHOLE: whether LINES and NUMBERS are no more than
    there are. PARTS: of a tile, each of TOKENS places. WIDE: multiply in float32, for Triton's interpreter, which
    multiplies the bits of bfloat16 as integers.
    """
    let_next_start(OVERLAP)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = mixed.dtype.element_ty
    operand: tl.constexpr = tl.float32 if WIDE else dtype
    kept: tl.constexpr = state.dtype.element_ty
    item: tl.constexpr = kept.primitive_bitwidth // 8
    multiple: tl.constexpr = 16 // item if ALIGNED else 1
    within = tl.arange(0, TOKENS)
    along, across = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, NUMBERS)
    in_head, in_line = along < head_size, across < state_size
    rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
    wait_for_inputs(OVERLAP)
    first_tile, count = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    first = lines + 2 * head * head_size
    line = _lines(first, pages + row * page_count, along, in_head, page_numbers, item, multiple)
    inside = in_head[:, None] & in_line[None, :]
    has_tiles, size = count > 0, heads * head_size
    before = tl.load(tiles + 4 * first_tile + 1, mask=has_tiles, other=0)
    before += tl.load(tiles + 4 * first_tile + 2, mask=has_tiles, other=0)
    continues = (tl.load(rows + 3 * row) > 0) | (before != tl.load(rows + 3 * row + 1))
    place = state + line[:, None] + across[None, :]
    held = tl.load(place, mask=inside & continues & has_tiles, other=0.0).to(tl.float32)
    own = head * head_size + along
    shared = size + (head // (heads // groups)) * state_size + across
    for part in tl.range(first_tile * PARTS, (first_tile + count) * PARTS):
        tile, places = part // PARTS, part % PARTS * TOKENS + within
        base, begin, end = tl.load(tiles + 4 * tile + 1), tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
        # Places without a token read a neighbouring one, with a step of 0: no load of a row needs a mask.
        valid = (places >= begin) & (places < end)
        token = base.to(tl.int64) + tl.minimum(tl.maximum(places, begin), end - 1)
        step_at = steps + token * steps_stride + head
        step = _softplus(tl.load(step_at).to(tl.float32) + bias)
        step = tl.where(valid, tl.minimum(tl.maximum(step, step_min), step_max), 0.0)
        passed = tl.cumsum(rate * step, axis=0)  # logarithms of decays from the part's begin
        whole = tl.sum(tl.where(within == TOKENS - 1, passed, 0.0), axis=0)
        given = mixed + token[:, None] * mixed_stride
        b_at = given + shared[None, :]
        if WHOLE:
            c = tl.load(b_at + groups * state_size).to(operand)
        else:
            c = tl.load(b_at + groups * state_size, mask=in_line[None, :], other=0.0).to(operand)
        found = tl.dot(c, tl.trans(held.to(operand)), input_precision="ieee") * tl.exp(passed)[:, None]
        if WHOLE:
            b = tl.load(b_at).to(operand)
        else:
            b = tl.load(b_at, mask=in_line[None, :], other=0.0).to(operand)
        pairs = tl.dot(c, tl.trans(b), input_precision="ieee")
        pairs *= tl.exp(tl.minimum(passed[:, None] - passed[None, :], 0.0)) * step[None, :]
        pairs = tl.where(within[:, None] >= within[None, :], pairs, 0.0).to(operand)
        gate_at = gate + token[:, None] * gate_stride + own[None, :]
        if WHOLE:
            x, opened = tl.load(given + own[None, :]), tl.load(gate_at).to(tl.float32)
        else:
            x = tl.load(given + own[None, :], mask=in_head[None, :], other=0.0)
            opened = tl.load(gate_at, mask=in_head[None, :], other=0.0).to(tl.float32)
        found = tl.dot(pairs, x.to(operand), found, input_precision="ieee")
        left = (x.to(tl.float32) * (step * tl.exp(whole - passed))[:, None]).to(operand)
        held = tl.dot(tl.trans(left), b, held * tl.exp(whole), input_precision="ieee")
        if kept != tl.float32:
            held = held.to(kept).to(tl.float32)
        found = (found + skip * x.to(tl.float32)).to(dtype).to(tl.float32)
        found_at = target + token[:, None] * size + own[None, :]
        tl.store(found_at, (found * _silu(opened)).to(target.dtype.element_ty), mask=valid[:, None] & in_head[None, :])
    line = _lines(first, pages + row * page_count, along, in_head, page_numbers, item, multiple)  # not kept meanwhile
    tl.store(state + line[:, None] + across[None, :], held.to(kept), mask=inside & has_tiles)


def can_advance_spaces(target: Target, dtype: torch.dtype, states: StateRows, space: StateSpace) -> bool:
    """Return whether `advance_spaces_of_prompts` finds the lines of these states, and a program holds one."""
    fits = triton.next_power_of_2(space.state_size) <= STATE_MAX
    return states.lines is not None and fits and choose_tiles(target, dtype) is not None


def advance_spaces_of_prompts(
    launch: Launching, inputs: StateSpaceInputs, states: StateRows, space: StateSpace, rows: PromptRows
) -> torch.Tensor:
    """Compute `StateOperations.advance_state_space` of prompt rows, if `can_advance_spaces`.

    Args:
        launch: How to launch.
        inputs: The inputs of all tokens of the step.
        states: The states of the rows.
        space: The state spaces.
        rows: The rows.

    Returns:
        [tokens, heads x head_size], undefined for tokens outside the rows.
    """
    lines, mixed, heads = states.lines, inputs.mixed, space.heads
    assert lines is not None, "can_advance_spaces is false"
    gated = torch.empty((len(mixed), len(space.weight)), dtype=gated_dtype(space, mixed.dtype), device=mixed.device)
    numbers = max(SIZE_MIN, triton.next_power_of_2(space.state_size))
    most = PROGRAM_NUMBERS if launch.target.hopper or launch.target.warp_size == 64 else PROGRAM_NUMBERS // 2
    together = max(SIZE_MIN, min(triton.next_power_of_2(space.head_size), most // numbers))
    parts = 4 if numbers > NUMBERS_WHOLE else 1
    for segment in rows.segments:
        state_space_scan_kernel[(-(-space.head_size // together), heads, len(rows.starts))](
            mixed,
            inputs.gate,
            inputs.time_steps,
            space.rates,
            space.biases,
            space.skips,
            gated,
            *_paged(states),
            lines,
            segment.tiles,
            segment.spans,
            rows.rows,
            heads,
            space.groups,
            space.head_size,
            space.state_size,
            *(each.stride(0) for each in (mixed, inputs.gate, inputs.time_steps)),
            *space.limits,
            states.memory.shape[1] // states.tensor.stored.itemsize,
            states.pages.shape[1],
            TOKENS=CHUNK // parts,
            PARTS=parts,
            LINES=together,
            NUMBERS=numbers,
            ALIGNED=space.state_size * states.tensor.stored.itemsize % ALIGNMENT == 0,
            WHOLE=numbers == space.state_size and space.head_size % together == 0,
            WIDE=launch.target.backend == "cpu",
            num_warps=max(1, THREADS // launch.target.warp_size) if launch.target.backend != "cpu" else 1,
            num_stages=1,
            **launch_options(launch.overlap),
        )
    return norm_groups(launch, gated, space, mixed.dtype) if space.normalises else gated
