"""Simulated disk tiers: folders that outlive workers and hosts, and the processes that copy from and to them.

Orders end in any order, some late, and some not before the process dies. A process that dies leaves any part of
its writes: the old record is gone, or the new block is there without an acknowledgement. Blocks get flipped bits, a
disk is full or fails now and then, and in the next life the folder may be another one, because another model is served.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from kvforge.protocol.messages import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_ENTRY_NUMBERS,
    DISK_FAILED,
    DISK_FULL,
    DISK_ORDER_NUMBERS,
    DISK_WIPE,
    DISK_WRITE,
    DiskEntries,
    DiskOrders,
    DiskResults,
    DiskScan,
)
from kvforge.worker.disk.records import Entry, Record
from kvforge.worker.disk.recovery import usable
from tools.simulation.host_files import NO_CELLS, Cells, HostFile

OTHER_DISK_SHARE, FAILED_SHARE, FLIPPED_SHARE = 0.1, 0.03, 0.05
ENTRIES_AT_ONCE = 5
LATE_US = 60_000
Order = tuple[int, int, int, int, Entry]  # id, kind, host block, disk block, entry


NO_RECORD = Record(0, Entry(0, 0, False, b""), 0)


class WrongOrder(Exception):
    """An order that no coordinator may give."""


class SimulatedDisk:
    """The disk tier of one worker, through all its lives.

    Attributes:
        blocks: Number of blocks.
        found: What the present life found at its start.
    """

    def __init__(
        self, blocks: int, random: Random, block_size: int, order_us: int, late_share: float, stuck_share: float
    ) -> None:
        self.blocks, self._random, self._size, self._order_us = blocks, random, block_size, order_us
        self._late_share, self._stuck_share = late_share, stuck_share
        self._stuck: list[Callable[[], None]] = []
        self._content: dict[int, tuple[Record, Cells]] = {}
        self._flipped: set[int] = set()
        self._number, self._space = 0, blocks
        self._known: dict[int, tuple[int, int] | None] = {}  # outcomes by id; None: not ended
        self._unfinished: dict[int, Order] = {}
        self.found: list[tuple[int, Entry]] = []

    def begin(self) -> None:
        """Begin a life: of another process, or of the same one with a coordinator that does not know it."""
        for *_, block, entry in self._unfinished.values():
            if self._random.random() < 0.5:
                self._content.pop(block, None)
            elif self._random.random() < 0.2:
                self._put(block, entry, NO_CELLS)
                self._flipped.add(block)
        if self._random.random() < OTHER_DISK_SHARE:
            self._content.clear()
            self._flipped.clear()
        self._unfinished.clear()
        self._known.clear()
        self._stuck.clear()
        self._space = self.blocks if self._random.random() < 0.7 else self._random.randrange(self.blocks + 1)
        records = {block: record for block, (record, _) in self._content.items() if record is not NO_RECORD}
        self.found, others = usable(records)
        for block in others:  # what is left has no record, but its bytes
            self._content[block] = (NO_RECORD, self._content[block][1])

    def scan(self, message: DiskScan, epoch: int) -> DiskEntries:
        """Return the next entries."""
        part = self.found[message.cursor : message.cursor + ENTRIES_AT_ONCE]
        numbers = np.zeros((len(part), DISK_ENTRY_NUMBERS), np.int32)
        for row, (block, entry) in zip(numbers, part, strict=True):
            row[0], row[5] = block, entry.first
            row[1:5] = np.array([entry.value, entry.parent], "<u8").view("<i4")
        owners = np.array([entry.owner for _, entry in part], "<u8").view("<i4")
        tokens = np.frombuffer(b"".join(entry.tokens for _, entry in part), np.int32)
        last = message.cursor + len(part) >= len(self.found)
        usable = max(self._content, default=-1) + 1
        return DiskEntries(epoch, message.cursor, last, numbers.reshape(-1), tokens, owners, usable)

    def take(
        self, message: DiskOrders, after: Callable[[int, Callable[[], None]], None], ended: Callable[[int], None]
    ) -> None:
        """Begin orders.

        Args:
            message: The orders.
            after: Calls a function after some microseconds.
            ended: Called with the id of an order that has ended, or that ended before.
        """
        rows = message.orders.reshape(-1, DISK_ORDER_NUMBERS)
        values = np.ascontiguousarray(rows[:, 4:8]).view("<u8").tolist()
        tokens = iter(message.tokens.reshape(-1, self._size))
        owners = iter(np.ascontiguousarray(message.owners).view("<u8").tolist())
        for (number, kind, host_block, block, *_, first), (value, parent) in zip(rows.tolist(), values, strict=True):
            own, owner = (next(tokens).tobytes(), next(owners)) if kind == DISK_WRITE else (b"", 0)
            if number in self._known:
                if self._known[number] is not None:
                    ended(number)
                continue
            if host_block >= 0 and {host_block} & {order[2] for order in self._unfinished.values()}:
                raise WrongOrder(f"order {number} uses host block {host_block}, as another one does")
            self._known[number] = None
            self._unfinished[number] = (number, kind, host_block, block, Entry(value, parent, bool(first), own, owner))
            if self._stuck_share and self._random.random() < self._stuck_share:
                self._stuck.append(lambda at=number: ended(at))  # type: ignore[misc]
                continue
            late = self._random.random() < self._late_share
            after(1 + self._random.randrange(LATE_US if late else self._order_us), lambda at=number: ended(at))  # type: ignore[misc]

    def calm(self) -> None:
        """End the orders that are stuck, and let no other one be."""
        self._stuck_share, stuck = 0.0, self._stuck.copy()
        self._stuck.clear()
        for ended in stuck:
            ended()

    def finish(self, number: int, file: HostFile) -> DiskResults | None:
        """Carry an order out if it has not ended. Return its result; None if it belongs to an earlier life.

        Raises:
            WrongOrder: The host file or the disk has other content than the coordinator believes.
        """
        if number not in self._known:
            return None
        outcome = self._known[number]
        if outcome is None:
            outcome = self._known[number] = self._carry_out(self._unfinished.pop(number), file)
        return DiskResults(0, np.array([number, *outcome], np.int32))

    def _carry_out(self, order: Order, file: HostFile) -> tuple[int, int]:
        _, kind, host_block, block, entry = order
        tag = (*np.array([entry.value], "<u8").view("<i4").tolist(),)
        fails = self._random.random() < FAILED_SHARE
        if kind == DISK_WRITE:
            cells = file.read(host_block, tag)
            if cells is None:
                raise WrongOrder(f"host block {host_block}, to be written to the disk, has other content")
            if block >= self._space:
                return DISK_FULL, self._space
            self._content.pop(block, None)
            if fails:
                return DISK_FAILED, 0
            self._put(block, entry, cells)
            if host_block in file.flipped or self._random.random() < FLIPPED_SHARE:
                self._flipped.add(block)
            return DISK_DONE, 0
        if kind == DISK_WIPE:
            if fails:
                return DISK_FAILED, 0
            self._content.pop(block, None)
            self._flipped.discard(block)
            return DISK_DONE, 0
        file.write(host_block, (0, 0), NO_CELLS)
        if fails:
            return DISK_FAILED, 0
        found = self._content.get(block)
        if found is None or found[0].entry.value != entry.value:
            raise WrongOrder(f"disk block {block} has another entry than the coordinator believes")
        if block in self._flipped:
            return DISK_DAMAGED, 0
        file.write(host_block, tag, found[1])
        return DISK_DONE, 0

    def filled(self) -> set[int]:
        """Return the blocks with bytes of entries."""
        return set(self._content)

    def _put(self, block: int, entry: Entry, cells: Cells) -> None:
        self._number += 1
        self._content[block] = (Record(self._number, entry, 0), cells)
        self._flipped.discard(block)
