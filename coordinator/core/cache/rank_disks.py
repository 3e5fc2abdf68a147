"""The disk tiers of a worker's ranks, which count as one.

Each rank has its share of every block, in disk blocks of the same numbers. An announced entry counts if all ranks have
the same one in the same block: the other ranks announce first, then rank 0. An order goes to all ranks and ends when
all have answered it, with the worst outcome: one rank's damaged block is a miss for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_FULL,
    DISK_NOT_FOUND,
    DiskEntries,
    DiskScan,
)

from .disk_entries import DiskEntry, read_entries

NOTHING_TO_ASK, TO_ASK, ASKED = range(3)  # of a scan
WORST_FIRST = (DISK_FAILED, DISK_FULL, DISK_DAMAGED, DISK_NOT_FOUND, DISK_DONE)
DIGEST_BYTES = 16


class DiskOutcome(NamedTuple):
    """How an order has ended.

    Attributes:
        order: Its id.
        outcome: As in `DiskResults`; for several ranks, the worst.
        usable: Blocks that there is space for, if the outcome is DISK_FULL.
        partly: Some ranks carried it out, and others did not.
    """

    order: int
    outcome: int
    usable: int
    partly: bool = False


class RankDisks:
    """What the ranks of a worker have announced of their disks and answered to orders.

    Attributes:
        count: The number of ranks.
        found: What each rank except rank 0 announced: block -> digest of the entry, and its tag.
        cursors: How many entries each of these has announced.
        asked: Whether each of these owes a part of its announcement: NOTHING_TO_ASK, TO_ASK or ASKED.
        usable: Blocks from this one on have no bytes on these ranks.
        answers: Orders that some ranks have answered: outcomes and usable blocks by rank.
    """

    def __init__(self, count: int) -> None:
        assert count > 1
        self.count = count
        self.found: list[dict[int, bytes]] = [{} for _ in range(count - 1)]
        self.cursors, self.asked = [0] * (count - 1), [TO_ASK] * (count - 1)
        self.usable = 0
        self.answers: dict[int, dict[int, tuple[int, int]]] = {}

    # ---------------------------------------------------------------------------------------------------- announcements

    @property
    def announced(self) -> bool:
        """Whether all ranks except rank 0 have announced their entries."""
        return not any(self.asked)

    def scans(self, epoch: int) -> list[tuple[int, DiskScan]]:
        """Return the scans to send now, each with its rank."""
        due = [at for at, asked in enumerate(self.asked) if asked == TO_ASK]
        for at in due:
            self.asked[at] = ASKED
        return [(at + 1, DiskScan(epoch, self.cursors[at])) for at in due]

    def announce(self, rank: int, message: DiskEntries, total: int, block_size: int) -> None:
        """Note the entries that a rank other than rank 0 found; see `read_entries`.

        Raises:
            ProtocolError: The message is malformed, or names a block twice or outside the tier.
        """
        found, at = self.found[rank - 1], rank - 1
        if self.asked[at] == NOTHING_TO_ASK:
            return
        entries = read_entries(message, self.cursors[at], total, block_size)
        if entries is None:
            return
        if not found.keys().isdisjoint(entry.block for entry in entries):
            raise ProtocolError("disk_entries: a block was announced before")
        found.update((entry.block, _named(entry)) for entry in entries)
        self.cursors[at] += len(entries)
        self.asked[at] = NOTHING_TO_ASK if message.last else TO_ASK
        self.usable = max(self.usable, message.usable)

    def has(self, entry: DiskEntry) -> bool:
        """Return whether all other ranks have an entry of rank 0, in the same block."""
        named = _named(entry)
        return all(found.get(entry.block) == named for found in self.found)

    def tags(self) -> Iterator[tuple[int, int]]:
        """Yield the blocks with entries on other ranks than rank 0, and the tags of their owners."""
        for found in self.found:
            for block, named in found.items():
                yield block, int.from_bytes(named[DIGEST_BYTES:], "little")

    def forget_found(self) -> None:
        """Forget what was announced, once rank 0 has announced its entries too."""
        for found in self.found:
            found.clear()

    def came_back(self) -> None:
        """The ranks have other connections: ask again for announcements that did not arrive."""
        self.asked = [TO_ASK if asked else NOTHING_TO_ASK for asked in self.asked]

    # ----------------------------------------------------------------------------------------------------------- orders

    def answer(self, rank: int, outcome: DiskOutcome) -> DiskOutcome | None:
        """Note a rank's answer to an order in flight. Return the joint outcome once all ranks have answered it."""
        answers = self.answers.setdefault(outcome.order, {})
        answers.setdefault(rank, (outcome.outcome, outcome.usable))
        if len(answers) < self.count:
            return None
        del self.answers[outcome.order]
        given = {each for each, _ in answers.values()}
        worst = next(each for each in WORST_FIRST if each in given)
        space = [usable for each, usable in answers.values() if each == DISK_FULL]
        usable = min(space) if worst == DISK_FULL else 0
        return DiskOutcome(outcome.order, worst, usable, partly=worst != DISK_DONE and DISK_DONE in given)


def _named(entry: DiskEntry) -> bytes:
    """Return the digest of what an entry is, and its tag."""
    numbers = np.array([entry.value, entry.parent, entry.first], "<u8").tobytes()
    digest = hashlib.blake2b(numbers + entry.tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
    return digest + entry.tag.to_bytes(8, "little")
