"""The state of one wave: its registers, and which of its lanes are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .values import M32, U8, U32, Array

if TYPE_CHECKING:
    from .machine import Workgroup

VCC, EXEC_BITS = 106, 64
ACCUMULATORS = 256  # the first of them among the vector registers
Code = Callable[["Wave"], "int | None"]  # an instruction: carried out by a wave, gives where to go on if not behind it


class Wave:
    """v: vector registers [512, lanes], of which the second half are accumulators. s: scalar registers, VCC among them.

    scc: the scalar condition. exec: a bit for each lane that is on; m: the same as bool [lanes]; full: all are on.
    stores: that nothing has waited for. unreleased: how many there were at the last barrier.
    """

    def __init__(self, group: Workgroup, number: int, lanes: int, scratch_bytes: int) -> None:
        self.group, self.number, self.lanes = group, number, lanes
        self.v = np.full((512, lanes), 0x7FC0DEAD, U32)  # NaN
        self.s = [0xDEAD0000 + place for place in range(128)]
        self.scc = self.pc = 0
        self.done = self.waiting = False
        self.lane = np.arange(lanes)
        self.scratch = np.full((lanes, max(scratch_bytes, 4)), 0xCD, U8)
        self.stores = self.unreleased = 0
        self._masks: dict[int, Array] = group.masks
        self.exec, self.m, self.full = 0, self.lane < 0, False
        self.set_exec((1 << lanes) - 1)

    def set_exec(self, bits: int) -> None:
        self.exec, self.m = bits, self.mask(bits)
        self.full = bits == (1 << self.lanes) - 1

    def mask(self, bits: int) -> Array:
        """bool [lanes]. Few different ones come up, again and again."""
        found = self._masks.get(bits)
        if found is None:
            packed = np.frombuffer(bits.to_bytes(EXEC_BITS // 8, "little"), U8)
            found = self._masks[bits] = np.unpackbits(packed, bitorder="little")[: self.lanes].astype(bool)
        return found

    def text(self) -> str:
        """Of the instruction that it is at."""
        return self.group.program.assembly.instructions[self.pc].text

    def vcc(self) -> int:
        return self.s[VCC] | (self.s[VCC + 1] << 32 if self.lanes == 64 else 0)

    def put(self, register: int, bits: Array) -> None:
        """bits: uint32, to the lanes that are on."""
        if self.full:
            self.v[register] = bits
        else:
            np.copyto(self.v[register], bits, where=self.m)

    def put64(self, register: int, bits: Array) -> None:
        both = np.asarray(bits)
        self.put(register, (both & np.uint64(M32)).astype(U32))
        self.put(register + 1, (both >> np.uint64(32)).astype(U32))

    def spread(self, bits: Array) -> Array:
        """One number for each lane."""
        return np.broadcast_to(bits, self.lanes)


def packed(mask: Array) -> int:
    """A bit for each lane."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
