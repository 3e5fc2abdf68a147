"""How many lines of batches run at once in this process: as many as the service has no other use for.

A batch must not make interactive requests wait, and the coordinator admits whatever fits. The gateway therefore submits
a line only while rows stay free for others, and looks at the service several times a second. While others run, batches
use a small share of the rows, since each row makes the steps of all longer; otherwise they fill the service.

The processes of one port know each other's lines. Those of other gateways look like requests of others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from kvforge.gateway.generate.service import Load

START = 16
SPARE_SHARE = 8  # one row in so many stays free for interactive requests
GROWTH = 4
QUEUED_TOKENS_MAX, BUSY_MAX = 2048, 0.5  # beside others
QUIET_S = 10.0  # how long after the last request of others the service counts as free


class Room:
    """Places for lines. `limit` may change while places are taken.

    Args:
        most: The highest limit.
        beside_share: The share of the rows while others run.

    Attributes:
        limit: How many places there are.
        used: How many are taken.
    """

    def __init__(self, most: int, beside_share: float) -> None:
        self._most, self._beside_share = most, beside_share
        self._others_at = -QUIET_S
        self.limit, self.used = min(START, most), 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def place(self, count: int) -> Place:
        """Return a context that holds so many places, or all of them if there are fewer."""
        return Place(self, count)

    def meet_others(self, now: float) -> None:
        """Note that requests of others have come."""
        self._others_at = now

    def adjust(self, load: Load, used: int, now: float, busy: float = 0.0) -> None:
        """Set the limit for the load of the service.

        Args:
            load: The load.
            used: The lines of all processes that ran when it was asked for, at most.
            now: The time in seconds, by any clock.
            busy: The share of a core that this process used since the last call.
        """
        rows = load.running + load.rows_free
        if load.running + load.pending > used:
            self.meet_others(now)
        most = self._most
        if now - self._others_at < QUIET_S:
            most = min(most, int(rows * self._beside_share))
            # A prompt of others would wait for those of batches, or their answers for the event loop.
            if load.queued_tokens > QUEUED_TOKENS_MAX or busy > BUSY_MAX:
                most = min(most, self.used // 2)
        spare = min(max(1, rows // SPARE_SHARE), max(0, rows - 1))
        if load.pending:
            limit = self.used - load.pending
        else:
            limit = self.used + min(load.rows_free - spare, max(GROWTH, self.used // GROWTH))
        self.limit = max(1, min(limit, most))
        self._admit()

    async def reserve(self, count: int) -> None:
        """Wait for places and reserve them, in the order of the calls."""
        if not self._waiting and self._fits(count):
            self.used += count
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.release(count)
            raise

    def release(self, count: int) -> None:
        """Return places."""
        self.used -= count
        self._admit()

    def _fits(self, count: int) -> bool:
        return not self.used or self.used + count <= self.limit

    def _admit(self) -> None:
        while self._waiting:
            count, admitted = self._waiting[0]
            if not admitted.cancelled():
                if not self._fits(count):
                    return
                self.used += count
                admitted.set_result(None)
            self._waiting.popleft()


class Place:
    """Places of one line; see `Room.place`."""

    def __init__(self, room: Room, count: int) -> None:
        self._room, self._count = room, count

    async def __aenter__(self) -> Self:
        await self._room.reserve(self._count)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._room.release(self._count)
