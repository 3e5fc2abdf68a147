"""A timeout that leaves out the time in which this process itself stood still.

`asyncio.timeout` measures with the loop's clock, which runs on while the process is stopped. When it runs again, the
timeout is over at once, though the awaited answer may be in the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .steady_clock import WAIT_S_MAX, monotonic


@asynccontextmanager
async def steady_timeout(seconds: float) -> AsyncIterator[None]:
    """Limit the time of the body, as `asyncio.timeout` does, on the steady clock.

    Args:
        seconds: The limit.

    Raises:
        TimeoutError: The body did not end in time and was cancelled.
    """
    loop = asyncio.get_running_loop()
    deadline = monotonic() + seconds

    timers: list[asyncio.TimerHandle] = []  # the next look, alone

    def look() -> None:
        left_s = deadline - monotonic()
        if left_s <= 0:
            timeout.reschedule(loop.time())
        else:
            timers[:] = [loop.call_later(min(left_s, WAIT_S_MAX), look)]

    async with asyncio.timeout(None) as timeout:
        look()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
