"""Instructions on floats of one lane each: float32, float64, pairs of float32, and 16 bits, single or in pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.amdgcn.checks import Unsupported
from tools.amdgcn.values import Array, fma, fma64

from .operands import KINDS, PAIRS, narrowed, put_result, source, widened
from .text import Instruction
from .unit import Code, Unit

_TWO: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.fmin,
    "max": np.fmax,
}
_ONE: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def numbers(i: Instruction) -> Code | None:
    """Translate an operation on float32 or float64; None if it is unknown."""
    name, kind = i.name, i.parts[-1]
    dtype, flush = KINDS[kind], "ftz" in i.parts
    sources = [source(each, kind) for each in i.operands[1:]]

    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x) if flush else x

    if name == "fma":
        multiplied: Callable[[Array, Array, Array], Array] = fma64 if kind == "f64" else fma
        a, b, c = sources

        def added(u: Unit) -> Array:
            return flushed(multiplied(*np.broadcast_arrays(*(flushed(each(u)) for each in (a, b, c)))))

        return put_result(i, added)
    if name in _TWO:
        a, b = sources
        two = _TWO[name]
        if "NaN" in i.parts:
            two = {"min": np.minimum, "max": np.maximum}[name]
        return put_result(i, lambda u: flushed(two(flushed(a(u)), flushed(b(u)))).astype(dtype))
    if name in _ONE:
        (a,) = sources
        one, exact = _ONE[name], name in ("neg", "abs")

        def alone(u: Unit) -> Array:
            return one(a(u)) if exact else flushed(one(flushed(a(u)).astype(np.float64)).astype(dtype))

        return put_result(i, alone)
    return None


def pairs_of_32(i: Instruction) -> Code:
    """Translate an operation on two float32 of one register."""
    sources = [source(each, "b64") for each in i.operands[1:]]
    operation = fma if i.name == "fma" else _TWO[i.name]
    if "ftz" in i.parts:
        raise Unsupported(i.text)

    def computed(u: Unit) -> Array:
        values = np.broadcast_arrays(*(each(u) for each in sources))
        halves = [np.ascontiguousarray(value).view(np.float32) for value in values]
        return np.asarray(operation(*halves), np.float32).view(np.uint64)

    return put_result(i, computed)


def halves(i: Instruction) -> Code:
    """Translate an operation on floats of 16 bits, one or two of a register, each rounded from the exact result."""
    kind = i.parts[-1]
    parts, narrow = PAIRS[kind], kind.removesuffix("x2")
    sources = [source(each, f"b{16 * parts}") for each in i.operands[1:]]
    operation: Callable[..., Array] = (
        (lambda a, b, c: a.astype(np.float64) * b + c) if i.name == "fma" else (_TWO | _ONE)[i.name]
    )

    def computed(u: Unit) -> Array:
        values = [each(u) for each in sources]
        total = np.zeros(1, np.uint32)
        for part in range(parts):
            halves = [widened((value >> value.dtype.type(16 * part)).astype(np.uint16), narrow) for value in values]
            total = total | narrowed(operation(*halves), narrow).astype(np.uint32) << np.uint32(16 * part)
        return total.astype(np.uint16) if parts == 1 else total

    return put_result(i, computed)
