"""Which evicted blocks are copied to the host tier: used again, always; used once, while that pays.

A block counts as used again if a request has hit it, if its sequence goes on (an idle, pinned or preempted one), or if
its content was evicted without a copy and computed again. All others are used once.

Traffic that never repeats a prefix has blocks used once alone, and copying them costs throughput for nothing. The tier
measures which share of these blocks is *wanted* again: read from the host or the disk, or computed again although it
was evicted before. The chained hashes of skipped blocks, as many as the tier has blocks, show the second case: they
predict the reads of copies that were not made.

The share is an average over about `window` evicted blocks, with weights that decay. Below half of what a copy must
yield to pay, blocks used once are skipped; at that yield, they are copied again. Each tenant has a share of its own,
once it has seen a window; until then, that of all blocks decides. A chain keeps its beginning either way: a copied
block takes the blocks before it along, and a chain is evicted from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from .costs import StepCosts

WHOLE = 1 << 40  # a share of 1
DEFAULT = WHOLE // 16  # what a copy must yield while its costs are not measured
LEAST, MOST = WHOLE // 64, WHOLE // 4
SKIPPED_MAX = 1 << 17  # remembered hashes
PERIOD = 16  # evicted blocks used once between two decisions, at most


class OnceShare(msgspec.Struct):
    """Which share of evicted blocks that were used once is wanted again, recently, in units of 1 / WHOLE.

    Attributes:
        share: The share.
        seen: How many were evicted, up to the window: until then, the share says nothing.
        evicted: How many were evicted in all.
        copying: Whether they are copied.
    """

    share: int = 0
    seen: int = 0
    evicted: int = 0
    copying: bool = True


class HostYield:
    """How many of the evicted blocks that were used once are wanted again, for each tenant and for all.

    Attributes:
        overall: The share of all blocks. It counts for tenants with few blocks.
        by_tenant: The shares of tenants.
        skipped: The chained hashes of blocks that were not copied and not wanted yet, with their tenants, oldest first.
        skipped_max: How many of these are remembered.
        once_total: Evicted blocks that were used once, copied or not.
        wanted_total: Blocks of these that were wanted again.
        skipped_total: Blocks of these that were not copied.
        recomputed_total: Skipped blocks that were computed again.
    """

    def __init__(self, window: int, blocks: int) -> None:
        """Create the measure of a new tier.

        Args:
            window: Evicted blocks after which a share counts; 0: all blocks are copied.
            blocks: Blocks of the tier.
        """
        self._window, self._period = window, max(1, min(PERIOD, window // PERIOD))
        self.overall = OnceShare()
        self.by_tenant: dict[int, OnceShare] = {}
        self.skipped: OrderedDict[int, int] = OrderedDict()
        self.skipped_max = 0
        self.remember(blocks)
        self.once_total = self.wanted_total = self.skipped_total = self.recomputed_total = 0

    def remember(self, blocks: int) -> None:
        """Remember as many skipped blocks as a tier of so many blocks would have kept."""
        self.skipped_max = max(self.skipped_max, min(blocks, SKIPPED_MAX))

    def share_of(self, tenant: int) -> OnceShare:
        """Return the share that decides for a tenant's blocks."""
        own = self.by_tenant.get(tenant)
        return own if own is not None and own.seen >= self._window else self.overall

    def evicted(self, tenant: int, needed: Callable[[], int]) -> None:
        """Count a block that was used once, which the pool evicts; after each few, decide if such blocks are copied.

        Args:
            tenant: The tenant that is charged for it.
            needed: Returns the share of copies that must be read for copies to pay.
        """
        self.once_total += 1
        window = self._window
        if not window:
            return
        own = self.by_tenant.get(tenant)
        if own is None:
            own = self.by_tenant[tenant] = OnceShare()
        for each in (own, self.overall):
            each.share -= each.share // window
            each.evicted += 1
            if each.seen < window:
                each.seen += 1
            if each.seen == window and not each.evicted % self._period:
                each.copying = each.share >= needed() // (2 if each.copying else 1)

    def wanted(self, tenant: int) -> None:
        """Count such a block that is read, or computed again."""
        self.wanted_total += 1
        if not self._window:
            return
        own = self.by_tenant.get(tenant)
        for each in (self.overall,) if own is None else (own, self.overall):
            each.share = min(WHOLE, each.share + WHOLE // self._window)

    def skip(self, value: int, tenant: int) -> None:
        """Remember a block that is evicted without a copy by its chained hash."""
        self.skipped_total += 1
        skipped = self.skipped
        if value in skipped:
            skipped.move_to_end(value)
            return
        skipped[value] = tenant
        if len(skipped) > self.skipped_max:
            skipped.popitem(last=False)

    def computed_again(self, values: list[int]) -> list[int]:
        """Return the places of skipped blocks among blocks that were computed, by their chained hashes: [n] places."""
        if not self.skipped or self.skipped.keys().isdisjoint(values):
            return []
        places = [place for place, value in enumerate(values) if value in self.skipped]
        for place in places:
            tenant = self.skipped.pop(values[place], None)
            if tenant is not None:  # otherwise two rows computed the same content
                self.recomputed_total += 1
                self.wanted(tenant)
        return places

    def check_invariants(self) -> None:
        """Check that the numbers agree."""
        assert len(self.skipped) <= self.skipped_max, "too many skipped blocks are remembered"
        for each in (self.overall, *self.by_tenant.values()):
            assert 0 <= each.share <= WHOLE and each.seen == min(each.evicted, self._window), (
                "a share of evicted blocks"
            )
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


def permille(share: OnceShare) -> int:
    """Return how many of 1,000 evicted blocks that were used once are wanted again."""
    return 1000 * share.share // WHOLE
