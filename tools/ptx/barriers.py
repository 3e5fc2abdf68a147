"""Barriers of threads and in shared memory, and boxes that the tensor copy engine writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tools.amdgcn.checks import Fault, Unsupported
from tools.amdgcn.values import Array

from .memory import parameter_place, spread
from .operands import SHARED, address, source
from .text import Instruction, Place, Register
from .unit import Code, Unit


def swizzled(addresses: Array, swizzle: int) -> Array:
    """Return the addresses in shared memory after a swizzle over 32 (1), 64 (2) or 128 bytes (3); 0: none."""
    return np.asarray(addresses ^ (addresses >> 7 & (1 << swizzle) - 1) << 4)


class Barrier:
    """A barrier in shared memory. phase: how often it was complete."""

    def __init__(self, count: int) -> None:
        self.count, self.waits_for, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, count: int, expects: int = 0) -> None:
        """Count arrivals, and bytes that must come before the phase is complete."""
        if count > self.waits_for:
            raise Fault("more arrivals at a barrier than it counts")
        self.bytes += expects
        self.waits_for -= count
        self._complete()

    def receive(self, count: int) -> None:
        """Count bytes that came."""
        self.bytes -= count
        self._complete()

    def _complete(self) -> None:
        if not self.waits_for and not self.bytes:
            self.phase, self.waits_for = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        """Return whether the phase with a parity is complete."""
        return self.phase & 1 != parity


@dataclass(frozen=True)
class Descriptor:
    """A tensor that boxes are copied from. strides and sizes: the last dimension has neighbours in memory.

    base: address. item: bytes of a number. box: its shape. swizzle: see `swizzled`. nan: whether NaN is read outside.
    """

    base: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    nan: bool = False

    def __post_init__(self) -> None:
        """Refuse what the driver does: sizes and strides that the copy engine cannot take."""
        if self.base % 16:
            raise Fault("a tensor that does not begin at a multiple of 16 bytes")
        if any(stride * self.item % 16 for stride in self.strides[:-1]) or self.strides[-1] != 1:
            raise Fault(f"strides that are not multiples of 16 bytes: {self.strides}")
        if any(not 0 < size <= 256 for size in self.box) or any(size < 1 for size in self.shape):
            raise Fault(f"a box of {self.box} of {self.shape}")
        row = self.box[-1] * self.item
        if row % 16 or (self.swizzle and row > 16 << self.swizzle):
            raise Fault(f"rows of {row} bytes with swizzle {self.swizzle}")

    def addresses(self, first: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the addresses of a box's numbers in its order, and which are inside of the tensor."""
        grid = np.indices(self.box).reshape(len(self.box), -1) + np.array(first)[:, None]
        inside = ((grid >= 0) & (grid < np.array(self.shape)[:, None])).all(0)
        return self.base + self.item * (grid * np.array(self.strides)[:, None]).sum(0), inside


@dataclass(frozen=True)
class Box:
    """A copy under way. target: address in shared memory. barrier: the address of its barrier."""

    descriptor: Descriptor
    first: tuple[int, ...]
    target: int
    barrier: int


def write_box(unit: Unit, box: Box) -> None:
    """Write a box, and count its bytes.

    Raises:
        Fault: it overwrites what a product under way reads, or its barrier is not made.
    """
    block, descriptor = unit.block, box.descriptor
    addresses, inside = descriptor.addresses(box.first)
    data = np.full((addresses.size, descriptor.item), 255 if descriptor.nan else 0, np.uint8)
    if inside.any():
        data[inside] = block.memory.read(addresses[inside], descriptor.item)
    if box.target % 128:
        raise Fault("a box that does not begin at a multiple of 128 bytes of shared memory")
    linear = box.target + np.arange(0, data.size, 16)
    end = box.target + data.size
    for each in block.units:
        for group in each.products:
            if any(first < end and box.target < last for first, last in group.reads):
                raise Fault("a box overwrites what a product under way reads")
    block.shared.write(swizzled(linear, descriptor.swizzle), data.reshape(-1, 16))
    barrier_at(unit, box.barrier).receive(data.size)


def barrier_at(unit: Unit, place: int) -> Barrier:
    """Return the barrier at an address.

    Raises:
        Fault: there is none.
    """
    found = unit.block.barriers.get(place)
    if found is None:
        raise Fault(f"no barrier at {place - SHARED} of the shared memory")
    return found


def build_box(i: Instruction) -> Code:
    """Translate cp.async.bulk.tensor into shared memory."""
    if "tensor" not in i.parts or "global" not in i.parts or i.parts[-1] != "mbarrier::complete_tx::bytes":
        raise Unsupported(i.text)
    to, barrier, tensor = address(i.operands[0]), address(i.operands[2]), i.operands[1]
    assert isinstance(tensor, Place)
    at = address(Place(tensor.base, tensor.offset))
    places = [source(each, "s32") for each in reversed(tensor.coordinates)]

    def begin(u: Unit) -> None:
        lanes = u.mask.size
        for lane in u.mask.nonzero()[0]:
            descriptor = u.block.descriptors.get(parameter_place(int(spread(at(u), lanes)[lane])))
            if descriptor is None:
                raise Fault("a box of no descriptor")
            first = tuple(int(spread(each(u), lanes)[lane]) for each in places)
            box = Box(descriptor, first, int(spread(to(u), lanes)[lane]), int(spread(barrier(u), lanes)[lane]))
            u.block.begin(partial(write_box, u, box))

    return begin


def build(i: Instruction) -> Code:
    """Translate an instruction on barriers in shared memory."""
    what = i.parts[1]
    if what == "init":
        at, count = address(i.operands[0]), source(i.operands[1], "u32")

        def init(u: Unit) -> None:
            for lane in u.mask.nonzero()[0]:
                place = int(spread(at(u), u.mask.size)[lane])
                u.block.barriers[place] = Barrier(int(spread(count(u), u.mask.size)[lane]))
                u.block.shared.write(np.array([place]), np.zeros((1, 8), np.uint8))

        return init
    if what == "arrive":
        at = address(i.operands[1])
        expects = "expect_tx" in i.parts
        number = source(i.operands[2], "u32") if len(i.operands) > 2 else None

        def arrive(u: Unit) -> None:
            for lane in u.mask.nonzero()[0]:
                barrier = barrier_at(u, int(spread(at(u), u.mask.size)[lane]))
                many = int(spread(number(u), u.mask.size)[lane]) if number else 1
                barrier.arrive(1 if expects else many, many if expects else 0)

        return arrive
    if what in ("try_wait", "test_wait") and i.parts[2] == "parity":
        at, parity, target = address(i.operands[1]), source(i.operands[2], "u32"), i.operands[0]
        assert isinstance(target, Register)

        def wait(u: Unit) -> None:
            places, parities = spread(at(u), u.mask.size), spread(parity(u), u.mask.size)
            pairs = {(int(places[lane]), int(parities[lane])) for lane in u.mask.nonzero()[0]}
            u.stalled = not all(barrier_at(u, place).passed(which & 1) for place, which in pairs)
            if not u.stalled:
                u.put(target, True)

        return wait
    if what == "inval":
        at = address(i.operands[0])

        def forget(u: Unit) -> None:
            for lane in u.mask.nonzero()[0]:
                u.block.barriers.pop(int(spread(at(u), u.mask.size)[lane]), None)

        return forget
    raise Unsupported(i.text)


def build_threads(i: Instruction) -> Code:
    """Translate a barrier of threads."""
    if i.parts[1] != "sync" and i.parts[1] != "warp":
        raise Unsupported(i.text)
    if i.parts[1] == "warp":
        return lambda u: None
    number = source(i.operands[0], "u32")
    count = source(i.operands[1], "u32") if len(i.operands) > 1 else None

    def sync(u: Unit) -> None:
        which = int(number(u)[0])
        threads = int(count(u)[0]) if count else u.block.program.kernel.threads
        u.block.meet(u, which, threads)

    return sync
