"""The connections with messages to receive, in the order in which they are served."""

from __future__ import annotations

from .connection import Connection
from .fairness import AbuseBackoff, FairQueue, Throttled


class ReceiveQueue:
    """The connections of one side that may have a message. A connection is in one of the parts, or in none.

    Attributes:
        fair: Those that are served in turn.
        throttled: Those that must wait because of their message rate.
        backoff: Those that are held back because their peers are untrusted.
    """

    def __init__(self, share_us: int, backoff: AbuseBackoff) -> None:
        self.fair, self.throttled, self.backoff = FairQueue(share_us), Throttled(), backoff

    def add(self, connection: Connection) -> None:
        """Add a connection that may have a message. Idempotent."""
        if not connection.listed:
            connection.listed = True
            backoff = self.backoff
            (backoff.held_back if backoff.active and not connection.trusted else self.fair.ready).append(connection)

    def release(self, connection: Connection) -> None:
        """Serve a connection that has become trusted in turn, if it was held back."""
        if connection in self.backoff.held_back:
            self.backoff.held_back.remove(connection)
            self.fair.ready.append(connection)

    def set_backoff(self, active: bool) -> None:
        """Start or stop holding back untrusted peers."""
        self.backoff.active = active
        if not active:
            self.fair.ready += self.backoff.held_back
            self.backoff.held_back.clear()
