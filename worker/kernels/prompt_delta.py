"""The gated delta rule of prompt tokens as Triton kernels. Tiles: see `prompt_rows`; the form: `prompt_reference`.

Three kernels: the first computes what a tile needs of its own tokens, all tiles at once. The second carries the states
from tile to tile, a part of the values' columns in each program. The third applies the gated norm. Tiles have one size,
and empty places add exact zeros, so a token's bits do not depend on other rows, nor on how many tokens follow.

Products have operands in float16 (in float32 for float32, which the interpreter alone computes), and sums in float32;
states stay in float32. Queries and keys have length 1, so that float16 holds them with three bits more than bfloat16.
Values and states are divided by 16 first, so that numbers up to a million fit. The triangular system is inverted with
an accuracy close to float32's: blocks of 16 by substitution, then what lies between them.

Where each number of a key has a decay, another kernel computes the products of keys and queries before (see
`prompt_channel_pairs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvforge.worker.attention.states import ALIGNMENT, StateRows
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import Target

from .gated_norm import gated_norm
from .launching import Launching
from .prompt_channel_pairs import SIZE_MIN, _of_length_1, pairs_by_channel
from .prompt_rows import CHUNK, PromptRows
from .recurrent import SUM_MIN, DeltaInputs, GatedDelta
from .recurrent_kernels import _lines, _paged, _softplus

SMALLER = tl.constexpr(1 / 16)  # the factor of values and states in products: a power of two rounds nothing
SIZE_MAX = 128  # of keys and values


@dataclass(frozen=True)
class DeltaTiles:
    """Launch parameters of the kernels.

    Attributes:
        warps: Warps of a tile's program.
        columns: Columns of values of a program that carries states.
        scan_warps: Its warps.
        scan_stages: Its stages.
    """

    warps: int
    columns: int
    scan_warps: int
    scan_stages: int


def choose_tiles(target: Target, dtype: torch.dtype) -> DeltaTiles | None:
    """Return the launch parameters for a target; None: it has no matrix instructions, or too few registers."""
    if target.backend == "cpu":
        return DeltaTiles(1, 32, 1, 1)
    if dtype == torch.float32 or not target.matrix:
        return None
    if target.hopper:
        return DeltaTiles(8, 64, 4, 2)
    return DeltaTiles(16, 16, 8, 1) if (target.backend, target.warp_size) == ("hip", 32) else DeltaTiles(8, 32, 4, 1)


@triton.jit
def _dot_in_parts(a, b):
    """Multiply float32 by float32 with twice the digits of float16; the numbers are far below its largest."""
    a_high, b_high = a.to(tl.float16), b.to(tl.float16)
    a_low, b_low = (a - a_high.to(tl.float32)).to(tl.float16), (b - b_high.to(tl.float32)).to(tl.float16)
    small = tl.dot(a_low, b_high, tl.dot(a_high, b_low))
    return tl.dot(a_high, b_high, small)


@triton.jit
def _inverse_of(lower):
    """Invert 1 + lower, strictly lower triangular [64, 64] float32."""
    block, place = tl.arange(0, 4), tl.arange(0, 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    own = -tl.sum(tl.where(same, tl.reshape(lower, [4, 16, 4, 16]), 0.0), axis=2)  # [4, 16, 16], the diagonal's blocks
    solved = own
    for index in tl.range(1, 16):
        chosen = (place == index)[None, :, None]
        row = tl.sum(tl.where(chosen, own, 0.0), axis=1)
        row += tl.sum(row[:, :, None] * solved, axis=1)
        solved = tl.where(chosen, row[:, None, :], solved)
    solved += tl.where((place[:, None] == place[None, :])[None, :, :], 1.0, 0.0)
    inverse = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), [64, 64])
    places = tl.arange(0, 64)
    between = tl.where((places // 16)[:, None] > (places // 16)[None, :], lower, 0.0)
    # (1 + n)^-1 inverse with n = inverse between, whose fourth power is zero.
    n = _dot_in_parts(inverse, between)
    found = inverse
    for _ in tl.static_range(3):
        found = inverse - _dot_in_parts(n, found)
    return found


@triton.jit
def _of_keys(numbers, BY_CHANNEL: tl.constexpr):
    """Return numbers of tokens as factors of keys [TOKENS, KEYS]; by channel they are."""
    if BY_CHANNEL:
        return numbers
    else:
        return numbers[:, None]


@triton.jit(do_not_specialize=["heads", "groups", "mixed_stride", "beta_stride", "decay_stride"])
def delta_tiles_kernel(
    mixed,
    beta,
    decay,
    rates,
    biases,
    tiles,
    queries,
    known,
    left,
    added,
    pairs,
    factors,
    lower,
    heads,
    groups,
    key_size,
    value_size,
    mixed_stride,
    beta_stride,
    decay_stride,
    query_scale,
    least,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [heads of values, tiles]. Compute what a tile needs of its own tokens.

    queries, known, left: [tiles, heads, TOKENS, KEYS]. added: [tiles, heads, TOKENS, VALUES]. pairs: [tiles, heads,
    TOKENS, TOKENS], all in the dtype of operands. factors: [tiles, heads] float32, the decay of a state over the tile;
    by channel [tiles, heads, KEYS]. lower: [tiles, heads, TOKENS, TOKENS] float32, by channel alone: what
    `channel_pairs_kernel` has stored, as in `pairs`. See `prompt_reference`.
    """
    let_next_start(OVERLAP)
    head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = mixed.dtype.element_ty
    operand: tl.constexpr = known.dtype.element_ty
    places, along, across = tl.arange(0, TOKENS), tl.arange(0, KEYS), tl.arange(0, VALUES)
    rate = tl.load(rates + head)
    if BY_CHANNEL:
        bias = tl.load(biases + head * key_size + along, mask=along < key_size, other=0.0)[None, :]
    else:
        bias = tl.load(biases + head)
    wait_for_inputs(OVERLAP)
    base, begin, end = tl.load(tiles + 4 * tile + 1), tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    valid, first = (places >= begin) & (places < end), base.to(tl.int64)
    x = tl.load(beta + first * beta_stride + head + places * beta_stride, mask=valid, other=0.0).to(tl.float32)
    share = tl.where(valid, (1.0 / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32), 0.0)
    inside = valid[:, None] & (along < key_size)[None, :]
    # `passed`: logarithms of decays from the tile's begin.
    if BY_CHANNEL:
        decay_at = decay + first * decay_stride + head * key_size + places[:, None] * decay_stride + along[None, :]
        x = tl.load(decay_at, mask=inside, other=0.0).to(tl.float32) + bias
        passed = tl.cumsum(tl.where(inside, rate * _softplus(x), 0.0), axis=0)
        whole = tl.sum(tl.where((places == TOKENS - 1)[:, None], passed, 0.0), axis=0)
        own, shares = tile * heads + head, share[:, None]
        tl.store(factors + own * KEYS + along, tl.exp(whole))
        whole = whole[None, :]
    else:
        x = tl.load(decay + first * decay_stride + head + places * decay_stride, mask=valid, other=0.0).to(tl.float32)
        x += bias
        passed = tl.cumsum(tl.where(valid, rate * _softplus(x), 0.0), axis=0)
        whole = tl.sum(tl.where(places == TOKENS - 1, passed, 0.0), axis=0)
        own, shares = tile * heads + head, share
        tl.store(factors + own, tl.exp(whole))
        apart = passed[:, None] - passed[None, :]
        decays = tl.where(places[:, None] >= places[None, :], tl.exp(tl.minimum(apart, 0.0)), 0.0)

    mixed += first * mixed_stride
    query_at = mixed + (head // groups) * key_size + places[:, None] * mixed_stride + along[None, :]
    keys = (heads // groups) * key_size
    key = _of_length_1(tl.load(query_at + keys, mask=inside, other=0.0).to(tl.float32), least)
    narrow = key.to(operand)
    key_at = places[:, None] * KEYS + along[None, :]
    until = _of_keys(tl.exp(whole - passed), BY_CHANNEL)
    tl.store(left + own * TOKENS * KEYS + key_at, (key * until).to(operand))
    weighted = (key * _of_keys(shares * tl.exp(passed), BY_CHANNEL)).to(operand)
    query = _of_length_1(tl.load(query_at, mask=inside, other=0.0).to(tl.float32), least) * query_scale
    since = _of_keys(tl.exp(passed), BY_CHANNEL)
    tl.store(queries + own * TOKENS * KEYS + key_at, (query * since).to(operand))
    earlier = places[:, None] > places[None, :]
    pair_at = own * TOKENS * TOKENS + (places[:, None] * TOKENS + places[None, :])
    if BY_CHANNEL:
        alike = tl.load(lower + pair_at, mask=earlier, other=0.0) * shares
    else:
        flipped = tl.trans(narrow)
        found = tl.dot(query.to(operand), flipped) * decays
        tl.store(pairs + pair_at, found.to(operand))
        alike = tl.dot(narrow, flipped) * decays * share[:, None]
    inverse = _inverse_of(tl.where(earlier, alike, 0.0)).to(operand)
    tl.store(known + own * TOKENS * KEYS + key_at, tl.dot(inverse, weighted).to(operand))
    value_at = mixed + 2 * keys + head * value_size + places[:, None] * mixed_stride + across[None, :]
    value = tl.load(value_at, mask=valid[:, None] & (across < value_size)[None, :], other=0.0).to(tl.float32)
    correction = tl.dot(inverse, (value * (share * SMALLER)[:, None]).to(operand)).to(operand)
    tl.store(added + own * TOKENS * VALUES + (places[:, None] * VALUES + across[None, :]), correction)


@triton.jit(do_not_specialize=["heads", "page_numbers", "page_count"])
def delta_scan_kernel(
    queries,
    known,
    left,
    added,
    pairs,
    factors,
    target,
    state,
    pages,
    lines,
    tiles,
    spans,
    rows,
    heads,
    key_size,
    value_size,
    page_numbers,
    page_count,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [blocks of COLUMNS of a value, heads of values, rows]. Advance states over their tiles; store results.

    See `delta_tiles_kernel` for the first arguments, `recurrent_kernels.delta_kernel` for the pages, and `Segment`.
    target: [tokens, heads x value_size].
    """
    let_next_start(OVERLAP)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = target.dtype.element_ty
    operand: tl.constexpr = known.dtype.element_ty
    kept: tl.constexpr = state.dtype.element_ty
    item: tl.constexpr = kept.primitive_bitwidth // 8
    multiple: tl.constexpr = 16 // item if ALIGNED else 1
    places, along = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    across = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_inputs(OVERLAP)
    first_tile, count = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    in_key, in_value = along < key_size, across < value_size
    line = _lines(lines + 2 * head * key_size, pages + row * page_count, along, in_key, page_numbers, item, multiple)
    place = state + line[:, None] + across[None, :]
    inside = in_key[:, None] & in_value[None, :]
    has_tiles, all_heads = count > 0, heads.to(tl.int64)
    before = tl.load(tiles + 4 * first_tile + 1, mask=has_tiles, other=0)
    before += tl.load(tiles + 4 * first_tile + 2, mask=has_tiles, other=0)
    continues = (tl.load(rows + 3 * row) > 0) | (before != tl.load(rows + 3 * row + 1))
    held = tl.load(place, mask=inside & continues & has_tiles, other=0.0).to(tl.float32) * SMALLER
    key_at, pair_at = places[:, None] * KEYS + along[None, :], places[:, None] * TOKENS + places[None, :]
    value_at = places[:, None] * VALUES + across[None, :]
    for tile in tl.range(first_tile, first_tile + count):
        own = tile * all_heads + head
        narrow = held.to(operand)
        if BY_CHANNEL:
            held *= tl.load(factors + own * KEYS + along)[:, None]
        correction = tl.load(added + own * TOKENS * VALUES + value_at).to(tl.float32)
        correction -= tl.dot(tl.load(known + own * TOKENS * KEYS + key_at), narrow)
        corrected = correction.to(operand)
        found = tl.dot(tl.load(queries + own * TOKENS * KEYS + key_at), narrow)
        found += tl.dot(tl.load(pairs + own * TOKENS * TOKENS + pair_at), corrected)
        if not BY_CHANNEL:
            held *= tl.load(factors + own)
        held += tl.dot(tl.trans(tl.load(left + own * TOKENS * KEYS + key_at)), corrected)
        if kept != tl.float32:
            held = (held / SMALLER).to(kept).to(tl.float32) * SMALLER
        base, begin, end = tl.load(tiles + 4 * tile + 1), tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
        valid, first = (places >= begin) & (places < end), (base * all_heads + head) * value_size
        found_at = target + first + (places[:, None] * heads * value_size + across[None, :])
        tl.store(found_at, (found / SMALLER).to(dtype), mask=valid[:, None] & in_value[None, :])
    tl.store(place, (held / SMALLER).to(kept), mask=inside & has_tiles)


def can_advance_prompts(target: Target, dtype: torch.dtype, states: StateRows, delta: GatedDelta) -> bool:
    """Return whether `advance_prompts` finds the lines of these states, and multiplies tiles of these sizes."""
    fits = max(delta.key_size, delta.value_size) <= SIZE_MAX
    return states.lines is not None and fits and choose_tiles(target, dtype) is not None


def advance_prompts(
    launch: Launching, inputs: DeltaInputs, states: StateRows, delta: GatedDelta, rows: PromptRows
) -> torch.Tensor:
    """Compute `StateOperations.advance_delta` of prompt rows, if `can_advance_prompts`.

    Args:
        launch: How to launch.
        inputs: The inputs of all tokens of the step.
        states: The states of the rows.
        delta: The rule.
        rows: The rows.

    Returns:
        [tokens, value heads x value_size], undefined for tokens outside the rows.
    """
    mixed, lines, target, heads = inputs.mixed, states.lines, launch.target, delta.value_heads
    tiles = choose_tiles(target, mixed.dtype)
    assert lines is not None and tiles is not None, "can_advance_prompts is false"
    keys, values = (max(SIZE_MIN, triton.next_power_of_2(each)) for each in (delta.key_size, delta.value_size))
    found = torch.empty((len(mixed), heads * delta.value_size), dtype=mixed.dtype, device=mixed.device)
    most = max(len(segment.tiles) for segment in rows.segments)
    widths = (keys, keys, keys, values, CHUNK)
    operand = torch.float32 if mixed.dtype == torch.float32 else torch.float16
    kept = [torch.empty((most, heads, CHUNK, width), dtype=operand, device=mixed.device) for width in widths]
    by_channel = delta.is_by_channel
    shape = (most, heads, keys) if by_channel else (most, heads)
    kept.append(torch.empty(shape, dtype=torch.float32, device=mixed.device))
    lower = kept[-1].new_empty((most, heads, CHUNK, CHUNK)) if by_channel else kept[-1]  # which nothing reads
    common = {"TOKENS": CHUNK, "KEYS": keys, "VALUES": values, **launch_options(launch.overlap)}
    columns = min(tiles.columns, values)
    for segment in rows.segments:
        if by_channel:
            pairs_by_channel(launch, inputs, delta, segment.tiles, kept[-2], lower)
        delta_tiles_kernel[(heads, len(segment.tiles))](
            mixed,
            inputs.beta,
            inputs.decay,
            delta.rates,
            delta.biases,
            segment.tiles,
            *kept,
            lower,
            heads,
            delta.groups,
            delta.key_size,
            delta.value_size,
            *(each.stride(0) for each in (mixed, inputs.beta, inputs.decay)),
            delta.key_size**-0.5,
            SUM_MIN,
            BY_CHANNEL=by_channel,
            num_warps=tiles.warps,
            num_stages=1,
            **common,
        )
        delta_scan_kernel[(values // columns, heads, len(rows.starts))](
            *kept,
            found,
            *_paged(states),
            lines,
            segment.tiles,
            segment.spans,
            rows.rows,
            heads,
            delta.key_size,
            delta.value_size,
            states.memory.shape[1] // states.tensor.stored.itemsize,
            states.pages.shape[1],
            COLUMNS=columns,
            BY_CHANNEL=by_channel,
            ALIGNED=delta.value_size * states.tensor.stored.itemsize % ALIGNMENT == 0,
            num_warps=tiles.scan_warps,
            num_stages=tiles.scan_stages,
            **common,
        )
    return gated_norm(launch, found, inputs.gate, delta)
