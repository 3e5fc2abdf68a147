"""Reading a request in asyncio: what becomes of it when the task that reads it is cancelled.

A task may be cancelled while it waits for a token, or between two of them, in whatever its loop's body waits for. The
second is seen when the iterator is dropped while the task that used it is being cancelled: so this is an iterator of
its own. (A generator that is dropped is closed later, by another task, which knows nothing of this.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from .calls import Calls
from .session import Track

T = TypeVar("T")


async def read(calls: Calls, tracks: Sequence[Track], awaited: Awaitable[T]) -> T:
    """Awaits something of these requests. Where that is cancelled, so are they (see `Calls.abandon`)."""
    _count(tracks, 1)
    cancelled = False
    try:
        return await awaited
    except asyncio.CancelledError:
        cancelled = True
        raise
    finally:
        _count(tracks, -1)
        if cancelled:
            calls.abandon(tracks)


class Reading(AsyncIterator[T], Generic[T]):
    """What `following` gives until it gives None, as long as anybody wants it."""

    def __init__(self, calls: Calls, tracks: Sequence[Track], following: Callable[[], Awaitable[T | None]]) -> None:
        self._calls, self._tracks, self._following = calls, tuple(tracks), following
        self._task: asyncio.Task[object] | None = None
        _count(self._tracks, 1)

    def __aiter__(self) -> Reading[T]:
        return self

    async def __anext__(self) -> T:
        self._task = asyncio.current_task()
        try:
            item = await self._following()
        except asyncio.CancelledError:
            self._end(cancelled=True)
            raise
        if item is None:
            raise StopAsyncIteration
        return item

    def __del__(self) -> None:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs here any more
            task = None
        self._end(cancelled=task is not None and task is self._task and task.cancelling() > 0)

    def _end(self, *, cancelled: bool) -> None:
        tracks, self._tracks = self._tracks, ()
        _count(tracks, -1)
        if cancelled:
            self._calls.abandon(tracks)


def _count(tracks: Sequence[Track], more: int) -> None:
    """So many more tasks read these requests."""
    for track in tracks:
        track.readers += more
