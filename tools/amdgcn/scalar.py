"""Scalar instructions: one value per wave, computed with Python integers."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly import Assembly, Instruction
from .checks import Unsupported
from .operands import HALF, INTEGER, SINGLE, Source, scalar_register, scalar_source, scalar_target, source
from .tables import COMPARE, FLOAT32
from .values import F32, I32, M32, M64, U32, Array, as_f16, as_f32, bits16, bits32, fma, signed, to_i32, to_u32
from .wave import Code, Wave

_LOADED = {
    "dword": 1,
    "b32": 1,
    "dwordx2": 2,
    "b64": 2,
    "dwordx3": 3,
    "b96": 3,
    "dwordx4": 4,
    "b128": 4,
    "dwordx8": 8,
    "b256": 8,
    "dwordx16": 16,
    "b512": 16,
}
_LOADED_NARROW = {"u8": "<B", "i8": "<b", "u16": "<H", "i16": "<h"}  # gfx12
_LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "and_not1": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "or_not1": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
_BRANCHES: dict[str, Callable[[Wave], Any]] = {
    "branch": lambda w: True,
    "cbranch_scc0": lambda w: not w.scc,
    "cbranch_scc1": lambda w: w.scc,
    "cbranch_vccz": lambda w: not w.vcc(),
    "cbranch_vccnz": lambda w: w.vcc(),
    "cbranch_execz": lambda w: not w.exec,
    "cbranch_execnz": lambda w: w.exec,
}
# (result, SCC); an SCC of None leaves it unchanged.
_Result = tuple[int, "int | bool | None"]
_ARITHMETIC: dict[str, Callable[[int, int, int], _Result]] = {  # arguments: both operands and the old SCC
    "add_u32": lambda a, b, c: (a + b, a + b > M32),
    "addc_u32": lambda a, b, c: (a + b + c, a + b + c > M32),
    "sub_u32": lambda a, b, c: (a - b, a < b),
    "subb_u32": lambda a, b, c: (a - b - c, a < b + c),
    "add_i32": lambda a, b, c: _overflowing(signed(a) + signed(b)),
    "sub_i32": lambda a, b, c: _overflowing(signed(a) - signed(b)),
    "add_nc_u64": lambda a, b, c: ((a + b) & M64, None),
    "sub_nc_u64": lambda a, b, c: ((a - b) & M64, None),
    "mul_u64": lambda a, b, c: ((a * b) & M64, None),
    "mul_i32": lambda a, b, c: (a * b, None),
    "mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "mul_hi_i32": lambda a, b, c: (signed(a) * signed(b) >> 32, None),
    "min_i32": lambda a, b, c: (a if signed(a) <= signed(b) else b, signed(a) < signed(b)),
    "max_i32": lambda a, b, c: (a if signed(a) >= signed(b) else b, signed(a) > signed(b)),
    "min_u32": lambda a, b, c: (min(a, b), a < b),
    "max_u32": lambda a, b, c: (max(a, b), a > b),
    "pack_ll_b32_b16": lambda a, b, c: ((a & 0xFFFF) | (b & 0xFFFF) << 16, None),
    "pack_lh_b32_b16": lambda a, b, c: ((a & 0xFFFF) | (b & 0xFFFF0000), None),
    "pack_hh_b32_b16": lambda a, b, c: ((a >> 16) | (b & 0xFFFF0000), None),
}
_FLOATS: dict[str, Callable[..., Any]] = {
    "fmac_f32": fma,
    "fmaak_f32": fma,
    "fmamk_f32": fma,
    "cvt_i32_f32": lambda a: to_i32(a).view(F32),
    "cvt_u32_f32": lambda a: to_u32(a).view(F32),
    "cvt_f32_i32": lambda a: np.asarray(a).view(I32).astype(F32),
    "cvt_f32_u32": lambda a: np.asarray(a).view(U32).astype(F32),
}


def build(instruction: Instruction, assembly: Assembly) -> Code:
    """Translate a scalar instruction (s_...)."""
    name, operands = instruction.name.removeprefix("s_"), instruction.operands
    if name in _BRANCHES:
        test, labels, label = _BRANCHES[name], assembly.labels, operands[0]
        return lambda w: labels[label] if test(w) else None
    if name.startswith("load_") and name[5:] in _LOADED_NARROW:
        return _load_narrow(_LOADED_NARROW[name[5:]], operands, instruction.modifiers.get("offset", 0))
    if name in ("cvt_f32_f16", "cvt_f16_f32"):
        return _convert_half(operands, to_half=name == "cvt_f16_f32")
    if name.startswith("load_"):
        return _load(_LOADED[name[5:]], operands, instruction.modifiers.get("offset", 0))
    if name.startswith("cmp_") and name.endswith("_f32"):
        return _compare_floats(COMPARE[name[4:-4]], source(operands[0], SINGLE), source(operands[1], SINGLE))
    if name in FLOAT32 or name in _FLOATS:
        return _float(name, operands)
    for pattern, make in _FORMS:
        found = re.fullmatch(pattern, name)
        if found:
            return make(found, operands)
    bits = 64 if name.endswith("64") else 32
    if name in _ARITHMETIC:
        return _with_condition(operands, bits, _ARITHMETIC[name])
    raise Unsupported(instruction.text)


def _overflowing(total: int) -> _Result:
    return total, not -(2**31) <= total < 2**31


def _load(count: int, operands: tuple[str, ...], offset: int) -> Code:
    first, base, more = scalar_register(operands[0]), scalar_source(operands[1], 64), scalar_source(operands[2])

    def load(w: Wave) -> None:
        at = (base(w) + more(w) + offset) & ~3
        w.group.memory.check_one(at, 4 * count)
        w.s[first : first + count] = struct.unpack(f"<{count}I", ctypes.string_at(at, 4 * count))

    return load


def _load_narrow(form: str, operands: tuple[str, ...], offset: int) -> Code:
    first, base, more = scalar_register(operands[0]), scalar_source(operands[1], 64), scalar_source(operands[2])
    size = struct.calcsize(form)

    def load(w: Wave) -> None:
        at = base(w) + more(w) + offset
        w.group.memory.check_one(at, size)
        w.s[first] = struct.unpack(form, ctypes.string_at(at, size))[0] & M32

    return load


def _convert_half(operands: tuple[str, ...], to_half: bool) -> Code:
    """Translate a conversion between float32 and the lower half of a scalar register; the upper one becomes zero."""
    read, put = source(operands[1], SINGLE if to_half else HALF), scalar_target(operands[0])
    if to_half:
        return lambda w: put(w, int(np.atleast_1d(bits16(as_f32(np.asarray(read(w)))))[0]))
    return lambda w: put(w, int(np.atleast_1d(bits32(as_f16(np.asarray(read(w))).astype(F32)))[0]))


def _compare_floats(test: Callable[[Any, Any], Any], a: Source, b: Source) -> Code:
    def compare(w: Wave) -> None:
        w.scc = int(bool(test(as_f32(a(w)), as_f32(b(w)))))

    return compare


def _float(name: str, operands: tuple[str, ...]) -> Code:
    """Translate float32 arithmetic in scalar registers (gfx11 on)."""
    kind = INTEGER if name == "cvt_f32_i32" else SINGLE
    sources = [source(text, kind) for text in operands[1:]]
    if name == "fmac_f32":
        sources.append(source(operands[0], SINGLE))
    put, function = scalar_target(operands[0]), _FLOATS[name] if name in _FLOATS else FLOAT32[name][1]

    def calculate(w: Wave) -> None:
        numbers: list[Array] = [np.asarray(as_f32(read(w))) for read in sources]
        put(w, int(np.asarray(function(*numbers), F32).view(U32)))

    return calculate


def _compare(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits = int(found[3])
    a, b = (scalar_source(text, bits) for text in operands[:2])
    test, mask = COMPARE["ne" if found[1] == "lg" else found[1]], (1 << bits) - 1

    def compare(w: Wave) -> None:
        w.scc = int(test(a(w) & mask, b(w) & mask))

    def compare_signed(w: Wave) -> None:
        w.scc = int(test(signed(a(w), bits), signed(b(w), bits)))

    return compare_signed if found[2] == "i" else compare


def _compare_bit(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    a, b, wanted = scalar_source(operands[0]), scalar_source(operands[1]), int(found[1])

    def compare(w: Wave) -> None:
        w.scc = int((a(w) >> (b(w) & 31)) & 1 == wanted)

    return compare


def _short(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    """Translate an instruction with a 16-bit constant."""
    put, before, number = scalar_target(operands[0]), scalar_source(operands[0]), signed(int(operands[1], 0), 16)

    def move(w: Wave) -> None:
        put(w, number)

    def multiply(w: Wave) -> None:
        put(w, signed(before(w)) * number)

    def add(w: Wave) -> None:
        total, overflow = _overflowing(signed(before(w)) + number)
        put(w, total)
        w.scc = int(bool(overflow))

    return {"mov": move, "mul": multiply, "add": add}[found[1]]


def _save_exec(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits, combine = int(found[2]), _LOGIC[found[1]]
    put, read = scalar_target(operands[0], bits), scalar_source(operands[1], bits)

    def save(w: Wave) -> None:
        before, value = w.exec, read(w)
        w.set_exec(combine(value, before) & ((1 << w.lanes) - 1))
        put(w, before)
        w.scc = int(w.exec != 0)

    return save


def _select(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits = int(found[1])
    put, a, b = scalar_target(operands[0], bits), *(scalar_source(text, bits) for text in operands[1:3])
    return lambda w: put(w, a(w) if w.scc else b(w))


def _move_if(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits = int(found[1])
    put, read = scalar_target(operands[0], bits), scalar_source(operands[1], bits)
    return lambda w: put(w, read(w)) if w.scc else None


def _logic(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits, combine = int(found[2]), _LOGIC[found[1]]
    mask = (1 << bits) - 1

    def calculate(a: int, b: int, _: int) -> _Result:
        result = combine(a, b) & mask
        return result, result != 0

    return _with_condition(operands, bits, calculate)


def _one_operand(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits = int(found[2])
    mask = (1 << bits) - 1
    put, read = scalar_target(operands[0], bits), scalar_source(operands[1], bits)

    def move(w: Wave) -> None:
        put(w, read(w) & mask)

    def invert(w: Wave) -> None:
        result = ~read(w) & mask
        put(w, result)
        w.scc = int(result != 0)

    def reverse(w: Wave) -> None:
        put(w, int(f"{read(w) & mask:0{bits}b}"[::-1], 2))

    return {"mov": move, "not": invert, "brev": reverse}[found[1]]


def _extend(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    put, read, bits = scalar_target(operands[0]), scalar_source(operands[1]), int(found[1])
    return lambda w: put(w, signed(read(w), bits))


def _count(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    put, read = scalar_target(operands[0]), scalar_source(operands[1], int(found[1]))

    def count(w: Wave) -> None:
        result = read(w).bit_count()
        put(w, result)
        w.scc = int(result != 0)

    return count


def _find(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    """Find the lowest set bit, or count the zeros above the highest; -1 if no bit is set."""
    bits, lowest = int(found[2]), found[1] in ("ff1_i32", "ctz_i32")
    put, read = scalar_target(operands[0]), scalar_source(operands[1], bits)

    def find(w: Wave) -> None:
        number = read(w)
        place = (number & -number).bit_length() - 1 if lowest else bits - number.bit_length()
        put(w, place if number else -1)

    return find


def _leading_signs(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    put, read = scalar_target(operands[0]), scalar_source(operands[1])

    def count(w: Wave) -> None:
        number = signed(read(w))
        put(w, -1 if number in (0, -1) else 32 - (number if number > 0 else ~number).bit_length())

    return count


def _set_bit(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    put, before, place = scalar_target(operands[0]), scalar_source(operands[0]), scalar_source(operands[1])
    if found[1] == "1":
        return lambda w: put(w, before(w) | 1 << (place(w) & 31))
    return lambda w: put(w, before(w) & ~(1 << (place(w) & 31)))


def _shift(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits = int(found[2])
    mask = (1 << bits) - 1

    def calculate(a: int, b: int, _: int) -> _Result:
        by = b & (bits - 1)
        shifted = {"lshl_b": a << by, "lshr_b": (a & mask) >> by, "ashr_i": signed(a, bits) >> by}[found[1]] & mask
        return shifted, shifted != 0

    return _with_condition(operands, bits, calculate, 32)


def _shift_and_add(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    by = int(found[1])
    return _with_condition(operands, 32, lambda a, b, _: ((a << by) + b, (a << by) + b > M32))


def _field(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    is_signed, bits = found[1] == "i", int(found[2])
    mask = (1 << bits) - 1

    def calculate(a: int, b: int, _: int) -> _Result:
        first, width = b & (bits - 1), (b >> 16) & 127
        result = ((a & mask) >> first) & ((1 << width) - 1)
        if is_signed and width:
            result = signed(result, width) & mask
        return result, result != 0

    return _with_condition(operands, bits, calculate, 32)


def _field_mask(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    bits = int(found[1])
    low = bits - 1
    return _with_condition(operands, bits, lambda a, b, _: (((1 << (a & low)) - 1) << (b & low), None), 32)


def _absolute(found: re.Match[str], operands: tuple[str, ...]) -> Code:
    put, read = scalar_target(operands[0]), scalar_source(operands[1])

    def absolute(w: Wave) -> None:
        result = abs(signed(read(w)))
        put(w, result)
        w.scc = int(result != 0)

    return absolute


def _with_condition(
    operands: tuple[str, ...], bits: int, calculate: Callable[[int, int, int], _Result], second_bits: int = 0
) -> Code:
    """Translate an instruction that also writes SCC: calculate(first, second, SCC) -> (result, SCC)."""
    put, a = scalar_target(operands[0], bits), scalar_source(operands[1], bits)
    b = scalar_source(operands[2], second_bits or bits)

    def run(w: Wave) -> None:
        result, condition = calculate(a(w), b(w), w.scc)
        put(w, result)
        if condition is not None:
            w.scc = int(condition)

    return run


_FORMS: tuple[tuple[str, Callable[[re.Match[str], tuple[str, ...]], Code]], ...] = (
    (r"cmpk?_(eq|lg|gt|ge|lt|le)_([iu])(32|64)", _compare),
    (r"bitcmp([01])_b32", _compare_bit),
    (r"(mov|mul|add)k(?:_co)?_i32", _short),
    (r"(\w+)_saveexec_b(32|64)", _save_exec),
    (r"cselect_b(32|64)", _select),
    (r"cmov_b(32|64)", _move_if),
    (r"(and|or|xor|andn2|and_not1|orn2|or_not1|nand|nor|xnor)_b(32|64)", _logic),
    (r"(mov|not|brev)_b(32|64)", _one_operand),
    (r"sext_i32_i(8|16)", _extend),
    (r"bcnt1_i32_b(32|64)", _count),
    (r"(ff1_i32|ctz_i32|flbit_i32|clz_i32)_[bu](32|64)", _find),
    (r"(?:flbit|cls)_i32", _leading_signs),
    (r"bitset([01])_b32", _set_bit),
    (r"(lshl_b|lshr_b|ashr_i)(32|64)", _shift),
    (r"lshl([1-4])_add_u32", _shift_and_add),
    (r"bfe_([ui])(32|64)", _field),
    (r"bfm_b(32|64)", _field_mask),
    (r"abs_i32", _absolute),
)
