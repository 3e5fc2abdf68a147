"""Local data share (LDS) of a workgroup: its contents, the accesses since the last barrier, and its instructions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .assembly import Instruction
from .checks import Fault, Findings, Unsupported
from .operands import vector_register
from .values import HIGH, I64, U8, U16, U32, Array, halves
from .wave import Code, Wave
from .widths import WIDTHS, Width

BYTES_MAX = 160 * 1024  # gfx950 has the largest LDS
SEVERAL = -1  # waves that added to a byte: the number of none


class Lds:
    """LDS with race detection: between two barriers, a byte that one wave changes must not be touched by another.

    A store that leaves a byte unchanged does not count as a change: Triton lets several waves store the same values.
    Atomic additions of several waves do not race with each other.
    """

    def __init__(self, size: int, findings: Findings) -> None:
        self.size, self._findings = size, findings
        room = size + 64
        self._bytes = np.full(room, 0xFF, U8)
        self._views: dict[int, Array] = {1: self._bytes, 2: self._bytes.view(U16), 4: self._bytes.view(U32)}
        self._epoch = 1  # incremented at each barrier
        self._written, self._read = np.zeros(room, np.int32), np.zeros(room, np.int32)  # the epoch of the last access
        self._writer, self._readers = np.zeros(room, np.int16), np.zeros(room, I64)  # wave number; bit per wave
        self._added = np.zeros(room, np.int32)  # the epoch of atomic additions, if it has no store

    def barrier(self) -> None:
        """Start a new epoch: accesses before the barrier cannot race with those after it."""
        self._epoch += 1

    def load(self, w: Wave, at: Array, width: Width) -> Array:
        """Return the loaded values, [count, lanes] uint32, and record races and uninitialised reads.

        Args:
            w: the wave.
            at: byte addresses, [lanes] int64.
            width: the access width.
        """
        loaded = np.zeros((width.count, w.lanes), U32)
        if not w.exec:
            return loaded
        first = self._checked(at[w.m], width, "read")
        touched = (first[:, None] + np.arange(width.bytes)).ravel()
        if ((self._written[touched] == self._epoch) & (self._writer[touched] != w.number)).any():
            self._findings.races.add(f"read after write: {w.text()}")
        if (self._written[touched] == 0).any():
            self._findings.uninitialised.add(w.text())
        stale = self._read[touched] != self._epoch
        self._readers[touched] = np.where(stale, 0, self._readers[touched]) | (1 << w.number)
        self._read[touched] = self._epoch
        for place in range(width.count):
            numbers = self._views[width.size][first // width.size + place].astype(U32)
            loaded[place][w.m] = width.extended(numbers)
        return loaded

    def store(self, w: Wave, at: Array, register: int, width: Width) -> None:
        """Store from `register` on to the byte addresses `at` ([lanes] int64), and record races."""
        if not w.exec:
            return
        first = self._checked(at[w.m], width, "write")
        touched = (first[:, None] + np.arange(width.bytes)).ravel()
        before = self._bytes[touched].copy()
        view = self._views[width.size]
        for place, numbers in enumerate(width.registers(w, register)):
            view[first // width.size + place] = numbers[w.m].astype(view.dtype)
        changed = self._bytes[touched] != before
        others_wrote, others_read = self._by_others(w, touched)
        if (others_wrote & changed).any():
            self._findings.races.add(f"write after write: {w.text()}")
        if (others_read & changed).any():
            self._findings.races.add(f"write after read: {w.text()}")
        self._written[touched], self._writer[touched], self._added[touched] = self._epoch, w.number, 0

    def add(self, w: Wave, at: Array, register: int) -> None:
        """Add the numbers of `register` atomically at the byte addresses `at` ([lanes] int64), and record races."""
        if not w.exec:
            return
        width = Width(4, 1)
        first = self._checked(at[w.m], width, "atomic")
        touched = np.unique(first[:, None] + np.arange(width.bytes))
        if (self._written[touched] == 0).any():
            self._findings.uninitialised.add(w.text())
        others_wrote, others_read = self._by_others(w, touched)
        with_adds = (self._added[touched] == self._epoch) | (self._written[touched] != self._epoch)
        if (others_wrote & ~with_adds).any():
            self._findings.races.add(f"atomic after write: {w.text()}")
        if others_read.any():
            self._findings.races.add(f"atomic after read: {w.text()}")
        np.add.at(self._views[4], first // 4, w.v[register][w.m].astype(U32))
        self._writer[touched] = np.where(others_wrote & with_adds, SEVERAL, w.number)
        self._added[touched] = np.where(with_adds, self._epoch, 0)
        self._written[touched] = self._epoch

    def _by_others(self, w: Wave, touched: Array) -> tuple[Array, Array]:
        """Return which bytes other waves have written, and read, since the last barrier."""
        wrote = (self._written[touched] == self._epoch) & (self._writer[touched] != w.number)
        read = (self._read[touched] == self._epoch) & ((self._readers[touched] & ~(1 << w.number)) != 0)
        return wrote, read

    def _checked(self, first: Array, width: Width, what: str) -> Array:
        if (first < 0).any() or (first + width.bytes > self.size).any():
            raise Fault(f"LDS {what} out of bounds: {first.max()} of {self.size}")
        if (first % width.size).any():
            raise Fault(f"unaligned LDS {what}")
        return first


def build(instruction: Instruction) -> Code:
    """Translate an LDS instruction (ds_...)."""
    name, operands = instruction.name.removeprefix("ds_"), instruction.operands
    if name == "bpermute_b32":
        return _permute(instruction)
    if name == "swizzle_b32":
        return _swizzle(instruction)
    if name in _TRANSPOSED:
        made: Code = _TRANSPOSED[name](instruction)
        return made
    offset = instruction.modifiers.get("offset", 0)
    if name == "add_u32":
        at, data = vector_register(operands[0]), vector_register(operands[1])
        return lambda w: w.group.lds.add(w, w.v[at].astype(I64) + offset, data)
    two = re.fullmatch(r"(read|write|load|store)(?:2|_2addr)(st64|_stride64)?_b(32|64)", name)
    if two:
        return _two(instruction, two)
    kind, _, width_name = name.partition("_")
    if width_name not in WIDTHS or kind not in ("read", "load", "write", "store"):
        raise Unsupported(instruction.text)
    width = WIDTHS[width_name]
    if kind in ("write", "store"):
        at, data = vector_register(operands[0]), vector_register(operands[1])
        return lambda w: w.group.lds.store(w, w.v[at].astype(I64) + offset, data, width)
    target, at = vector_register(operands[0]), vector_register(operands[1])
    return lambda w: width.place(w, target, w.group.lds.load(w, w.v[at].astype(I64) + offset, width))


def _two(instruction: Instruction, found: re.Match[str]) -> Code:
    """Translate a load or store of two values at two offsets (read2, write2)."""
    width = Width(4, int(found[3]) // 32)
    step = width.bytes * (64 if found[2] else 1)
    offsets = [instruction.modifiers.get(name, 0) * step for name in ("offset0", "offset1")]
    registers = [vector_register(text) for text in instruction.operands[:3]]

    def store(w: Wave) -> None:
        for offset, data in zip(offsets, registers[1:], strict=True):
            w.group.lds.store(w, w.v[registers[0]].astype(I64) + offset, data, width)

    def load(w: Wave) -> None:
        at = w.v[registers[1]].astype(I64)
        loaded = [w.group.lds.load(w, at + offset, width) for offset in offsets]
        for place, numbers in enumerate(loaded):
            width.place(w, registers[0] + place * width.count, numbers)

    return store if found[1] in ("write", "store") else load


def _moved(w: Wave, register: int, lanes: Array) -> Array:
    """Return the register's values of other lanes; inactive lanes give zeros."""
    return np.where(w.m[lanes], w.v[register][lanes], U32(0))


def _permute(instruction: Instruction) -> Code:
    target, at, data = (vector_register(text) for text in instruction.operands)
    offset = U32(instruction.modifiers.get("offset", 0))

    def permute(w: Wave) -> None:
        lanes = (((w.v[at] + offset) >> U32(2)) % U32(w.lanes)).astype(I64)
        w.put(target, _moved(w, data, lanes))

    return permute


def _swizzle(instruction: Instruction) -> Code:
    """Translate ds_swizzle: lanes of each 32 by and, or, xor masks, or lanes of each quad."""
    target, data = (vector_register(text) for text in instruction.operands)
    found = re.fullmatch(r"swizzle\((\w+),\s*(.*)\)", str(instruction.modifiers.get("offset")))
    mode, rest = (found[1], found[2]) if found else ("", "")
    keep, or_, xor = 31, 0, 0
    if mode == "SWAP":
        xor = int(rest)
    elif mode == "REVERSE":
        xor = int(rest) - 1
    elif mode == "BITMASK_PERM":
        bits = list(enumerate(rest.strip('"')[::-1]))
        keep = sum((letter in "pi") << place for place, letter in bits)
        or_ = sum((letter == "1") << place for place, letter in bits)
        xor = sum((letter == "i") << place for place, letter in bits)
    elif mode == "QUAD_PERM":
        quad = np.array([int(number) for number in rest.split(",")])
        return lambda w: w.put(target, _moved(w, data, (w.lane & ~3) + quad[w.lane & 3]))
    else:
        raise Unsupported(instruction.text)
    return lambda w: w.put(target, _moved(w, data, (w.lane & 32) | ((((w.lane & 31) & keep) | or_) ^ xor)))


def _transposed16(instruction: Instruction) -> Code:
    """Translate a transposing load: 16 lanes hold a [4, 16] matrix of 16-bit values; each lane gets one column."""
    target, at = (vector_register(text) for text in instruction.operands)
    offset = instruction.modifiers.get("offset", 0)

    def load(w: Wave) -> None:
        held = halves(_whole(w, at, offset, instruction))  # [4, lanes]
        first, place = w.lane & ~15, w.lane & 15
        column = np.stack([held[place % 4, first + 4 * row + place // 4] for row in range(4)]).astype(U32)
        w.put(target, column[0] | column[1] << HIGH)
        w.put(target + 1, column[2] | column[3] << HIGH)

    return load


def _transposed8(instruction: Instruction) -> Code:
    """Translate a transposing load: 16 lanes hold a [8, 16] matrix of bytes."""
    target, at = (vector_register(text) for text in instruction.operands)
    offset = instruction.modifiers.get("offset", 0)

    def load(w: Wave) -> None:
        words = _whole(w, at, offset, instruction)
        held = np.stack([(words[byte // 4] >> U32(8 * (byte % 4))) & U32(255) for byte in range(8)])
        first, place = w.lane & ~15, w.lane & 15
        column = [held[place % 8, first + 2 * row + place // 8] for row in range(8)]
        for word in (0, 1):
            low = column[4 * word] | column[4 * word + 1] << U32(8)
            high = column[4 * word + 2] << U32(16) | column[4 * word + 3] << U32(24)
            w.put(target + word, low | high)

    return load


def _whole(w: Wave, at: int, offset: int, instruction: Instruction) -> Array:
    if not w.full:
        raise Unsupported(f"{instruction.text} with lanes off")
    return w.group.lds.load(w, w.v[at].astype(I64) + offset, Width(4, 2))


_TRANSPOSED: dict[str, Any] = {"read_b64_tr_b16": _transposed16, "read_b64_tr_b8": _transposed8}
