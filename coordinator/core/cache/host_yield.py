"""Which evicted blocks are copied to the host tier: used again, always; used once, while that pays.

A block counts as used again if a request has hit it, if its sequence goes on (an idle, pinned or preempted one), or if
its content was evicted without a copy and computed again. All others are used once.

Traffic that never repeats a prefix has blocks used once alone, and copying them costs throughput for nothing. The tier
measures which share of these blocks is *wanted* again: read from the host or the disk, or computed again although it
was evicted before. The chained hashes of skipped blocks, as many as the tier has blocks, show the second case: they
predict the reads of copies that were not made.

The share is an average over about `window` evicted blocks, whose weights decay. Below half of what a copy must yield
to pay, blocks used once are skipped; at that yield, they are copied again. A chain keeps its beginning either way: a
copied block takes the blocks before it along, and a chain is evicted from its end.
"""

from __future__ import annotations

from collections import OrderedDict

from .costs import StepCosts

WHOLE = 1 << 40  # a share of 1
DEFAULT = WHOLE // 16  # what a copy must yield while its costs are not measured
LEAST, MOST = WHOLE // 64, WHOLE // 4
SKIPPED_MAX = 1 << 17  # remembered hashes
PERIOD = 16  # evicted blocks used once between two decisions, at most


class HostYield:
    """How many of the evicted blocks that were used once are wanted again. Shares are in units of 1 / WHOLE.

    Attributes:
        share: The share that is wanted again, recently.
        seen: How many were evicted, up to the window: until then, all are copied.
        copying: Whether blocks used once are copied.
        skipped: The chained hashes of blocks that were not copied and not wanted yet, oldest first.
        skipped_max: How many of these are remembered.
        once_total: Evicted blocks that were used once, copied or not.
        wanted_total: Blocks of these that were wanted again.
        skipped_total: Blocks of these that were not copied.
        recomputed_total: Skipped blocks that were computed again.
    """

    def __init__(self, window: int, blocks: int) -> None:
        """Create the measure of a new tier.

        Args:
            window: Evicted blocks after which the share counts; 0: all blocks are copied.
            blocks: Blocks of the tier.
        """
        self._window, self._period = window, max(1, min(PERIOD, window // PERIOD))
        self.share = self.seen = 0
        self.copying = True
        self.skipped: OrderedDict[int, None] = OrderedDict()
        self.skipped_max = 0
        self.remember(blocks)
        self.once_total = self.wanted_total = self.skipped_total = self.recomputed_total = 0

    @property
    def wanted_permille(self) -> int:
        """How many of 1,000 evicted blocks that were used once are wanted again, recently."""
        return 1000 * self.share // WHOLE

    def remember(self, blocks: int) -> None:
        """Remember as many skipped blocks as a tier of so many blocks would have kept."""
        self.skipped_max = max(self.skipped_max, min(blocks, SKIPPED_MAX))

    @property
    def is_due(self) -> bool:
        """Whether to decide again if blocks used once are copied: after each few of them, not to do so for each."""
        return self.seen >= self._window > 0 and not self.once_total % self._period

    def decide(self, needed: int) -> None:
        """Decide whether blocks used once are copied from now on, if copies must yield `needed` to pay."""
        self.copying = self.share >= needed // (2 if self.copying else 1)

    def evicted(self) -> None:
        """Count a block that was used once, which the pool evicts."""
        self.once_total += 1
        if self._window:
            self.seen = min(self.seen + 1, self._window)
            self.share -= self.share // self._window

    def wanted(self) -> None:
        """Count such a block that is read, or computed again."""
        self.wanted_total += 1
        if self._window:
            self.share = min(WHOLE, self.share + WHOLE // self._window)

    def skip(self, value: int) -> None:
        """Remember a block that is evicted without a copy by its chained hash."""
        self.skipped_total += 1
        skipped = self.skipped
        if value in skipped:
            skipped.move_to_end(value)
            return
        skipped[value] = None
        if len(skipped) > self.skipped_max:
            skipped.popitem(last=False)

    def computed_again(self, values: list[int]) -> list[int]:
        """Return the places of skipped blocks among blocks that were computed, by their chained hashes: [n] places."""
        if not self.skipped or self.skipped.keys().isdisjoint(values):
            return []
        places = [place for place, value in enumerate(values) if value in self.skipped]
        for place in places:
            if self.skipped.pop(values[place], True) is None:  # not twice, if two rows computed the same content
                self.recomputed_total += 1
                self.wanted()
        return places

    def check_invariants(self) -> None:
        """Check that the numbers agree."""
        assert len(self.skipped) <= self.skipped_max, "too many skipped blocks are remembered"
        assert 0 <= self.share <= WHOLE and 0 <= self.seen <= self._window, "a share of evicted blocks"
        assert self.recomputed_total <= min(self.skipped_total, self.wanted_total), "skipped blocks computed again"
        assert max(self.skipped_total, self.wanted_total) <= self.once_total, "blocks used once"


def needed_yield(write: StepCosts, read: StepCosts, compute: StepCosts, block_size: int) -> int:
    """Return the share of copies that must be read for copies to pay, in units of 1 / WHOLE.

    A copy costs its time, and one that is read saves the time of computing the block, less that of reading it.

    Args:
        write: The measured costs of copies to the host, by blocks.
        read: The same of copies from the host.
        compute: The measured costs of steps, by prompt tokens.
        block_size: Tokens of a block.
    """
    if not write.token or not compute.token:
        return DEFAULT
    saves = compute.token * block_size - (read.token or write.token)
    return max(LEAST, min(MOST, WHOLE * write.token // saves)) if saves > 0 else MOST
