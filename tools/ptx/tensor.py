"""tcgen05: Blackwell's tensor memory, and products that read and write it.

A block has 128 lanes of 512 columns of 32 bits. A warp reaches the 32 lanes of its place in a group of four. The sums
of 128 rows are in all lanes, those of 64 rows in the first 16 lanes of each warp. Products are queued, and run once
they are committed, when a copy could end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.amdgcn.checks import Fault, Unsupported
from tools.amdgcn.values import Array

from .barriers import barrier_at
from .matrix import Shape, matrix_in_shared, numbers_of
from .memory import spread
from .operands import address, rows, source
from .text import Instruction, Place, Register
from .unit import LANES, Code, Unit

ROWS, COLUMNS = 128, 512
_HALF = LANES // 2


class TensorMemory:
    """The tensor memory of a block.

    Attributes:
        queued: products that are not committed yet.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self._data = random.integers(0, 1 << 32, (ROWS, COLUMNS), np.uint32)
        self._ends: list[int] = []
        self.queued: list[Callable[[], None]] = []

    def allocate(self, columns: int) -> int:
        """Return the first of free columns.

        Raises:
            Fault: there are not as many.
        """
        first = max(self._ends, default=0)
        if first + columns > COLUMNS or columns < 32 or columns & columns - 1:
            raise Fault(f"{columns} columns of tensor memory behind {first}")
        self._ends.append(first + columns)
        return first

    def free(self, first: int, columns: int) -> None:
        """Give columns back."""
        if first + columns not in self._ends:
            raise Fault(f"{columns} columns of tensor memory from {first} on were not allocated")
        self._ends.remove(first + columns)

    def _places(self, lanes: Array, columns: Array) -> tuple[Array, Array]:
        if columns.min() < 0 or columns.max() >= max(self._ends, default=0) or lanes.max() >= ROWS:
            raise Fault("access outside the allocated tensor memory")
        return lanes, columns

    def read(self, lanes: Array, columns: Array) -> Array:
        """Return words; garbage where nothing was written: compiled code loads numbers that it does not use.

        Raises:
            Fault: an access is outside.
        """
        return self._data[self._places(lanes, columns)]

    def write(self, lanes: Array, columns: Array, words: Array) -> None:
        """Write words."""
        self._data[self._places(lanes, columns)] = words


def build(i: Instruction) -> Code:
    """Translate a tcgen05 instruction."""
    what = i.parts[1]
    if what.startswith(("wait", "fence", "relinquish")):
        return lambda u: None
    if "cta_group::2" in i.parts:
        raise Unsupported(i.text)
    if what == "alloc":
        return _allocate(i)
    if what == "dealloc":
        first, columns = source(i.operands[0], "u32"), int(str(i.operands[1]))
        return lambda u: u.block.tensor.free(int(first(u)[0]) & 0xFFFF, columns)
    if what in ("ld", "st"):
        return _move(i)
    if what == "mma":
        return _multiply(i)
    if what == "commit":
        return _commit(i)
    raise Unsupported(i.text)


def _allocate(i: Instruction) -> Code:
    at, columns = address(i.operands[0]), int(str(i.operands[1]))

    def allocate(u: Unit) -> None:
        warps = {int(thread) // LANES for thread in u.threads[u.mask]}
        if len(warps) != 1:
            raise Fault(f"{len(warps)} warps allocate tensor memory")
        first = u.block.tensor.allocate(columns)
        place = spread(at(u), u.mask.size)[u.mask][:1]
        u.block.shared.write(place, np.array([[first]], np.uint32).view(np.uint8))

    return allocate


def _move(i: Instruction) -> Code:
    loads, shape = i.parts[1] == "ld", i.parts[4]
    if shape not in ("32x32b", "16x32bx2") or i.parts[5][0] != "x" or i.parts[-1] != "b32" or len(i.parts) != 7:
        raise Unsupported(i.text)
    place = i.operands[1 if loads else 0]
    targets, at = rows(i.operands[0 if loads else -1]), address(place)
    apart = int(str(i.operands[2 if loads else 1])) if shape == "16x32bx2" else 0

    def move(u: Unit) -> None:
        if not u.by_warp(u.mask).all(1).any():
            return
        first = spread(at(u), u.mask.size)
        lane = u.threads % LANES
        inside = lane % _HALF if apart else lane
        own = u.threads // LANES % 4 * LANES
        lanes = (first >> 16) + inside
        if (lanes[u.mask] // LANES * LANES != own[u.mask]).any():
            raise Fault("tensor memory of another warp")
        columns = (first & 0xFFFF) + np.where(lane >= _HALF, apart, 0)
        for further, row in enumerate(targets):
            held = u.files["w"][row]
            if loads:
                held[u.mask] = u.block.tensor.read(lanes[u.mask], columns[u.mask] + further)
            else:
                u.block.tensor.write(lanes[u.mask], columns[u.mask] + further, held[u.mask])

    return move


def _places_of(at: int, count: int, columns: int) -> tuple[Array, Array]:
    """Return lanes and columns of a matrix of 64 or 128 rows, [rows, columns] each."""
    row = np.arange(count)
    lanes = row if count == ROWS else row // 16 * LANES + row % 16
    lane, column = np.broadcast_arrays((at >> 16) + lanes[:, None], (at & 0xFFFF) + np.arange(columns)[None, :])
    return lane, column


def _shape(description: int, kind: str) -> Shape:
    def field(first: int, bits: int) -> int:
        return description >> first & (1 << bits) - 1

    if field(2, 2) or field(13, 2) or field(4, 2) != 1 or field(7, 3) != field(10, 3):
        raise Unsupported(f"a product described as {description:#x}")
    names = {"kind::f16": {0: "f16", 1: "bf16"}, "kind::tf32": {2: "tf32"}}
    of = names.get(kind, {}).get(field(7, 3))
    if of is None or field(24, 5) * 16 not in (64, ROWS):
        raise Unsupported(f"a product described as {description:#x}")
    size = numbers_of(of)[0]
    return Shape(of, field(24, 5) * 16, field(17, 6) * 8, 32 // size, bool(field(15, 1)), bool(field(16, 1)))


def _multiply(i: Instruction) -> Code:
    kind = i.parts[3]
    sums, a, b, description, adds = i.operands
    to, right, described = address(sums), source(b, "u64"), source(description, "u32")
    of_tensor = isinstance(a, Place)
    left = address(a) if of_tensor else source(a, "u64")
    added = source(adds, "pred") if isinstance(adds, Register) else None

    def multiply(u: Unit) -> None:
        lanes = u.mask.nonzero()[0]
        if len(lanes) != 1:
            raise Fault(f"{len(lanes)} threads begin a product")

        def of_lane(values: Array) -> int:
            return int(spread(values, u.mask.size)[lanes[0]])

        shape = _shape(of_lane(described(u)), kind)
        at_sums, at_left, at_right = of_lane(to(u)), of_lane(left(u)), of_lane(right(u))
        keep = bool(of_lane(added(u))) if added else bool(int(str(adds)))
        u.block.tensor.queued.append(lambda: run(u, shape, at_sums, at_left, at_right, keep))

    def run(u: Unit, shape: Shape, at_sums: int, at_left: int, at_right: int, keep: bool) -> None:
        tensor, (size, convert) = u.block.tensor, numbers_of(shape.kind)
        if of_tensor:
            words = tensor.read(*_places_of(at_left, shape.m, shape.k * size // 4))
            factors = convert(words.view(np.dtype(f"u{size}")))
        else:
            factors = matrix_in_shared(u, at_left, shape.m, shape, shape.left_across)
        others = matrix_in_shared(u, at_right, shape.n, shape, shape.right_across)
        total = factors @ others.T
        places = _places_of(at_sums, shape.m, shape.n)
        if keep:
            total = total + tensor.read(*places).view(np.float32)
        tensor.write(*places, total.astype(np.float32).view(np.uint32))

    return multiply


def _commit(i: Instruction) -> Code:
    at = address(i.operands[0])

    def commit(u: Unit) -> None:
        lanes = u.mask.nonzero()[0]
        if len(lanes) != 1:
            raise Fault(f"{len(lanes)} threads commit products")
        place = int(spread(at(u), u.mask.size)[lanes[0]])
        products, u.block.tensor.queued = u.block.tensor.queued, []

        def finish() -> None:
            for product in products:
                product()
            u.products[-1].reads.clear()  # they are done
            barrier_at(u, place).arrive(1)

        u.block.begin(finish)

    return commit
