"""Vector instructions that are pure functions of their operands' bits: name -> (operand count, function)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .values import (
    F16,
    F32,
    F64,
    HIGH,
    I16,
    I32,
    I64,
    U16,
    U32,
    U64,
    Array,
    as_i16,
    as_i32,
    bits16,
    bits32,
    chosen_bytes,
    exp2,
    fma,
    leading_signs,
    leading_zeros,
    log2,
    low16,
    reciprocal,
    reciprocal_root,
    reversed_bits,
    set_bits,
    signed_field,
)

Table = dict[str, tuple[int, Callable[..., Any]]]


def _shift(x: Array) -> Array:
    result: Array = np.asarray(x) & U32(31)
    return result


def _signed_high(a: Array, b: Array) -> Array:
    return ((as_i32(a).astype(I64) * as_i32(b).astype(I64)) >> I64(32)).astype(I32).view(U32)


def _shifted_right(a: Array, b: Array) -> Array:
    return (as_i32(b) >> _shift(a).astype(I32)).astype(I32).view(U32)


def _middle(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _signed24(x: Array) -> Array:
    return (as_i32(np.asarray(x) << U32(8)) >> 8).astype(I64)


def _unsigned24(x: Array) -> Array:
    return (np.asarray(x) & U32(0xFFFFFF)).astype(U64)


def _byte(x: Array, place: int) -> Array:
    return bits32(((x >> U32(8 * place)) & U32(255)).astype(F32))


def _of_signed(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: function(*(as_i32(x) for x in operands)).view(U32)


FLOAT32: Table = {
    "add_f32": (2, lambda a, b: a + b),
    "sub_f32": (2, lambda a, b: a - b),
    "subrev_f32": (2, lambda a, b: b - a),
    "mul_f32": (2, lambda a, b: a * b),
    "max_f32": (2, np.fmax),
    "min_f32": (2, np.fmin),
    "fma_f32": (3, fma),
    "max3_f32": (3, lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3_f32": (3, lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "med3_f32": (3, lambda a, b, c: np.median(np.broadcast_arrays(a, b, c), axis=0).astype(F32)),
    "maxmin_f32": (3, lambda a, b, c: np.fmin(np.fmax(a, b), c)),
    "minmax_f32": (3, lambda a, b, c: np.fmax(np.fmin(a, b), c)),
    "exp_f32": (1, exp2),
    "log_f32": (1, log2),
    "rcp_f32": (1, reciprocal),
    "rcp_iflag_f32": (1, reciprocal),
    "rsq_f32": (1, reciprocal_root),
    "sqrt_f32": (1, np.sqrt),
    "rndne_f32": (1, np.rint),
    "floor_f32": (1, np.floor),
    "trunc_f32": (1, np.trunc),
    "ceil_f32": (1, np.ceil),
    "fract_f32": (1, lambda a: a - np.floor(a)),
}
INTEGER32: Table = {
    "mov_b32": (1, lambda a: a),
    "accvgpr_read_b32": (1, lambda a: a),
    "accvgpr_write_b32": (1, lambda a: a),
    "accvgpr_mov_b32": (1, lambda a: a),
    "not_b32": (1, lambda a: ~a),
    "add_u32": (2, lambda a, b: a + b),
    "add_nc_u32": (2, lambda a, b: a + b),
    "sub_u32": (2, lambda a, b: a - b),
    "sub_nc_u32": (2, lambda a, b: a - b),
    "subrev_u32": (2, lambda a, b: b - a),
    "subrev_nc_u32": (2, lambda a, b: b - a),
    "mul_lo_u32": (2, lambda a, b: (a.astype(U64) * b.astype(U64)).astype(U32)),
    "mul_hi_u32": (2, lambda a, b: ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)),
    "mul_hi_i32": (2, _signed_high),
    "and_b32": (2, lambda a, b: a & b),
    "or_b32": (2, lambda a, b: a | b),
    "xor_b32": (2, lambda a, b: a ^ b),
    "xnor_b32": (2, lambda a, b: ~(a ^ b)),
    "lshlrev_b32": (2, lambda a, b: b << _shift(a)),
    "lshrrev_b32": (2, lambda a, b: b >> _shift(a)),
    "ashrrev_i32": (2, _shifted_right),
    "min_i32": (2, _of_signed(np.minimum)),
    "max_i32": (2, _of_signed(np.maximum)),
    "min_u32": (2, np.minimum),
    "max_u32": (2, np.maximum),
    "min3_i32": (3, _of_signed(lambda a, b, c: np.minimum(np.minimum(a, b), c))),
    "max3_i32": (3, _of_signed(lambda a, b, c: np.maximum(np.maximum(a, b), c))),
    "maxmin_i32": (3, _of_signed(lambda a, b, c: np.minimum(np.maximum(a, b), c))),
    "minmax_i32": (3, _of_signed(lambda a, b, c: np.maximum(np.minimum(a, b), c))),
    "med3_i32": (3, _of_signed(_middle)),
    "add3_u32": (3, lambda a, b, c: a + b + c),
    "lshl_add_u32": (3, lambda a, b, c: (a << _shift(b)) + c),
    "add_lshl_u32": (3, lambda a, b, c: (a + b) << _shift(c)),
    "lshl_or_b32": (3, lambda a, b, c: (a << _shift(b)) | c),
    "and_or_b32": (3, lambda a, b, c: (a & b) | c),
    "or3_b32": (3, lambda a, b, c: a | b | c),
    "xad_u32": (3, lambda a, b, c: (a ^ b) + c),
    "xor3_b32": (3, lambda a, b, c: a ^ b ^ c),
    "bfe_u32": (3, lambda a, b, c: (a >> _shift(b)) & ((U32(1) << _shift(c)) - U32(1))),
    "bfe_i32": (3, signed_field),
    "bfi_b32": (3, lambda a, b, c: (a & b) | (~a & c)),
    "bfm_b32": (2, lambda a, b: ((U32(1) << _shift(a)) - U32(1)) << _shift(b)),
    "alignbit_b32": (3, lambda a, b, c: (((a.astype(U64) << U64(32)) | b) >> _shift(c).astype(U64)).astype(U32)),
    "perm_b32": (3, chosen_bytes),
    "cvt_f32_i32": (1, lambda a: bits32(as_i32(a).astype(F32))),
    "cvt_f32_u32": (1, lambda a: bits32(np.asarray(a).astype(F32))),
    "cvt_f32_ubyte0": (1, lambda a: _byte(a, 0)),
    "cvt_f32_ubyte1": (1, lambda a: _byte(a, 1)),
    "cvt_f32_ubyte2": (1, lambda a: _byte(a, 2)),
    "cvt_f32_ubyte3": (1, lambda a: _byte(a, 3)),
    "mul_i32_i24": (2, lambda a, b: (_signed24(a) * _signed24(b)).astype(I64).astype(U64).astype(U32)),
    "mul_u32_u24": (2, lambda a, b: (_unsigned24(a) * _unsigned24(b)).astype(U32)),
    "mad_i32_i24": (3, lambda a, b, c: (_signed24(a) * _signed24(b) + as_i32(c)).astype(I64).view(U64).astype(U32)),
    "mad_u32_u24": (3, lambda a, b, c: (_unsigned24(a) * _unsigned24(b) + c.astype(U64)).astype(U32)),
    "bfrev_b32": (1, reversed_bits),
    "ffbh_i32": (1, leading_signs),
    "cls_i32": (1, leading_signs),
    "ffbh_u32": (1, leading_zeros),
    "clz_i32_u32": (1, leading_zeros),
    "bcnt_u32_b32": (2, lambda a, b: set_bits(a) + b),
}
# The same with `clamp`: no result wraps.
CLAMPED32: Table = {
    "sub_u32": (2, lambda a, b: np.where(a < b, U32(0), a - b)),
    "sub_nc_u32": (2, lambda a, b: np.where(a < b, U32(0), a - b)),
}
FLOAT16: Table = {
    "add_f16": (2, lambda a, b: a + b),
    "sub_f16": (2, lambda a, b: a - b),
    "subrev_f16": (2, lambda a, b: b - a),
    "mul_f16": (2, lambda a, b: a * b),
    "max_f16": (2, np.fmax),
    "min_f16": (2, np.fmin),
    "fma_f16": (3, lambda a, b, c: (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16)),
}
# 16-bit operations, on the lower half of each operand and of the result.
INTEGER16: Table = {
    "add_u16": (2, lambda a, b: low16(a + b)),
    "sub_i16": (2, lambda a, b: low16(a - b)),
    "add_nc_u16": (2, lambda a, b: low16(a + b)),
    "sub_u16": (2, lambda a, b: low16(a - b)),
    "sub_nc_u16": (2, lambda a, b: low16(a - b)),
    "mul_lo_u16": (2, lambda a, b: low16(a * b)),
    "mad_u16": (3, lambda a, b, c: low16(a * b + c)),
    "lshlrev_b16": (2, lambda a, b: low16(b << (a & U32(15)))),
    "lshrrev_b16": (2, lambda a, b: low16(b) >> (a & U32(15))),
    "ashrrev_i16": (2, lambda a, b: (as_i16(b) >> (np.asarray(a) & U32(15)).astype(I16)).view(U16).astype(U32)),
    "and_b16": (2, lambda a, b: low16(a & b)),
    "or_b16": (2, lambda a, b: low16(a | b)),
    "xor_b16": (2, lambda a, b: low16(a ^ b)),
    "cvt_f16_i16": (1, lambda a: bits16(as_i16(a))),
    "cvt_f16_u16": (1, lambda a: bits16(low16(a))),
    "max_i16": (2, lambda a, b: np.maximum(as_i16(a), as_i16(b)).view(U16).astype(U32)),
    "min_i16": (2, lambda a, b: np.minimum(as_i16(a), as_i16(b)).view(U16).astype(U32)),
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}


def upper(x: Array) -> Array:
    """Return the upper halves, moved to the lower halves."""
    result: Array = np.asarray(x) >> HIGH
    return result
