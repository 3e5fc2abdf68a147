"""Unpacks the codes of stored weights inside kernels, into numbers of 16 bits without their scales.

A word of 16 bits holds two codes of 8 bits or four of 4 bits, 16 columns apart (see `stored`). Unpacking a tile of
words therefore gives two or four tiles of numbers without moving any between threads. Every result is exact in
bfloat16 and float16, but those of nf4, which are rounded to them.

The assembly handles two words at a time, for NVIDIA from Hopper on (`mul.bf16x2`). Elsewhere the same bits are made one
by one. Small floats of other formats become numbers by moving their bits to the place of exponent and mantissa, and
by a product with the difference of the exponents' biases, which is right for subnormal numbers too.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from .code_tables import E2M1_BITS, TABLES
from .stored_exponents import RAISE

# Operands: $0 to $3 results, then the words, then the number that stands for 0: 128 + zero, or 1024 + zero in float16.
_INT4_BF16 = tl.constexpr("""{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $0, $0, $5;
sub.bf16x2 $1, $1, $5;
sub.bf16x2 $2, $2, $5;
sub.bf16x2 $3, $3, $5;
}""")
_INT4_F16 = tl.constexpr(_INT4_BF16.value.replace("0x43004300", "0x64006400").replace("bf16x2", "f16x2"))
BF16_BITS, F16_BITS = E2M1_BITS[0], (9, 10, 11, 15)  # places of mantissa, exponent and sign in 16-bit floats


def _e2m1(kind: str, factor: int, wanted: tuple[int, ...]) -> str:
    """Return the assembly that moves bits to the places `wanted` of 16-bit floats. factor: multiplied in; 0: none."""
    lines = [".reg .b32 t, f;"]
    for code, places in enumerate(E2M1_BITS):
        masks: dict[int, int] = {}
        for place, goal in zip(places, wanted, strict=True):
            masks[goal - place] = masks.get(goal - place, 0) | 0x10001 << goal
        for number, (by, mask) in enumerate(sorted(masks.items(), key=lambda item: item[0] != 0)):
            moved = "t" if by else "$4"
            if by:
                lines.append(f"{'shl.b32' if by > 0 else 'shr.u32'} t, $4, {abs(by)};")
            if number:
                lines.append(f"lop3.b32 ${code}, {moved}, {mask:#010x}, ${code}, 0xea;")
            else:
                lines.append(f"and.b32 ${code}, {moved}, {mask:#010x};")
    if factor:
        lines += [f"mov.b32 f, {factor:#x};", *(f"mul.{kind} ${code}, ${code}, f;" for code in range(4))]
    return "\n".join(("{", *lines, "}"))


_E2M1_BF16 = tl.constexpr(_e2m1("bf16x2", 0x7E807E80, BF16_BITS))  # 2 ** 126
_E2M1_F16 = tl.constexpr(_e2m1("f16x2", 0x74007400, F16_BITS))  # 2 ** 14
_TINY_BF16, _TINY_F16 = tl.constexpr(_e2m1("", 0, BF16_BITS)), tl.constexpr(_e2m1("", 0, F16_BITS))
# Two words, each with four codes, look up the high and the low bytes of four numbers: a `prmt` chooses among the bytes
# of two registers, so that two of them and a third one between their results choose among 16. The last ones put the
# bytes of the same place of both words beside each other.
_WORD_OF_TABLE = """and.b32 s, w, 0x7777;
shr.u32 p, w, 1;
lop3.b32 p, p, 0x4444, 0x3210, 0xea;
prmt.b32 l, HIGH0, HIGH1, s;
prmt.b32 h, HIGH2, HIGH3, s;
prmt.b32 h, l, h, p;
prmt.b32 l, LOW0, LOW1, s;
prmt.b32 s, LOW2, LOW3, s;
prmt.b32 l, l, s, p;
"""
_TABLE = (
    """{
.reg .b32 w, s, p, l, h, a, b, c, d;
mov.b32 w, $4;
"""
    + _WORD_OF_TABLE
    + """prmt.b32 a, l, h, 0x5140;
prmt.b32 b, l, h, 0x7362;
shr.u32 w, $4, 16;
"""
    + _WORD_OF_TABLE
    + """prmt.b32 c, l, h, 0x5140;
prmt.b32 d, l, h, 0x7362;
prmt.b32 $0, a, c, 0x5410;
prmt.b32 $1, a, c, 0x7632;
prmt.b32 $2, b, d, 0x5410;
prmt.b32 $3, b, d, 0x7632;
}"""
)


def _table(code: str, dtype: torch.dtype) -> str:
    """Return the assembly for the table of a code, rounded to 16 bits."""
    bits = torch.tensor(TABLES[code]).to(dtype).view(torch.int16).tolist()
    octets = struct.pack("<16h", *bits)
    text = _TABLE
    for place in range(4):
        four = octets[8 * place : 8 * place + 8]
        for name, first in (("LOW", 0), ("HIGH", 1)):
            (value,) = struct.unpack("<I", four[first::2])
            text = text.replace(f"{name}{place}", f"{value:#010x}")
    return text


_NF4_BF16, _NF4_F16 = (tl.constexpr(_table("nf4", each)) for each in (torch.bfloat16, torch.float16))
_IQ4_BF16, _IQ4_F16 = (tl.constexpr(_table("iq4", each)) for each in (torch.bfloat16, torch.float16))
_PLACES = tl.constexpr(E2M1_BITS)
_RAISE = tl.constexpr(RAISE)
_NF4, _IQ4 = tl.constexpr(TABLES["nf4"]), tl.constexpr(TABLES["iq4"])
_INT8_BF16 = tl.constexpr("""{
.reg .b32 a, b, c;
shr.u32 a, $2, 8;
lop3.b32 b, $2, 0x00800080, 0x43004300, 0xea;
lop3.b32 c, a, 0x00800080, 0x43004300, 0xea;
lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
lop3.b32 $1, a, 0x007f007f, 0x43004300, 0xea;
sub.bf16x2 $0, $0, b;
sub.bf16x2 $1, $1, c;
}""")
_INT8_F16 = tl.constexpr("""{
.reg .b32 a, b;
mov.b32 b, 0x64806480;
shr.u32 a, $2, 8;
lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
lop3.b32 $1, a, 0x00ff00ff, 0x64806480, 0x6a;
sub.f16x2 $0, $0, b;
sub.f16x2 $1, $1, b;
}""")
_E4M3 = """{
.reg .b32 a, b, f;
mov.b32 f, FACTOR;
shl.b32 a, $2, LEFT;
RIGHT b, $2, BY;
and.b32 a, a, MASK;
and.b32 b, b, MASK;
shl.b32 $0, $2, 8;
lop3.b32 $0, $0, 0x80008000, a, 0xea;
lop3.b32 $1, $2, 0x80008000, b, 0xea;
mul.TYPE $0, $0, f;
mul.TYPE $1, $1, f;
}"""


def _e4m3(kind: str, factor: int, mask: int, shift: int) -> str:
    """Return the assembly for 16-bit floats with bit `shift` as the third bit of the mantissa."""
    text = _E4M3.replace("TYPE", kind).replace("FACTOR", f"{factor:#x}").replace("MASK", f"{mask:#010x}")
    return text.replace("LEFT", str(shift)).replace("RIGHT", "shr.u32").replace("BY", str(8 - shift))


_E4M3_BF16 = tl.constexpr(_e4m3("bf16x2", 0x7B807B80, 0x07F007F0, 4))  # 2 ** 120
_E4M3_F16 = tl.constexpr(_e4m3("f16x2", 0x5C005C00, 0x3F803F80, 7))  # 2 ** 8


@triton.jit
def _four(words, zero, TEXT: tl.constexpr, HALF: tl.constexpr):
    if HALF:
        return tl.inline_asm_elementwise(
            TEXT,
            "=&r,=&r,=&r,=&r,r,r",
            [words, zero],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            TEXT,
            "=&r,=&r,=&r,=&r,r,r",
            [words, zero],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _two(words, TEXT: tl.constexpr, HALF: tl.constexpr):
    if HALF:
        return tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def _float(sign, magnitude, SHIFT: tl.constexpr, FACTOR: tl.constexpr, TYPE: tl.constexpr):
    """Return the number with a sign of 0 or 1 and the bits of exponent and mantissa at bit SHIFT of 32."""
    return ((((sign << 31) | (magnitude << SHIFT)).to(tl.float32, bitcast=True)) * FACTOR).to(TYPE)


@triton.jit
def _looked_up(code, TABLE: tl.constexpr):
    """Return the numbers of codes of 4 bits, float32."""
    one, two, three, four = code & 1 != 0, code & 2 != 0, code & 4 != 0, code & 8 != 0
    a = tl.where(two, tl.where(one, TABLE[3], TABLE[2]), tl.where(one, TABLE[1], TABLE[0]))
    b = tl.where(two, tl.where(one, TABLE[7], TABLE[6]), tl.where(one, TABLE[5], TABLE[4]))
    c = tl.where(two, tl.where(one, TABLE[11], TABLE[10]), tl.where(one, TABLE[9], TABLE[8]))
    d = tl.where(two, tl.where(one, TABLE[15], TABLE[14]), tl.where(one, TABLE[13], TABLE[12]))
    return tl.where(four, tl.where(three, d, c), tl.where(three, b, a))


@triton.jit
def _nibble(wide, zero, PLACE: tl.constexpr, CODE: tl.constexpr, HALF: tl.constexpr):
    TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    code = (wide >> (4 * PLACE)) & 15
    if CODE == "int4":
        FIRST: tl.constexpr = 1024 if HALF else 128
        return ((code + FIRST).to(tl.float32) - zero.to(tl.float32)).to(TYPE)
    elif CODE == "nf4":
        return _looked_up(code, _NF4).to(TYPE)
    elif CODE == "iq4":
        return _looked_up(code, _IQ4).to(TYPE)
    else:
        MANTISSA: tl.constexpr = _PLACES[PLACE][0]
        HIGH: tl.constexpr = _PLACES[PLACE][2]  # bit of the exponent; the last code has a gap below it
        size = ((wide >> MANTISSA) & 3) | ((wide >> (HIGH - 2)) & 4)
        return _float((wide >> _PLACES[PLACE][3]) & 1, size, 22, 2.0**126, TYPE)


@triton.jit
def _octet(wide, PLACE: tl.constexpr, CODE: tl.constexpr, HALF: tl.constexpr):
    TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    code = (wide >> (8 * PLACE)) & 255
    if CODE == "int8":
        return ((code & 127) - (code & 128)).to(tl.float32).to(TYPE)
    else:
        return _float(code >> 7, code & 127, 20, 2.0**120, TYPE)


@triton.jit
def unpack_four(
    words, zero, CODE: tl.constexpr, HALF: tl.constexpr, ASSEMBLY: tl.constexpr, TINY: tl.constexpr = False
):
    """Unpack int16 words into four tiles of bfloat16 numbers, or of float16 ones with HALF.

    zero: of the same shape and the type of the result: 128 (in float16 1024) + the code of 0. Only int4 uses it. TINY:
    with ASSEMBLY leave numbers of e2m1 too small by what `unpack_exponents` multiplies into its factors.
    """
    if ASSEMBLY and CODE == "int4":
        return _four(words, zero, _INT4_F16 if HALF else _INT4_BF16, HALF)
    elif ASSEMBLY and CODE == "nf4":
        return _four(words, zero, _NF4_F16 if HALF else _NF4_BF16, HALF)
    elif ASSEMBLY and CODE == "iq4":
        return _four(words, zero, _IQ4_F16 if HALF else _IQ4_BF16, HALF)
    elif ASSEMBLY and TINY:
        return _four(words, zero, _TINY_F16 if HALF else _TINY_BF16, HALF)
    elif ASSEMBLY:
        return _four(words, zero, _E2M1_F16 if HALF else _E2M1_BF16, HALF)
    else:
        wide = words.to(tl.int32) & 0xFFFF
        return (
            _nibble(wide, zero, 0, CODE, HALF),
            _nibble(wide, zero, 1, CODE, HALF),
            _nibble(wide, zero, 2, CODE, HALF),
            _nibble(wide, zero, 3, CODE, HALF),
        )


@triton.jit
def unpack_two(words, CODE: tl.constexpr, HALF: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Unpack int16 words into two tiles of bfloat16 numbers, or of float16 ones with HALF."""
    if ASSEMBLY and CODE == "int8":
        return _two(words, _INT8_F16 if HALF else _INT8_BF16, HALF)
    elif ASSEMBLY:
        return _two(words, _E4M3_F16 if HALF else _E4M3_BF16, HALF)
    else:
        wide = words.to(tl.int32) & 0xFFFF
        return _octet(wide, 0, CODE, HALF), _octet(wide, 1, CODE, HALF)


@triton.jit
def unpack_factors(factors, HALF: tl.constexpr):
    """Unpack int32 words into four tensors of e4m3 numbers, the one in the lowest bits first; see `unpack_four`."""
    return (
        _octet(factors, 0, "e4m3", HALF),
        _octet(factors, 1, "e4m3", HALF),
        _octet(factors, 2, "e4m3", HALF),
        _octet(factors, 3, "e4m3", HALF),
    )


@triton.jit
def unpack_exponents(exponents, HALF: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Unpack the two lowest bytes of int32 words into two tensors of factors; see `Codes.exponents`.

    They are powers of two, and 0. With ASSEMBLY they make up for numbers that are TINY.
    """
    first, second = exponents & 255, (exponents >> 8) & 255
    if ASSEMBLY and HALF:
        # A float16 has exponents with a bias of 15, and its numbers are too small by 2 ** 14.
        first = tl.maximum(first - (_RAISE + 98), 0) << 10
        second = tl.maximum(second - (_RAISE + 98), 0) << 10
        return first.to(tl.int16).to(tl.float16, bitcast=True), second.to(tl.int16).to(tl.float16, bitcast=True)
    elif ASSEMBLY:
        first, second = (first << 7).to(tl.int16), (second << 7).to(tl.int16)
        return first.to(tl.bfloat16, bitcast=True), second.to(tl.bfloat16, bitcast=True)
    else:
        TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
        first = tl.maximum(first - _RAISE, 0) << 23
        second = tl.maximum(second - _RAISE, 0) << 23
        return first.to(tl.float32, bitcast=True).to(TYPE), second.to(tl.float32, bitcast=True).to(TYPE)
