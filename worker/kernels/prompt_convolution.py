"""Short convolutions of prompt tokens as Triton kernels: see `prompt_rows` for their tiles.

Each number of a result is a sum over the taps in order, so its bits depend on its own inputs alone. A second kernel
writes the states once all tiles have read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.attention.states import StateRows
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching
from .prompt_rows import CHUNK, PromptRows
from .recurrent import Convolution
from .recurrent_kernels import CHANNELS, _lines, _paged, _silu

TILE_TOKENS, TILE_CHANNELS = 16, 64  # of a program


@triton.jit
def _input(place, channels, inside, dtype: tl.constexpr, GATED: tl.constexpr):
    """Load inputs of the convolution, rounded to the dtype, as float32."""
    number = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        number *= tl.load(place + 2 * channels, mask=inside, other=0.0).to(tl.float32)
        number = number.to(dtype).to(tl.float32)
    return number


@triton.jit(do_not_specialize=["channels", "x_stride", "page_numbers", "page_count"])
def convolve_tiles_kernel(
    x,
    weight,
    bias,
    target,
    state,
    pages,
    lines,
    tiles,
    rows,
    channels,
    x_stride,
    page_numbers,
    page_count,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    ROUNDS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [tiles, blocks of channels, parts of TOKENS of a tile]. Compute the results of a part.

    state, pages, lines: see `recurrent_kernels.convolve_kernel`. tiles, rows: see `PromptRows`. ROUNDS: whether pages
    hold a narrower dtype, to which inputs before the tile are rounded.
    """
    let_next_start(OVERLAP)
    tile, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    row, base = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    begin, end = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    start, first = tl.load(rows + 3 * row), tl.load(rows + 3 * row + 1)
    dtype: tl.constexpr = target.dtype.element_ty
    kept: tl.constexpr = state.dtype.element_ty
    item: tl.constexpr = kept.primitive_bitwidth // 8
    own_pages = pages + row.to(tl.int64) * page_count
    inside = columns < channels
    line = state + _lines(lines, own_pages, columns, inside, page_numbers, item, 1)
    places = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    x += base.to(tl.int64) * x_stride
    target += base.to(tl.int64) * channels
    valid = (places >= begin)[:, None] & (places < end)[:, None] & inside[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        before = base + places - back - first  # negative: the input is in the state
        is_new = valid & (before >= 0)[:, None]
        given = x + ((places - back)[:, None] * x_stride + columns[None, :])
        number = _input(given, channels, is_new, dtype, GATED)
        if ROUNDS:
            number = tl.where((places < back)[:, None], number.to(kept).to(tl.float32), number)
        if base + begin == first:
            is_old = valid & (before < 0)[:, None] & (start > 0)
            old = tl.load(line[None, :] + (TAPS + before)[:, None], mask=is_old, other=0.0)
            number += old.to(tl.float32)
        factor = tl.load(weight + columns * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total += factor[None, :] * number
    if BIASED:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    found = total.to(dtype)
    if SILU:
        found = _silu(found.to(tl.float32)).to(dtype)
    if GATED:
        gate = tl.load(x + (places[:, None] * x_stride + channels + columns[None, :]), mask=valid, other=0.0)
        found = (found.to(tl.float32) * gate.to(tl.float32)).to(dtype)
    tl.store(target + (places[:, None] * channels + columns[None, :]), found, mask=valid)


@triton.jit(do_not_specialize=["channels", "x_stride", "page_numbers", "page_count"])
def convolve_states_kernel(
    x,
    state,
    pages,
    lines,
    rows,
    channels,
    x_stride,
    page_numbers,
    page_count,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [rows, blocks of channels]. Write the last inputs of each row. See `convolve_tiles_kernel`."""
    let_next_start(OVERLAP)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    start, first = tl.load(rows + 3 * row), tl.load(rows + 3 * row + 1)
    count = tl.load(rows + 3 * row + 2)
    dtype: tl.constexpr = x.dtype.element_ty
    kept: tl.constexpr = state.dtype.element_ty
    item: tl.constexpr = kept.primitive_bitwidth // 8
    inside = columns < channels
    line = state + _lines(lines, pages + row * page_count, columns, inside, page_numbers, item, 1)
    for tap in tl.static_range(TAPS):  # a line's numbers move to the front: each is read before it is written
        behind = count - TAPS + tap  # negative: it was in the state
        token = (first + behind).to(tl.int64)
        number = _input(x + token * x_stride + columns, channels, inside & (behind >= 0), dtype, GATED)
        old = tl.load(line + tap + count, mask=inside & (behind < 0) & (start > 0), other=0.0)
        tl.store(line + tap, (number + old.to(tl.float32)).to(kept), mask=inside)


def convolve_prompts(
    launch: Launching, x: torch.Tensor, states: StateRows, convolution: Convolution, rows: PromptRows
) -> torch.Tensor:
    """Compute `StateOperations.convolve` of prompt rows, if `recurrent_kernels.can_convolve`.

    Args:
        launch: How to launch.
        x: [tokens, inputs], of all tokens of the step.
        states: The last inputs of each row.
        convolution: The convolution.
        rows: The rows.

    Returns:
        [tokens, channels], undefined for tokens outside the rows.
    """
    weight, bias, lines = convolution.weight, convolution.bias, states.lines
    assert lines is not None, "can_convolve is false"
    channels, taps = weight.shape
    target = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    paged = (*_paged(states), lines)
    sizes = (channels, x.stride(0), states.memory.shape[1] // states.tensor.stored.itemsize, states.pages.shape[1])
    convolve_tiles_kernel[(len(rows.tiles), ceil_div(channels, TILE_CHANNELS), CHUNK // TILE_TOKENS)](
        x,
        weight,
        weight if bias is None else bias,
        target,
        *paged,
        rows.tiles,
        rows.rows,
        *sizes,
        TAPS=taps,
        GATED=convolution.is_gated,
        SILU=convolution.has_silu,
        BIASED=bias is not None,
        ROUNDS=states.tensor.stored != states.tensor.dtype,
        TOKENS=TILE_TOKENS,
        BLOCK=TILE_CHANNELS,
        num_warps=4,
        **launch_options(launch.overlap),
    )
    convolve_states_kernel[(len(rows.starts), ceil_div(channels, CHANNELS))](
        x,
        *paged,
        rows.rows,
        *sizes,
        TAPS=taps,
        GATED=convolution.is_gated,
        BLOCK=CHANNELS,
        num_warps=max(1, CHANNELS // 2 // launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return target
