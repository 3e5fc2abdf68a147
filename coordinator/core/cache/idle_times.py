"""For how long sequences are idle between two requests, learned for each tenant.

A sequence is idle from the end of a request until the next one that continues it. Most of an agent's requests end with
a call of a tool, which takes seconds, and some with an answer to a person, who takes minutes. The times are counted in
buckets of half octaves. Sequences that were removed before a next request are counted apart: they were at risk to come
back until then. Counts are halved from time to time, so that old ones fade.

All arithmetic is on integers, so the same events give the same expectation in any process.
"""

from __future__ import annotations

import msgspec

UNIT_US = 1000
OCTAVES = 27  # of milliseconds: 37 hours
BUCKETS = 2 * OCTAVES
LEARN_MIN = 16  # idle times from which on a tenant's own are known; before, all tenants' count
COUNTED_MAX = 1024  # counts are halved when they exceed this
OUTSIDE = 32  # 1 / OUTSIDE of the times are shorter than the expected ones, and as many longer
WORTH = 2  # a sequence is expected while one of so many comes back in time


class IdleCounts(msgspec.Struct):
    """Counts of idle times by bucket.

    Attributes:
        returned: Times that ended with a request, [BUCKETS].
        removed: Times that ended with the removal of the sequence, [BUCKETS].
        total: The sum of both.
    """

    returned: list[int] = msgspec.field(default_factory=lambda: [0] * BUCKETS)
    removed: list[int] = msgspec.field(default_factory=lambda: [0] * BUCKETS)
    total: int = 0

    def add(self, counts: list[int], idle_us: int) -> None:
        """Count an idle time in one of the two lists."""
        counts[bucket_of(idle_us)] += 1
        self.total += 1
        if self.total > COUNTED_MAX:
            self.returned = [count // 2 for count in self.returned]
            self.removed = [count // 2 for count in self.removed]
            self.total = sum(self.returned) + sum(self.removed)

    def expected(self) -> tuple[int, int] | None:
        """Return the times in us between which nearly all sequences that come back do so; None if none has yet."""
        whole = sum(self.returned)
        if not whole:
            return None
        early, late, seen = -1, 0, 0
        for bucket, count in enumerate(self.returned):
            seen += count
            if early < 0 and seen * OUTSIDE > whole:
                early = bucket
            if (whole - seen) * OUTSIDE <= whole:
                late = bucket
                break
        return start_of(early), start_of(late + 1)

    def is_likely(self, idle_us: int, until_us: int) -> bool:
        """Return whether a sequence that has been idle for so long is likely enough to come back before `until_us`."""
        first, end = bucket_of(idle_us), bucket_of(max(0, until_us - 1)) + 1
        back, all_left = sum(self.returned[first:end]), sum(self.returned[first:]) + sum(self.removed[first:])
        return back > 0 and back * WORTH >= all_left


class IdleTimes:
    """The idle times of each tenant's sequences.

    Attributes:
        overall: The counts of all tenants.
        by_tenant: The counts of each tenant with idle times.
    """

    def __init__(self) -> None:
        self.overall = IdleCounts()
        self.by_tenant: dict[int, IdleCounts] = {}

    def own(self, tenant: int) -> IdleCounts | None:
        """Return a tenant's own counts; None while too little is known."""
        own = self.by_tenant.get(tenant)
        return own if own is not None and own.total >= LEARN_MIN else None

    def of(self, tenant: int) -> IdleCounts | None:
        """Return the counts that decide for a tenant's sequences; None while too little is known."""
        own = self.own(tenant)
        if own is not None:
            return own
        return self.overall if self.overall.total >= LEARN_MIN else None

    def returned(self, tenant: int, idle_us: int) -> None:
        """Count a sequence that a request continues."""
        for counts in (self._begun(tenant), self.overall):
            counts.add(counts.returned, idle_us)

    def removed(self, tenant: int, idle_us: int) -> None:
        """Count a sequence that was removed without a further request."""
        for counts in (self._begun(tenant), self.overall):
            counts.add(counts.removed, idle_us)

    def forget_tenant(self, tenant: int) -> None:
        """Forget a tenant before its number is given to another one."""
        self.by_tenant.pop(tenant, None)

    def _begun(self, tenant: int) -> IdleCounts:
        own = self.by_tenant.get(tenant)
        if own is None:
            own = self.by_tenant[tenant] = IdleCounts()
        return own


def bucket_of(idle_us: int) -> int:
    """Return the bucket of an idle time."""
    units = idle_us // UNIT_US
    if units < 2:
        return max(0, units)
    octave = units.bit_length() - 1
    return min(BUCKETS - 1, 2 * octave + (units >> (octave - 1) & 1))


def start_of(bucket: int) -> int:
    """Return the shortest idle time of a bucket, in us."""
    if bucket < 2:
        return bucket * UNIT_US
    octave, half = divmod(bucket, 2)
    return ((2 + half) << (octave - 1)) * UNIT_US
