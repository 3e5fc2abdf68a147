"""Instructions on parts of registers: packed 16-bit and float32 pairs, mixed precision, and SDWA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly import Instruction, Isa
from .checks import Unsupported
from .operands import HALF, INTEGER, SINGLE, Source, half, modified, register, selected, source, vector_register
from .tables import FLOAT16, FLOAT32, INTEGER16, INTEGER32
from .values import F32, HIGH, LOW, U32, Array, as_f16, as_f32, bits16, bits32, fma, low16, to_i32, to_u32
from .wave import ACCUMULATORS, Code, Wave

_PAIRS: dict[str, Callable[..., Array]] = {
    "pk_add_f32": lambda a, b: a + b,
    "pk_mul_f32": lambda a, b: a * b,
    "pk_fma_f32": fma,
}


def build(name: str, instruction: Instruction, isa: Isa) -> Code:
    """Translate a packed instruction (v_pk_...), which computes two results."""
    if name in _PAIRS or name == "pk_mov_b32":
        return _pair(name, instruction)
    count = len(instruction.operands) - 1
    target, operation, modifiers = vector_register(instruction.operands[0]), name[3:], instruction.modifiers
    is_float = operation.endswith("f16")
    if operation not in (FLOAT16 if is_float else INTEGER16):
        raise Unsupported(instruction.text)
    function = (FLOAT16 if is_float else INTEGER16)[operation][1]
    sources = [source(text, HALF if is_float else INTEGER) for text in instruction.operands[1:]]

    def part(select: list[int], negate: list[int]) -> Source:
        parts = [half(read, select[place]) for place, read in enumerate(sources)]

        def floats(w: Wave) -> Array:
            numbers = [as_f16(read(w)) for read in parts]
            return bits16(function(*(-x if negate[place] else x for place, x in enumerate(numbers))))

        def integers(w: Wave) -> Array:
            result: Array = function(*(np.asarray(read(w)) for read in parts))
            return result

        return floats if is_float else integers

    low = part(modifiers.get("op_sel", [0] * count), modifiers.get("neg_lo", [0] * count))
    high = part(modifiers.get("op_sel_hi", [1] * count), modifiers.get("neg_hi", [0] * count))
    return lambda w: w.put(target, low16(low(w)) | (low16(high(w)) << HIGH))


def _pair(name: str, instruction: Instruction) -> Code:
    """Translate a packed float32 instruction; each operand is a pair of registers."""
    count = len(instruction.operands) - 1
    target, modifiers = vector_register(instruction.operands[0]), instruction.modifiers
    select = modifiers.get("op_sel", [0] * count), modifiers.get("op_sel_hi", [1] * count)
    negate = modifiers.get("neg_lo", [0] * count), modifiers.get("neg_hi", [0] * count)

    def operand(text: str, second: int, negative: int) -> Source:
        found = register(text)
        if found is not None:
            text = _name(found.file, found.first + (1 if second else 0))
        read = source(text, SINGLE)
        return (lambda w: read(w) ^ U32(0x80000000)) if negative else read

    if name == "pk_mov_b32":
        a, b = operand(instruction.operands[1], select[0][0], 0), operand(instruction.operands[2], select[0][1], 0)

        def move(w: Wave) -> None:
            first, second = np.array(a(w)), np.array(b(w))
            w.put(target, first)
            w.put(target + 1, second)

        return move
    function = _PAIRS[name]
    low, high = (
        [operand(text, select[side][place], negate[side][place]) for place, text in enumerate(instruction.operands[1:])]
        for side in (0, 1)
    )

    def calculate(w: Wave) -> None:
        first = bits32(function(*(as_f32(read(w)) for read in low)))
        second = bits32(function(*(as_f32(read(w)) for read in high)))
        w.put(target, first)
        w.put(target + 1, second)

    return calculate


def _name(file: str, number: int) -> str:
    if file != "v":
        return f"s{number}"
    return f"v{number}" if number < ACCUMULATORS else f"a{number - ACCUMULATORS}"


def build_mixed(name: str, instruction: Instruction, isa: Isa) -> Code:
    """Translate v_fma_mix..., with float16 or float32 operands."""
    if "clamp" in instruction.modifiers:
        raise Unsupported(instruction.text)
    upper = instruction.modifiers.get("op_sel", [0, 0, 0])
    narrow = instruction.modifiers.get("op_sel_hi", [0, 0, 0])
    sources = [_mixed(text, upper[at], narrow[at]) for at, text in enumerate(instruction.operands[1:])]
    target = vector_register(instruction.operands[0])

    def value(w: Wave) -> Array:
        return fma(*(np.asarray(read(w), F32) for read in sources))

    if name.endswith("mix_f32"):
        return lambda w: w.put(target, bits32(value(w)))
    if "mixlo" in name:
        return lambda w: w.put(target, (w.v[target] & ~LOW) | bits16(value(w)))
    return lambda w: w.put(target, (w.v[target] & LOW) | (bits16(value(w)) << HIGH))


def _mixed(text: str, upper: int, narrow: int) -> Source:
    """Return a reader of one operand, widened to float32."""
    operand = modified(text)
    read = half(source(operand.text, HALF), upper) if narrow else source(operand.text, SINGLE)

    def number(w: Wave) -> Array:
        x = as_f16(read(w)).astype(F32) if narrow else as_f32(read(w))
        x = np.abs(x) if operand.absolute else x
        return -x if operand.negative else x

    return number


def build_selected(name: str, instruction: Instruction) -> Code:
    """Translate an SDWA instruction (gfx9): operands and result are a byte or a half of their registers."""
    kind = SINGLE if name in FLOAT32 else INTEGER
    modifiers, texts = instruction.modifiers, [text for text in instruction.operands[1:] if text != "vcc"]
    sources = [selected(text, modifiers.get(f"src{at}_sel", "DWORD"), kind) for at, text in enumerate(texts)]
    target, value = vector_register(instruction.operands[0]), _selected_value(name, sources, instruction)
    select, unused = modifiers.get("dst_sel", "DWORD"), modifiers.get("dst_unused", "UNUSED_PAD")
    if select == "DWORD":
        return lambda w: w.put(target, value(w))
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise Unsupported(instruction.text)
    bits = 8 if select.startswith("BYTE") else 16
    shift = U32(bits * int(select[-1]))
    mask = U32((1 << bits) - 1) << shift

    def run(w: Wave) -> None:
        part = (np.asarray(value(w)) << shift) & mask
        w.put(target, part | (w.v[target] & ~mask) if unused == "UNUSED_PRESERVE" else part)

    return run


def _selected_value(name: str, sources: list[Source], instruction: Instruction) -> Source:
    if name == "cndmask_b32":
        a, b = sources
        return lambda w: np.where(w.mask(w.vcc()), b(w), a(w))
    conversions: dict[str, Callable[[Array], Array]] = {
        "cvt_f32_f16": lambda x: bits32(as_f16(x).astype(F32)),
        "cvt_f16_f32": lambda x: bits16(as_f32(x)),
        "cvt_i32_f32": lambda x: to_i32(as_f32(x)),
        "cvt_u32_f32": lambda x: to_u32(as_f32(x)),
    }
    if name in conversions:
        convert, (only,) = conversions[name], sources
        return lambda w: convert(only(w))
    function: Callable[..., Any]
    if name in FLOAT32:
        function = FLOAT32[name][1]
        return lambda w: bits32(function(*(as_f32(read(w)) for read in sources)))
    if name in FLOAT16:
        function = FLOAT16[name][1]
        return lambda w: bits16(function(*(as_f16(read(w)) for read in sources)))
    if name not in INTEGER32 and name not in INTEGER16:
        raise Unsupported(instruction.text)
    function = (INTEGER32.get(name) or INTEGER16[name])[1]
    return lambda w: np.asarray(function(*(read(w) for read in sources)))
