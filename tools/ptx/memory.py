"""Memory: the storages of the arguments, the parameters, and the shared memory of a block."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import numpy as np

from tools.amdgcn.checks import Fault, Unsupported
from tools.amdgcn.values import Array

from .operands import KINDS, PARAMETERS, SHARED, address, bytes_of, registers, source
from .text import Instruction, Operand, Place, Register
from .unit import Code, Unit

_VECTORS = {"v2": 2, "v4": 4}
_ATOMIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "max": np.maximum,
    "min": np.minimum,
    "exch": lambda old, new: new,
}


class Global:
    """The storages of the arguments, as bytes of this process."""

    def __init__(self, regions: Iterable[tuple[int, int]]) -> None:
        """Take (address, bytes) of each storage."""
        ordered = sorted({(start, size) for start, size in regions if size}) or [(0, 1)]
        self._starts = np.array([start for start, _ in ordered], np.int64)
        self._ends = np.array([start + size for start, size in ordered], np.int64)
        self._base = int(self._starts[0])
        span = int(self._ends.max()) - self._base if regions else 1
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(self._base)) if self._base else None

    def places(self, addresses: Array, size: int, what: str) -> Array:
        """Return the places of accesses in the bytes.

        Raises:
            Fault: one is outside of the storages, or not aligned.
        """
        region = np.searchsorted(self._starts, addresses, "right") - 1
        outside = (region < 0) | (addresses + size > self._ends[np.maximum(region, 0)])
        if outside.any():
            raise Fault(f"{what} outside the arguments: {size} bytes at {int(addresses[outside][0]):#x}")
        if (addresses % size).any():
            raise Fault(f"unaligned {what}")
        return addresses - self._base

    def read(self, addresses: Array, size: int) -> Array:
        """Return [n, size] bytes."""
        return self._view[self.places(addresses, size, "load")[:, None] + np.arange(size)]

    def write(self, addresses: Array, data: Array) -> None:
        """Write [n, size] bytes."""
        size = data.shape[1]
        self._view[self.places(addresses, size, "store")[:, None] + np.arange(size)] = data

    @property
    def _view(self) -> Array:
        assert self._bytes is not None
        return self._bytes


class Shared:
    """The shared memory of a block.

    Attributes:
        data: its bytes.
        written: bool, which of these were written.
    """

    def __init__(self, size: int, random: np.random.Generator) -> None:
        self.data = random.integers(0, 256, size, np.uint8)
        self.written = np.zeros(size, bool)

    def _places(self, addresses: Array, size: int, what: str) -> Array:
        first = np.asarray(addresses) - SHARED
        if (first < 0).any() or (first + size > self.data.size).any():
            raise Fault(f"{what} outside the shared memory: {size} bytes at {int(first.min())} to {int(first.max())}")
        if (first % size).any():
            raise Fault(f"unaligned {what}")
        return first[:, None] + np.arange(size)

    def read(self, addresses: Array, size: int) -> Array:
        """Return [n, size] bytes.

        Raises:
            Fault: an access is outside, or reads what nothing has written.
        """
        places = self._places(addresses, size, "load")
        if not self.written[places].all():
            raise Fault("a load of shared memory that nothing has written")
        return self.data[places]

    def write(self, addresses: Array, data: Array) -> None:
        """Write [n, size] bytes."""
        places = self._places(addresses, data.shape[1], "store")
        self.data[places] = data
        self.written[places] = True


def spread(values: Array, lanes: int) -> Array:
    """Return one value for each lane."""
    return np.broadcast_to(values, (lanes,)) if values.shape != (lanes,) else values


def build(i: Instruction) -> Code:
    """Translate ld, st, atom and red."""
    if i.name in ("atom", "red"):
        return _atomic(i)
    space = next((part for part in i.parts if part.partition("::")[0] in ("global", "shared", "param", "local")), None)
    if space is None:
        raise Unsupported(i.text)
    kind = i.parts[-1]
    count = next((_VECTORS[part] for part in i.parts if part in _VECTORS), 1)
    if i.name == "ld":
        if space == "param":
            return _parameter(i, kind)
        return _load(i, kind, count, space)
    return _store(i, kind, count, space)


def _parameter(i: Instruction, kind: str) -> Code:
    place, (target,) = i.operands[1], registers(i.operands[0])
    assert isinstance(place, Place) and isinstance(place.base, str)
    base, offset, size = place.base, place.offset, bytes_of(kind)

    def load(u: Unit) -> None:
        program = u.block.program
        first = program.offsets[base] + offset
        value = np.frombuffer(u.block.arguments[first : first + size], KINDS[kind])
        u.put(target, _extended(value, target))

    return load


def _extended(values: Array, target: Register) -> Array:
    dtype = {"h": np.uint16, "w": np.uint32, "d": np.uint64}[target.file]
    if values.dtype.itemsize == np.dtype(dtype).itemsize:
        return values.view(dtype)
    return values.astype(np.int64).astype(dtype)


class _Local:
    """Private memory of the lanes that execute."""

    def __init__(self, u: Unit) -> None:
        self._unit, self._lanes = u, u.mask.nonzero()[0]

    def _places(self, addresses: Array, size: int) -> tuple[Array, Array]:
        if (addresses < 0).any() or (addresses + size > self._unit.local.shape[1]).any():
            raise Fault("access outside the private memory")
        return self._lanes[:, None], addresses[:, None] + np.arange(size)

    def read(self, addresses: Array, size: int) -> Array:
        """Return [n, size] bytes."""
        return np.ascontiguousarray(self._unit.local[self._places(addresses, size)])

    def write(self, addresses: Array, data: Array) -> None:
        """Write [n, size] bytes."""
        self._unit.local[self._places(addresses, data.shape[1])] = data


def _memory(u: Unit, space: str) -> Global | Shared | _Local:
    if space == "local":
        return _Local(u)
    return u.block.memory if space == "global" else u.block.shared


def _load(i: Instruction, kind: str, count: int, space: str) -> Code:
    targets, at, size = registers(i.operands[0]), address(i.operands[1]), bytes_of(kind) * count
    if len(targets) != count:
        raise Unsupported(i.text)

    def load(u: Unit) -> None:
        if not u.mask.any():
            return
        addresses = spread(at(u), u.mask.size)[u.mask]
        values = _memory(u, space).read(addresses, size).view(KINDS[kind])
        for place, target in enumerate(targets):
            row = u.files[target.file][target.index]
            row[u.mask] = _extended(np.ascontiguousarray(values[:, place]), target)

    return load


def _parts(operand: Operand, kind: str) -> list[Callable[[Unit], Array]]:
    return [source(each, kind) for each in (operand if isinstance(operand, tuple) else (operand,))]


def _store(i: Instruction, kind: str, count: int, space: str) -> Code:
    at, parts = address(i.operands[0]), _parts(i.operands[1], kind)
    if len(parts) != count:
        raise Unsupported(i.text)

    def store(u: Unit) -> None:
        if not u.mask.any():
            return
        addresses = spread(at(u), u.mask.size)[u.mask]
        values = np.stack([spread(part(u), u.mask.size)[u.mask] for part in parts], 1)
        data = np.ascontiguousarray(values).view(np.uint8)
        _memory(u, space).write(addresses, data)

    return store


def _atomic(i: Instruction) -> Code:
    kind, operation = i.parts[-1], next((part for part in i.parts if part in _ATOMIC), None)
    space = next((part for part in i.parts if part in ("global", "shared")), None)
    if operation is None or space is None:
        raise Unsupported(i.text)
    target = registers(i.operands[0])[0] if i.name == "atom" and i.operands[0] != "_" else None
    at, value = address(i.operands[-2]), source(i.operands[-1], kind.replace("b", "u"))
    combine, size = _ATOMIC[operation], bytes_of(kind)

    def atomic(u: Unit) -> None:
        addresses, values = spread(at(u), u.mask.size), spread(value(u), u.mask.size)
        for lane in u.mask.nonzero()[0]:
            place = addresses[[lane]]
            old = _memory(u, space).read(place, size).view(values.dtype)[0]
            new = combine(old, values[[lane]])
            _memory(u, space).write(place, np.ascontiguousarray(new)[:, None].view(np.uint8))
            if target is not None:
                u.files[target.file][target.index][lane] = _extended(old, target)[0]

    return atomic


def copy(i: Instruction) -> Code:
    """Translate cp.async: lanes copy from global to shared memory, at once."""
    to, of = address(i.operands[0]), address(i.operands[1])
    size = int(str(i.operands[2]), 0)
    kept = source(i.operands[3], "u32") if len(i.operands) > 3 else None

    def copied(u: Unit) -> None:
        lanes = u.mask.size
        targets, sources = spread(to(u), lanes), spread(of(u), lanes)
        counts = spread(kept(u), lanes) if kept else np.full(lanes, size)
        data = np.zeros((lanes, size), np.uint8)
        reads = u.mask & (counts > 0)
        if (counts[reads] != size).any():
            raise Unsupported(i.text)
        if reads.any():
            data[reads] = u.block.memory.read(sources[reads], size)
        if u.mask.any():
            u.block.shared.write(targets[u.mask], data[u.mask])

    return copied


def parameter_place(address_of: int) -> int:
    """Return the offset of a parameter by its address."""
    return address_of - PARAMETERS
