"""The waiting queue: whose turn it is.

Requests that ran before come first, in the order of their admission: they hold work that is done already. Then tenants
share by weight, and each tenant's requests go by the time they came, a step of priority being worth a fixed time of
waiting: so no request is passed for ever by later ones of higher priority.

Tenants share what is computed: each has a counter of tokens computed for it, divided by its weight, and the one with
the lowest is served next. One for which nothing waited gets no credit for that time: its counter is lifted to where the
queue is (start-time fair queueing, Goyal et al., SIGCOMM 1996; tokens as the unit: Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024).
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
from ..requests.lifecycle import Request

DEPARTURES = 32
RETRY_MS_MIN, RETRY_MS_DEFAULT, RETRY_MS_MAX = 10, 1000, 60_000


class WaitingQueue:
    """Every request that is pending or preempted. Iterating gives them in the order in which they will be tried.

    size: how many they are. Those that are parked wait for another request, and are not tried: they come last.
    """

    def __init__(self, clock: Clock, limits: Limits, tenants: Tenants) -> None:
        self._clock, self._tenants, self._ageing_us = clock, tenants, microseconds(limits.schedule.ageing_s)
        self._returned: list[tuple[int, Request]] = []
        self._fresh: dict[int, list[tuple[int, int, Request]]] = {}
        self._parked: dict[int, Request] = {}
        self.size = 0
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
        """How many requests of each tenant wait."""
        return Counter(request.tenant for request in self)

    def add(self, request: Request) -> None:
        """A new request waits."""
        tenant = request.tenant
        if tenant not in self._fresh:
            self.service[tenant] = max(self.service[tenant], self._virtual)
        insort(self._fresh.setdefault(tenant, []), self._entry(request), key=_by_time)
        self.size += 1

    def park(self, request: Request) -> None:
        """A new request waits, and is not tried before another request has got further."""
        self._parked[request.id] = request
        self.size += 1

    def unpark(self, request: Request) -> None:
        """It takes its place in the queue: that of the time when it came."""
        del self._parked[request.id]
        self.size -= 1
        self.add(request)

    def is_parked(self, request: Request) -> bool:
        """Whether it is not to be tried."""
        return request.id in self._parked

    def put_back(self, request: Request) -> None:
        """A request that ran waits again."""
        insort(self._returned, (request.admitted_order, request), key=_by_order)
        self.size += 1

    def start(self, request: Request) -> None:
        """The request starts."""
        if not request.admitted_order:
            self._virtual = max(self._virtual, float(self.service[request.tenant]))
        self.remove(request)
        self._departures.append(self._clock.now_us)

    def remove(self, request: Request) -> None:
        """The request does not wait any more."""
        if self._parked.pop(request.id, None) is not None:
            self.size -= 1
            return
        if request.admitted_order:
            self._returned.remove((request.admitted_order, request))
        else:
            entries = self._fresh[request.tenant]
            entries.remove(self._entry(request))
            if not entries:
                del self._fresh[request.tenant]
        self.size -= 1

    def charge(self, tenant: int, tokens: int) -> None:
        """So many tokens are computed for the tenant."""
        self.service[tenant] += tokens / self._tenants.weight[tenant]

    def charge_each(self, tenants: npt.NDArray[np.int64]) -> None:
        """One token for each entry: [n] tenants."""
        self.service += np.bincount(tenants, minlength=self.service.size) / self._tenants.weight

    def retry_after_ms(self) -> int:
        """When a place in a full queue may be free: the mean time between the latest starts, or since the last one."""
        if not self._departures:
            return RETRY_MS_DEFAULT
        mean_us = (self._clock.now_us - self._departures[0]) / len(self._departures)
        since_us = self._clock.now_us - self._departures[-1]
        return min(max(round(max(mean_us, since_us) / 1000), RETRY_MS_MIN), RETRY_MS_MAX)

    def _entry(self, request: Request) -> tuple[int, int, Request]:
        return (request.submitted_us - request.priority * self._ageing_us, request.id, request)

    def check_invariants(self) -> None:
        """The lists agree with the count, and each is in order."""
        queued = len(self._returned) + sum(map(len, self._fresh.values()))
        assert self.size == queued + len(self._parked), "the count of waiting requests"
        assert all(self._fresh.values()), "an empty list of a tenant"
        for entries in self._fresh.values():
            assert entries == sorted(entries, key=_by_time), "a tenant's queue is out of order"
        assert self._returned == sorted(self._returned, key=_by_order), "returned requests are out of order"
        assert np.isfinite(self.service).all(), "a tenant's share"


def _by_time(entry: tuple[int, int, Request]) -> tuple[int, int]:
    return entry[:2]


def _by_order(entry: tuple[int, Request]) -> int:
    return entry[0]
