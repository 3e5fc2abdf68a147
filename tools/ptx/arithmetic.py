"""Instructions of one lane each: integers, bits, comparisons, choices. Floats: see `floats`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.amdgcn.checks import Unsupported
from tools.amdgcn.values import Array

from . import floats
from .operands import KINDS, PAIRS, bytes_of, constant, put_result, registers, source, widened
from .text import Instruction, Register
from .unit import Code, Unit

_INTEGER = {"u16", "s16", "u32", "s32", "u64", "s64"}
_BITS = {"b16", "b32", "b64", "pred"}
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _shifted(x: Array, count: Array, left: bool) -> Array:
    bits = x.dtype.itemsize * 8
    by = np.minimum(count, bits - 1).astype(x.dtype)
    moved = np.left_shift(x, by) if left else np.right_shift(x, by)
    gone = left or x.dtype.kind == "u"
    return np.where(count >= bits, x.dtype.type(0), moved) if gone else np.asarray(moved)


def _divided(a: Array, b: Array) -> Array:
    """Divide integers towards zero; by zero: all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = np.abs(a.astype(np.float64)) // np.abs(safe.astype(np.float64))
    if a.dtype.itemsize > 4:
        raise Unsupported("a division of 64 bits")
    signed = np.where((a < 0) ^ (safe < 0), -quotient, quotient)
    return np.where(b == 0, -1, signed).astype(np.int64).astype(a.dtype)


TWO: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "div": _divided,
    "rem": lambda a, b: a - _divided(a, b) * b,
}
_ORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_WHOLE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def build(i: Instruction) -> Code | None:
    """Translate an instruction; None if it is of another kind."""
    name, kind = i.name, i.parts[-1]
    if name == "mov":
        return _move(i)
    if name in ("addc", "madc") or "cc" in i.parts:
        return _carried(i)
    if name in ("selp", "setp", "bfe", "lop3", "prmt", "shf", "popc", "clz"):
        return {
            "selp": _select, "setp": _compare, "bfe": _field, "lop3": _logic, "prmt": _bytes, "shf": _funnel,
            "popc": _counted, "clz": _counted,
        }[name](i)  # fmt: skip
    if kind in PAIRS and name in ("add", "sub", "mul", "fma", "min", "max", "neg", "abs"):
        return floats.halves(i)
    if kind in ("f32", "f64"):
        return floats.numbers(i)
    if kind == "f32x2":
        return floats.pairs_of_32(i)
    if name in ("mul", "mad"):
        return _product(i)
    if name in ("shl", "shr"):
        x, count = source(i.operands[1], kind.replace("b", "u")), source(i.operands[2], "u32")
        left = name == "shl"
        return put_result(i, lambda u: _shifted(x(u), count(u), left))
    if name in ("not", "neg", "abs") and kind in _INTEGER | _BITS:
        x = source(i.operands[1], kind)
        one = {"not": np.invert, "neg": np.negative, "abs": np.abs}[name]
        return put_result(i, lambda u: one(x(u)))
    if name in TWO and kind in _INTEGER | _BITS:
        a, b, two = source(i.operands[1], kind), source(i.operands[2], kind), TWO[name]
        return put_result(i, lambda u: two(a(u), b(u)))
    return None


def _move(i: Instruction) -> Code:
    kind, (to, of) = i.parts[-1], i.operands
    if isinstance(of, tuple):  # parts into a register
        parts, width = [source(each, f"b{8 * bytes_of(kind) // len(of)}") for each in of], bytes_of(kind)
        bits = 8 * width // len(parts)

        def join(u: Unit) -> Array:
            total = np.zeros(1, np.uint64)
            for place, part in enumerate(parts):
                total = total | part(u).astype(np.uint64) << np.uint64(bits * place)
            return total.astype(KINDS[kind])

        return put_result(i, join)
    if isinstance(to, tuple):  # a register into parts
        whole, bits = source(of, kind), 8 * bytes_of(kind) // len(to)

        def split(u: Unit) -> None:
            value = whole(u).astype(np.uint64)
            for place, each in enumerate(to):
                if isinstance(each, Register):
                    u.put(each, (value >> np.uint64(bits * place) & np.uint64((1 << bits) - 1)).astype(f"u{bits // 8}"))

        return split
    return put_result(i, source(of, kind))


def _select(i: Instruction) -> Code:
    kind = i.parts[-1]
    a, b, which = source(i.operands[1], kind), source(i.operands[2], kind), source(i.operands[3], "pred")
    return put_result(i, lambda u: np.where(which(u), a(u), b(u)))


def _compare(i: Instruction) -> Code:
    test, kind = i.parts[1], i.parts[-1]
    if len(i.parts) > 3 and i.parts[2] in ("and", "or", "xor"):
        raise Unsupported(i.text)
    if kind in ("bf16", "f16"):
        ordered, one, other = _ORDERED[test], source(i.operands[1], "b16"), source(i.operands[2], "b16")
        return put_result(i, lambda u: ordered(widened(one(u), kind), widened(other(u), kind)))
    compared = (_ORDERED if kind in ("f32", "f64") else _WHOLE)[test]
    a, b = source(i.operands[1], kind), source(i.operands[2], kind)
    return put_result(i, lambda u: compared(a(u), b(u)))


def _field(i: Instruction) -> Code:
    kind = i.parts[-1]
    x, first, count = source(i.operands[1], kind), source(i.operands[2], "u32"), source(i.operands[3], "u32")
    signed = kind.startswith("s")

    def field(u: Unit) -> Array:
        at, bits = first(u).astype(np.uint64) & np.uint64(255), count(u).astype(np.int64) & 255
        wide = x(u).astype(np.int64) >> at.astype(np.int64)
        kept = wide & ((np.int64(1) << bits) - 1)
        if signed:
            kept = np.where((bits > 0) & (kept >> np.maximum(bits - 1, 0) & 1 == 1), kept - (np.int64(1) << bits), kept)
        return kept.astype(KINDS[kind])

    return put_result(i, field)


def _logic(i: Instruction) -> Code:
    a, b, c = (source(each, "b32") for each in i.operands[1:4])
    table = int(constant(str(i.operands[4]), "u32")[0])

    def logic(u: Unit) -> Array:
        total = np.zeros(1, np.uint32)
        x, y, z = a(u), b(u), c(u)
        for case in range(8):
            if table >> case & 1:
                total = total | (x if case & 4 else ~x) & (y if case & 2 else ~y) & (z if case & 1 else ~z)
        return total

    return put_result(i, logic)


def _bytes(i: Instruction) -> Code:
    if len(i.parts) > 2:
        raise Unsupported(i.text)
    a, b, which = (source(each, "b32") for each in i.operands[1:4])

    def chosen(u: Unit) -> Array:
        both = a(u).astype(np.uint64) | b(u).astype(np.uint64) << np.uint64(32)
        select, total = which(u).astype(np.uint64), np.zeros(1, np.uint64)
        for place in range(4):
            one = select >> np.uint64(4 * place) & np.uint64(15)
            byte = both >> (one & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            byte = np.where(one & np.uint64(8), np.where(byte & np.uint64(128), 255, 0).astype(np.uint64), byte)
            total = total | byte << np.uint64(8 * place)
        return total.astype(np.uint32)

    return put_result(i, chosen)


def _funnel(i: Instruction) -> Code:
    side, mode = i.parts[1], i.parts[2]
    low, high, count = (source(each, "b32") for each in i.operands[1:4])

    def shifted(u: Unit) -> Array:
        by = count(u).astype(np.uint64)
        by = by & np.uint64(31) if mode == "wrap" else np.minimum(by, np.uint64(32))
        both = low(u).astype(np.uint64) | high(u).astype(np.uint64) << np.uint64(32)
        if side == "l":
            return (both << by >> np.uint64(32)).astype(np.uint32)
        return (both >> by).astype(np.uint32)

    return put_result(i, shifted)


def _counted(i: Instruction) -> Code:
    x, bits, ones = source(i.operands[1], i.parts[-1]), 8 * bytes_of(i.parts[-1]), i.name == "popc"

    def count(n: int) -> int:
        return n.bit_count() if ones else bits - n.bit_length()

    return put_result(i, lambda u: np.array([count(int(n)) for n in x(u)], np.uint32))


def _product(i: Instruction) -> Code:
    how, kind = i.parts[1], i.parts[-1]
    a, b = source(i.operands[1], kind), source(i.operands[2], kind)
    wide = how == "wide"
    c = source(i.operands[3], _WIDER[kind] if wide else kind) if i.name == "mad" else None
    if how == "hi":
        if bytes_of(kind) > 4:
            raise Unsupported(i.text)
        signed = np.int64 if kind.startswith("s") else np.uint64
        return put_result(i, lambda u: (a(u).astype(signed) * b(u).astype(signed) >> signed(32)).astype(KINDS[kind]))
    dtype = KINDS[_WIDER[kind]] if wide else KINDS[kind]

    def multiplied(u: Unit) -> Array:
        product = a(u).astype(dtype) * b(u).astype(dtype)
        return product if c is None else product + c(u)

    return put_result(i, multiplied)


def _carried(i: Instruction) -> Code:
    """Translate sums of 32 bits that give or take a carry."""
    name, kind = i.name.removesuffix("c"), i.parts[-1]
    if name not in ("add", "mad") or kind not in ("u32", "s32") or (kind == "s32" and name == "mad"):
        raise Unsupported(i.text)
    sources, high = [source(each, "u32") for each in i.operands[1:]], "hi" in i.parts
    takes, gives = i.name.endswith("c"), "cc" in i.parts
    (target,) = registers(i.operands[0])

    def add(u: Unit) -> None:
        values = [each(u).astype(np.uint64) for each in sources]
        first = values[0]
        if name == "mad":
            product = values[0] * values[1]
            first = product >> np.uint64(32) if high else product & np.uint64(0xFFFFFFFF)
        total = first + values[-1] + (u.carry if takes else np.uint64(0))
        if gives:
            np.copyto(u.carry, total >> np.uint64(32), where=u.mask)
        u.put(target, total.astype(np.uint32))

    return add
