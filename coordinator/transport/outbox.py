"""Outgoing messages: the transport interface of a turn, and the reply backlog of slow clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

Frames = Sequence[bytes | memoryview]
# Replies queued for a slow client beyond its connection's send queue. A single longer reply is queued alone.
BACKLOG_BYTES_MAX = 16 << 20


class Sent(Enum):
    """The outcome of sending a message."""

    DONE = "done"  # the message was sent or queued
    FULL = "full"  # the peer's send queue is full
    GONE = "gone"  # the peer is not connected any more


class PeerIdentity(NamedTuple):
    """The identity of a peer, as verified by the system or by a key.

    Attributes:
        user: Its uid on this machine; -1 if unknown.
        key: The public key that it has proved; b"" for none.
    """

    user: int = -1
    key: bytes = b""


class Transport(Protocol):
    """The connections of one side, clients or workers; `router_socket.RouterSocket` has them over ZeroMQ."""

    def __len__(self) -> int: ...

    @property
    def again_us(self) -> int | None:
        """When a turn is due without further input; None for never."""

    def receive(self) -> tuple[bytes, int, Frames] | None:
        """Return the next message as (identity, descriptor, frames), or None.

        The descriptor is meaningful only for connections that are not admitted yet.
        """

    def number(self, identity: bytes) -> int | None:
        """Return the number of an admitted connection."""

    def peer_identity(self, identity: bytes) -> PeerIdentity:
        """Return the identity of the peer."""

    def admit(self, identity: bytes, descriptor: int, number: int | None = None) -> int | None:
        """Give a connection its number, which may be that of a connection it replaces; None if it has ended."""

    def note_ends(self, turn_over: bool = True) -> bool:
        """Look for connections that ended. Return whether `pop_disconnected` has any.

        Args:
            turn_over: Nothing more is received in this turn.
        """

    def pop_disconnected(self) -> list[int]:
        """Return the numbers of the connections that ended since the last call."""

    def forget(self, number: int) -> None:
        """Disconnect without reporting it in `pop_disconnected`. Idempotent."""

    def send(self, number: int, frames: Frames) -> Sent:
        """Send without waiting. A peer found to be gone is removed and reported by `pop_disconnected`."""

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        """Send without waiting to a connection that may have no number."""

    def fault(self, identity: bytes) -> None:
        """Count a malformed message of the peer, which is disconnected after too many."""

    def flush(self) -> None:
        """Write messages that were queued during the turn."""


class Outbox:
    """Messages to clients. Replies to a slow client are queued in order; streams are not.

    Attributes:
        backlogs: Queued replies by client.
    """

    def __init__(self, clients: Transport, backlog_max: int) -> None:
        self._clients, self._backlog_max = clients, backlog_max
        self.backlogs: dict[int, deque[list[bytes]]] = {}
        self._bytes: dict[int, int] = {}  # size of each backlog

    def reply(self, client: int, frames: Frames) -> bool:
        """Send or queue a reply. Return False if the client's backlog is full."""
        backlog = self.backlogs.get(client)
        if backlog is None:
            if self._clients.send(client, frames) is not Sent.FULL:
                return True
            backlog = self.backlogs[client] = deque()
            self._bytes[client] = 0
        copied = [bytes(frame) for frame in frames]  # a frame may be a view of an array that will change
        size = sum(map(len, copied))
        if backlog and (len(backlog) >= self._backlog_max or self._bytes[client] + size > BACKLOG_BYTES_MAX):
            return False
        backlog.append(copied)
        self._bytes[client] += size
        return True

    def retry(self) -> None:
        """Send queued replies as far as possible."""
        for client, backlog in list(self.backlogs.items()):
            sent = Sent.DONE
            while backlog and sent is Sent.DONE:
                sent = self._clients.send(client, backlog[0])
                if sent is Sent.DONE:
                    self._bytes[client] -= sum(map(len, backlog.popleft()))
            if sent is Sent.GONE or not backlog:
                self.forget(client)

    def kept(self, client: int) -> str:
        """Describe a client's backlog for the log."""
        return f"{len(self.backlogs[client])} replies of {self._bytes[client]} bytes are queued"

    def forget(self, client: int) -> None:
        """Drop the backlog of a client that is gone. Idempotent."""
        self.backlogs.pop(client, None)
        self._bytes.pop(client, None)
