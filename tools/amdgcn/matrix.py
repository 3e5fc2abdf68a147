"""Matrix instructions: v_mfma (gfx9), v_wmma (gfx11, gfx12); products are summed in float64, in any order.

AMD's "Matrix Instruction Calculator" prints the mapping from lanes and registers to matrix elements used here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .assembly import Instruction, Isa
from .checks import Fault, Unsupported
from .operands import SINGLE, constant, register, vector_register
from .values import F16, F32, F64, HIGH, U32, Array, as_f32, halves
from .wave import Code, Wave


def build_mfma(name: str, instruction: Instruction, isa: Isa) -> Code:
    """Translate v_mfma: D = A B + C with A [size, depth] and B [depth, size].

    Each lane holds depth x size / 64 consecutive elements of row `lane % size` of A, and as many of that column of B.

    Args:
        name: the mnemonic without `v_`.
        instruction: the parsed instruction.
        isa: the instruction set.

    Returns:
        A function that executes the instruction on a wave.

    Raises:
        Unsupported: the shape or dtype is not implemented.
    """
    found = re.fullmatch(r"mfma_f32_(\d+)x\d+x(\d+)_?(f32|f16|bf16)(?:_1k)?", name)
    if found is None or instruction.modifiers:
        raise Unsupported(instruction.text)
    size, depth, numbers = int(found[1]), int(found[2]), _READ[found[3]]
    run_length = depth * size // 64
    lane, results = np.arange(64), size * size // 64
    number = np.arange(results)[:, None]
    rows = 8 * (number // 4) + 4 * (lane // 32) + number % 4 if size == 32 else 4 * (lane // 16) + number
    columns = np.broadcast_to(lane % size, rows.shape)
    target, a, b = (vector_register(text) for text in instruction.operands[:3])
    added = _added(instruction.operands[3], results)

    def matrix(w: Wave, first: int) -> Array:
        held = numbers(w, first, run_length)
        made = np.empty((size, depth))
        for place in range(run_length):
            made[lane % size, run_length * (lane // size) + place] = held[place]
        return made

    def multiply(w: Wave) -> None:
        product = matrix(w, a) @ matrix(w, b).T
        # v_mfma ignores EXEC.
        w.v[target : target + results] = (product[rows, columns] + added(w)).astype(F32).view(U32)

    return multiply


def build_wmma(name: str, instruction: Instruction, isa: Isa) -> Code:
    """Translate v_wmma 16 x 16 x 16.

    On gfx11 both halves of a wave hold the whole operand; on gfx12 each half holds one half of its depth.

    Args:
        name: the mnemonic without `v_`.
        instruction: the parsed instruction.
        isa: the instruction set.

    Returns:
        A function that executes the instruction on a wave.

    Raises:
        Unsupported: the dtype is not implemented.
    """
    found = re.fullmatch(r"wmma_f32_16x16x16_(bf16|f16)", name)
    if found is None or instruction.modifiers:
        raise Unsupported(instruction.text)
    lane, number = np.arange(32), np.arange(8)[:, None]
    rows = 8 * (lane // 16) + number if isa.gfx12 else 2 * number + lane // 16
    columns = np.broadcast_to(lane % 16, (8, 32))
    target, a, b = (vector_register(text) for text in instruction.operands[:3])
    added, numbers = _added(instruction.operands[3], 8), _READ[found[1]]

    def matrix(w: Wave, first: int) -> Array:
        """Return the operand as a matrix [rows, depth]."""
        if isa.gfx12:
            held = numbers(w, first, 8)
            return np.concatenate([held[:, :16], held[:, 16:]]).T
        bits = w.v[first : first + 8]
        if not np.array_equal(bits[:, :16], bits[:, 16:]):
            raise Fault("v_wmma: the two halves of the wave hold different operands")
        return numbers(w, first, 16)[:, :16].T

    def multiply(w: Wave) -> None:
        if not w.full:
            raise Fault("v_wmma with inactive lanes")
        product = matrix(w, a) @ matrix(w, b).T
        w.v[target : target + 8] = (product[rows, columns] + added(w)).astype(F32).view(U32)

    return multiply


def _added(text: str, registers: int) -> Callable[[Wave], Array]:
    """Return a reader of C as float64: [registers, lanes], or one constant."""
    if register(text) is None:
        number = np.array(constant(text, SINGLE), U32).view(F32).astype(F64)
        return lambda w: number
    first = vector_register(text)
    return lambda w: as_f32(w.v[first : first + registers]).astype(F64)


def _read32(w: Wave, first: int, count: int) -> Array:
    return as_f32(w.v[first : first + count]).astype(F64)


def _read16(w: Wave, first: int, count: int) -> Array:
    return halves(w.v[first : first + count // 2]).view(F16).astype(F64)


def _read_bf16(w: Wave, first: int, count: int) -> Array:
    return (halves(w.v[first : first + count // 2]).astype(U32) << HIGH).view(F32).astype(F64)


# Readers of [count, lanes] float64, with `count` elements per lane.
_READ: dict[str, Callable[[Wave, int, int], Array]] = {"f32": _read32, "f16": _read16, "bf16": _read_bf16}
