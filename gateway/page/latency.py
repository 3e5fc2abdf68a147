"""Latency of the requests that ended in the last minute: per tenant and overall."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np

from kvforge.protocol.messages import RequestRow

WINDOW_S = 60.0
ENDED_MAX = 20_000
TENANTS_SHOWN = 16
ALL = ""
Pair = tuple[float, float]


class Ended(msgspec.Struct, frozen=True):
    """One ended request.

    Attributes:
        at_s: When it ended, on the monotonic clock.
        tenant: Its tenant.
        first_s: The time to its first token.
        between_s: The mean time between its tokens; None if it generated one token only.
        whole_s: The time to its end.
    """

    at_s: float
    tenant: str
    first_s: float
    between_s: float | None
    whole_s: float


class Latency(msgspec.Struct, frozen=True):
    """Median and 99th percentile in milliseconds over `count` requests of a tenant, or of all (ALL)."""

    tenant: str
    count: int
    first_ms: Pair | None
    between_ms: Pair | None
    whole_ms: Pair | None


class Latencies:
    """Collects ended requests from successive lists, each request once."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque(maxlen=ENDED_MAX)
        self._known: set[int] = set()

    def look(self, rows: Iterable[RequestRow], now_s: float) -> None:
        """Add the ended requests of a list that was made at `now_s` (monotonic clock)."""
        over = [row for row in rows if row.ended_us >= 0]
        for row in over:
            if row.request_id not in self._known and row.first_token_us >= 0:
                since_s = (row.age_us - row.ended_us) / 1e6
                self._ended.append(_ended(row, now_s - since_s))
        self._known = {
            row.request_id for row in over
        }  # lists hold the newest requests, so one that has left does not come back
        self._ended = deque((one for one in self._ended if one.at_s >= now_s - WINDOW_S), ENDED_MAX)

    def by_tenant(self) -> list[Latency]:
        """Return the overall latency, then that of the tenants with the most requests, by name."""
        groups: dict[str, list[Ended]] = {}
        for one in self._ended:
            groups.setdefault(one.tenant, []).append(one)
        most = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))[:TENANTS_SHOWN]
        return [_latency_of(ALL, list(self._ended)), *(_latency_of(tenant, ended) for tenant, ended in sorted(most))]


def _ended(row: RequestRow, at_s: float) -> Ended:
    more = row.generated_tokens - 1
    between_s = (row.ended_us - row.first_token_us) / 1e6 / more if more > 0 else None
    return Ended(at_s, row.tenant, row.first_token_us / 1e6, between_s, row.ended_us / 1e6)


def _latency_of(tenant: str, ended: list[Ended]) -> Latency:
    between = [one.between_s for one in ended if one.between_s is not None]
    first, whole = [one.first_s for one in ended], [one.whole_s for one in ended]
    return Latency(tenant, len(ended), _pair(first), _pair(between), _pair(whole))


def _pair(seconds: list[float]) -> Pair | None:
    if not seconds:
        return None
    median, high = np.percentile(np.array(seconds), (50, 99)).tolist()
    return round(1e3 * median, 2), round(1e3 * high, 2)
