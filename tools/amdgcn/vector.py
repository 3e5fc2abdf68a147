"""Vector instructions of 32 and 16 bits: one value per lane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import compare, lanes, matrix, packed, wide
from .assembly import Assembly, Instruction, Isa
from .checks import Unsupported
from .operands import HALF, INTEGER, SINGLE, Source, half, scalar_target, source, vector_register
from .tables import CLAMPED32, FLOAT16, FLOAT32, INTEGER16, INTEGER32
from .values import (
    F32,
    F64,
    HIGH,
    LOW,
    U32,
    Array,
    as_f16,
    as_f32,
    as_i32,
    bits16,
    bits32,
    division_fixup,
    division_scale,
    exponent,
    fma,
    low16,
    to_bf16,
    to_i32,
    to_u32,
)
from .wave import Code, Wave
from .wave import packed as packed_mask

_SUFFIXES = ("_e64_dpp", "_e32", "_e64", "_dpp", "_sdwa")  # encodings


def build(instruction: Instruction, assembly: Assembly) -> Code:
    """Translate a vector instruction (v_...).

    Args:
        instruction: the parsed instruction.
        assembly: the kernel that it belongs to.

    Returns:
        A function that executes the instruction on a wave.

    Raises:
        Unsupported: the instruction or one of its modifiers is not implemented.
    """
    name, isa = instruction.name.removeprefix("v_"), assembly.isa
    encoding = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    name = name.removesuffix(encoding).removeprefix("dual_")
    modifiers = instruction.modifiers
    if "mul" in modifiers or "div" in modifiers:
        raise Unsupported(instruction.text)
    if name.startswith(("cmp_", "cmpx_")):
        return compare.build(name, instruction, isa, encoding)
    if encoding in ("_dpp", "_e64_dpp"):
        return lanes.build_dpp(name, instruction, isa)
    if encoding == "_sdwa":
        return packed.build_selected(name, instruction)
    for prefixes, make in _FAMILIES:
        if name.startswith(prefixes):
            return make(name, instruction, isa)
    if name in FLOAT32:
        return _float(name, instruction)
    if name in INTEGER32:
        return _integer(name, instruction)
    if name in FLOAT16 or name in INTEGER16:
        return _narrow(name, instruction, isa)
    if name in _SINGLE:
        return _SINGLE[name](instruction, isa)
    built = lanes.build(name, instruction) or wide.build(name, instruction, isa)
    if built is None:
        raise Unsupported(instruction.text)
    return built


def _sources(instruction: Instruction, count: int, kind: str) -> tuple[int, list[Source]]:
    """Return the destination register and the readers of the sources."""
    if len(instruction.operands) != count + 1:
        raise Unsupported(instruction.text)
    return vector_register(instruction.operands[0]), [source(text, kind) for text in instruction.operands[1:]]


def _float(name: str, instruction: Instruction) -> Code:
    count, function = FLOAT32[name]
    target, (a, *rest) = _sources(instruction, count, SINGLE)
    if "clamp" in instruction.modifiers:
        plain = function

        def function(*numbers: Array) -> Array:
            return np.asarray(np.nan_to_num(np.clip(plain(*numbers), 0, 1)), F32)

    if count == 1:
        return lambda w: w.put(target, bits32(function(a(w).view(F32))))
    b = rest[0]
    if count == 2:
        return lambda w: w.put(target, bits32(function(a(w).view(F32), b(w).view(F32))))
    c = rest[1]
    return lambda w: w.put(target, bits32(function(a(w).view(F32), b(w).view(F32), c(w).view(F32))))


def _integer(name: str, instruction: Instruction) -> Code:
    table = CLAMPED32 if "clamp" in instruction.modifiers else INTEGER32
    if name not in table:
        raise Unsupported(instruction.text)
    count, function = table[name]
    target, (a, *rest) = _sources(instruction, count, INTEGER)
    if count == 1:
        return lambda w: w.put(target, function(a(w)))
    b = rest[0]
    if count == 2:
        return lambda w: w.put(target, function(a(w), b(w)))
    c = rest[1]
    return lambda w: w.put(target, function(a(w), b(w), c(w)))


def _narrow(name: str, instruction: Instruction, isa: Isa) -> Code:
    """Translate a 16-bit instruction."""
    is_float = name in FLOAT16
    count, function = FLOAT16[name] if is_float else INTEGER16[name]
    select = instruction.modifiers.get("op_sel", [0, 0, 0, 0])
    kind = HALF if is_float or name.endswith("f16") else INTEGER
    sources = [half(source(text, kind), select[at]) for at, text in enumerate(instruction.operands[1:])]
    if len(sources) != count:
        raise Unsupported(instruction.text)

    def floats(w: Wave) -> Array:
        return bits16(function(*(as_f16(read(w)) for read in sources)))

    def integers(w: Wave) -> Array:
        result: Array = function(*(np.asarray(read(w)) for read in sources))
        return result

    target = vector_register(instruction.operands[0])
    return narrow_result(target, floats if is_float else integers, isa, select[count])


def narrow_result(target: int, value: Source, isa: Isa, upper: int) -> Code:
    """Return code that writes one half; the other half keeps its value, but gfx9 clears the upper one."""
    if upper:
        return lambda w: w.put(target, (w.v[target] & LOW) | (value(w) << HIGH))
    if isa.gfx9:
        return lambda w: w.put(target, value(w))
    return lambda w: w.put(target, (w.v[target] & ~LOW) | value(w))


def _fmac(instruction: Instruction, isa: Isa) -> Code:
    target, a, b = vector_register(instruction.operands[0]), *(source(x, SINGLE) for x in instruction.operands[1:3])
    return lambda w: w.put(target, bits32(fma(as_f32(a(w)), as_f32(b(w)), as_f32(w.v[target]))))


def _fmac_half(instruction: Instruction, isa: Isa) -> Code:
    target, a, b = vector_register(instruction.operands[0]), *(source(x, HALF) for x in instruction.operands[1:3])
    if "op_sel" in instruction.modifiers:
        raise Unsupported(instruction.text)
    function = FLOAT16["fma_f16"][1]

    def added(w: Wave) -> Array:
        return bits16(function(as_f16(a(w)), as_f16(b(w)), as_f16(w.v[target])))

    return narrow_result(target, added, isa, 0)


def _fma_constant(instruction: Instruction, isa: Isa) -> Code:
    target = vector_register(instruction.operands[0])
    a, b, c = (source(text, SINGLE) for text in instruction.operands[1:])
    return lambda w: w.put(target, bits32(fma(as_f32(a(w)), as_f32(b(w)), as_f32(c(w)))))


def _to_half(instruction: Instruction, isa: Isa) -> Code:
    select = instruction.modifiers.get("op_sel", [0, 0])
    a = source(instruction.operands[1], SINGLE)
    return narrow_result(vector_register(instruction.operands[0]), lambda w: bits16(as_f32(a(w))), isa, select[-1])


def _from_half(instruction: Instruction, isa: Isa) -> Code:
    select = instruction.modifiers.get("op_sel", [0])
    target, a = vector_register(instruction.operands[0]), half(source(instruction.operands[1], HALF), select[0])
    return lambda w: w.put(target, bits32(as_f16(a(w)).astype(F32)))


def _to_integer(convert: Callable[[Array], Array]) -> Callable[[Instruction, Isa], Code]:
    def make(instruction: Instruction, isa: Isa) -> Code:
        target, a = vector_register(instruction.operands[0]), source(instruction.operands[1], SINGLE)
        return lambda w: w.put(target, convert(as_f32(a(w))))

    return make


def _scale_exponent(instruction: Instruction, isa: Isa) -> Code:
    target, a = vector_register(instruction.operands[0]), source(instruction.operands[1], SINGLE)
    b = source(instruction.operands[2])
    return lambda w: w.put(
        target, bits32(np.ldexp(as_f32(a(w)).astype(F64), np.clip(as_i32(b(w)), -400, 400)).astype(F32))
    )


def _pack_halves(instruction: Instruction, isa: Isa) -> Code:
    select = instruction.modifiers.get("op_sel", [0, 0])
    a, b = (half(source(text, HALF), select[at]) for at, text in enumerate(instruction.operands[1:3]))
    target = vector_register(instruction.operands[0])
    return lambda w: w.put(target, low16(a(w)) | (low16(b(w)) << HIGH))


def _choose(instruction: Instruction, isa: Isa) -> Code:
    target = vector_register(instruction.operands[0])
    a, b = (source(text, SINGLE) for text in instruction.operands[1:3])
    mask = compare.mask_source(instruction.operands[3] if len(instruction.operands) > 3 else "vcc", isa)
    return lambda w: w.put(target, np.where(w.mask(mask(w)), b(w), a(w)))


def _division_scale(instruction: Instruction, isa: Isa) -> Code:
    target, flag = vector_register(instruction.operands[0]), compare.mask_target(instruction.operands[1], isa)
    sources = [source(text, SINGLE) for text in instruction.operands[2:]]

    def scale(w: Wave) -> None:
        result, scaled = division_scale(*(as_f32(w.spread(read(w))) for read in sources))
        flag(w, packed_mask(scaled & w.m))
        w.put(target, bits32(result))

    return scale


def _division_fma(instruction: Instruction, isa: Isa) -> Code:
    target, sources = vector_register(instruction.operands[0]), [source(x, SINGLE) for x in instruction.operands[1:]]

    def calculate(w: Wave) -> None:
        a, b, c = (as_f32(w.spread(read(w))) for read in sources)
        plain = fma(a, b, c)
        scaled = (plain.astype(F64) * np.where(exponent(c) > 127, 2.0**64, 2.0**-64)).astype(F32)
        w.put(target, bits32(np.where(w.mask(w.vcc()), scaled, plain)))

    return calculate


def _division_fixup(instruction: Instruction, isa: Isa) -> Code:
    target, sources = vector_register(instruction.operands[0]), [source(x, SINGLE) for x in instruction.operands[1:]]
    return lambda w: w.put(target, bits32(division_fixup(*(as_f32(w.spread(read(w))) for read in sources))))


def _pack_converted(convert: Callable[[Array], Array]) -> Callable[[Instruction, Isa], Code]:
    def make(instruction: Instruction, isa: Isa) -> Code:
        target, a, b = vector_register(instruction.operands[0]), *(source(x, SINGLE) for x in instruction.operands[1:3])
        return lambda w: w.put(target, convert(a(w)) | (convert(b(w)) << HIGH))

    return make


def _dot_of_two(instruction: Instruction, isa: Isa) -> Code:
    """Translate v_dot2_bf16_bf16: the products of both halves, added. From gfx11 on Triton multiplies bfloat16 with it.

    Which of its sums a GPU rounds, and how, is not known here. A single product, with halves of 0, is rounded once.
    """
    if any(instruction.modifiers.get("op_sel", ())) or instruction.operands[3] != "0":
        raise Unsupported(instruction.text)
    a, b = (source(text) for text in instruction.operands[1:3])

    def halves(bits: Array) -> tuple[Array, Array]:
        whole = np.asarray(bits)
        return as_f32(low16(whole) << HIGH).astype(F64), as_f32((whole >> HIGH) << HIGH).astype(F64)

    def calculate(w: Wave) -> Array:
        (low, high), (other_low, other_high) = halves(a(w)), halves(b(w))
        return to_bf16(bits32(low * other_low + high * other_high))

    return narrow_result(vector_register(instruction.operands[0]), calculate, isa, 0)


def _any_logic(narrow: bool) -> Callable[[Instruction, Isa], Code]:
    """Translate v_bitop3: any function of three bits, given by its truth table of eight bits."""

    def make(instruction: Instruction, isa: Isa) -> Code:
        if narrow and any(instruction.modifiers.get("op_sel", ())):
            raise Unsupported(instruction.text)
        target, table = vector_register(instruction.operands[0]), instruction.modifiers.get("bitop3", 0)
        sources = [half(source(text), 0) if narrow else source(text) for text in instruction.operands[1:4]]

        def calculate(w: Wave) -> None:
            a, b, c = (np.asarray(read(w)) for read in sources)
            result = U32(0) & a
            for case in range(8):
                if table >> case & 1:
                    result = result | ((a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c))
            w.put(target, low16(result) if narrow else result)

        return calculate

    return make


def _scalar_result(name: str, instruction: Instruction, isa: Isa) -> Code:
    """Translate v_s_...: one value in scalar registers (gfx12)."""
    put, read, function = (
        scalar_target(instruction.operands[0]),
        source(instruction.operands[1], SINGLE),
        FLOAT32[name[2:]][1],
    )
    return lambda w: put(w, int(np.asarray(function(np.asarray(as_f32(read(w)))), F32).view(U32)))


_FAMILIES: tuple[tuple[str | tuple[str, ...], Callable[[str, Instruction, Isa], Code]], ...] = (
    ("mfma_", matrix.build_mfma),
    ("wmma_", matrix.build_wmma),
    ("pk_", packed.build),
    (("fma_mix", "mad_mix"), packed.build_mixed),
    ("s_", _scalar_result),
)
_SINGLE: dict[str, Callable[[Instruction, Isa], Code]] = {
    "fmac_f32": _fmac,
    "mac_f32": _fmac,
    "fmac_f16": _fmac_half,
    "fmaak_f32": _fma_constant,
    "fmamk_f32": _fma_constant,
    "cvt_f16_f32": _to_half,
    "cvt_f32_f16": _from_half,
    "cvt_i32_f32": _to_integer(to_i32),
    "cvt_u32_f32": _to_integer(to_u32),
    "ldexp_f32": _scale_exponent,
    "pack_b32_f16": _pack_halves,
    "cndmask_b32": _choose,
    "div_scale_f32": _division_scale,
    "div_fmas_f32": _division_fma,
    "div_fixup_f32": _division_fixup,
    "cvt_pk_bf16_f32": _pack_converted(to_bf16),
    "cvt_pk_f16_f32": _pack_converted(lambda bits: bits16(as_f32(bits))),
    "dot2_bf16_bf16": _dot_of_two,
    "bitop3_b32": _any_logic(narrow=False),
    "bitop3_b16": _any_logic(narrow=True),
}
