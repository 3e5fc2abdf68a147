"""How messages leave: connections as a turn sees them, and what is kept for a client that does not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

Frames = Sequence[bytes | memoryview]
# Kept for one client that does not read, beside what its connection holds. A longer reply is kept alone.
BACKLOG_BYTES_MAX = 16 << 20


class Sent(Enum):
    """What became of a message."""

    DONE = "done"  # it is on its way
    FULL = "full"  # the peer takes nothing more for now
    GONE = "gone"  # there is no such peer any more


class Who(NamedTuple):
    """Whom the system, or a key, says that a peer is: user -1, key b"" where it does not.

    user: its number on this machine. key: its public key, whose secret it has.
    """

    user: int = -1
    key: bytes = b""


class Transport(Protocol):
    """The connections of one side, clients or workers: what `kvforge.coordinator.peers.Peers` is over ZeroMQ."""

    def __len__(self) -> int: ...

    @property
    def again_us(self) -> int | None:
        """When a turn is due for it though nothing arrives; None: never."""

    def receive(self) -> tuple[bytes, int, Frames] | None:
        """The next message: (identity, descriptor, frames); None where none is waiting. The descriptor is that of a
        connection which is not admitted yet; what it is for others nobody asks."""

    def number(self, identity: bytes) -> int | None:
        """The number of an admitted connection."""

    def who(self, identity: bytes) -> Who:
        """Who is there."""

    def admit(self, identity: bytes, descriptor: int, number: int | None = None) -> int | None:
        """Gives a connection its number, that of an earlier one where it takes its place; None where it has ended
        already."""

    def note_ends(self, turn_over: bool = True) -> None:
        """Looks for connections that ended. turn_over: nothing more is received in this turn."""

    def take_gone(self) -> list[int]:
        """Numbers of the connections that ended since the last call."""

    def forget(self, number: int) -> None:
        """The connection is no longer ours to talk to. Idempotent."""

    def send(self, number: int, frames: Frames) -> Sent:
        """Sends without waiting. A peer that is found to be gone is forgotten and reported by `take_gone`."""

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        """Sends to a connection that has no number (yet), without waiting."""

    def fault(self, identity: bytes) -> None:
        """What it sent is no message at all, and was refused. One that goes on so is disconnected."""

    def flush(self) -> None:
        """The turn is over: what was sent and still waits leaves now."""


class Outbox:
    """What goes to clients. Replies to one that takes nothing more for now are kept, in order; streams are not."""

    def __init__(self, clients: Transport, backlog_max: int) -> None:
        self._clients, self._backlog_max = clients, backlog_max
        self._backlogs: dict[int, deque[list[bytes]]] = {}
        self._bytes: dict[int, int] = {}  # of each backlog

    @property
    def waiting(self) -> bool:
        """Whether replies are kept for anyone."""
        return bool(self._backlogs)

    def reply(self, client: int, frames: Frames) -> bool:
        """Sends a reply, or keeps it behind those that wait. False: no more may be kept for this client."""
        backlog = self._backlogs.get(client)
        if backlog is None:
            if self._clients.send(client, frames) is not Sent.FULL:
                return True
            backlog = self._backlogs[client] = deque()
            self._bytes[client] = 0
        copied = [bytes(frame) for frame in frames]  # a frame shows an array that may change
        size = sum(map(len, copied))
        if backlog and (len(backlog) >= self._backlog_max or self._bytes[client] + size > BACKLOG_BYTES_MAX):
            return False
        backlog.append(copied)
        self._bytes[client] += size
        return True

    def stream(self, client: int, frames: Frames) -> bool:
        """Sends a Stream. False: the client takes nothing more for now, or has yet to get replies from before it."""
        return client not in self._backlogs and self._clients.send(client, frames) is not Sent.FULL

    def retry(self) -> None:
        """Sends what is kept, as far as it is taken."""
        for client, backlog in list(self._backlogs.items()):
            sent = Sent.DONE
            while backlog and sent is Sent.DONE:
                sent = self._clients.send(client, backlog[0])
                if sent is Sent.DONE:
                    self._bytes[client] -= sum(map(len, backlog.popleft()))
            if sent is Sent.GONE or not backlog:
                self.forget(client)

    def kept(self, client: int) -> str:
        """How much is, for the log."""
        return f"{len(self._backlogs[client])} replies of {self._bytes[client]} bytes wait for it"

    def forget(self, client: int) -> None:
        """The client is gone. Idempotent."""
        self._backlogs.pop(client, None)
        self._bytes.pop(client, None)
