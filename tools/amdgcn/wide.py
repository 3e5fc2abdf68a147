"""Vector instructions of 64 bits and with carries, on pairs of registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import compare
from .assembly import Instruction, Isa
from .operands import DOUBLE, INTEGER, SINGLE, source, source64, vector_register
from .values import (
    F32,
    F64,
    I32,
    I64,
    M32,
    U32,
    U64,
    Array,
    as_f32,
    as_f64,
    as_i32,
    bits32,
    division_fixup,
    fma64,
    rough64,
    to_i32,
    to_u32,
)
from .wave import Code, Wave, packed

_DOUBLES: dict[str, Callable[..., Any]] = {
    "add_f64": lambda a, b: a + b,
    "mul_f64": lambda a, b: a * b,
    "max_f64": np.fmax,
    "min_f64": np.fmin,
    "fma_f64": fma64,
    "div_fmas_f64": fma64,
    "rcp_f64": lambda a: rough64(1.0 / a),
    "rsq_f64": lambda a: rough64(1.0 / np.sqrt(a)),
    "sqrt_f64": np.sqrt,
    "rndne_f64": np.rint,
    "floor_f64": np.floor,
    "trunc_f64": np.trunc,
    "ceil_f64": np.ceil,
    "fract_f64": lambda a: a - np.floor(a),
    "frexp_mant_f64": lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a),
}
_TO_DOUBLE: dict[str, Callable[[Array], Array]] = {
    "cvt_f64_f32": lambda x: as_f32(x).astype(F64),
    "cvt_f64_i32": lambda x: as_i32(x).astype(F64),
    "cvt_f64_u32": lambda x: np.asarray(x).astype(F64),
}
_FROM_DOUBLE: dict[str, Callable[[Array], Array]] = {
    "cvt_f32_f64": lambda x: bits32(x.astype(F32)),
    "cvt_i32_f64": to_i32,
    "cvt_u32_f64": to_u32,
    "frexp_exp_i32_f64": lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32).view(U32),
}
_SHIFTS: dict[str, Callable[[Array, Array], Array]] = {
    "lshlrev_b64": lambda x, by: x << by,
    "lshrrev_b64": lambda x, by: x >> by,
    "ashrrev_i64": lambda x, by: (x.view(I64) >> by.astype(I64)).view(U64),
}
_SUMS: dict[str, Callable[[Array, Array], Array]] = {
    "add_co_u32": lambda a, b: a + b,
    "sub_co_u32": lambda a, b: a - b,
    "subrev_co_u32": lambda a, b: b - a,
}
_SUMS_WITH_CARRY: dict[str, Callable[[Array, Array, Array], Array]] = {
    "add_co_ci_u32": lambda a, b, c: a + b + c,
    "addc_co_u32": lambda a, b, c: a + b + c,
    "sub_co_ci_u32": lambda a, b, c: a - b - c,
    "subb_co_u32": lambda a, b, c: a - b - c,
    "subrev_co_ci_u32": lambda a, b, c: b - a - c,
    "subbrev_co_u32": lambda a, b, c: b - a - c,
}


def build(name: str, instruction: Instruction, isa: Isa) -> Code | None:
    """Translate a 64-bit or carry instruction, or return None if `name` is none."""
    if name in _DOUBLES:
        return _double(_DOUBLES[name], instruction)
    if name in _TO_DOUBLE:
        return _to_double(name, instruction)
    if name in _FROM_DOUBLE:
        return _from_double(_FROM_DOUBLE[name], instruction)
    if name in _SHIFTS:
        return _shift(_SHIFTS[name], instruction)
    if name in _SUMS or name in _SUMS_WITH_CARRY:
        return _sum(name, instruction, isa)
    if name in ("mad_u64_u32", "mad_i64_i32"):
        return _multiply_and_add(instruction, isa, is_signed=name == "mad_i64_i32")
    made = _OTHERS.get(name)
    return None if made is None else made(instruction, isa)


def _put(w: Wave, target: int, numbers: Any) -> None:
    """Write float64 numbers to a register pair."""
    w.put64(target, w.spread(np.asarray(numbers, F64).view(U64)))


def _double(function: Callable[..., Any], instruction: Instruction) -> Code:
    target, sources = vector_register(instruction.operands[0]), [source64(x, DOUBLE) for x in instruction.operands[1:]]
    return lambda w: _put(w, target, function(*(as_f64(read(w)) for read in sources)))


def _double_fmac(instruction: Instruction, isa: Isa) -> Code:
    first, *others = instruction.operands
    target, sources = vector_register(first), [source64(text, DOUBLE) for text in (*others, first)]
    return lambda w: _put(w, target, fma64(*(as_f64(read(w)) for read in sources)))


def _to_double(name: str, instruction: Instruction) -> Code:
    convert, kind = _TO_DOUBLE[name], SINGLE if name == "cvt_f64_f32" else INTEGER
    target, read = vector_register(instruction.operands[0]), source(instruction.operands[1], kind)
    return lambda w: _put(w, target, convert(read(w)))


def _from_double(convert: Callable[[Array], Array], instruction: Instruction) -> Code:
    target, read = vector_register(instruction.operands[0]), source64(instruction.operands[1], DOUBLE)
    return lambda w: w.put(target, convert(as_f64(read(w))))


def _scale_exponent(instruction: Instruction, isa: Isa) -> Code:
    target, a = vector_register(instruction.operands[0]), source64(instruction.operands[1], DOUBLE)
    b = source(instruction.operands[2])
    return lambda w: _put(w, target, np.ldexp(as_f64(a(w)), np.clip(as_i32(np.asarray(b(w))), -4000, 4000)))


def _division_scale(instruction: Instruction, isa: Isa) -> Code:
    """Translate v_div_scale_f64 for moderate exponents, where nothing is scaled."""
    target, flag = vector_register(instruction.operands[0]), compare.mask_target(instruction.operands[1], isa)
    read = source64(instruction.operands[2], DOUBLE)

    def scale(w: Wave) -> None:
        flag(w, 0)
        _put(w, target, as_f64(read(w)))

    return scale


def _division_fixup(instruction: Instruction, isa: Isa) -> Code:
    target, sources = vector_register(instruction.operands[0]), [source64(x, DOUBLE) for x in instruction.operands[1:]]
    return lambda w: _put(w, target, division_fixup(*(w.spread(as_f64(read(w))) for read in sources)))


def _move(instruction: Instruction, isa: Isa) -> Code:
    target, read = vector_register(instruction.operands[0]), source64(instruction.operands[1])
    return lambda w: w.put64(target, w.spread(read(w)))


def _shift(function: Callable[[Array, Array], Array], instruction: Instruction) -> Code:
    target, by = vector_register(instruction.operands[0]), source(instruction.operands[1])
    read = source64(instruction.operands[2])
    return lambda w: w.put64(target, w.spread(function(read(w), (np.asarray(by(w)) & U32(63)).astype(U64))))


def _shift_and_add(instruction: Instruction, isa: Isa) -> Code:
    target, a = vector_register(instruction.operands[0]), source64(instruction.operands[1])
    by, b = source(instruction.operands[2]), source64(instruction.operands[3])
    return lambda w: w.put64(target, w.spread((a(w) << (np.asarray(by(w)) & U32(7)).astype(U64)) + b(w)))


def _multiply_and_add(instruction: Instruction, isa: Isa, is_signed: bool) -> Code:
    target, carry = vector_register(instruction.operands[0]), compare.mask_target(instruction.operands[1], isa)
    a, b = (source(text) for text in instruction.operands[2:4])
    c = source64(instruction.operands[4])

    def calculate(w: Wave) -> None:
        x, y = w.spread(a(w)), w.spread(b(w))
        if is_signed:
            product = (as_i32(x).astype(I64) * as_i32(y).astype(I64)).view(U64)
        else:
            product = x.astype(U64) * y.astype(U64)
        total = product + w.spread(c(w))
        carry(w, packed((total < product) & w.m))
        w.put64(target, total)

    return calculate


def _sum(name: str, instruction: Instruction, isa: Isa) -> Code:
    target, carry = vector_register(instruction.operands[0]), compare.mask_target(instruction.operands[1], isa)
    a, b = (source(text) for text in instruction.operands[2:4])
    carried = compare.mask_source(instruction.operands[4], isa) if name in _SUMS_WITH_CARRY else None

    def calculate(w: Wave) -> None:
        x, y = w.spread(a(w)).astype(I64), w.spread(b(w)).astype(I64)
        if carried is None:
            total = _SUMS[name](x, y)
        else:
            total = _SUMS_WITH_CARRY[name](x, y, w.mask(carried(w)).astype(I64))
        carry(w, packed(((total > M32) | (total < 0)) & w.m))
        w.put(target, (total & M32).astype(U32))

    return calculate


_OTHERS: dict[str, Callable[[Instruction, Isa], Code]] = {
    "fmac_f64": _double_fmac,
    "ldexp_f64": _scale_exponent,
    "div_scale_f64": _division_scale,
    "div_fixup_f64": _division_fixup,
    "mov_b64": _move,
    "lshl_add_u64": _shift_and_add,
}
