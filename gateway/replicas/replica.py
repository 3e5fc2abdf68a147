"""One replica: a coordinator with its workers, its connection, and whether a request would be served there now."""

from __future__ import annotations

import asyncio
import logging
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


class Guest(Protocol):
    """What runs on a replica."""

    def evicted(self, reason: str) -> None:
        """The replica has not answered for too long."""


class Replica:
    """health: what it said last. reason: why it gets nothing now; "": it does. guests: what is under way there.
    leaving: it is not one of the replicas any more, and stays for its guests. answered: it has, once.

    lost_s: after so long without an answer it is given up, until it answers again.
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
        self.reason = "it has not answered yet"
        self.guests: dict[Guest, None] = {}
        self.answered = asyncio.Event()
        self._silent_since: float | None = None

    @property
    def streams(self) -> AsyncStreams:
        """To submit with; there since it was ready first."""
        assert self._streams is not None, "it is ready"
        return self._streams

    @property
    def ready(self) -> bool:
        """Whether it is to be asked."""
        return not self.reason and self._streams is not None and self._streams.connected

    def silent(self) -> None:
        """It did not answer in time: it is left out until it does."""
        self._say("it does not answer")

    def leave(self) -> None:
        """It gets nothing new; who is there stays until it has ended, or is handed back."""
        self.leaving = True

    async def watch(self, looked: Callable[[], None]) -> None:
        """Looks after it until it is cancelled, or has left and nobody is there. looked: is called when there is
        news."""
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
            self._say(error.message)
            if monotonic() - self._silent_since >= self._lost_s:
                self._evict(error.message)
            return
        self.health, self._silent_since = health, None
        self._say("" if health.ready else health.reason)

    def _evict(self, reason: str) -> None:
        for guest in tuple(self.guests):
            guest.evicted(reason)

    def _say(self, reason: str) -> None:
        if bool(reason) != bool(self.reason):
            log.warning("replica %s: %s", self.name, reason or "ready")
        self.reason = reason
