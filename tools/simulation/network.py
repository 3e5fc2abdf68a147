"""Simulated clock and network: the coordinator's transport over connections with random delays.

Messages are encoded frames of protocol.codec. One connection keeps its order; different connections overtake each
other. A cut connection loses the messages to the peer. Messages to the coordinator may arrive or not, and the notice of
the end may overtake them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from kvforge.coordinator.transport.outbox import PeerIdentity, Sent
from kvforge.protocol.codec import Decoder
from kvforge.protocol.messages import Message

Frames = Sequence[bytes | memoryview]
Call = Callable[[], None]
Receive = Callable[[Any], None]
NO_LIFE = -1  # the life number while no coordinator runs


class Clock:
    """Simulated time in microseconds, and the scheduled calls; ties run in scheduling order."""

    def __init__(self) -> None:
        self.now_us = 0
        self._heap: list[tuple[int, int, Call]] = []
        self._planned = 0

    def at(self, when_us: int, call: Call) -> None:
        """Schedule a call, at the earliest now."""
        self._planned += 1
        heapq.heappush(self._heap, (max(self.now_us, when_us), self._planned, call))

    def after(self, delay_us: int, call: Call) -> None:
        """Schedule a call `delay_us` from now."""
        self.at(self.now_us + delay_us, call)

    def step(self) -> bool:
        """Run the next scheduled call; return False if there is none."""
        if not self._heap:
            return False
        self.now_us, _, call = heapq.heappop(self._heap)
        call()
        return True


class Delays:
    """Delays of messages: mostly short, sometimes long; `calm` switches the long ones off."""

    def __init__(self, short_us: int, long_us: int, long_share: float) -> None:
        self.short_us, self.long_us, self.long_share = short_us, long_us, long_share
        self.calm = False

    def draw(self, random: Random) -> int:
        """Return a delay in microseconds."""
        if not self.calm and random.random() < self.long_share:
            return 1 + int(random.random() * self.long_us)
        return 1 + int(random.random() * self.short_us)


def _copied(frames: Frames) -> tuple[bytes, ...]:
    return tuple(map(bytes, frames))


class Connection:
    """A peer's connection.

    Attributes:
        receive: called with the coordinator's messages, in order.
        lost: called when the coordinator's process has died.
        commands: the commands sent on it, by rid, with the labels of what they create.
        room: messages that a peer that does not read still accepts; None while it reads.
    """

    def __init__(
        self, peers: SimulatedPeers, identity: bytes, random: Random, receive: Receive, lost: Call, life: int
    ) -> None:
        self.identity, self.random, self.life = identity, random, life
        self._lost = lost
        self.open = True
        self.commands: dict[int, tuple[Message, tuple[str, ...]]] = {}
        self._peers, self._receive = peers, receive
        self._last_in = self._last_out = 0
        self.room: int | None = None
        self._unread: list[Message] = []

    def send(self, frames: Frames) -> None:
        """Send to the coordinator."""
        if self.open:
            parts = list(map(bytes, frames))
            self._last_in = max(self._last_in, self._peers.arrival(self.random))
            self._peers.clock.at(self._last_in, lambda: self._peers.arrive(self, parts))

    def to_peer(self, message: Message) -> None:
        """Deliver from the coordinator; the message is lost if the connection is cut meanwhile."""
        if self.room is not None:
            self.room -= 1
        self._last_out = max(self._last_out, self._peers.arrival(self.random))
        self._peers.clock.at(self._last_out, lambda: self._deliver(message))

    def _deliver(self, message: Message) -> None:
        if self.open and self.room is not None:
            self._unread.append(message)
        elif self.open:
            self._receive(message)

    @property
    def full(self) -> bool:
        """Return whether the peer accepts no message for now."""
        return self.room is not None and self.room <= 0

    def stall(self, room: int) -> None:
        """Stop reading; `room` more messages fit into the buffers."""
        self.room = room

    def read_on(self) -> None:
        """Resume reading, first the messages that arrived meanwhile."""
        self.room = None
        unread, self._unread = self._unread, []
        for message in unread:
            self._deliver(message)

    @property
    def last_us(self) -> int:
        """Return the arrival time of the last message, in either direction."""
        return max(self._last_in, self._last_out)

    def end(self) -> None:
        """Note that the other end is gone; messages in transit arrive until the coordinator notices."""
        self._peers.clock.at(self._peers.arrival(self.random), self._notice)

    def _notice(self) -> None:
        if self.open:
            self.open = False
            self._lost()

    def cut(self, at_once: bool = False) -> None:
        """End the connection.

        Args:
            at_once: The coordinator can notice it now; else later.
        """
        if self.open:
            self.open = False
            notice_us = self._peers.clock.now_us if at_once else self._peers.arrival(self.random)
            self._peers.clock.at(notice_us, lambda: self._peers.ended(self))


Tap = Callable[[int, Message, Sent], None]


class SimulatedPeers:
    """The transport of one side, clients or workers (kvforge.coordinator.turn.Transport).

    Attributes:
        leaves: called before each message to an admitted connection.
        tap: called with each message, decoded from its bytes, and the result of sending it, in sending order.
    """

    def __init__(
        self,
        clock: Clock,
        delays: Delays,
        numbers: Callable[[], int],
        wake: Call,
        decoder: Decoder,
        leaves: Call,
        tap: Tap,
    ) -> None:
        self.clock, self._delays, self._numbers, self._wake = clock, delays, numbers, wake
        self._leaves = leaves
        self._decoder, self._tap = decoder, tap
        self._foreseen: dict[tuple[bytes, ...], Message] = {}
        self._inbox: deque[tuple[bytes, int, list[bytes]]] = deque()
        self._connections: dict[bytes, Connection] = {}
        self._users: dict[bytes, int] = {}
        self._number_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}
        self._ended: list[bytes] = []
        self._gone: list[int] = []
        self._made = 0
        self._life, self._down = 0, False

    def __len__(self) -> int:
        return len(self._number_of)

    # ---------------------------------------------------------------------------------------------- simulator interface

    def connect(self, random: Random, receive: Receive, user: int = -1, lost: Call = lambda: None) -> Connection:
        """Open a peer's connection.

        Args:
            random: the connection's random stream.
            receive: called with each message.
            user: the peer's user number.
            lost: called if the coordinator's process dies or does not run.

        Returns:
            The connection.
        """
        self._made += 1
        life = NO_LIFE if self._down else self._life
        connection = Connection(self, b"id%d" % self._made, random, receive, lost, life)
        if self._down:
            connection.end()
            return connection
        self._connections[connection.identity] = connection
        self._users[connection.identity] = user
        return connection

    def die(self) -> None:
        """Kill the coordinator's process, with all messages in its sockets and in transit."""
        self._down = True
        self._life += 1
        connections, self._connections = self._connections, {}
        for kept in (self._inbox, self._number_of, self._identity_of, self._ended, self._gone, self._foreseen):
            kept.clear()
        for connection in connections.values():
            connection.end()

    def rise(self) -> None:
        """Start another process."""
        self._down = False

    def serves(self, connection: Connection) -> bool:
        """Return whether the connection's process is alive."""
        return connection.life == self._life and not self._down

    def arrival(self, random: Random) -> int:
        """Return the arrival time of a message sent now."""
        return self.clock.now_us + self._delays.draw(random)

    def arrive(self, connection: Connection, frames: list[bytes]) -> None:
        """Deliver a message to the coordinator's socket."""
        if connection.life != self._life:
            return
        self._inbox.append((connection.identity, 0, frames))
        self._wake()

    def ended(self, connection: Connection) -> None:
        """Deliver the end of a connection to the coordinator's socket."""
        if connection.life != self._life:
            return
        self._connections.pop(connection.identity, None)
        self._ended.append(connection.identity)
        self._wake()

    def foresee(self, frames: Frames) -> Message:
        """Return what a peer will decode from these bytes, and keep it for the send."""
        parts = _copied(frames)
        message = self._foreseen[parts] = self._decoder.decode(parts)
        return message

    def _read(self, frames: Frames) -> Message:
        parts = _copied(frames)
        message = self._foreseen.pop(parts, None) if self._foreseen else None
        return self._decoder.decode(parts) if message is None else message

    @property
    def waiting(self) -> bool:
        """Return whether messages are left that no turn has read."""
        return bool(self._inbox or self._ended or self._gone)

    # -------------------------------------------------------------------------------------------- coordinator interface

    def receive(self) -> tuple[bytes, int, list[bytes]] | None:
        """Return the next message, or None."""
        return self._inbox.popleft() if self._inbox else None

    def number(self, identity: bytes) -> int | None:
        """Return the number of an admitted connection."""
        return self._number_of.get(identity)

    def peer_identity(self, identity: bytes) -> PeerIdentity:
        """Return the credentials of a peer."""
        return PeerIdentity(self._users[identity])

    def admit(self, identity: bytes, _descriptor: int, number: int | None = None) -> int | None:
        """Admit a connection, optionally under a given number; return None if it has ended."""
        if identity not in self._connections:
            return None
        number = self._numbers() if number is None else number
        self._number_of[identity], self._identity_of[number] = number, identity
        return number

    def note_ends(self, turn_over: bool = True) -> bool:
        """Collect the connections that have ended. Return whether `pop_disconnected` has any."""
        ended, self._ended = self._ended, []
        for identity in ended:
            number = self._number_of.get(identity)
            if number is not None:
                self.forget(number)
                self._gone.append(number)
        return bool(self._gone)

    @property
    def again_us(self) -> None:
        """Return the time of the next retry; there is none."""
        return None

    def pop_disconnected(self) -> list[int]:
        """Return the connections that have ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def forget(self, number: int) -> None:
        """Drop an admitted connection's number."""
        identity = self._identity_of.pop(number, None)
        if identity is not None:
            del self._number_of[identity]

    def send(self, number: int, frames: Frames) -> Sent:
        """Send to an admitted connection."""
        self._leaves()
        message = self._read(frames)
        sent = self._send(number, message)
        self._tap(number, message, sent)
        return sent

    def _send(self, number: int, message: Message) -> Sent:
        identity = self._identity_of.get(number)
        if identity is None:
            return Sent.GONE
        connection = self._connections.get(identity)
        if connection is None:
            self.forget(number)
            self._gone.append(number)
            return Sent.GONE
        if connection.full:
            return Sent.FULL
        connection.to_peer(message)
        return Sent.DONE

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        """Send to a connection by its identity."""
        connection = self._connections.get(identity)
        if connection is None:
            return Sent.GONE
        if connection.full:
            return Sent.FULL
        connection.to_peer(self._read(frames))
        return Sent.DONE

    def flush(self) -> None:
        """Flush; messages are delivered at once."""

    def fault(self, identity: bytes) -> None:
        """Record a protocol violation; ignored here."""
