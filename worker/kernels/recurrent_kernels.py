"""Steps of layers with a recurrent state as Triton kernels: one token of each row, with the states in the pool's pages.

A program finds the lines of its part of a state through the pages of its row (see `StateRows`), reads each number once
and writes it once. Its sums depend on its own numbers alone, so the bits of a row do not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.attention.states import ALIGNMENT, StateRows
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .gated_norm import gated_norm
from .launching import Launching
from .recurrent import SUM_MIN, Convolution, DeltaInputs, GatedDelta

CHANNELS = 256  # of a program
STATE_NUMBERS = 1 << 13  # of a head's state in the registers of a program: small programs, so that many read at once
KEY_SIZE_MAX = 1 << 9
NUMBERS_OF_THREAD = 64


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _lines(lines, pages, indices, inside, page_numbers, ITEM: tl.constexpr, MULTIPLE: tl.constexpr):
    """Return where lines begin in the memory of the pages, in numbers: multiples of MULTIPLE. pages: of the row."""
    page = tl.load(lines + 2 * indices, mask=inside, other=0)
    offset = tl.load(lines + 2 * indices + 1, mask=inside, other=0)
    block = tl.load(pages + page, mask=inside, other=0).to(tl.int64)
    return tl.multiple_of(block * page_numbers + offset // ITEM, MULTIPLE)


@triton.jit(do_not_specialize=["channels", "x_stride", "page_numbers", "page_count"])
def convolve_kernel(
    x,
    weight,
    bias,
    target,
    state,
    pages,
    lines,
    channels,
    x_stride,
    page_numbers,
    page_count,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [rows, blocks of channels]. See StateOperations.convolve.

    state: the memory of all pages, in the dtype of the states. page_numbers: of a page. page_count: of a row.
    """
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    dtype: tl.constexpr = target.dtype.element_ty
    kept: tl.constexpr = state.dtype.element_ty
    given = x + row * x_stride + columns
    wait_for_inputs(OVERLAP)
    item: tl.constexpr = kept.primitive_bitwidth // 8
    line = state + _lines(lines, pages + row * page_count, columns, inside, page_numbers, item, 1)
    newest = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        newest *= tl.load(given + 2 * channels, mask=inside, other=0.0).to(tl.float32)
        newest = newest.to(dtype).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS - 1):
        number = tl.load(line + tap + 1, mask=inside, other=0.0)
        tl.store(line + tap, number, mask=inside)
        total += tl.load(weight + columns * TAPS + tap, mask=inside, other=0.0).to(tl.float32) * number.to(tl.float32)
    tl.store(line + TAPS - 1, newest.to(kept), mask=inside)
    total += tl.load(weight + columns * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32) * newest
    if BIASED:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    found = total.to(dtype)
    if SILU:
        found = _silu(found.to(tl.float32)).to(dtype)
    if GATED:
        gate = tl.load(given + channels, mask=inside, other=0.0).to(tl.float32)
        found = (found.to(tl.float32) * gate).to(dtype)
    tl.store(target + row * channels + columns, found, mask=inside)


def can_convolve(states: StateRows) -> bool:
    """Return whether `convolve` finds the lines of these states."""
    return states.lines is not None


def convolve(launch: Launching, x: torch.Tensor, states: StateRows, convolution: Convolution) -> torch.Tensor:
    """Implement `StateOperations.convolve`, if `can_convolve`."""
    weight, bias, lines = convolution.weight, convolution.bias, states.lines
    assert lines is not None, "can_convolve is false"
    rows, (channels, taps) = len(x), weight.shape
    target = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    convolve_kernel[(rows, ceil_div(channels, CHANNELS))](
        x,
        weight,
        weight if bias is None else bias,
        target,
        *_paged(states),
        lines,
        channels,
        x.stride(0),
        states.memory.shape[1] // states.tensor.stored.itemsize,
        states.pages.shape[1],
        TAPS=taps,
        GATED=convolution.is_gated,
        SILU=convolution.has_silu,
        BIASED=bias is not None,
        BLOCK=CHANNELS,
        num_warps=max(1, CHANNELS // 2 // launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return target


def _paged(states: StateRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory of all pages in the dtype of the states, and the pages of the rows."""
    return states.memory.view(-1).view(states.tensor.stored), states.pages


@triton.jit
def _of_length_1(numbers, eps):
    return numbers * (1.0 / tl.sqrt(tl.sum(numbers * numbers, axis=0) + eps))


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(
    do_not_specialize=[
        "heads",
        "groups",
        "mixed_stride",
        "beta_stride",
        "decay_stride",
        "page_numbers",
        "page_count",
    ]
)
def delta_kernel(
    mixed,
    beta,
    decay,
    rates,
    biases,
    target,
    state,
    pages,
    lines,
    heads,
    groups,
    key_size,
    value_size,
    mixed_stride,
    beta_stride,
    decay_stride,
    page_numbers,
    page_count,
    query_scale,
    least,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [rows, heads, parts of a value]. Advances the states; see StateOperations.advance_delta, before its norm.

    See `convolve_kernel` for the pages.

    heads: of values. groups: of them with the same query and key. least: added to sums of squares of queries and keys.
    KEYS: a power of two that holds a key. VALUES: numbers of a value that a program computes. BY_CHANNEL: whether each
    number of a key has a decay. ALIGNED: whether lines begin at multiples of 16 bytes.
    """
    let_next_start(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = target.dtype.element_ty
    kept: tl.constexpr = state.dtype.element_ty
    along, across = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = along < key_size, across < value_size
    rate = tl.load(rates + head)
    if BY_CHANNEL:
        bias = tl.load(biases + head * key_size + along, mask=in_key, other=0.0)
    else:
        bias = tl.load(biases + head)
    keys = (heads // groups) * key_size
    own = mixed + row * mixed_stride
    item: tl.constexpr = kept.primitive_bitwidth // 8
    multiple: tl.constexpr = 16 // item if ALIGNED else 1
    first = lines + 2 * head * key_size
    wait_for_inputs(OVERLAP)
    line = _lines(first, pages + row * page_count, along, in_key, page_numbers, item, multiple)
    inside = in_key[:, None] & in_value[None, :]
    place = state + line[:, None] + across[None, :]
    held = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    query_at = own + (head // groups) * key_size + along
    query = _of_length_1(tl.load(query_at, mask=in_key, other=0.0).to(tl.float32), least) * query_scale
    key = _of_length_1(tl.load(query_at + keys, mask=in_key, other=0.0).to(tl.float32), least)
    if BY_CHANNEL:  # here, where fewer numbers are in registers
        decay_at = decay + row * decay_stride + head * key_size + along
        x = tl.load(decay_at, mask=in_key, other=0.0).to(tl.float32) + bias
        held *= tl.exp(rate * _softplus(x))[:, None]
    value = tl.load(own + 2 * keys + head * value_size + across, mask=in_value, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-tl.load(beta + row * beta_stride + head).to(tl.float32)))
    share = share.to(dtype).to(tl.float32)
    if not BY_CHANNEL:
        x = tl.load(decay + row * decay_stride + head).to(tl.float32) + bias
        held *= tl.exp(rate * _softplus(x))
    missing = (value - tl.sum(held * key[:, None], axis=0)) * share
    held += key[:, None] * missing[None, :]
    tl.store(place, held.to(kept), mask=inside)
    found = tl.sum(held * query[:, None], axis=0).to(dtype)
    tl.store(target + (row * heads + head) * value_size + across, found, mask=in_value)


def can_advance_delta(states: StateRows, delta: GatedDelta) -> bool:
    """Return whether `advance_delta` finds the lines of these states, and a program holds enough of them."""
    return states.lines is not None and delta.key_size <= KEY_SIZE_MAX


def advance_delta(launch: Launching, inputs: DeltaInputs, states: StateRows, delta: GatedDelta) -> torch.Tensor:
    """Implement `StateOperations.advance_delta`, if `can_advance_delta`."""
    lines, mixed = states.lines, inputs.mixed
    assert lines is not None, "can_advance_delta is false"
    rows, heads, warp = len(mixed), delta.value_heads, launch.target.warp_size
    target = torch.empty((rows, heads * delta.value_size), dtype=mixed.dtype, device=mixed.device)
    keys, values = triton.next_power_of_2(delta.key_size), triton.next_power_of_2(delta.value_size)
    part, overlap = min(values, STATE_NUMBERS // keys), launch_options(launch.overlap)
    delta_kernel[(rows, heads, ceil_div(delta.value_size, part))](
        mixed,
        inputs.beta,
        inputs.decay,
        delta.rates,
        delta.biases,
        target,
        *_paged(states),
        lines,
        heads,
        delta.groups,
        delta.key_size,
        delta.value_size,
        *(each.stride(0) for each in (mixed, inputs.beta, inputs.decay)),
        states.memory.shape[1] // states.tensor.stored.itemsize,
        states.pages.shape[1],
        delta.key_size**-0.5,
        SUM_MIN,
        KEYS=keys,
        VALUES=part,
        BY_CHANNEL=delta.is_by_channel,
        ALIGNED=delta.value_size * states.tensor.stored.itemsize % ALIGNMENT == 0,
        num_warps=max(1, keys * part // NUMBERS_OF_THREAD // warp),
        **overlap,
    )
    return gated_norm(launch, target, inputs.gate, delta)
