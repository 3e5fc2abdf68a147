"""Operands: functions that read and write registers and constants, built from the operand's text.

Sources read as uint32: one value per lane for vector registers, one value for everything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from .checks import Unsupported
from .values import (
    HIGH,
    I32,
    LOW,
    M32,
    M64,
    U32,
    U64,
    Array,
    as_i32,
    f16_constant,
    f32_constant,
    f64_constant,
)
from .wave import ACCUMULATORS, VCC, Wave

Source = Callable[[Wave], Array]
ScalarSource = Callable[[Wave], int]
ScalarTarget = Callable[[Wave, int], None]
NULL = 125
_NAMED = {"ttmp7": 115, "ttmp9": 117, "vcc_lo": VCC, "vcc_hi": VCC + 1, "vcc": VCC, "m0": 124, "null": NULL}
_ONE_OVER_TWO_PI = ("0.15915494", "0.15915494309189532")
# Interpretation of a constant: 32-bit integer, float32, float16, float64, 64-bit integer.
INTEGER, SINGLE, HALF, DOUBLE, LONG = "i", "f", "h", "d", "q"


@dataclass(frozen=True)
class Register:
    """A register or the first of a range.

    Attributes:
        file: `v`, `s`, `exec`, `exec_lo` or `exec_hi`.
        first: index of the (first) register; accumulators follow the vector registers in file `v`.
    """

    file: str
    first: int


def register(text: str) -> Register | None:
    """Parse a register operand; None means that the text is a constant."""
    found = re.fullmatch(r"([vsa])(?:(\d+)|\[(\d+):\d+\])", text)
    if found:
        number = int(found[2] or found[3])
        return Register("s" if found[1] == "s" else "v", number + (ACCUMULATORS if found[1] == "a" else 0))
    if text in _NAMED:
        return Register("s", _NAMED[text])
    return Register(text, 0) if text in ("exec", "exec_lo", "exec_hi") else None


def vector_register(text: str) -> int:
    """Return the index of a vector register operand, or raise Unsupported."""
    found = register(text)
    if found is None or found.file != "v":
        raise Unsupported(f"operand {text}: expected a vector register")
    return found.first


def scalar_register(text: str) -> int:
    """Return the index of a scalar register operand, or raise Unsupported."""
    found = register(text)
    if found is None or found.file != "s":
        raise Unsupported(f"operand {text}: expected a scalar register")
    return found.first


def constant(text: str, kind: str) -> int:
    """Return the bits of a constant operand of the given kind."""
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        number = int(text, 0)
        if kind == DOUBLE:  # an inline integer, or the upper half of a literal
            return (number << 32 if "0x" in text else number) & M64
        return number & (M64 if kind == LONG else M32)
    try:
        value = 1 / (2 * math.pi) if text in _ONE_OVER_TWO_PI else float(text)
    except ValueError:
        raise Unsupported(f"operand {text}: not a constant") from None
    if kind in (INTEGER, SINGLE):
        return f32_constant(value)
    return f16_constant(value) if kind == HALF else f64_constant(value)


@dataclass(frozen=True)
class Modified:
    """An operand with its modifiers (negation, absolute value, sign extension) split off."""

    text: str
    negative: bool = False
    absolute: bool = False
    sign_extended: bool = False


def modified(text: str) -> Modified:
    """Split the modifiers off an operand."""
    negative = absolute = extended = False
    while True:
        if text.startswith("-") and (register(text[1:]) or text[1:2] == "|"):
            negative, text = True, text[1:]
        elif text.startswith("|") and text.endswith("|"):
            absolute, text = True, text[1:-1]
        elif text.startswith("neg("):
            negative, text = True, text[4:-1]
        elif text.startswith("abs("):
            absolute, text = True, text[4:-1]
        elif text.startswith("sext("):
            extended, text = True, text[5:-1]
        else:
            return Modified(text, negative, absolute, extended)


def source(text: str, kind: str = INTEGER) -> Source:
    """Return a reader of a 32-bit operand, with its modifiers applied.

    Args:
        text: the operand.
        kind: interpretation of a constant; HALF puts the sign modifiers at bit 15.

    Returns:
        A function that reads the operand as uint32.
    """
    operand = modified(text)
    read = _plain_source(operand.text, kind)
    sign = U32(0x8000 if kind == HALF else 0x80000000)
    keep = ~sign
    if operand.absolute and operand.negative:
        return lambda w: read(w) | sign
    if operand.absolute:
        return lambda w: read(w) & keep
    return (lambda w: read(w) ^ sign) if operand.negative else read


def _plain_source(text: str, kind: str) -> Source:
    found = register(text)
    if found is None:
        bits = U32(constant(text, kind))
        return lambda w: bits  # type: ignore[return-value]  # a numpy scalar stands for as many as there are lanes
    place = found.first
    if found.file == "v":
        return lambda w: w.v[place]
    read = scalar_source(text)
    return lambda w: U32(read(w) & M32)  # type: ignore[return-value]


def source64(text: str, kind: str = LONG) -> Source:
    """Return a reader of a 64-bit operand as uint64, from a pair of registers."""
    operand = modified(text)
    read = _plain_source64(operand.text, kind)
    if operand.absolute and operand.negative:
        return lambda w: read(w) | U64(1 << 63)
    if operand.absolute:
        return lambda w: read(w) & U64(M64 >> 1)
    return (lambda w: read(w) ^ U64(1 << 63)) if operand.negative else read


def _plain_source64(text: str, kind: str) -> Source:
    found = register(text)
    if found is None:
        bits = U64(constant(text, kind))
        return lambda w: bits  # type: ignore[return-value]
    place = found.first
    if found.file == "v":
        return lambda w: w.v[place].astype(U64) | (w.v[place + 1].astype(U64) << U64(32))
    read = scalar_source(text, 64)
    return lambda w: U64(read(w))  # type: ignore[return-value]


def half(read: Source, upper: int) -> Source:
    """Return a reader of one half of each value, moved to the lower half."""
    return (lambda w: read(w) >> HIGH) if upper else (lambda w: read(w) & LOW)


def selected(text: str, select: str, kind: str) -> Source:
    """Return a reader of an SDWA operand: one byte or half of each value, in the lowest bits."""
    operand = modified(text)
    if operand.negative or operand.absolute:
        raise Unsupported(f"operand {text}: SDWA does not support source modifiers here")
    read = source(operand.text, kind)
    bits = {"B": 8, "W": 16, "D": 32}[select[0]]
    shift = U32(0 if bits == 32 else bits * int(select[-1]))
    mask, free = U32((1 << bits) - 1), U32(32 - bits)

    def part(w: Wave) -> Array:
        return (read(w) >> shift) & mask

    def extended(w: Wave) -> Array:
        return (as_i32(part(w) << free) >> I32(free)).view(U32)

    return extended if operand.sign_extended else part


def scalar_source(text: str, bits: int = 32) -> ScalarSource:
    """Return a reader of a scalar operand of 32 or 64 bits as a Python int."""
    found = register(text)
    if found is None:
        value = constant(text, LONG if bits == 64 else INTEGER)
        return lambda w: value
    place = found.first
    if found.file == "exec" or (found.file == "exec_lo" and bits == 64):
        return lambda w: w.exec
    if found.file == "exec_lo":
        return lambda w: w.exec & M32
    if found.file == "exec_hi":
        return lambda w: w.exec >> 32
    if found.file != "s":
        raise Unsupported(f"operand {text}: expected a scalar register or a constant")
    if place == NULL:
        return lambda w: 0
    if bits == 64:
        return lambda w: w.s[place] | w.s[place + 1] << 32
    return lambda w: w.s[place]


def scalar_target(text: str, bits: int = 32) -> ScalarTarget:
    """Return a writer of a scalar destination of 32 or 64 bits; writes to `null` are dropped."""
    found = register(text)
    if found is not None and found.file in ("exec", "exec_lo"):
        return lambda w, x: w.set_exec(x)
    place = scalar_register(text)

    def nowhere(w: Wave, x: int) -> None:
        pass

    def put(w: Wave, x: int) -> None:
        w.s[place] = x & M32

    def put_pair(w: Wave, x: int) -> None:
        w.s[place], w.s[place + 1] = x & M32, (x >> 32) & M32

    return nowhere if place == NULL else put_pair if bits == 64 else put
