"""Warps that run together: their registers, and which of their threads execute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tools.amdgcn.values import Array

from .text import Register

if TYPE_CHECKING:
    from .machine import Block

LANES = 32
DTYPES = {"p": np.bool_, "h": np.uint16, "w": np.uint32, "d": np.uint64}


class Unit:
    """Warps that execute one instruction at a time together.

    Attributes:
        block: the block.
        threads: [lanes] int64, their numbers in the block.
        even: whether all lanes run and are at `place`; else `places` counts.
        place: the current instruction.
        running: bool [lanes], which are at it.
        mask: bool [lanes], which of these execute it.
        full: whether all lanes do.
        files: registers of each file, [registers, lanes].
        places: [lanes] int64, the next instruction of each.
        ended: bool [lanes], which have returned.
        stopped: bool [lanes], which wait at a barrier of threads.
        at: [lanes] int64, the barrier of threads that each came to last.
        stalled: whether the current instruction waits for a barrier in shared memory, or for products.
        products: groups of products under way.
        local: private memory, [lanes, bytes].
        carry: [lanes] uint64, of sums of more than 32 bits.
    """

    def __init__(self, block: Block, first: int, count: int) -> None:
        self.block = block
        self.threads = np.arange(first, first + count)
        random = block.random
        self.files: dict[str, Array] = {}
        for file, rows in block.program.kernel.counts.items():
            garbage = random.integers(0, 1 << 16, (rows, count), np.uint16)
            wide = garbage.astype(np.uint64) * np.uint64(0x7FF1_7FF1_7FF1_7FF1)
            self.files[file] = (garbage & 1).astype(bool) if file == "p" else wide.astype(DTYPES[file])
        self.places = np.zeros(count, np.int64)
        self.ended, self.stopped = np.zeros(count, bool), np.zeros(count, bool)
        self.at = np.full(count, -1)
        self.mask = self.running = self._all = np.ones(count, bool)
        self.full = self.even = True
        self.place = 0
        self.stalled = False
        self.products: list[Products] = [Products()]
        self.carry = np.zeros(count, np.uint64)
        self.local = random.integers(0, 256, (count, block.program.kernel.local_bytes), np.uint8)

    def put(self, register: Register, values: Array | np.generic | int) -> None:
        """Write a register of the lanes that execute."""
        row = self.files[register.file][register.index]
        if self.full:
            row[:] = values
        else:
            np.copyto(row, values, where=self.mask, casting="unsafe")

    @property
    def waited_for(self) -> bool:
        """Whether products are under way."""
        return len(self.products) > 1 or bool(self.products[0].sums)

    def scatter(self) -> None:
        """Let each lane have its own place, because they no longer go on together."""
        if self.even:
            self.even = False
            self.places[:] = self.place

    def align(self) -> bool:
        """Find the lanes that are behind the others; return whether any runs."""
        lanes = ~(self.ended | self.stopped)
        if not lanes.any():
            return False
        self.place = int(self.places[lanes].min())
        self.running = lanes & (self.places == self.place)
        if self.running.all():
            self.even, self.running = True, self._all
        return True

    def go_on(self) -> None:
        """Let the lanes at the current instruction go on to the next one."""
        if self.even:
            self.place += 1
        else:
            self.places[self.running] = self.place + 1

    def first_place(self) -> int:
        """Return the place of the lanes that are behind the others."""
        return self.place if self.even else int(self.places[~self.ended].min())

    def by_warp(self, values: Array) -> Array:
        """Return [lanes] as [warps, 32]."""
        return values.reshape(-1, LANES)


class Products:
    """A group of products under way.

    Attributes:
        sums: rows of the 32-bit file that receive sums.
        inputs: rows of the 32-bit file that are read.
        reads: (first, end) of shared memory that is read.
    """

    def __init__(self) -> None:
        self.sums: set[int] = set()
        self.inputs: set[int] = set()
        self.reads: list[tuple[int, int]] = []


Code = Callable[[Unit], None]
Source = Callable[[Unit], Array]
