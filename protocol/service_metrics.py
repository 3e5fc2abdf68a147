"""The numbers in the shared tables: counters per tenant and pool (`meters`), and the gauges of the same instant.

A version counter is odd during a write. A reader that finds it odd, or changed after its copy, copies the numbers
again.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from . import steady_clock
from .errors import DeadlineExceeded
from .layout import GAUGES
from .messages import Int64Array
from .meters import POOL_COUNTS, ServiceInfo

READ_WAIT_S = 1.0
SPINS_MAX = 32
LENGTH_BYTES = 8
NEVER_US = -(1 << 62)
Views = dict[str, npt.NDArray[Any]]
Copied = TypeVar("Copied")


class ServiceMetrics(NamedTuple):
    """All numbers as of one instant.

    Attributes:
        gauges: The gauges by name.
        tenants: [TENANT_ROWS + 1, TENANT_CELLS] int64.
        tenant_blocks: [TENANT_ROWS + 1, TENANT_TIERS] int64, the blocks that each tenant is charged for, by tier.
        pools: [pools, POOL_CELLS] int64.
        facts: The names and states that are not numbers.
        age_s: Seconds since the coordinator wrote them. The coordinator writes them at least once a second.
    """

    gauges: dict[str, int]
    tenants: Int64Array
    tenant_blocks: Int64Array
    pools: Int64Array
    facts: ServiceInfo
    age_s: float


class ServiceMetricsWriter:
    """The coordinator's side: writes the arrays of `ServiceMetrics` between begin() and finish().

    Attributes:
        written_us: The time of the last write on the coordinator's clock, in microseconds.
    """

    def __init__(self, views: Views) -> None:
        self._head: Int64Array = views["numbers"]
        self.tenants: Int64Array = views["tenants"]
        self.tenant_blocks: Int64Array = views["tenant_blocks"]
        self.pools: Int64Array = views["pool_counts"]
        self._facts: npt.NDArray[np.uint8] = views["facts"]
        self.begin()
        self.facts(ServiceInfo())
        self.finish(NEVER_US, [0] * len(GAUGES))

    def begin(self) -> None:
        """Mark the numbers as being written until `finish`."""
        self._head[0] += 1

    def pool(self, number: int, counts: Sequence[int], times: Sequence[int]) -> None:
        """Write the row of a pool.

        Args:
            number: The number of the pool.
            counts: Counters in the order of `meters.POOL_COUNTS`.
            times: The cells of the distribution of its step times.
        """
        row = self.pools[number]
        row[: len(POOL_COUNTS)] = counts
        row[len(POOL_COUNTS) :] = times

    def facts(self, facts: ServiceInfo) -> None:
        """Write the facts. Their size is bounded: there is room for as many workers as pools."""
        data = msgspec.msgpack.encode(facts)
        whole = len(data).to_bytes(LENGTH_BYTES, "little") + data
        assert len(whole) <= self._facts.size, "facts exceed their area in the tables"
        self._facts[: len(whole)] = np.frombuffer(whole, np.uint8)

    def finish(self, now_us: int, gauges: Sequence[int]) -> None:
        """Mark the numbers as completely written.

        Args:
            now_us: The time on the coordinator's clock, in microseconds.
            gauges: Values in the order of `layout.GAUGES`.
        """
        self._head[1] = time.monotonic_ns()
        self._head[2:] = gauges
        self.written_us = now_us
        self._head[0] += 1


class ServiceMetricsReader:
    """The readers' side."""

    def __init__(self, views: Views) -> None:
        self._head: Int64Array = views["numbers"]
        self._rest = [views[name] for name in ("tenants", "tenant_blocks", "pool_counts")]
        self._facts: npt.NDArray[np.uint8] = views["facts"]

    def all(self) -> ServiceMetrics:
        """Return all numbers as of one instant.

        Raises:
            DeadlineExceeded: The coordinator died during a write.
        """
        looked_ns = time.monotonic_ns()  # before the copy: a pause of this reader after the copy must not count as age
        (written_ns, *gauges), tenants, blocks, pools, facts = undisturbed(self._head, self._copy)
        age_s = max(0.0, (looked_ns - written_ns) / 1e9)
        named = dict(zip(GAUGES, gauges, strict=True))
        return ServiceMetrics(named, tenants, blocks, pools, msgspec.msgpack.decode(facts, type=ServiceInfo), age_s)

    def _copy(self) -> tuple[list[int], Int64Array, Int64Array, Int64Array, bytes]:
        size = int.from_bytes(self._facts[:LENGTH_BYTES].tobytes(), "little")
        tenants, blocks, pools = (array.copy() for array in self._rest)
        facts = self._facts[LENGTH_BYTES : LENGTH_BYTES + size].tobytes()
        return self._head[1:].tolist(), tenants, blocks, pools, facts


def undisturbed(version: Int64Array, copy: Callable[[], Copied]) -> Copied:
    """Copy data that the writer does not change during the copy.

    Args:
        version: [1 or more] int64; the first item is odd during a write.
        copy: Makes the copy.

    Returns:
        The result of `copy`.

    Raises:
        DeadlineExceeded: The writer died or hangs during a write.
    """
    for _ in attempts():
        before = int(version[0])
        if before & 1 == 0:
            copied = copy()
            if int(version[0]) == before:
                return copied
    raise DeadlineExceeded("the gauges of the shared tables stay inconsistent: their writer died or hangs")


def attempts() -> Iterator[None]:
    """Yield once per attempt: first at once, then after giving up the core, until READ_WAIT_S has passed."""
    deadline = steady_clock.monotonic() + READ_WAIT_S
    for attempt in itertools.count():
        yield
        if attempt >= SPINS_MAX:
            if steady_clock.monotonic() >= deadline:
                return
            os.sched_yield()
