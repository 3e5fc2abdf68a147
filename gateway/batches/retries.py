"""Calls of the storage that are repeated until it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvforge.gateway.storage import StorageFailed
from kvforge.protocol.errors import QueueFull

AGAIN_S, AGAIN_MAX_S = 0.1, 5.0
AWAY = (StorageFailed, QueueFull)  # the storage fails, or has too much to do
T = TypeVar("T")
log = logging.getLogger(__name__)


class Backoff:
    """Growing waits between the tries of one batch.

    Args:
        name: The batch, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Begin with the shortest wait again."""
        self._wait_s = AGAIN_S

    async def storage(self, error: StorageFailed | QueueFull) -> None:
        """Wait for the storage."""
        log.warning("batch %s waits for the storage: %s", self._name, error.message)
        await self.rest()

    async def rest(self) -> None:
        """Wait, and longer the next time."""
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, AGAIN_MAX_S)


async def retried(call: Callable[[], Awaitable[T]], name: str) -> T:
    """Return the result of a call, repeated while the storage fails.

    Args:
        call: The call.
        name: The batch, for the log.
    """
    backoff = Backoff(name)
    while True:
        try:
            return await call()
        except AWAY as error:
            await backoff.storage(error)
