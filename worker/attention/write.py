"""The kernel that stores K and V of new tokens, after rotation where the layout allows it, and quantises them.

One program handles a few heads of one token's query (only rotated), key or value. A thread holds both
halves of a head, with number i of the first beside number i of the second, because rotation mixes these; a query can
therefore be rotated in place. `reference.write_kv` computes the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.target import HEAD_UNIT, Target, head_class, in_units

from .interface import KvLayer
from .quantised import SCALE_MIN, TOP, as_bytes, is_quantised

HEADS = 8  # heads of one program
_UNIT = tl.constexpr(HEAD_UNIT)
_SCALE_MIN = tl.constexpr(SCALE_MIN)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # x + this - this is x rounded to the nearest integer, ties to even


@triton.jit
def _load_heads(source, heads, columns, inside_heads, inside):
    """Load [HEADS, columns] as float32, with zeros outside."""
    mask = inside_heads[:, None] & inside[None, :]
    return tl.load(source + heads[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotate(first, second, cosines, sines, token, rotated_size, columns, inside):
    """Compute x cos + rotate_half(x) sin for both halves of each head. cosines, sines: [tokens, rotated_size]."""
    half = rotated_size // 2
    row = token * rotated_size + columns
    cosine_first = tl.load(cosines + row, mask=inside, other=0.0).to(tl.float32)
    cosine_second = tl.load(cosines + row + half, mask=inside, other=0.0).to(tl.float32)
    sine_first = tl.load(sines + row, mask=inside, other=0.0).to(tl.float32)
    sine_second = tl.load(sines + row + half, mask=inside, other=0.0).to(tl.float32)
    cosines_of = cosine_first[None, :], cosine_second[None, :]
    return rotated_pair(first, second, *cosines_of, sine_first[None, :], sine_second[None, :])


@triton.jit
def rotated_pair(first, second, cosine_first, cosine_second, sine_first, sine_second):
    """Rotate both halves of heads.

    Explicit fused multiply-adds fix the rounding, which the compiler would otherwise choose differently in each kernel.
    """
    first, cosine_first = tl.broadcast(first, cosine_first)
    second, cosine_second = tl.broadcast(second, cosine_second)
    return tl.fma(first, cosine_first, -(second * sine_first)), tl.fma(second, cosine_second, first * sine_second)


@triton.jit
def _largest(numbers):
    """Return max |x| of each row [HEADS]; infinite if a number is not finite."""
    sizes = tl.abs(numbers)
    return tl.max(tl.where(sizes < float("inf"), sizes, float("inf")), axis=1)


@triton.jit
def _to_e4m3(numbers):
    """Round float32 numbers [...] of at most 448 to the bits of float8_e4m3fn, ties to even: [...] int8.

    This uses integers, because only some GPUs have an instruction for it, and all must give the same result.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # drop 20 of 23 mantissa bits; bias 127 to 7
    # Below 2^-6 the last bit is 2^-9, as it is in float32 from 2^14 on: adding 2^14 rounds there.
    sum_bits = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    small = size < (121 << 23)
    return (tl.where(small, sum_bits - (141 << 23), normal) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _encode(numbers, divisors, top, QUANTISED: tl.constexpr, dtype: tl.constexpr):
    """Encode numbers [HEADS, columns] float32 as `dtype`. divisors: [HEADS]; infinite for rows stored as zeros."""
    if QUANTISED:
        finite = tl.where(tl.abs(numbers) < float("inf"), numbers, 0.0)
        quotients = tl.math.div_rn(finite, tl.broadcast_to(divisors[:, None], finite.shape))
        if top > 127.0:
            encoded = _to_e4m3(quotients)
        else:
            encoded = ((quotients + _ROUNDER) - _ROUNDER).to(tl.int8)
    else:
        encoded = numbers.to(dtype)
    return encoded


@triton.jit
def _store_heads(target, heads, columns, inside_heads, inside, numbers):
    mask = inside_heads[:, None] & inside[None, :]
    tl.store(target + heads[:, None] + columns[None, :], numbers, mask=mask)


@triton.jit
def _columns(head_size, rotated_size, HALF: tl.constexpr, REST: tl.constexpr):
    """Return the layout of a head's numbers.

    These are the columns of the first half, their number, the valid ones of the first and of the second half, the
    columns beyond both halves, and the valid ones of these.
    """
    width = rotated_size
    if rotated_size == 0:
        width = head_size + head_size % 2
    half = width // 2
    columns = tl.arange(0, HALF)
    inside_first = columns < half
    inside_second = inside_first & (half + columns < head_size)
    rest_columns = columns
    inside_rest = inside_first
    if REST > 0:
        rest_columns = width + tl.arange(0, REST)
        inside_rest = rest_columns < head_size
    return columns, half, inside_first, inside_second, rest_columns, inside_rest


@triton.jit
def _store_cache(
    new,
    stored,
    rotary,
    position,
    shape,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Store heads of one token, rotated if `rotated_size` is above 0.

    new: (numbers of the token, stride from head to head). stored: (cache, scales, top). rotary: (cosines, sines,
    rotated_size). position: (token, its slot in the cache, index of the group of HEADS heads). shape: (heads,
    head_size).

    K and V are stored by separate calls with their own pointers: Triton's AMD backend fails to compile a kernel that
    selects between pointers.
    """
    source, stride = new
    cache, scales, top = stored
    cosines, sines, rotated_size = rotary
    token, slot, unit = position
    heads, head_size = shape
    dtype: tl.constexpr = cache.dtype.element_ty
    columns, half, inside_first, inside_second, rest_columns, inside_rest = _columns(
        head_size, rotated_size, HALF, REST
    )
    head = unit * HEADS + tl.arange(0, HEADS)
    inside_heads = head < heads
    first = _load_heads(source, head * stride, columns, inside_heads, inside_first)
    second = _load_heads(source, head * stride, half + columns, inside_heads, inside_second)
    rest = first
    if REST > 0:
        rest = _load_heads(source, head * stride, rest_columns, inside_heads, inside_rest)
    if rotated_size > 0:
        first, second = _rotate(first, second, cosines, sines, token, rotated_size, columns, inside_first)
    divisors = tl.zeros([HEADS], tl.float32)
    row = slot * heads + head
    if QUANTISED:
        largest = tl.maximum(_largest(first), _largest(second))
        if REST > 0:
            largest = tl.maximum(largest, _largest(rest))
        scale = tl.math.div_rn(largest, tl.zeros(largest.shape, tl.float32) + top)
        broken = largest == float("inf")
        zero = scale < _SCALE_MIN
        divisors = tl.where(zero, float("inf"), scale)
        scale = tl.where(broken, float("nan"), tl.where(zero, 0.0, scale))
        tl.store(scales + row, scale, mask=inside_heads)
    places = row * head_size
    _store_heads(cache, places, columns, inside_heads, inside_first, _encode(first, divisors, top, QUANTISED, dtype))
    _store_heads(
        cache, places, half + columns, inside_heads, inside_second, _encode(second, divisors, top, QUANTISED, dtype)
    )
    if REST > 0:
        _store_heads(
            cache, places, rest_columns, inside_heads, inside_rest, _encode(rest, divisors, top, QUANTISED, dtype)
        )


# As in `decode_kernel`, specialising on these arguments gains nothing.
@triton.jit(
    do_not_specialize=[
        "query_stride", "query_head_stride", "key_stride", "key_head_stride", "value_stride", "value_head_stride",
        "rotated_stride", "rotated_head_stride", "heads", "kv_heads", "head_size", "rotated_size", "query_units",
        "kv_units", "key_scales", "value_scales",
    ],
    do_not_specialize_on_alignment=["cosines", "sines", "slots"],
)  # fmt: skip
def write_kernel(
    query,
    key,
    value,
    rotated,
    cosines,
    sines,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    rotated_stride,
    rotated_head_stride,
    heads,
    kv_heads,
    head_size,
    rotated_size,
    query_units,
    kv_units,
    top,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    QUANTISED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Rotate and store. Grid: [tokens, query_units + 2 kv_units].

    query, key, value, rotated: [tokens, heads, head_size], contiguous along head_size. Strides and head_size: in units
    of HEAD_UNIT numbers. rotated_size: rotated numbers of a head, 0: none. HALF: columns of a half, padded to a power
    of two; REST: padded columns beyond the rotated part, 0 if there are none. top: largest number of the quantised
    format that `keys` and `values` hold as bits. CHAINED: launched before the previous kernel has ended (programmatic
    dependent launch).
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # few programs: the next kernel fits on every multiprocessor
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    head_size *= _UNIT
    if unit < query_units:
        columns, half, inside_first, inside_second, rest_columns, inside_rest = _columns(
            head_size, rotated_size, HALF, REST
        )
        head = unit * HEADS + tl.arange(0, HEADS)
        inside_heads = head < heads
        source, target = query + token * (query_stride * _UNIT), rotated + token * (rotated_stride * _UNIT)
        places, stride = head * (rotated_head_stride * _UNIT), query_head_stride * _UNIT
        first = _load_heads(source, head * stride, columns, inside_heads, inside_first)
        second = _load_heads(source, head * stride, half + columns, inside_heads, inside_second)
        first, second = _rotate(first, second, cosines, sines, token, rotated_size, columns, inside_first)
        dtype: tl.constexpr = rotated.dtype.element_ty
        if REST > 0:
            rest = _load_heads(source, head * stride, rest_columns, inside_heads, inside_rest)
            _store_heads(target, places, rest_columns, inside_heads, inside_rest, rest.to(dtype))
        _store_heads(target, places, columns, inside_heads, inside_first, first.to(dtype))
        _store_heads(target, places, half + columns, inside_heads, inside_second, second.to(dtype))
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            unit -= query_units
            if unit < kv_units:
                _store_cache(
                    (key + token * (key_stride * _UNIT), key_head_stride * _UNIT), (keys, key_scales, top),
                    (cosines, sines, rotated_size), (token, slot, unit), (kv_heads, head_size),
                    HEADS, HALF, REST, QUANTISED,
                )  # fmt: skip
            else:
                _store_cache(
                    (value + token * (value_stride * _UNIT), value_head_stride * _UNIT), (values, value_scales, top),
                    (cosines, sines, 0), (token, slot, unit - kv_units), (kv_heads, head_size),
                    HEADS, HALF, 0, QUANTISED,
                )  # fmt: skip


def write_kv(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    layer: KvLayer,
    slots: torch.Tensor,
    target: Target,
    output: torch.Tensor | None = None,
) -> None:
    """Store K and V of new tokens; with `cos` and `sin`, rotate the key, and the query if given.

    Args:
        query: [tokens, heads, head_size] float on the device; None: do not rotate a query.
        key: [tokens, kv_heads, head_size] float on the device, contiguous along head_size, as are all three.
        value: As `key`.
        cos: [tokens, rotated] float on the device, contiguous, from transformers' rotary modules: the first `rotated`
            numbers x of each head become x cos + rotate_half(x) sin, the rest stays.
        sin: As `cos`.
        layer: The layer's cache.
        slots: [tokens] int32 or int64 on the device; -1: do not store.
        target: The architecture.
        output: Receives the rotated query; None: rotate in place.
    """
    tokens, kv_heads, head_size = key.shape
    size = head_class(head_size)
    rotated_size = 0 if cos is None else cos.shape[1]
    rotates_query = query is not None and cos is not None
    q = query if rotates_query and query is not None else key
    rotated = q if output is None else output
    heads = q.shape[1] if rotates_query else 0
    kv_units, query_units = ceil_div(kv_heads, HEADS), ceil_div(heads, HEADS)
    no_scales = layer.key_scales is None
    write_kernel[(tokens, query_units + 2 * kv_units)](
        q,
        key,
        value,
        rotated,
        key if cos is None else cos,
        key if sin is None else sin,
        as_bytes(layer.keys),
        as_bytes(layer.values),
        slots if no_scales else layer.key_scales,
        slots if no_scales else layer.value_scales,
        slots,
        *in_units(*q.stride()[:2], *key.stride()[:2], *value.stride()[:2], *rotated.stride()[:2]),
        heads,
        kv_heads,
        *in_units(head_size),
        rotated_size,
        query_units,
        kv_units,
        TOP.get(layer.keys.dtype, 0.0),
        HEADS=HEADS,
        HALF=size // 2,
        REST=size if 0 < rotated_size < head_size else 0,
        QUANTISED=is_quantised(layer.keys.dtype),
        CHAINED=target.chained,
        num_warps=target.write.warps,
        **({"launch_pdl": True} if target.chained else {}),
    )
