"""The descriptors that one side polls, in two nested epolls: trusted peers, and everything else."""

from __future__ import annotations

import select
from collections.abc import Callable

from kvforge.protocol.steady_clock import monotonic_ns

from .connection import Connection

EVENTS_MAX = 4  # descriptors served between two checks of the time


class PollSet:
    """The descriptors of one side.

    The outer epoll has trusted peers. The inner one has all others and the listeners, and is one descriptor of the
    outer one, which does not poll it during the back-off against abuse.

    Attributes:
        outer: The outer epoll.
        inner: The inner epoll.
    """

    def __init__(self) -> None:
        self.outer, self.inner = select.epoll(), select.epoll()
        self.outer.register(self.inner, select.EPOLLIN)

    def update(self, connection: Connection) -> None:
        """Register the events of interest: none after the end, no input for a full or rate-limited connection."""
        if connection.ended or connection.removed:
            wanted = 0
        else:
            wanted = 0 if connection.full or connection.slowed else select.EPOLLIN
            if connection.queued_bytes:
                wanted |= select.EPOLLOUT
        if wanted == connection.registered:
            return
        epoll = self.outer if connection.trusted else self.inner
        if not wanted:
            epoll.unregister(connection.descriptor)
        elif connection.registered:
            epoll.modify(connection.descriptor, wanted)
        else:
            epoll.register(connection.descriptor, wanted)
        connection.registered = wanted

    def set_trusted(self, connection: Connection, trusted: bool) -> None:
        """Move a connection to the epoll for trusted peers, or away from it."""
        if connection.registered:
            (self.outer if connection.trusted else self.inner).unregister(connection.descriptor)
            connection.registered = 0
        connection.trusted = trusted
        self.update(connection)

    def set_backoff(self, active: bool) -> None:
        """Exclude untrusted peers and listeners from the outer epoll, or include them again."""
        if active:
            self.outer.unregister(self.inner)
        else:
            self.outer.register(self.inner, select.EPOLLIN)

    def serve(
        self, epoll: select.epoll, handle: Callable[[int, int], None], count: int, now_ns: int, for_us: int
    ) -> bool:
        """Handle the events of each ready descriptor once.

        Args:
            epoll: The outer or the inner epoll.
            handle: Called with a descriptor and its events.
            count: An upper bound of the number of descriptors.
            now_ns: The time.
            for_us: The time limit, in microseconds.

        Returns:
            Whether the time ended first. The others come first in the next call, because epoll rotates its ready list.
        """
        while events := epoll.poll(0, EVENTS_MAX):
            for descriptor, mask in events:
                handle(descriptor, mask)
            count -= len(events)
            if len(events) < EVENTS_MAX or count <= 0:
                return False
            if monotonic_ns() - now_ns >= for_us * 1000:
                return True
        return False

    def close(self) -> None:
        """Close both epolls. Idempotent."""
        self.outer.close()
        self.inner.close()
