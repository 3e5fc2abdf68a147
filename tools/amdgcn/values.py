"""Bit patterns of numbers, and arithmetic of AMD's vector units that numpy lacks.

Registers hold uint32. Functions take and return arrays (or numpy scalars, for constants) of the dtype they name.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
M16, M32, M64 = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
HIGH = U32(16)  # shift to the upper half
LOW = U32(M16)


def f32_constant(x: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def f16_constant(x: float) -> int:
    """Return the bits of a float16."""
    return int(np.array(x, F16).view(U16))


def f64_constant(x: float) -> int:
    """Return the bits of a float64."""
    return int(struct.unpack("<Q", struct.pack("<d", x))[0])


def signed(x: int, bits: int = 32) -> int:
    """Return the lowest `bits` of x as a signed integer."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def as_f32(x: Array) -> Array:
    """View the bits as float32."""
    return x.view(F32)


def as_f64(x: Array) -> Array:
    """View the bits as float64."""
    return np.asarray(x).view(F64)


def as_i32(x: Array) -> Array:
    """View the bits as int32."""
    return x.view(I32)


def as_f16(x: Array) -> Array:
    """View the lower halves as float16."""
    return (np.asarray(x) & LOW).astype(U16).view(F16)


def as_i16(x: Array) -> Array:
    """View the lower halves as int16."""
    return (np.asarray(x) & LOW).astype(U16).view(I16)


def low16(x: Array) -> Array:
    """Return the lower halves as uint32."""
    result: Array = np.asarray(x) & LOW
    return result


def bits32(x: Any) -> Array:
    """Return the bits of float32 numbers."""
    return np.asarray(x, F32).view(U32)


def bits16(x: Any) -> Array:
    """Return the bits of the numbers as float16, in the lower halves."""
    return np.asarray(x).astype(F16).view(U16).astype(U32)


def halves(registers: Array) -> Array:
    """Split [n, lanes] uint32 into [2n, lanes] uint16, the lower half first."""
    pairs = np.stack([(registers & LOW).astype(U16), (registers >> HIGH).astype(U16)], 1)
    return pairs.reshape(-1, registers.shape[1])


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float32 with one rounding, by rounding the float64 sum to odd (Boldo and Melquiond, 2008)."""
    product = a.astype(F64) * b.astype(F64)
    addend = c.astype(F64)
    total = np.asarray(product + addend)
    share = total - product
    error = (product - (total - share)) + (addend - share)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    if inexact.any():
        bits = total.view(I64).copy()
        even = inexact & ((bits & 1) == 0)
        total = np.where(even, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(F64)
    return total.astype(F32)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float64 from exact products (Dekker, 1971) and an 80-bit sum.

    Falls back to plain float64 arithmetic where the exact product overflows.
    """

    def cut(x: Array) -> tuple[Array, Array]:
        scaled = x * 134217729.0
        high = scaled - (scaled - x)
        return high, x - high

    product = a * b
    (a_high, a_low), (b_high, b_low) = cut(a), cut(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    exact = ((np.longdouble(1) * product + c) + error).astype(F64)
    return np.where(np.isfinite(error), exact, product + c)


def rough64(x: Array) -> Array:
    """Round to the precision that v_rcp_f64 and v_rsq_f64 promise."""
    return (np.asarray(x, F64).view(U64) & U64(M64 << 26 & M64)).view(F64)


def flushed(x: Any) -> Array:
    """Return float32 with subnormals flushed to zero."""
    numbers = np.asarray(x, F32)
    return np.where(np.abs(numbers) < F32(2.0**-126), np.copysign(F32(0), numbers), numbers).astype(F32)


def exp2(x: Array) -> Array:
    """Return 2 ** x in float32 (v_exp_f32)."""
    return flushed(np.exp2(flushed(x).astype(F64)).astype(F32))


def log2(x: Array) -> Array:
    """Return the binary logarithm in float32 (v_log_f32)."""
    result: Array = np.asarray(np.log2(flushed(x).astype(F64)), F32)
    return result


def reciprocal(x: Array) -> Array:
    """Return 1 / x in float32 (v_rcp_f32)."""
    return flushed((1.0 / flushed(x).astype(F64)).astype(F32))


def reciprocal_root(x: Array) -> Array:
    """Return 1 / sqrt(x) in float32 (v_rsq_f32)."""
    result: Array = np.asarray(1.0 / np.sqrt(flushed(x).astype(F64)), F32)
    return result


def exponent(x: Array) -> Array:
    """Return the biased exponent of float32."""
    return ((np.asarray(x).view(U32) >> U32(23)) & U32(255)).astype(I32)


def to_i32(x: Array) -> Array:
    """Convert to int32 towards zero, saturating, NaN to 0; return the bits."""
    whole = np.nan_to_num(np.trunc(np.asarray(x, F64)), nan=0.0)
    return np.asarray(np.clip(whole, -(2**31), 2**31 - 1), I64).astype(I32).view(U32)


def to_u32(x: Array) -> Array:
    """Convert to uint32 towards zero, saturating, NaN to 0."""
    whole = np.nan_to_num(np.trunc(np.asarray(x, F64)), nan=0.0)
    return np.asarray(np.clip(whole, 0, 2**32 - 1), U64).astype(U32)


def to_bf16(bits: Array) -> Array:
    """Convert float32 bits to bfloat16 bits in the lower halves, ties to even."""
    x = np.asarray(bits)
    rounded = (x.astype(U64) + U64(0x7FFF) + ((x >> HIGH) & U32(1))) >> U64(16)
    return np.where(np.isnan(x.view(F32)), (x >> HIGH) | U32(0x40), rounded).astype(U32)


# Biased exponents of operands that differ by less than 96 and whose quotients and reciprocals are normal.
ORDINARY_MIN, ORDINARY_MAX = 80, 174


def division_scale(which: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Return v_div_scale_f32: `which` operand scaled, and whether the quotient must be scaled back."""
    shape = np.broadcast(which, denominator, numerator).shape
    s0, s1, s2 = (np.broadcast_to(x, shape) for x in (which, denominator, numerator))
    e1, e2 = exponent(s1), exponent(s2)
    if min(e1.min(), e2.min()) >= ORDINARY_MIN and max(e1.max(), e2.max()) <= ORDINARY_MAX:
        return s0, np.zeros(shape, bool)  # no case below applies
    quotient = s2.astype(F64) / s1.astype(F64)
    tiny = (np.abs(quotient) < 2.0**-126) & (quotient != 0)
    inverse_tiny = np.abs(1.0 / s1.astype(F64)) < 2.0**-126
    up, down = (s0.astype(F64) * 2.0**64).astype(F32), (s0.astype(F64) * 2.0**-64).astype(F32)
    denominator_up, numerator_up = np.where(s0 == s1, up, s0), np.where(s0 == s2, up, s0)
    cases = [
        ((s1 == 0) | (s2 == 0), np.full_like(s0, np.nan), False),
        (e2 - e1 >= 96, denominator_up, True),
        ((e1 == 0) & (s1 != 0), up, False),
        (inverse_tiny & tiny, denominator_up, True),
        (inverse_tiny, down, False),
        (tiny, numerator_up, True),
        (e2 <= 23, up, False),
    ]
    scaled, flags = s0, np.zeros(shape, bool)
    for condition, value, flag in reversed(cases):  # the first that applies
        scaled, flags = np.where(condition, value, scaled), np.where(condition, flag, flags)
    return scaled.astype(F32), flags


def division_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """Return v_div_fixup: the quotient with its sign, and the special results of zeros, infinities and NaN."""
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    if np.isfinite(quotient + denominator + numerator).all() and denominator.all() and numerator.all():
        return np.copysign(quotient, np.where(negative, -1, 1)).astype(quotient.dtype)

    def with_sign(x: Array) -> Array:
        return np.where(negative, -x, x)

    infinite = with_sign(np.full_like(quotient, np.inf))
    result = np.where(np.isnan(quotient), infinite, with_sign(np.abs(quotient)))
    result = np.where(np.isinf(denominator) | (numerator == 0), with_sign(np.zeros_like(quotient)), result)
    result = np.where((denominator == 0) | np.isinf(numerator), infinite, result)
    undefined = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    undefined |= np.isnan(denominator) | np.isnan(numerator)
    return np.where(undefined, np.nan, result).astype(quotient.dtype)


def classes(x: Array) -> Array:
    """Return v_cmp_class: one bit for the class of each float16, float32 or float64."""
    kind, exponent_bits, mantissa_bits = {F32: (U32, 8, 23), F16: (U16, 5, 10), F64: (U64, 11, 52)}[x.dtype.type]
    bits = np.asarray(x).view(kind).astype(U64)
    negative = (bits >> U64(exponent_bits + mantissa_bits)) & U64(1) == 1
    power = (bits >> U64(mantissa_bits)) & U64((1 << exponent_bits) - 1)
    mantissa = bits & U64((1 << mantissa_bits) - 1)
    top = power == (1 << exponent_bits) - 1
    cases: list[tuple[Array, Any]] = [
        (top & (mantissa != 0) & (mantissa >> U64(mantissa_bits - 1) == 0), U32(1)),  # signalling NaN
        (top & (mantissa != 0), U32(2)),
        (top, np.where(negative, U32(4), U32(512))),
        ((power == 0) & (mantissa == 0), np.where(negative, U32(32), U32(64))),
        (power == 0, np.where(negative, U32(16), U32(128))),
    ]
    bits_of = np.where(negative, U32(8), U32(256))
    return np.asarray(np.select([case for case, _ in cases], [bit for _, bit in cases], bits_of)).astype(U32)


def leading_zeros(x: Array) -> Array:
    """Count leading zeros; all ones for zero."""
    return np.array([M32 if n == 0 else 32 - int(n).bit_length() for n in np.atleast_1d(x)], U32)


def leading_signs(x: Array) -> Array:
    """Count the leading bits that equal the sign; all ones for 0 and -1."""
    numbers = np.atleast_1d(x).view(I32).tolist()
    return np.array([M32 if n in (0, -1) else 32 - (n if n > 0 else ~n).bit_length() for n in numbers], U32)


def reversed_bits(x: Array) -> Array:
    """Reverse the bits."""
    return np.array([int(f"{int(n):032b}"[::-1], 2) for n in np.atleast_1d(x)], U32)


def set_bits(x: Array) -> Array:
    """Count the set bits."""
    return np.array([int(n).bit_count() for n in np.atleast_1d(x)], U32)


def signed_field(x: Array, first: Array, width: Array) -> Array:
    """Return v_bfe_i32: the field of `width` bits from bit `first`, sign-extended."""
    at, n = (np.asarray(part).astype(I64) & 31 for part in (first, width))
    field = (np.asarray(x).astype(I64) >> at) & ((I64(1) << n) - 1)
    negative = (n > 0) & ((field >> np.maximum(n - 1, 0)) & 1 == 1)
    return np.where(negative, field - (I64(1) << n), field).astype(I32).view(U32)


def chosen_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Return v_perm_b32: four bytes of a:b, selected by the bytes of `selector`."""
    both = (np.asarray(a).astype(U64) << U64(32)) | np.asarray(b).astype(U64)
    select = np.asarray(selector)
    result = np.zeros(np.broadcast(both, select).shape, U32)
    for byte in range(4):
        choice = (select >> U32(8 * byte)) & U32(255)
        chosen = ((both >> (np.minimum(choice, 7).astype(U64) * U64(8))) & U64(255)).astype(U32)
        if np.any(choice > 7):  # sign bytes, 0, 255
            place = (choice.astype(U64) & U64(3)) * U64(16) + U64(15)
            sign = ((both >> place) & U64(1)).astype(U32) * U32(255)
            other = np.where(choice < 12, sign, np.where(choice == 12, U32(0), U32(255)))
            chosen = np.where(choice < 8, chosen, other).astype(U32)
        result |= chosen << U32(8 * byte)
    return result
