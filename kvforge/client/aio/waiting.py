"""How the asyncio client waits, and what happens to a request when its reading task is cancelled.

The event loop watches ZeroMQ's file descriptors. They are edge-triggered, so everything is drained each time. Windows'
default loop cannot watch them; there, waiting calls poll.

A task may be cancelled while it waits for a token, or in the body of its loop between two tokens. The second case shows
only when the iterator is dropped while the cancelled task still runs; `_Reading` is therefore a class. (A dropped
generator is closed later by another task, which does not know about the cancellation.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import zmq

from kvforge.client.pending import RequestStream, Watched
from kvforge.protocol.errors import Conflict
from kvforge.protocol.steady_clock import WAIT_S_MAX, monotonic

from ..operations import Operations
from ..reconnector import ROOM_POLL_S

T = TypeVar("T")
POLL_S = 0.005  # between two looks where the event loop cannot watch descriptors


class AsyncCalls(Operations):
    """The operations with a wait that lets other tasks run."""

    _loop: asyncio.AbstractEventLoop | None = None
    _timer: asyncio.TimerHandle | None = None
    _polls = False  # the loop cannot watch descriptors

    def _check_usable(self) -> None:
        super()._check_usable()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise Conflict("this client belongs to another event loop; make one in each, and close it there")

    def _check_closable(self) -> None:
        if self._loop is not None and self._loop.is_running() and self._loop is not asyncio.get_running_loop():
            raise Conflict("this client belongs to another event loop: close it there, or when that has ended")

    def close(self) -> None:
        """Leave the coordinator, close the sockets and stop the timer."""
        super().close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _until(
        self, ready: Callable[[], bool], watch: Sequence[Watched], deadline: float, *, for_room: bool = False
    ) -> bool:
        loop = asyncio.get_running_loop()
        with self.link.reconnector.waiting():
            while not ready():
                # Sending or asking for a socket's state may have swallowed the edge that the event loop waits for.
                if self._pump() or ready():
                    continue
                left_s = deadline - monotonic()
                if left_s <= 0:
                    return False
                if for_room:  # asking for room may swallow an edge just before the wait: poll
                    left_s = min(left_s, ROOM_POLL_S)
                if self._polls:
                    left_s = min(left_s, POLL_S)
                changed = loop.create_future()

                def wake(changed: asyncio.Future[None] = changed) -> None:
                    if not changed.done():
                        changed.set_result(None)

                for thing in watch:
                    thing.wakers.add(wake)
                timer = loop.call_later(min(left_s, WAIT_S_MAX), wake)
                try:
                    await changed
                finally:
                    timer.cancel()
                    for thing in watch:
                        thing.wakers.discard(wake)
        return True

    @contextmanager
    def _awaiting(self, tracks: Sequence[RequestStream]) -> Iterator[None]:
        """Cancel the requests if the waiting task is cancelled (see `abandon`)."""
        _count(tracks, 1)
        cancelled = False
        try:
            yield
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            _count(tracks, -1)
            if cancelled:
                self.abandon(tracks)

    def reading(
        self, tracks: Sequence[RequestStream], following: Callable[[], Awaitable[T | None]]
    ) -> AsyncIterator[T]:
        """Return an iterator over the results of `following` for these requests, until it returns None."""
        return _Reading(self, tracks, following)

    def abandon(self, tracks: Sequence[RequestStream]) -> None:
        """Cancel requests that lost their last reader here, after a reading task was cancelled."""
        left = [track.request_id for track in tracks if not (track.done or track.kept or track.readers)]
        self.link.send_soon(self.session.cancel(left))

    def _link_opened(self) -> None:
        loop = asyncio.get_running_loop()
        sockets = (self.link.socket, self.link.monitor)
        descriptors = [int(socket.getsockopt(zmq.FD)) for socket in sockets if socket is not None]
        try:
            for descriptor in descriptors:
                loop.add_reader(descriptor, self._pump)
        except NotImplementedError:  # a Windows loop with completion ports
            self._polls = True
            return

        def closing() -> None:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

        self.link.closing = closing

    def _pump(self) -> bool:
        more = self.link.pump()
        if more:  # other tasks run between two batches of a long queue
            asyncio.get_running_loop().call_soon(self._pump)
        self._set_timer()
        return more

    def _set_timer(self) -> None:
        """Set the one timer for the next attempt to connect."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self.link.reconnector.due()) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - monotonic()), self._pump)


class _Reading(AsyncIterator[T], Generic[T]):
    """Iterator over the results of `following`, until it returns None."""

    def __init__(
        self, calls: AsyncCalls, tracks: Sequence[RequestStream], following: Callable[[], Awaitable[T | None]]
    ) -> None:
        self._calls, self._tracks, self._following = calls, tuple(tracks), following
        self._task: asyncio.Task[object] | None = None
        _count(self._tracks, 1)

    def __aiter__(self) -> _Reading[T]:
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
        except RuntimeError:  # the loop has ended
            task = None
        self._end(cancelled=task is not None and task is self._task and task.cancelling() > 0)

    def _end(self, *, cancelled: bool) -> None:
        tracks, self._tracks = self._tracks, ()
        _count(tracks, -1)
        if cancelled:
            self._calls.abandon(tracks)


def _count(tracks: Sequence[RequestStream], more: int) -> None:
    """Change the number of tasks that read these requests."""
    for track in tracks:
        track.readers += more
