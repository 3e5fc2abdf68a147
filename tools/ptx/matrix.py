"""Matrix instructions: wgmma of a group of four warps, mma of a warp, and their loads and stores of 8 x 8 tiles.

The layouts are those of the PTX ISA: fragments of A, B and sums in registers, and matrices in shared memory under a
descriptor with one of four swizzles.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.amdgcn.checks import Fault, Unsupported
from tools.amdgcn.values import Array

from .barriers import swizzled
from .memory import spread
from .operands import SHARED, address, rows, source, widened
from .text import Instruction, Register
from .unit import LANES, Code, Products, Unit

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
# By the number in a descriptor: the swizzle of `swizzled`.
_SWIZZLES = {0: 0, 1: 3, 2: 2, 3: 1}
_GROUP, _PAIR = np.arange(LANES) // 4, np.arange(LANES) % 4


class _Operand:
    """A matrix in shared memory, under a descriptor. across: rows (of M or N) are neighbours in memory, not K."""

    def __init__(self, descriptor: int, across: bool) -> None:
        def field(first: int) -> int:
            return (descriptor >> first & 0x3FFF) << 4

        self._start, self._leading, self._stride = SHARED + field(0), field(16), field(32)
        if descriptor >> 49 & 7:
            raise Unsupported("a base offset in a descriptor of a matrix")
        self._swizzle, self._across = _SWIZZLES[descriptor >> 62 & 3], across

    def addresses(self, rows_: Array, columns: Array, size: int) -> Array:
        """Return the addresses of numbers of `size` bytes at rows (of M or N) and columns (of K)."""
        width = 16 << self._swizzle  # bytes of a line before the next one
        if self._across:
            if not self._swizzle:
                raise Unsupported("rows that are neighbours without a swizzle")
            chunk = width // size
            linear = rows_ // chunk * self._leading + rows_ % chunk * size
            linear = linear + columns % 8 * width + columns // 8 * self._stride
        elif self._swizzle:
            linear = rows_ // 8 * self._stride + rows_ % 8 * width + columns * size
        else:
            piece = 16 // size
            linear = rows_ // 8 * self._stride + rows_ % 8 * 16 + columns // piece * self._leading
            linear = linear + columns % piece * size
        return swizzled(self._start + linear, self._swizzle)


@dataclass(frozen=True)
class Shape:
    """A product. kind: of its numbers. across: whether rows, and not K, are neighbours in shared memory."""

    kind: str
    m: int
    n: int
    k: int
    left_across: bool
    right_across: bool


def matrix_in_shared(u: Unit, descriptor: int, count: int, shape: Shape, across: bool, first: int = 0) -> Array:
    """Return `count` rows of a matrix in shared memory from `first` on, [count, k], and note that they are read."""
    size, convert = numbers_of(shape.kind)
    at_row, column = np.divmod(np.arange(count * shape.k), shape.k)
    addresses = _Operand(descriptor, across).addresses(at_row + first, column, size)
    u.products[-1].reads.append((int(addresses.min()), int(addresses.max()) + size))
    bits = u.block.shared.read(addresses, size).view(np.dtype(f"u{size}"))
    return convert(bits.ravel()).reshape(count, shape.k)


def numbers_of(kind: str) -> tuple[int, Callable[[Array], Array]]:
    """Return the bytes of a number, and how its bits become float64."""
    if kind in ("bf16", "f16"):
        return 2, lambda bits: widened(bits, kind).astype(np.float64)
    if kind == "tf32":
        return 4, lambda bits: (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind in ("s8", "u8"):
        return 1, lambda bits: bits.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    raise Unsupported(kind)


def _fragment(registers: list[Array], kind: str, size: int, side: str) -> Array:
    """Return A [warps, 16, k] or B [warps, k, 8] from its registers, each [lanes] uint32; `side` is "a" or "b"."""
    each = 4 // size
    bits = np.stack(registers).view(np.dtype(f"u{size}"))
    parts = numbers_of(kind)[1](bits).reshape(len(registers), -1, LANES, each)
    columns, warps = 4 * each, parts.shape[1]  # of a register
    if side == "b":
        whole = np.zeros((warps, len(parts) * columns, 8))
        for place, part in enumerate(parts):
            for number in range(each):
                whole[:, place * columns + _PAIR * each + number, _GROUP] = part[:, :, number]
        return whole
    whole = np.zeros((warps, 16, len(parts) // 2 * columns))
    for place, part in enumerate(parts):
        for number in range(each):
            whole[:, _GROUP + place % 2 * 8, place // 2 * columns + _PAIR * each + number] = part[:, :, number]
    return whole


def _sum_places(count: int) -> tuple[Array, Array]:
    """Return row and column of each register's number of each lane, [count, 32]; four for each eight columns."""
    number = np.arange(count)[:, None]
    return _GROUP + number % 4 // 2 * 8, number // 4 * 8 + _PAIR * 2 + number % 2


def _sums(u: Unit, places: tuple[int, ...]) -> Array:
    """Return the sums [warps, 16, n]."""
    values = u.files["w"][list(places)].view(np.float32).reshape(len(places), -1, LANES)
    total = np.zeros((values.shape[1], 16, len(places) * 2))
    row, column = _sum_places(len(places))
    total[:, row, column] = values.transpose(1, 0, 2)
    return total


def _put_sums(u: Unit, places: tuple[int, ...], total: Array) -> None:
    row, column = _sum_places(len(places))
    values = total[:, row, column].astype(np.float32).transpose(1, 0, 2)
    u.files["w"][list(places)] = np.ascontiguousarray(values).view(np.uint32).reshape(len(places), -1)


def _all(u: Unit, i: Instruction) -> int:
    """Return the number of warps.

    Raises:
        Fault: a lane does not execute.
    """
    if not u.full:
        raise Fault(f"not all threads of a warp execute {i.parts[0]}")
    return u.mask.size // LANES


def wgmma(i: Instruction) -> Code:
    """Translate wgmma."""
    if i.parts[1] == "fence":
        return lambda u: None
    if i.parts[1] == "commit_group":
        return lambda u: u.products.append(Products())
    if i.parts[1] == "wait_group":
        left = int(str(i.operands[0]))

        def wait(u: Unit) -> None:
            u.products = u.products[-1 - left :]

        return wait
    shape = next(filter(None, map(_SHAPE.fullmatch, i.parts)))
    n, k = int(shape[2]), int(shape[3])
    sums, a, b, adds, *signs = i.operands
    kind, other = i.parts[-2], i.parts[-1]
    if kind != other or i.parts[-3] != "f32":
        raise Unsupported(i.text)
    if [int(str(sign)) for sign in signs[:2]] != [1, 1]:
        raise Unsupported(i.text)
    of_registers = isinstance(a, tuple)
    across = [bool(int(str(each))) for each in signs[2:]] or [False] * (1 if of_registers else 2)
    size, described = numbers_of(kind)[0], Shape(kind, 64, n, k, across[0], across[-1])
    places, right = rows(sums), source(b, "u64")
    inputs = rows(a) if of_registers else ()
    left_of = None if of_registers else source(a, "u64")
    added = source(adds, "pred") if isinstance(adds, Register) else None
    always = added is None and bool(int(str(adds)))

    def multiply(u: Unit) -> None:
        warps = _all(u, i)
        keep = always if added is None else bool(added(u).all())
        group = u.products[-1]
        group.sums.update(places)
        group.inputs.update(inputs)
        descriptors = spread(right(u), u.mask.size)
        if (descriptors != descriptors[0]).any():
            raise Unsupported("descriptors that differ between warps")
        transposed = matrix_in_shared(u, int(descriptors[0]), n, described, across[-1])
        if left_of is None:
            left = _fragment([u.files["w"][row] for row in inputs], kind, size, "a")
        else:
            first, of = int(u.threads[0]) // LANES % 4 * 16, int(spread(left_of(u), u.mask.size)[0])
            left = matrix_in_shared(u, of, 16 * warps, described, across[0], first).reshape(warps, 16, k)
        total = left @ transposed.T
        _put_sums(u, places, total + _sums(u, places) if keep else total)

    return multiply


def mma(i: Instruction) -> Code:
    """Translate mma.sync."""
    kinds = [part for part in i.parts if part in ("f32", "bf16", "f16", "tf32", "s8", "u8", "s32")]
    if len(kinds) != 4 or kinds[0] != kinds[3] or kinds[1] != kinds[2] or kinds[0] not in ("f32", "s32"):
        raise Unsupported(i.text)
    to, a, b, c = (rows(each) if isinstance(each, tuple) else () for each in i.operands)
    if not c or kinds[0] == "s32":
        raise Unsupported(i.text)
    size, _ = numbers_of(kinds[1])

    def multiply(u: Unit) -> None:
        _all(u, i)
        left = _fragment([u.files["w"][row] for row in a], kinds[1], size, "a")
        right = _fragment([u.files["w"][row] for row in b], kinds[1], size, "b")
        _put_sums(u, to, left @ right + _sums(u, c))

    return multiply


def tiles(i: Instruction) -> Code:
    """Translate ldmatrix and stmatrix: tiles of 8 x 8 numbers of 16 bits, with a lane for each row."""
    loads, across = i.name == "ldmatrix", "trans" in i.parts
    if "m8n8" not in i.parts or i.parts[-1] != "b16":
        raise Unsupported(i.text)
    at, targets = address(i.operands[1 if loads else 0]), rows(i.operands[0 if loads else 1])

    def load(u: Unit) -> None:
        addresses = spread(at(u), u.mask.size)
        for warp in range(_all(u, i)):
            lanes = slice(warp * LANES, (warp + 1) * LANES)
            for place, row in enumerate(targets):
                of = addresses[lanes][place * 8 : place * 8 + 8]
                tile = u.block.shared.read(of, 16).view(np.uint16)
                tile = tile.T if across else tile
                pairs = np.ascontiguousarray(tile[_GROUP[:, None], _PAIR[:, None] * 2 + np.arange(2)])
                u.files["w"][row][lanes] = pairs.view(np.uint32).ravel()

    def store(u: Unit) -> None:
        addresses = spread(at(u), u.mask.size)
        for warp in range(_all(u, i)):
            lanes = slice(warp * LANES, (warp + 1) * LANES)
            for place, row in enumerate(targets):
                tile = np.zeros((8, 8), np.uint16)
                pairs = np.ascontiguousarray(u.files["w"][row][lanes]).view(np.uint16).reshape(LANES, 2)
                tile[_GROUP[:, None], _PAIR[:, None] * 2 + np.arange(2)] = pairs
                tile = np.ascontiguousarray(tile.T if across else tile)
                u.block.shared.write(addresses[lanes][place * 8 : place * 8 + 8], tile.view(np.uint8))

    return load if loads else store
