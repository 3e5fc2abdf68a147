"""Operands: readers of registers, constants and addresses."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tools.amdgcn.checks import Unsupported
from tools.amdgcn.values import Array, to_bf16

from .text import Instruction, Operand, Place, Register
from .unit import Code, Source, Unit

# dtype of a PTX type, and that of its register.
KINDS: dict[str, type[np.generic]] = {
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "pred": np.bool_,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
}
PAIRS = {"bf16": 1, "f16": 1, "bf16x2": 2, "f16x2": 2}  # numbers of 16 bits of a type
SHARED, PARAMETERS = 1 << 24, 1 << 56  # where they begin, as addresses
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.([xyz])")


def bytes_of(kind: str) -> int:
    """Return the bytes of a PTX type.

    Raises:
        Unsupported: it is unknown.
    """
    if kind not in KINDS:
        raise Unsupported(kind)
    return np.dtype(KINDS[kind]).itemsize


def constant(text: str, kind: str) -> Array:
    """Return a constant as [1] of a PTX type."""
    dtype = np.dtype(KINDS[kind])
    if text.startswith(("0f", "0F")):
        bits = np.frombuffer(bytes.fromhex(text[2:]), ">u4").astype(np.uint32)
        return bits.view(np.float32) if kind == "f32" else bits.view(KINDS[kind])
    if text.startswith(("0d", "0D")):
        return np.frombuffer(bytes.fromhex(text[2:]), ">f8").astype(np.float64)
    number = int(text.rstrip("U"), 0)
    if dtype == np.bool_:
        return np.array([number != 0])
    if dtype.kind == "f":
        return np.array([number], dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.array([number & ((1 << 8 * dtype.itemsize) - 1)], unsigned).view(dtype)


def source(operand: Operand, kind: str) -> Source:
    """Return a reader of an operand as a PTX type: [lanes], or [1] of a constant.

    Raises:
        Unsupported: the operand is unknown.
    """
    dtype = KINDS[kind]
    if isinstance(operand, Register):
        return _of_register(operand, np.dtype(dtype))
    if not isinstance(operand, str):
        raise Unsupported(str(operand))
    special = _special(operand)
    if special is not None:
        return lambda u: np.atleast_1d(special(u)).astype(dtype)
    symbols = {"global_smem": SHARED, "__local_depot0": 0}
    if operand in symbols:
        place = np.array([symbols[operand]]).astype(dtype)
        return lambda u: place
    if not re.match(r"-?\d", operand):
        return lambda u: np.array([u.block.program.symbol(operand)]).astype(dtype)
    value = constant(operand, kind)
    return lambda u: value


def _of_register(register: Register, dtype: np.dtype[np.generic]) -> Source:
    file, index = register.file, register.index
    if file == "p":
        return (lambda u: ~u.files["p"][index]) if register.negated else (lambda u: u.files["p"][index])
    width = {"h": 2, "w": 4, "d": 8}[file]
    if dtype.itemsize == width:
        return lambda u: u.files[file][index].view(dtype)
    if dtype.itemsize > width:
        raise Unsupported(f"a register of {width} bytes read as {dtype}")
    # A wider register than its type: the lower part.
    narrow = np.dtype(f"u{dtype.itemsize}")
    return lambda u: u.files[file][index].astype(narrow).view(dtype)


def _special(name: str) -> Callable[[Unit], Array] | None:
    match = _SPECIAL.fullmatch(name)
    if match is None:
        of_lane: dict[str, Callable[[Unit], Array]] = {
            "%laneid": lambda u: u.threads % 32,
            "%warpid": lambda u: u.threads // 32,
        }
        return of_lane.get(name)
    axis = "xyz".index(match[2])
    sizes: dict[str, Callable[[Unit], Array]] = {
        "tid": lambda u: u.threads if axis == 0 else np.array([0]),
        "ntid": lambda u: np.array([u.block.program.kernel.threads if axis == 0 else 1]),
        "ctaid": lambda u: np.array([u.block.number[axis]]),
        "nctaid": lambda u: np.array([u.block.grid[axis]]),
    }
    return sizes[match[1]]


def address(operand: Operand) -> Source:
    """Return a reader of the address in brackets: [lanes] or [1] int64."""
    if not isinstance(operand, Place):
        raise Unsupported(str(operand))
    offset = operand.offset
    if operand.base is None:
        return lambda u: np.array([offset], np.int64)
    kind = "u64" if not isinstance(operand.base, Register) or operand.base.file == "d" else "u32"
    base = source(operand.base, kind)
    return lambda u: base(u).astype(np.int64) + offset


def registers(operand: Operand) -> tuple[Register, ...]:
    """Return the registers of an operand, one or a list in braces.

    Raises:
        Unsupported: it has others.
    """
    found = operand if isinstance(operand, tuple) else (operand,)
    if not all(isinstance(each, Register) for each in found):
        raise Unsupported(str(operand))
    return found  # type: ignore[return-value]


def rows(operand: Operand) -> tuple[int, ...]:
    """Return the rows of an operand's 32-bit registers."""
    return tuple(each.index for each in registers(operand))


def put_result(i: Instruction, result: Source) -> Code:
    """Return code that writes a result, reinterpreted as the register's bits."""
    (target,) = registers(i.operands[0])
    dtype = {"p": np.bool_, "h": np.uint16, "w": np.uint32, "d": np.uint64}[target.file]
    width = np.dtype(dtype).itemsize

    def put(u: Unit) -> None:
        found = np.atleast_1d(result(u))
        if found.dtype != dtype:
            if found.dtype.itemsize != width:  # extended, as loads and conversions are
                found = found.astype(np.int64).astype(dtype)
            else:
                found = found.view(dtype)
        u.put(target, found)

    return put


def widened(bits: Array, kind: str) -> Array:
    """Return 16-bit floats as float32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(bits.view(np.float16).astype(np.float32))


def narrowed(numbers: Array, kind: str) -> Array:
    """Return the bits of float32 as 16-bit floats, ties to even."""
    if kind == "bf16":
        return to_bf16(np.asarray(numbers, np.float32).view(np.uint32)).astype(np.uint16)
    return np.asarray(numbers).astype(np.float16).view(np.uint16)
