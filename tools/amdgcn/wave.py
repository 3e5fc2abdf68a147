"""State of one wave: its registers, and its active lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .values import M32, U8, U32, Array

if TYPE_CHECKING:
    from .machine import Workgroup

VCC, EXEC_BITS = 106, 64
ACCUMULATORS = 256  # index of the first accumulator among the vector registers
# executes an instruction on a wave; returns the next instruction's index, or None for the following one
Code = Callable[["Wave"], "int | None"]


class Wave:
    """One wave.

    Attributes:
        v: vector registers, [512, lanes]; the second half are accumulators.
        s: scalar registers, VCC among them.
        scc: the scalar condition code.
        exec: the active lanes, one bit per lane.
        m: the active lanes, bool [lanes].
        full: whether all lanes are active.
        stores: outstanding stores, for which no instruction has waited.
        unreleased: outstanding stores at the last barrier.
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
        """Set the active lanes."""
        self.exec, self.m = bits, self.mask(bits)
        self.full = bits == (1 << self.lanes) - 1

    def mask(self, bits: int) -> Array:
        """Return the bits as bool [lanes]; cached, because few different masks occur."""
        found = self._masks.get(bits)
        if found is None:
            packed = np.frombuffer(bits.to_bytes(EXEC_BITS // 8, "little"), U8)
            found = self._masks[bits] = np.unpackbits(packed, bitorder="little")[: self.lanes].astype(bool)
        return found

    def text(self) -> str:
        """Return the text of the current instruction."""
        return self.group.program.assembly.instructions[self.pc].text

    def vcc(self) -> int:
        """Return VCC as an integer with one bit per lane."""
        return self.s[VCC] | (self.s[VCC + 1] << 32 if self.lanes == 64 else 0)

    def put(self, register: int, bits: Array) -> None:
        """Write uint32 bits to a register of the active lanes."""
        if self.full:
            self.v[register] = bits
        else:
            np.copyto(self.v[register], bits, where=self.m)

    def put64(self, register: int, bits: Array) -> None:
        """Write uint64 bits to a register pair of the active lanes."""
        both = np.asarray(bits)
        self.put(register, (both & np.uint64(M32)).astype(U32))
        self.put(register + 1, (both >> np.uint64(32)).astype(U32))

    def spread(self, bits: Array) -> Array:
        """Broadcast to one value per lane."""
        return bits if bits.shape == self.lane.shape else np.broadcast_to(bits, self.lanes)


def packed(mask: Array) -> int:
    """Pack bool [lanes] into an integer with one bit per lane."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
