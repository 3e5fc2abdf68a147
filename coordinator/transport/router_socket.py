"""The server side of all connections to clients, or to workers: admission, fair reception, sending, and their ends.

The cost of any peer is bounded, and does not affect others:

- The number of connections is bounded by the process's descriptors. Few may have a pending handshake: if there are too
  many, one is evicted (silent ones first, those with a proved key last), and each has `connection.STRANGER_S`
  (`acceptor`).
- Messages are received in turn, one from each connection, and only for a limited time in a turn; they are answered
  before more are received (`receiver`). Each connection has a share of that time, a peer that exceeds its entry's
  message rate is read later, and while limits are broken continually, untrusted peers are throttled (`fairness`).
- Reading from sockets is limited likewise (`poll_set`, `receiver`).
- The size of a message is bounded, and so is the total size of incomplete messages: above that, the connection with
  the oldest one is dropped. A message must be complete within `connection.MESSAGE_S`.
- The send queue is bounded (`connection.Room`). A slow consumer is not read until its queue has drained (`sender`).
- A peer is disconnected after `FAULTS_MAX` malformed messages.
- A disconnected peer still gets what was sent before (`connections`).
- A dead process is noticed at once, and a silent peer after the heartbeat timeout (`heartbeats`). Time in which this
  process was suspended does not count (`kvforge.protocol.steady_clock`).

A peer that breaks a limit is disconnected, with a line in the log.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence

import msgspec

from kvforge.protocol import transport
from kvforge.protocol.steady_clock import monotonic_ns

from .acceptor import Acceptor
from .connection import ConnectionLimits
from .connections import LINGERING_MAX, ConnectionTable
from .fairness import AbuseBackoff
from .heartbeats import Heartbeats
from .listener import Endpoint
from .outbox import Frames, PeerIdentity, Sent
from .poll_set import PollSet
from .rate_limit import Rate
from .receive_queue import ReceiveQueue
from .receiver import InputReader, Receiver
from .sender import Sender

FAULTS_MAX = 64
CLIENT, WORKER = "client", "worker"
log = logging.getLogger("coordinator")


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of all connections of one side together.

    Attributes:
        admitted_max: Connections after their handshake.
        pending_handshakes_max: Connections with a pending handshake.
        partial_bytes_max: Memory for incomplete messages.
        turn_us: Time for receiving messages in one turn; one message is always received.
        share_us: Share of that time for one connection, while others have messages.
        idle_timeout_ms: A peer that sends nothing for this long, not even heartbeats, counts as gone.
        connection: Limits of each connection.
    """

    admitted_max: int = 256
    pending_handshakes_max: int = 64
    partial_bytes_max: int = 256 << 20
    turn_us: int = 2_000
    share_us: int = 1_000_000
    idle_timeout_ms: int = transport.HEARTBEAT_TIMEOUT_MS
    connection: ConnectionLimits = ConnectionLimits()

    @property
    def descriptors(self) -> int:
        """Descriptors needed: connections, lingering ones, epolls, and two for each of two endpoints."""
        return self.admitted_max + self.pending_handshakes_max + LINGERING_MAX + 8


def _nothing(_number: int) -> None: ...


def _unlimited(_peer: PeerIdentity) -> Rate | None:
    return None


class RouterSocket:
    """The connections of one side. A connection has a number once `admit` has given it one.

    Attributes:
        kind: The kind of the peers, for the log.
        offset_us: The core's time minus the steady clock.
        receive: Returns the next message as (identity, descriptor, frames), or None.
        flush: Writes messages that were queued for sending together. Like `receive`, it is the method of a part,
            because a turn has a limited number of calls.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        numbers: Callable[[], int],
        limits: PeerLimits | None = None,
        kind: str = CLIENT,
        on_silent: Callable[[int], None] = _nothing,
        together: bool = False,
        rates: Callable[[PeerIdentity], Rate | None] = _unlimited,
    ) -> None:
        """Bind each endpoint.

        Args:
            endpoints: The endpoints.
            numbers: Returns the next connection number.
            limits: The limits.
            kind: The kind of the peers, for the log.
            on_silent: Called with the number of an admitted connection that is dropped for silence, before
                `pop_disconnected` reports it; its process may still be alive.
            together: Batch messages until `flush`.
            rates: Returns the rate limiter of a peer, None for no limit.

        Raises:
            InvalidConfiguration: An endpoint cannot be used.
            CoordinatorInUse: Another process listens there.
        """
        limits = limits if limits is not None else PeerLimits()
        now_ns = monotonic_ns()
        self.kind, self.offset_us = kind, 0
        self._numbers, self._rates = numbers, rates
        backoff, self._poll_set = AbuseBackoff(), PollSet()
        table = self._table = ConnectionTable(kind, self._poll_set, backoff, now_ns)
        queue = self._queue = ReceiveQueue(limits.share_us, backoff)
        self._acceptor = Acceptor(table, self._poll_set, backoff, limits.connection, limits.pending_handshakes_max)
        self._sender = Sender(table, self._poll_set, queue, together)
        self.flush = self._sender.flush
        reader = InputReader(table, self._poll_set, queue, self._sender, self._acceptor, limits.partial_bytes_max)
        self._reader = reader
        self._receiver = Receiver(table, self._poll_set, queue, reader, self._acceptor, limits.turn_us)
        self.receive = self._receiver.receive
        self._heartbeats = Heartbeats(table, self._sender, limits.idle_timeout_ms, on_silent, now_ns)
        try:
            self._acceptor.listen(endpoints)
        except BaseException:  # close the endpoints opened so far
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._table.by_number)

    @property
    def endpoints(self) -> list[str]:
        """The addresses of the endpoints."""
        return self._acceptor.endpoints

    # ------------------------------------------------------------------------------------------------- for the loop

    def fileno(self) -> int:
        """Return a descriptor that is readable when input may have arrived."""
        return self._poll_set.outer.fileno()

    def watch(self, epoll: select.epoll) -> dict[int, Callable[[], None]]:
        """Register with `epoll`. Return the function to call for each descriptor that it reports."""
        self._reader.watched = True
        epoll.register(self._poll_set.outer, select.EPOLLIN)
        return {self.fileno(): self._reader.note_input}

    @property
    def waiting(self) -> bool:
        """Whether a message, the end of a connection, or a drained send queue waits to be handled."""
        queue, table = self._queue, self._table
        if (self._reader.due or not self._reader.watched) and not queue.fair.ready:
            self._reader.read_available(monotonic_ns())
        held_back = queue.backoff.held_back and queue.backoff.may_receive
        return bool(
            queue.fair.ready or held_back or queue.fair.spent or table.over or table.gone or self._sender.resumed
        )

    @property
    def again_us(self) -> int | None:
        """When a turn is due for throttled peers without further input; None if there are none."""
        backoff, throttled = self._queue.backoff, self._queue.throttled
        if not backoff.active and not throttled.connections:
            return None
        again_ns = [backoff.again_ns] if backoff.active else []
        again_ns += throttled.ready_ns()
        return min(again_ns) // 1000 + 1 + self.offset_us if again_ns else None

    # --------------------------------------------------------------------------------------------------- for the turn

    def number(self, identity: bytes) -> int | None:
        """Return the number of an admitted connection."""
        connection = self._table.by_identity.get(identity)
        return connection.number or None if connection is not None else None

    def peer_identity(self, identity: bytes) -> PeerIdentity:
        """Return the identity of the peer; an empty one if it is gone."""
        connection = self._table.by_identity.get(identity)
        return PeerIdentity(connection.user, connection.reader.key) if connection is not None else PeerIdentity()

    def admit(self, identity: bytes, descriptor: int, number: int | None = None) -> int | None:
        """Give a connection its number, which may be that of a connection it replaces; None if it has ended."""
        self.note_ends(turn_over=False)
        connection = self._table.by_identity.get(identity)
        if connection is None or connection.ended:
            return None
        assert connection.descriptor == descriptor, "a connection has one descriptor"
        if not connection.number:
            self._reader.set_trusted(connection, not connection.faults)
            connection.rate = self._rates(PeerIdentity(connection.user, connection.reader.key))
            self._table.admit(connection, self._numbers() if number is None else number)
        return connection.number

    def note_ends(self, turn_over: bool = True) -> bool:
        """Remove ended connections, and send heartbeats that are due. Return whether `pop_disconnected` has any."""
        table, reader, heartbeats = self._table, self._reader, self._heartbeats
        table.now_ns = now_ns = monotonic_ns()
        if self._queue.fair.serving is not None:
            self._queue.fair.charge(now_ns)
        beats = now_ns - heartbeats.sent_ns >= heartbeats.interval_ns
        if not reader.watched or beats or not turn_over:
            reader.read_available(now_ns)  # otherwise the next turn does, which is due immediately if there is input
        if turn_over:
            self._receiver.turn_begun = self._sender.resumed = False
        if table.over:
            table.end_over()
        if table.lingering:
            table.close_lingering()
        if beats:
            heartbeats.beat(now_ns)
        return bool(table.gone)

    def pop_disconnected(self) -> list[int]:
        """Return the numbers of the connections that ended since the last call."""
        gone, self._table.gone = self._table.gone, []
        return gone

    def forget(self, number: int) -> None:
        """Disconnect a peer. Earlier messages still reach it if it reads. Idempotent."""
        connection = self._table.by_number.get(number)
        if connection is not None:
            self._table.linger(connection)

    def end_where(self, problem: Callable[[PeerIdentity], str]) -> None:
        """End the connections for which `problem` returns a reason. `pop_disconnected` reports the admitted ones."""
        for connection in list(self._table.by_identity.values()):
            if words := problem(PeerIdentity(connection.user, connection.reader.key)):
                log.warning("%s connection %s ended: %s", self.kind, connection.number or "(new)", words)
                self._table.end(connection)

    def send(self, number: int, frames: Frames) -> Sent:
        """Send without waiting. A peer found to be gone is removed and reported by `pop_disconnected`."""
        connection = self._table.by_number.get(number)
        return self._sender.send(connection, frames) if connection is not None else Sent.GONE

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        """Send without waiting to a connection that may have no number."""
        connection = self._table.by_identity.get(identity)
        return self._sender.send(connection, frames) if connection is not None else Sent.GONE

    def fault(self, identity: bytes) -> None:
        """Count a malformed message of the peer, which is disconnected after too many."""
        connection = self._table.by_identity.get(identity)
        if connection is not None:
            connection.faults += 1
            self._queue.backoff.note_trouble(self._table.now_ns)
            self._reader.set_trusted(connection, False)
            if connection.faults > FAULTS_MAX:
                self._table.drop(connection, f"{connection.faults} malformed messages")

    def close(self) -> None:
        """Close everything, and remove the socket files. Idempotent."""
        self._table.close()
        self._poll_set.close()
        self._acceptor.close()
