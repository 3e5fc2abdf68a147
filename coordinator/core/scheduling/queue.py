"""The waiting queue: the order in which requests are tried.

Requests that ran before come first, in admission order, because their work would be lost. Tenants then share by
weight. The requests of one tenant are ordered by arrival time, and one step of priority counts as a fixed waiting
time. Later requests of higher priority can therefore not overtake a request forever.

Tenants share computed tokens: each has a counter of tokens computed for it, divided by its weight, and the tenant
with the lowest counter is served next. Idle time earns no credit: when a tenant's first request arrives, its counter
is lifted to the queue's virtual time (start-time fair queueing, Goyal et al., SIGCOMM 1996; tokens as the unit: Sheng
et al., "Fairness in Serving Large Language Models", OSDI 2024).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..cache.tenants import Tenants
from ..clock import Clock
from ..limits import Limits, microseconds
from ..requests.request import Request
from .rows import BATCH_PRIORITY

DEPARTURES = 32
RETRY_MS_MIN, RETRY_MS_DEFAULT, RETRY_MS_MAX = 10, 1000, 60_000


class WaitingQueue:
    """Every pending or preempted request. Iteration yields them in the order in which they are tried.

    `size` counts all, and `batches` those of batches. Parked requests wait for another request and are not tried;
    iteration yields them last.
    """

    def __init__(self, clock: Clock, limits: Limits, tenants: Tenants) -> None:
        self._clock, self._tenants, self._ageing_us = clock, tenants, microseconds(limits.schedule.ageing_s)
        self._returned: list[tuple[int, Request]] = []
        self._fresh: dict[int, list[tuple[int, int, Request]]] = {}
        self._parked: dict[int, Request] = {}
        self.size = self.batches = 0
        self.service = tenants.service
        self._virtual = 0.0
        self._departures: deque[int] = deque(maxlen=DEPARTURES)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Request]:
        for _, request in self._returned:
            yield request
        heap = [(float(self.service[tenant]), tenant, 0) for tenant in self._fresh]
        heapq.heapify(heap)
        while heap:
            service, tenant, place = heapq.heappop(heap)
            entries = self._fresh[tenant]
            request = entries[place][2]
            if place + 1 < len(entries):
                charged = service + request.prompt.size / self._tenants.weight[tenant]
                heapq.heappush(heap, (float(charged), tenant, place + 1))
            yield request
        yield from self._parked.values()

    def by_tenant(self) -> Counter[int]:
        """Return the number of waiting requests of each tenant."""
        return Counter(request.tenant for request in self)

    def add(self, request: Request) -> None:
        """Add a new request."""
        tenant = request.tenant
        if tenant not in self._fresh:
            self.service[tenant] = max(self.service[tenant], self._virtual)
        insort(self._fresh.setdefault(tenant, []), self._entry(request), key=_by_time)
        self._count(request, 1)

    def park(self, request: Request) -> None:
        """Add a new request that is not tried until another request has progressed."""
        self._parked[request.id] = request
        self._count(request, 1)

    def unpark(self, request: Request) -> None:
        """Move a parked request to its place in the queue, by its arrival time."""
        del self._parked[request.id]
        self._count(request, -1)
        self.add(request)

    def is_parked(self, request: Request) -> bool:
        """Return whether the request is parked."""
        return request.id in self._parked

    def put_back(self, request: Request) -> None:
        """Add a request that ran before."""
        insort(self._returned, (request.admitted_order, request), key=_by_order)
        self._count(request, 1)

    def start(self, request: Request) -> None:
        """Remove a request because it starts."""
        if not request.admitted_order:
            self._virtual = max(self._virtual, float(self.service[request.tenant]))
        self.remove(request)
        self._departures.append(self._clock.now_us)

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        self._count(request, -1)
        if self._parked.pop(request.id, None) is not None:
            return
        if request.admitted_order:
            self._returned.remove((request.admitted_order, request))
        else:
            entries = self._fresh[request.tenant]
            entries.remove(self._entry(request))
            if not entries:
                del self._fresh[request.tenant]

    def _count(self, request: Request, change: int) -> None:
        self.size += change
        if request.priority == BATCH_PRIORITY:
            self.batches += change

    def charge(self, tenant: int, tokens: int) -> None:
        """Charge `tokens` computed tokens to the tenant."""
        self.service[tenant] += tokens / self._tenants.weight[tenant]

    def charge_each(self, tenants: npt.NDArray[np.int64]) -> None:
        """Charge one token to the tenant of each entry, [n]."""
        self.service += np.bincount(tenants, minlength=self.service.size) / self._tenants.weight

    def retry_after_ms(self) -> int:
        """Estimate when a full queue has room: the mean time between recent starts, or the time since the last one."""
        if not self._departures:
            return RETRY_MS_DEFAULT
        mean_us = (self._clock.now_us - self._departures[0]) / len(self._departures)
        since_us = self._clock.now_us - self._departures[-1]
        return min(max(round(max(mean_us, since_us) / 1000), RETRY_MS_MIN), RETRY_MS_MAX)

    def _entry(self, request: Request) -> tuple[int, int, Request]:
        return (request.submitted_us - request.priority * self._ageing_us, request.id, request)

    def check_invariants(self) -> None:
        """Check that the lists agree with the count and are in order."""
        queued = len(self._returned) + sum(map(len, self._fresh.values()))
        assert self.size == queued + len(self._parked), "the count of waiting requests is wrong"
        batches = sum(request.priority == BATCH_PRIORITY for request in self)
        assert self.batches == batches, "the count of waiting requests of batches is wrong"
        assert all(self._fresh.values()), "an empty list of a tenant"
        for entries in self._fresh.values():
            assert entries == sorted(entries, key=_by_time), "a tenant's queue is out of order"
        assert self._returned == sorted(self._returned, key=_by_order), "returned requests are out of order"
        assert np.isfinite(self.service).all(), "a tenant's service is not finite"


def _by_time(entry: tuple[int, int, Request]) -> tuple[int, int]:
    return entry[:2]


def _by_order(entry: tuple[int, Request]) -> int:
    return entry[0]
