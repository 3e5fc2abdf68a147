"""Comparisons: one result bit per lane, into a scalar register, a register pair, or EXEC."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .assembly import Instruction, Isa
from .checks import Unsupported
from .operands import (
    DOUBLE,
    HALF,
    INTEGER,
    LONG,
    SINGLE,
    ScalarSource,
    ScalarTarget,
    Source,
    half,
    scalar_source,
    scalar_target,
    selected,
    source,
    source64,
)
from .tables import COMPARE
from .values import I64, Array, as_f16, as_f32, as_f64, as_i16, as_i32, classes, low16
from .wave import Code, Wave, packed

_VIEWS: dict[str, Callable[[Array], Array]] = {
    "f16": as_f16,
    "f32": as_f32,
    "f64": as_f64,
    "i16": as_i16,
    "i32": as_i32,
    "i64": lambda x: x.view(I64),
    "u16": low16,
    "u32": lambda x: x,
    "u64": lambda x: x,
}
_KINDS = {"f16": HALF, "f32": SINGLE, "f64": DOUBLE, "i64": LONG, "u64": LONG}


def mask_source(text: str, isa: Isa) -> ScalarSource:
    """Return a reader of a lane mask operand."""
    return scalar_source(text, isa.mask_bits)


def mask_target(text: str, isa: Isa) -> ScalarTarget:
    """Return a writer of a lane mask operand."""
    return scalar_target(text, isa.mask_bits)


def build(name: str, instruction: Instruction, isa: Isa, encoding: str) -> Code:
    """Translate a v_cmp or v_cmpx instruction.

    Args:
        name: the mnemonic without `v_` and its encoding suffix.
        instruction: the parsed instruction.
        isa: the instruction set.
        encoding: the encoding suffix, or "".

    Returns:
        A function that executes the instruction on a wave.

    Raises:
        Unsupported: the comparison is not implemented.
    """
    found = re.fullmatch(r"cmp(x?)_(\w+?)_([iufb]\d+)", name)
    if found is None or found[3] not in _VIEWS:
        raise Unsupported(instruction.text)
    to_exec, test, kind = bool(found[1]), found[2], found[3]
    # From gfx10 on, v_cmpx writes EXEC only and has no destination operand.
    operands = instruction.operands if to_exec and not isa.gfx9 else instruction.operands[1:]
    put = None if to_exec and not isa.gfx9 else mask_target(instruction.operands[0], isa)
    a, b = _sources(operands, test, kind, encoding, instruction)
    view = _VIEWS[kind]
    if test == "class":

        def result(w: Wave) -> Array:
            return np.asarray((classes(view(a(w))) & b(w)) != 0)

    else:
        compared = COMPARE[test]

        def result(w: Wave) -> Array:
            answer: Array = compared(view(a(w)), view(b(w)))
            return answer

    def compare(w: Wave) -> None:
        bits = packed(w.spread(result(w)) & w.m)
        if put is not None:
            put(w, bits)
        if to_exec:
            w.set_exec(bits)

    return compare


def _sources(
    operands: tuple[str, ...], test: str, kind: str, encoding: str, instruction: Instruction
) -> tuple[Source, Source]:
    how = _KINDS.get(kind, INTEGER)
    second = INTEGER if test == "class" else how
    if kind.endswith("64"):
        return source64(operands[0], how), source(operands[1]) if test == "class" else source64(operands[1], how)
    if encoding == "_sdwa":
        first, other = (
            selected(operands[place], instruction.modifiers.get(f"src{place}_sel", "DWORD"), how) for place in (0, 1)
        )
        return first, other
    a, b = source(operands[0], how), source(operands[1], second)
    if kind.endswith("16"):
        select = instruction.modifiers.get("op_sel", [0, 0, 0])
        return half(a, select[0]), half(b, select[1])
    return a, b
