"""Global memory and scratch: kernels may access the storages of their arguments only, within this process's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .assembly import Instruction
from .checks import Fault, Unsupported
from .operands import INTEGER, Source, scalar_register, scalar_source, source, source64, vector_register
from .values import I64, M32, M64, U8, U16, U32, U64, Array, as_i32, signed
from .wave import Code, Wave
from .widths import WIDTHS, Width

_ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: (old + new) & M32,
    "or": lambda old, new: old | new,
    "swap": lambda old, new: new,
    "umax": max,
    "max_u32": max,
}


class Memory:
    """Bounds-checked global memory.

    Attributes:
        regions: (address, bytes) of the accessible memory.
    """

    def __init__(self, regions: Iterable[tuple[int, int]]) -> None:
        ordered = sorted({(start, size) for start, size in regions if size})
        self._starts = np.array([start for start, _ in ordered], U64)
        self._ends = np.array([start + size for start, size in ordered], U64)
        self._base = int(self._starts[0]) & ~15
        span = int(self._ends.max()) - self._base

        def view(kind: Any, size: int) -> Array:
            """Return a view over the whole span, gaps included; every access is checked before it is made."""
            return np.ctypeslib.as_array((kind * (span // size + 1)).from_address(self._base))

        self._views = {1: view(ctypes.c_uint8, 1), 2: view(ctypes.c_uint16, 2), 4: view(ctypes.c_uint32, 4)}

    def check_one(self, address: int, size: int) -> None:
        """Raise Fault if a scalar load of `size` bytes at `address` is outside the regions."""
        at = int(np.searchsorted(self._starts, U64(address), "right")) - 1
        if at < 0 or address + size > int(self._ends[at]):
            raise Fault(f"access outside the arguments: {size} bytes at {address:#x}")

    def load(self, w: Wave, addresses: Array, mask: Array, width: Width) -> Array:
        """Load one value per lane.

        Args:
            w: the wave.
            addresses: [lanes] uint64.
            mask: bool [lanes]; the others load zeros.
            width: the access width.

        Returns:
            [count, lanes] uint32.
        """
        loaded = np.zeros((width.count, w.lanes), U32)
        if mask.any():
            first = self._places(addresses[mask], width, "load")
            for place in range(width.count):
                loaded[place][mask] = width.extended(self._views[width.size][first + place].astype(U32))
        return loaded

    def store(self, w: Wave, addresses: Array, mask: Array, register: int, width: Width) -> None:
        """Store from `register` on to `addresses` ([lanes] uint64) for the lanes in `mask`."""
        if not mask.any():
            return
        w.stores += 1
        first = self._places(addresses[mask], width, "store")
        view = self._views[width.size]
        for place, numbers in enumerate(width.registers(w, register)):
            view[first + place] = numbers[mask].astype(view.dtype)

    def _places(self, addresses: Array, width: Width, what: str) -> Array:
        region = np.searchsorted(self._starts, addresses, "right").astype(I64) - 1
        outside = (region < 0) | (addresses + U64(width.bytes) > self._ends[np.maximum(region, 0)])
        if outside.any():
            where = ", ".join(hex(int(address)) for address in addresses[outside][:4])
            raise Fault(f"{what} outside the arguments: {width.bytes} bytes at {where}")
        offsets = addresses - U64(self._base)
        if (offsets % U64(width.size)).any():
            raise Fault(f"unaligned {what}")
        return (offsets // U64(width.size)).astype(I64)


def build(instruction: Instruction) -> Code:
    """Translate a global, flat, buffer or scratch instruction."""
    space, _, what = instruction.name.partition("_")
    kind, _, width_name = what.partition("_")
    if kind == "atomic":
        return _atomic(instruction, width_name)
    if kind not in ("load", "store") or width_name not in WIDTHS:
        raise Unsupported(instruction.text)
    make = {"global": _global, "flat": _global, "buffer": _buffer, "scratch": _scratch}[space]
    return make(instruction, WIDTHS[width_name], kind == "store")


def _address(vector: str, scalar: str | None, offset: int) -> Source:
    """Return a reader of the addresses, [lanes] uint64: a register pair per lane, or a base and a register per lane."""
    if scalar is None or scalar == "off":
        whole = source64(vector)
        return lambda w: w.spread(whole(w)) + U64(offset & M64)
    part, base = source(vector), scalar_source(scalar, 64)
    return lambda w: w.spread(part(w)).astype(U64) + U64((base(w) + offset) & M64)


def _global(instruction: Instruction, width: Width, stores: bool) -> Code:
    offset, operands = instruction.modifiers.get("offset", 0), (*instruction.operands, None)
    if stores:
        at, data = _address(str(operands[0]), operands[2], offset), vector_register(str(operands[1]))
        return lambda w: w.group.memory.store(w, at(w), w.m, data, width)
    target, at = vector_register(str(operands[0])), _address(str(operands[1]), operands[2], offset)
    return lambda w: width.place(w, target, w.group.memory.load(w, at(w), w.m, width))


def _atomic(instruction: Instruction, operation: str) -> Code:
    """Translate an atomic operation; it reports stores of this workgroup that are still outstanding."""
    name = operation.removesuffix("_u32") if operation != "max_u32" else operation
    modifiers = instruction.modifiers
    if name not in _ATOMICS or instruction.name.startswith("buffer"):
        raise Unsupported(instruction.text)
    returns = "sc0" in modifiers or "glc" in modifiers or "RETURN" in str(modifiers.get("th", ""))
    target, *rest = instruction.operands if returns else (None, *instruction.operands)
    result = None if target is None else vector_register(target)
    at, data = _address(str(rest[0]), str(rest[2]), modifiers.get("offset", 0)), vector_register(str(rest[1]))
    combine = _ATOMICS[name]

    def atomic(w: Wave) -> None:
        addresses = at(w)
        if w.exec and (w.stores or any(other.unreleased for other in w.group.waves)):
            w.group.findings.unreleased.add(w.text())
        for lane in np.nonzero(w.m)[0]:
            address = int(addresses[lane])
            w.group.memory.check_one(address, 4)
            cell = ctypes.c_uint32.from_address(address)
            before, cell.value = cell.value, combine(cell.value, int(w.v[data][lane]))
            if result is not None:
                w.v[result][lane] = before

    return atomic


def _buffer(instruction: Instruction, width: Width, stores: bool) -> Code:
    """Translate a buffer access by a descriptor of four scalar registers.

    Lanes past the end of the buffer load zeros and store nothing.
    """
    operands, modifiers = instruction.operands, instruction.modifiers
    if "idxen" in modifiers or "lds" in modifiers:
        raise Unsupported(instruction.text)
    data, resource, more = vector_register(operands[0]), scalar_register(operands[2]), scalar_source(operands[3])
    part = source(operands[1] if "offen" in modifiers else "0", INTEGER)
    offset = U64(modifiers.get("offset", 0))

    def run(w: Wave) -> None:
        low, high, size = w.s[resource : resource + 3]
        if (high >> 16) & 0x3FFF:
            raise Unsupported(f"{instruction.text} with a stride")
        within = w.spread(part(w)).astype(U64) + offset
        addresses = within + U64(((low | (high & 0xFFFF) << 32) + more(w)) & M64)
        mask = w.m & (within + U64(width.bytes) <= U64(size))
        if stores:
            w.group.memory.store(w, addresses, mask, data, width)
        else:
            width.place(w, data, w.group.memory.load(w, addresses, mask, width))

    return run


def _scratch(instruction: Instruction, width: Width, stores: bool) -> Code:
    """Translate an access to scratch, the private memory of a lane."""
    operands = instruction.operands
    data = vector_register(operands[1] if stores else operands[0])
    vector, scalar = (operands[0], operands[2]) if stores else (operands[1], operands[2])
    part = None if vector == "off" else source(vector)
    base = None if scalar == "off" else scalar_source(scalar)
    offset = instruction.modifiers.get("offset", 0)

    def run(w: Wave) -> None:
        at = np.full(w.lanes, offset + (signed(base(w)) if base else 0), I64) + (as_i32(part(w)) if part else 0)
        lanes = w.lane[w.m]
        if not len(lanes):
            return
        at = at[lanes]
        if (at < 0).any() or (at + width.bytes > w.scratch.shape[1]).any():
            raise Fault("scratch out of bounds")
        places = at[:, None] + np.arange(width.bytes)
        kind = {1: U8, 2: U16, 4: U32}[width.size]
        if stores:
            numbers = np.stack([each[lanes].astype(kind) for each in width.registers(w, data)], 1)
            w.scratch[lanes[:, None], places] = numbers.view(U8)
        else:
            found = w.scratch[lanes[:, None], places].view(kind).astype(U32)  # [active lanes, count]
            loaded = np.zeros((width.count, w.lanes), U32)
            loaded[:, lanes] = width.extended(found).T
            width.place(w, data, loaded)

    return run
