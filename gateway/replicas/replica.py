"""One replica: a coordinator with its workers, the connection to it, and its health."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from kvforge.client.aio import AsyncClient, AsyncStreams
from kvforge.gateway.config import Replica as Place
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Health
from kvforge.protocol.steady_clock import monotonic

LOOK_S = 0.5
CONNECT_S = 1.0
log = logging.getLogger(__name__)


class RoutedRequest(Protocol):
    """A request that runs on a replica."""

    def evicted(self, reason: str) -> None:
        """Move elsewhere: the replica is unreachable."""


class Replica:
    """A replica.

    Args:
        name: Its name.
        place: Its address and keys.
        lost_s: How long it may be unreachable before its requests move away.

    Attributes:
        health: Its last answer.
        reason: Why it gets no requests now; "" if it does.
        guests: The requests that run on it.
        leaving: It was removed from the settings and stays only for its guests.
        answered: Set once it has answered for the first time.
    """

    def __init__(self, name: str, place: Place, lost_s: float) -> None:
        self.name, self.place, self._lost_s = name, place, lost_s
        self.leaving = False
        self.client = AsyncClient(
            place.coordinator,
            connect_timeout_s=CONNECT_S,
            timeout_s=max(lost_s, CONNECT_S),
            reconnect_s=lost_s,
            server_key=place.server_key or None,
            key_file=place.key_file or None,
        )
        self._streams: AsyncStreams | None = None
        self.health: Health | None = None
        self.reason = "no answer yet"
        self.guests: dict[RoutedRequest, None] = {}
        self.answered = asyncio.Event()
        self._silent_since: float | None = None
        self._refused_at = -math.inf  # monotonic clock

    @property
    def streams(self) -> AsyncStreams:
        """The submission interface; present once the replica was ready."""
        assert self._streams is not None, "it is ready"
        return self._streams

    @property
    def ready(self) -> bool:
        """Whether it gets requests."""
        return not self.reason and self._streams is not None and self._streams.connected

    def silent(self) -> None:
        """Skip it until it answers again: it was too slow."""
        self._set_reason("does not answer")

    def refused(self, reason: str) -> None:
        """Skip it until a later poll finds it ready: it refused a request because it drains or cannot serve."""
        self._refused_at = monotonic()
        self._set_reason(reason)

    def leave(self) -> None:
        """Accept no new requests; running ones stay until they end or the replica drains."""
        self.leaving = True

    async def watch(self, looked: Callable[[], None]) -> None:
        """Poll its health until cancelled, or until it has left and its last guest is gone.

        Args:
            looked: Called after each poll.
        """
        try:
            while not self.leaving or self.guests:
                await self._look()
                if self._silent_since is None:
                    self.answered.set()
                looked()
                await asyncio.sleep(LOOK_S)
        finally:
            if self._streams is not None:
                with suppress(KvforgeError):
                    self._streams.close()
            await self.client.close()

    async def _look(self) -> None:
        began = monotonic()
        try:
            health = await self.client.health()
            if self._streams is None:
                self._streams = AsyncStreams(self.client)
        except KvforgeError as error:
            self._silent_since = began if self._silent_since is None else self._silent_since
            self._set_reason(error.message)
            if monotonic() - self._silent_since >= self._lost_s:
                self._evict(error.message)
            return
        self.health, self._silent_since = health, None
        if not health.ready:
            self._set_reason(health.reason)
        elif began >= self._refused_at:  # otherwise the answer may be older than the refusal
            self._set_reason("")

    def _evict(self, reason: str) -> None:
        for guest in tuple(self.guests):
            guest.evicted(reason)

    def _set_reason(self, reason: str) -> None:
        if bool(reason) != bool(self.reason):
            log.warning("replica %s: %s", self.name, reason or "ready")
        self.reason = reason
