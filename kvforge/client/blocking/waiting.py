"""How the blocking client waits: it polls its sockets itself, up to a deadline. It uses no thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import zmq

from kvforge.client.pending import RequestStream, Watched
from kvforge.protocol.steady_clock import monotonic

from ..operations import Operations

T = TypeVar("T")
# The handler of a signal that arrives just before a wait runs only after that wait. This limits the delay of a Ctrl-C
# during a long answer.
POLL_S_MAX = 1.0


class Calls(Operations):
    """The operations with a wait that blocks."""

    async def _until(
        self,
        ready: Callable[[], bool],
        watch: Sequence[Watched],  # noqa: ARG002
        deadline: float,
        *,
        for_room: bool = False,
    ) -> bool:
        self._waiting = True
        try:
            with self.link.reconnector.waiting():
                while not ready():
                    left_s = deadline - monotonic()
                    self._poll(max(0.0, min(left_s, POLL_S_MAX)), for_room)
                    if left_s <= 0:
                        return ready()
        finally:
            self._waiting = False
        return True

    def reading(
        self,
        tracks: Sequence[RequestStream],  # noqa: ARG002
        following: Callable[[], Coroutine[Any, Any, T | None]],
    ) -> Iterator[T]:
        """Return the results of `following` for these requests, until it returns None."""
        while (item := drive(following())) is not None:
            yield item

    def _poll(self, wait_s: float, for_room: bool) -> None:
        link, poller = self.link, zmq.Poller()
        if link.socket is not None and link.monitor is not None:
            room = link.is_up and (link.reconnector.wants_room or (for_room and self.session.welcome is not None))
            poller.register(link.socket, zmq.POLLIN | zmq.POLLOUT if room else zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        if (due := link.reconnector.due()) is not None:
            wait_s = max(0.0, min(wait_s, due - monotonic()))
        if poller.sockets:
            poller.poll(math.ceil(wait_s * 1000))
        else:  # between two attempts to connect; pyzmq's poll of nothing returns at once
            time.sleep(wait_s)
        link.pump()


def drive(operation: Coroutine[Any, Any, T]) -> T:
    """Run an operation of `Calls`, which never suspends, to its end."""
    try:
        operation.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    operation.close()
    raise AssertionError("a blocking operation suspended")
