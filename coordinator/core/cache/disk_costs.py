"""Whether blocks are read from the disk or computed: what takes less time, by the measured costs of both.

Reads are measured by the coordinator's clock from orders to answers, since a request waits for that. A measurement
lasts while reads are in flight together. Its first answer shows what a read takes however few blocks there are, and
later ones what each further block takes: they are added to a line at 1, 2, 4 blocks, and so on. Computing is measured
by the durations of steps (`Group.costs`), and the copy from the host tier to the device by `HostCopies.read_costs`.
Prompts that the group computes first are not counted: no meter has them, and a request that reads waits for them
beside its reads.
"""

from __future__ import annotations

from ..clock import Clock
from .costs import StepCosts

PROBE_BLOCKS = 8  # of a read that is made to measure the disk: as many as a worker reads at a time
MEASURED_MAX = 256  # of one measurement: a disk that gets slower amid a long read is noticed
# So many loads in a row are computed before the disk is measured again, since it may have become faster. The probe
# takes 8 blocks, so a disk that is 10 times slower than computing costs each request the time of 5 computed blocks.
DECLINED_MAX = 16


class DiskCosts:
    """The measured cost of reads from a disk, and the choice between them and computing.

    Attributes:
        line: The cost of reads that are in flight together, by their blocks: until an answer, and for each block.
        declined: Loads in a row that were computed because that takes less time.
        began_us: When the reads of the present measurement began; -1 without one.
        blocks: How many blocks have come behind its first answer.
        due: With so many it is added to the line; 0 before the first answer.
    """

    def __init__(self, clock: Clock, copies: StepCosts, steps: StepCosts, wait_us: int) -> None:
        """Create the costs of a disk that has measured nothing.

        Args:
            clock: The clock.
            copies: The cost of copies from the host tier by their blocks.
            steps: The cost of steps by their prompt tokens.
            wait_us: How long requests wait for the disk. Reads that began earlier are no measure for later ones.
        """
        self._clock, self._copies, self._steps, self._wait_us = clock, copies, steps, wait_us
        self.line = StepCosts()
        self.declined = self.blocks = self.due = 0
        self.began_us = -1

    def worth(self, found: int, tokens: int, ahead: int) -> int:
        """Return how many of the blocks of a load are to be read; 0 for none.

        Args:
            found: The blocks, at least one.
            tokens: The tokens that need not be computed with them.
            ahead: Other blocks that are being read.
        """
        if not self._steps.token:
            return found
        copy = self._copies.of(found) if self._copies.token else 0
        if self.line.of(ahead + found) + copy < self._steps.token * tokens:
            self.declined = 0
            return found if self.line.token else min(found, PROBE_BLOCKS)
        if self.declined >= DECLINED_MAX and found >= PROBE_BLOCKS:
            self.line, self.declined = StepCosts(), 0
            return PROBE_BLOCKS
        self.declined += 1
        return 0

    def began(self) -> None:
        """Note that a read is ordered."""
        now_us = self._clock.now_us
        if self.began_us < 0 or now_us - self.began_us > self._wait_us:
            self.began_us, self.blocks, self.due = now_us, 0, 0

    def progressed(self, blocks: int, left: int) -> None:
        """Note that reads have ended.

        Args:
            blocks: How many brought their block.
            left: How many are still in flight.
        """
        if self.began_us < 0:
            return
        took_us = self._clock.now_us - self.began_us
        if not self.due and (blocks == 1 or (blocks and left)):
            self.line.add(0, took_us)
            self.due = 1
        else:
            self.blocks += blocks
            if self.blocks and (self.blocks >= self.due or not left):
                self.line.add(self.blocks, took_us)
                self.due = 2 * self.blocks
        if not left:
            self.began_us = -1
        elif self.blocks >= MEASURED_MAX:
            self.began_us, self.blocks, self.due = self._clock.now_us, 0, MEASURED_MAX

    def late(self) -> None:
        """Note that a request has waited for too long: the next block takes at least until now."""
        if self.began_us >= 0:
            self.line.add(self.blocks + 1, self._clock.now_us - self.began_us)
        self.interrupt()

    def interrupt(self) -> None:
        """End the measurement: reads in flight are no measure."""
        self.began_us = -1
