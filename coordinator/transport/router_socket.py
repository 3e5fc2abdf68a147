"""The server side of all connections to clients, or to workers: admission, fair reception, sending, and their ends.

The cost of any peer is bounded, and does not affect others:

- The number of connections is bounded by the process's descriptors. Few may have a pending handshake: if there are too
  many, one is evicted (silent ones first, those with a proved key last), and each has `connection.STRANGER_S`.
- Messages are received in turn, one from each connection, and only for a limited time in a turn; they are answered
  before more are received. Each connection has a share of that time (`shares`). Reading from sockets is limited
  likewise. While limits are broken continually, untrusted peers are throttled (`pace`).
- The size of a message is bounded, and so is the total size of incomplete messages: above that, the connection with
  the oldest one is dropped. A message must be complete within `connection.MESSAGE_S`.
- The send queue is bounded (`connection.Room`). A slow consumer is not read until its queue has drained.
- A peer that exceeds its entry's message rate is read later (`rate`, `slowed`).
- A peer is disconnected after `FAULTS_MAX` malformed messages.
- A disconnected peer still gets what was sent before: the socket closes `LINGER_S` later, because a ZeroMQ peer
  discards undelivered input when the connection ends.
- A dead process is noticed at once, and a silent peer after the heartbeat timeout. Time in which this process was
  suspended does not count (`kvforge.protocol.steady_clock`).

A peer that breaks a limit is disconnected, with a line in the log.
"""

from __future__ import annotations

import logging
import select
import socket as sockets
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvforge.protocol import transport
from kvforge.protocol.steady_clock import monotonic_ns

from . import zmtp
from .abuse_backoff import ACCEPTS_A_LOOK, AbuseBackoff
from .abuse_backoff import LOOK_US as PACED_LOOK_US
from .connection import Connection, Room
from .fair_queue import FairQueue
from .listener import ACCEPTS_MAX, Door, Listener
from .outbox import Frames, Sent, Who
from .rate_limit import Rate
from .throttled import Throttled

LINGER_S = 0.5
LINGERING_MAX = 8
FAULTS_MAX = 64
SPEAK_S = 0.1  # a new connection does not count as silent before
TOGETHER_MAX = 8  # messages batched for one peer, which can process the first while the turn writes the next
LOOKS_MAX = 4  # connections served between two checks of the time
LOOK_US = 100  # time for reading input at once
CLIENT, WORKER = "client", "worker"
log = logging.getLogger("coordinator")


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of all connections of one side together.

    Attributes:
        admitted_max: Connections after their handshake.
        strangers_max: Connections with a pending handshake.
        partial_bytes_max: Memory for incomplete messages.
        turn_us: Time for receiving messages in one turn; one message is always received.
        share_us: Share of that time for one connection, while others have messages.
        silence_ms: A peer that sends nothing for this long, not even heartbeats, counts as gone.
        room: Limits of each connection.
    """

    admitted_max: int = 256
    strangers_max: int = 64
    partial_bytes_max: int = 256 << 20
    turn_us: int = 2_000
    share_us: int = 1_000_000
    silence_ms: int = transport.HEARTBEAT_TIMEOUT_MS
    room: Room = Room()

    @property
    def descriptors(self) -> int:
        """Descriptors needed: connections, lingering ones, epolls, and two for each of two endpoints."""
        return self.admitted_max + self.strangers_max + LINGERING_MAX + 8


def _nothing(_number: int) -> None: ...


def _unlimited(_who: Who) -> Rate | None:
    return None


class RouterSocket:
    """The connections of one side. A connection has a number once `admit` has given it one.

    Attributes:
        kind: The kind of the peers, for the log.
        offset_us: The core's time minus the steady clock.
    """

    def __init__(
        self,
        doors: Sequence[Door],
        numbers: Callable[[], int],
        limits: PeerLimits | None = None,
        kind: str = CLIENT,
        on_silent: Callable[[int], None] = _nothing,
        together: bool = False,
        rates: Callable[[Who], Rate | None] = _unlimited,
    ) -> None:
        """Bind each endpoint.

        Args:
            doors: The endpoints.
            numbers: Returns the next connection number.
            limits: The limits.
            kind: The kind of the peers, for the log.
            on_silent: Called with the number of an admitted connection that is dropped for silence, before `take_gone`
                reports it; its process may still be alive.
            together: Batch messages until `flush`.
            rates: Returns the rate limiter of a peer, None for no limit.

        Raises:
            InvalidConfiguration: An endpoint cannot be used.
            CoordinatorInUse: Another process listens there.
        """
        self.limits = limits if limits is not None else PeerLimits()
        self.kind = kind
        self._numbers, self._on_silent, self._rates = numbers, on_silent, rates
        # At least four heartbeats, which the peer answers, fall within the timeout.
        self._beat_ns = min(transport.HEARTBEAT_INTERVAL_MS * 1_000_000, self.limits.silence_ms * 1_000_000 // 4)
        self._silence_ns = self.limits.silence_ms * 1_000_000
        self._ping = zmtp.ping(transport.HEARTBEAT_TIMEOUT_MS)
        self._by_identity: dict[bytes, Connection] = {}
        self._by_number: dict[int, Connection] = {}
        self._by_descriptor: dict[int, Connection] = {}
        self._strangers: dict[bytes, Connection] = {}  # pending handshakes, oldest first
        self._shares = FairQueue(self.limits.share_us)
        self._ready = self._shares.ready  # may have a message
        self._put_off: deque[Connection] = deque()  # may have a message, but are throttled
        self._slowed = Throttled()  # have a message, but exceeded their rate
        self._over: list[Connection] = []  # have ended, with their last message handed out
        self._gone: list[int] = []
        self._lingering: deque[Connection] = deque()  # disconnected by us, oldest first
        self._together = together
        self.offset_us = 0
        self._unsent: set[Connection] = set()
        self._partial_bytes = 0
        self._made = 0
        self._watched, self._stirred, self._turned, self._eased = False, True, False, False
        self._others_came = self._shut = False
        self._pace = AbuseBackoff()
        self._now_ns = self._beaten_ns = self._turn_ends_ns = monotonic_ns()
        # The outer epoll has trusted peers; the inner one has all others and the listeners, and is removed for
        # throttling.
        self._epoll, self._others = select.epoll(), select.epoll()
        self._listeners: dict[int, Listener] = {}
        try:
            for door in doors:
                listener = Listener(door, self._others)
                self._listeners[listener.fileno()] = listener
        except BaseException:  # close the endpoints opened so far
            self.close()
            raise
        self._epoll.register(self._others, select.EPOLLIN)
        self._paced = False

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def endpoints(self) -> list[str]:
        """The endpoints."""
        return [listener.endpoint for listener in self._listeners.values()]

    # ------------------------------------------------------------------------------------------------- for the loop

    def fileno(self) -> int:
        """Return a descriptor that is readable when input may have arrived."""
        return self._epoll.fileno()

    def watch(self, epoll: select.epoll) -> dict[int, Callable[[], None]]:
        """Register with `epoll`. Return the function to call for each descriptor that it reports."""
        self._watched = True
        epoll.register(self._epoll, select.EPOLLIN)
        return {self._epoll.fileno(): self._stir}

    def _stir(self) -> None:
        self._stirred = True

    @property
    def waiting(self) -> bool:
        """Whether a message, the end of a connection, or a drained send queue waits to be handled."""
        if (self._stirred or not self._watched) and not self._ready:
            self._look(monotonic_ns())
        put_off = self._put_off and self._pace.hears
        return bool(self._ready or put_off or self._shares.spent or self._over or self._gone or self._eased)

    @property
    def again_us(self) -> int | None:
        """When a turn is due for throttled peers without further input; None if there are none."""
        if not self._paced and not self._slowed.connections:
            return None
        again_ns = [self._pace.again_ns] if self._paced else []
        again_ns += self._slowed.ready_ns()
        return min(again_ns) // 1000 + 1 + self.offset_us if again_ns else None

    # --------------------------------------------------------------------------------------------------- for the turn

    def receive(self) -> tuple[bytes, int, list[zmtp.Frame]] | None:
        """Return the next message as (identity, descriptor, frames), or None."""
        now_ns = monotonic_ns()
        shares = self._shares
        if shares.serving is not None:
            shares.charge(now_ns)
        if not self._turned:
            self._begin_turn(now_ns)
        elif now_ns >= self._turn_ends_ns:
            return None  # answer what was received before receiving more
        while True:
            queue = self._ready
            if not queue and (self._stirred or not self._watched or self._put_off or shares.spent):
                queue = self._next_queue()
            if not queue:
                return None
            connection = queue.popleft()
            if connection.identity not in self._by_identity or connection.full:
                connection.listed = False
                continue  # a full connection is listed again when its queue has drained
            if queue is self._ready and not shares.has_share(connection):
                continue
            if connection.rate is not None and not connection.rate.take(now_ns):
                self._slowed.add(connection)
                self._register(connection)
                continue
            connection.listed = False
            if (frames := self._next(connection)) is not None:
                if queue is self._put_off:
                    self._pace.heard()
                if connection.head is not None or connection.reader.left:
                    self._list(connection)
                elif connection.ended:
                    self._over.append(connection)
                shares.serve(connection, monotonic_ns())
                return connection.identity, connection.descriptor, frames
            self._note_end(connection)

    def _begin_turn(self, now_ns: int) -> None:
        self._turned = True
        self._turn_ends_ns = now_ns + self.limits.turn_us * 1000
        if self._stirred or not self._watched or self._shut or self._pace.troubled:
            self._look(now_ns)  # even if messages are left over: other peers may have input
        self._shares.begin_turn()
        if self._slowed.connections:
            for connection in self._slowed.take_due(now_ns):
                self._register(connection)
                self._ready.append(connection)

    def _next_queue(self) -> deque[Connection]:
        """Return the queue for the next message when no connection is ready; it may be empty."""
        if self._stirred or not self._watched:
            self._look(monotonic_ns())
        if not self._ready:
            if self._put_off and self._pace.hears:
                return self._put_off
            if self._shares.spent:
                self._shares.forgive(monotonic_ns())
        return self._ready

    def number(self, identity: bytes) -> int | None:
        """Return the number of an admitted connection."""
        connection = self._by_identity.get(identity)
        return connection.number or None if connection is not None else None

    def who(self, identity: bytes) -> Who:
        """Return the identity of the peer; an empty one if it is gone."""
        connection = self._by_identity.get(identity)
        return Who(connection.user, connection.reader.key) if connection is not None else Who()

    def admit(self, identity: bytes, descriptor: int, number: int | None = None) -> int | None:
        """Give a connection its number, which may be that of a connection it replaces; None if it has ended."""
        self.note_ends(turn_over=False)
        connection = self._by_identity.get(identity)
        if connection is None or connection.ended:
            return None
        assert connection.descriptor == descriptor, "a connection has one descriptor"
        if not connection.number:
            self._trust(connection, not connection.faults)
            connection.number = self._numbers() if number is None else number
            connection.rate = self._rates(Who(connection.user, connection.reader.key))
            self._by_number[connection.number] = self._strangers.pop(identity)
        return connection.number

    def note_ends(self, turn_over: bool = True) -> bool:
        """Remove connections that ended, and send heartbeats that are due. Return whether `take_gone` has any."""
        self._now_ns = now_ns = monotonic_ns()
        if self._shares.serving is not None:
            self._shares.charge(now_ns)
        beats = now_ns - self._beaten_ns >= self._beat_ns
        if not self._watched or beats or not turn_over:
            self._look(now_ns)  # otherwise the next turn does, which is due immediately if there is input
        if turn_over:
            self._turned = self._eased = False
        if self._over:
            over, self._over = self._over, []
            for connection in over:
                self._end(connection)
        while self._lingering and now_ns - self._lingering[0].moved_ns > LINGER_S * 1e9:
            self._lingering.popleft().socket.close()
        if beats:
            self._beat()
        return bool(self._gone)

    def take_gone(self) -> list[int]:
        """Return the numbers of the connections that ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def forget(self, number: int) -> None:
        """Disconnect a peer. Earlier messages still reach it if it reads. Idempotent."""
        connection = self._by_number.get(number)
        if connection is not None:
            connection.flush(self._now_ns)
            self._remove(connection)
            connection.moved_ns = self._now_ns
            self._lingering.append(connection)
            if len(self._lingering) > LINGERING_MAX:
                self._lingering.popleft().socket.close()

    def end_where(self, problem: Callable[[Who], str]) -> None:
        """End the connections for which `problem` returns a reason. `take_gone` reports the admitted ones."""
        for connection in list(self._by_identity.values()):
            if words := problem(Who(connection.user, connection.reader.key)):
                log.warning("%s connection %s ended: %s", self.kind, connection.number or "(new)", words)
                self._end(connection)

    def send(self, number: int, frames: Frames) -> Sent:
        """Send without waiting. A peer found to be gone is removed and reported by `take_gone`."""
        connection = self._by_number.get(number)
        return self._send(connection, frames) if connection is not None else Sent.GONE

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        """Send without waiting to a connection that may have no number."""
        connection = self._by_identity.get(identity)
        return self._send(connection, frames) if connection is not None else Sent.GONE

    def fault(self, identity: bytes) -> None:
        """Count a malformed message of the peer, which is disconnected after too many."""
        connection = self._by_identity.get(identity)
        if connection is not None:
            connection.faults += 1
            self._pace.note_trouble(self._now_ns)
            self._trust(connection, False)
            if connection.faults > FAULTS_MAX:
                self._drop(connection, f"{connection.faults} malformed messages")

    def flush(self) -> None:
        """Write messages that were queued for sending together."""
        unsent, self._unsent = self._unsent, set()
        for connection in unsent:
            if connection.identity in self._by_identity:
                self._write(connection)

    def close(self) -> None:
        """Close everything, and remove the socket files. Idempotent."""
        for connection in list(self._by_identity.values()):
            self._close(connection)
        while self._lingering:
            self._lingering.popleft().socket.close()
        if not self._epoll.closed:
            self._epoll.close()
            self._others.close()
            for listener in self._listeners.values():
                listener.close()

    # ---------------------------------------------------------------------------------------------------------- input

    def _look(self, now_ns: int) -> None:
        """Read available input: some from each connection."""
        self._now_ns = now_ns
        self._stirred = self._others_came = False
        if self._shut:
            self._open(now_ns)
        self._look_through(self._epoll, now_ns, LOOK_US)
        # If time ran out before the inner epoll was checked, check it too, so that busy peers cannot starve the others.
        if (self._others_came or self._stirred or self._pace.troubled) and self._pace.begins(now_ns):
            self._look_at_others()

    def _open(self, now_ns: int) -> None:
        """Resume accepting where it had failed, if it is time."""
        for listener in self._listeners.values():
            if listener.again_ns:
                listener.look_again(now_ns)
        self._shut = any(listener.again_ns for listener in self._listeners.values())

    def _look_at_others(self) -> None:
        """Serve untrusted peers, and accept new connections."""
        stirred = self._stirred
        self._look_through(self._others, monotonic_ns(), PACED_LOOK_US if self._paced else LOOK_US)
        if bool(self._pace.again_ns) != self._paced:
            self._change_pace()
        if self._paced:
            self._stirred = stirred

    def _look_through(self, epoll: select.epoll, now_ns: int, for_us: int) -> None:
        """Serve each descriptor once, for at most `for_us`."""
        left = len(self._by_descriptor) + 1
        while events := epoll.poll(0, LOOKS_MAX):  # epoll rotates its ready list, so every descriptor has its turn
            for descriptor, what in events:
                self._look_at(descriptor, what)
            left -= len(events)
            if len(events) < LOOKS_MAX or left <= 0:
                return
            if monotonic_ns() - now_ns >= for_us * 1000:
                self._stirred = True
                return

    def _change_pace(self) -> None:
        """Start or stop throttling untrusted peers."""
        self._paced = not self._paced
        if self._paced:
            self._epoll.unregister(self._others)
        else:
            self._epoll.register(self._others, select.EPOLLIN)
            self._ready += self._put_off
            self._put_off.clear()

    def _look_at(self, descriptor: int, what: int) -> None:
        now_ns = self._now_ns
        connection = self._by_descriptor.get(descriptor)
        if connection is None:
            if (listener := self._listeners.get(descriptor)) is not None:
                for socket in listener.accept(now_ns, ACCEPTS_A_LOOK if self._paced else ACCEPTS_MAX):
                    self._welcome(socket, listener.door)
                self._shut = self._shut or listener.again_ns > 0
            elif descriptor == self._others.fileno():
                self._others_came = True
            return
        if what & select.EPOLLHUP and connection.full:
            connection.discard()  # the peer has closed, and reads nothing more
            self._ease(connection)
        elif what & select.EPOLLOUT and connection.flush(now_ns):
            self._ease(connection)
        if connection.ended:
            self._over.append(connection)
        if what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not connection.full:
            self._take_in(connection)
        self._register(connection)

    def _take_in(self, connection: Connection) -> None:
        """Read from a connection, unless earlier input is still unprocessed."""
        if connection.ended or connection.listed:
            return
        if connection.read(self._now_ns):
            self._stirred = True
        connection.head = self._next(connection)
        if connection.reader.key and not connection.trusted and not connection.faults:
            self._stand(connection)
        if connection.head is not None:
            self._list(connection)
        else:
            self._note_end(connection)

    def _note_end(self, connection: Connection) -> None:
        """Note a connection that has ended and has no more messages."""
        if connection.ended:
            self._over.append(connection)

    def _list(self, connection: Connection) -> None:
        """Queue a connection that may have a message."""
        if not connection.listed:
            connection.listed = True
            (self._put_off if self._paced and not connection.trusted else self._ready).append(connection)

    def _trust(self, connection: Connection, trusted: bool) -> None:
        """Change whether a connection is trusted."""
        if connection.trusted != trusted:
            if connection.registered:
                self._epoll_of(connection).unregister(connection.descriptor)
                connection.registered = 0
            connection.trusted = trusted
            self._register(connection)
            if trusted and connection in self._put_off:
                self._put_off.remove(connection)
                self._ready.append(connection)

    def _stand(self, connection: Connection) -> None:
        """Trust a peer that has proved a listed key, so that its handshake does not wait among untrusted ones."""
        if connection.identity in self._by_identity:
            self._trust(connection, True)

    def _epoll_of(self, connection: Connection) -> select.epoll:
        return self._epoll if connection.trusted else self._others

    def _next(self, connection: Connection) -> list[zmtp.Frame] | None:
        """Return the next message of a connection, or None. A peer that violates the protocol is dropped."""
        try:
            frames = connection.next(self._now_ns)
        except zmtp.Violation as violation:
            if violation.last:
                connection.command(violation.last, self._now_ns)
            self._drop(connection, str(violation))
            return None
        held = connection.reader.held
        if held != connection.counted:
            self._partial_bytes += held - connection.counted
            connection.counted = held
            if self._partial_bytes > self.limits.partial_bytes_max:
                oldest = min((c for c in self._by_identity.values() if c.counted), key=lambda c: c.begun_ns)
                self._drop(oldest, f"{self._partial_bytes} bytes held for incomplete messages, this one is the oldest")
        return frames

    def _welcome(self, socket: sockets.socket, door: Door) -> None:
        """Accept a connection, as untrusted until it is admitted."""
        if door.users is not None and (problem := door.users.problem(socket)):
            log.warning("%s connection refused: %s", self.kind, problem)
            self._pace.note_trouble(self._now_ns)
            socket.close()
            return
        if len(self._strangers) >= self.limits.strangers_max:
            self._drop(self._least_promising(), "evicted: too many pending handshakes")
        socket.setblocking(False)
        self._made += 1
        connection = Connection(socket, b"%d" % self._made, door, self.limits.room, self._now_ns)
        self._by_identity[connection.identity] = self._strangers[connection.identity] = connection
        self._by_descriptor[connection.descriptor] = connection
        connection.command(connection.reader.greeting, self._now_ns)
        self._note_end(connection)
        self._register(connection)

    def _least_promising(self) -> Connection:
        """Return the pending connection to evict: the oldest silent, else the oldest without a key, else the oldest."""
        oldest = None
        for connection in self._strangers.values():
            if self._now_ns - connection.opened_ns < SPEAK_S * 1e9:
                break
            if not connection.reader.spoke:
                return connection
        for connection in self._strangers.values():
            if not connection.reader.key:
                return connection
            oldest = oldest or connection
        assert oldest is not None, "a handshake is pending"
        return oldest

    # --------------------------------------------------------------------------------------------------------- output

    def _send(self, connection: Connection, frames: Frames) -> Sent:
        sent = connection.send(frames, self._now_ns)
        if connection.queued_bytes:
            if connection.registered & select.EPOLLOUT:
                pass  # epoll reports when the socket accepts data again
            elif self._together and connection.queued_messages < TOGETHER_MAX:
                self._unsent.add(connection)
            else:
                self._write(connection)
        return sent

    def _write(self, connection: Connection) -> None:
        if connection.flush(self._now_ns):
            self._ease(connection)
        if connection.ended:
            self._end(connection)
        elif connection.queued_bytes or connection.full or connection.registered != select.EPOLLIN:
            self._register(connection)

    def _register(self, connection: Connection) -> None:
        """Register the events of interest: none after the end, no input for a full or rate-limited connection."""
        if connection.ended or connection.identity not in self._by_identity:
            wanted = 0
        else:
            wanted = 0 if connection.full or connection.slowed else select.EPOLLIN
            if connection.queued_bytes:
                wanted |= select.EPOLLOUT
        if wanted == connection.registered:
            return
        epoll = self._epoll_of(connection)
        if not wanted:
            epoll.unregister(connection.descriptor)
        elif connection.registered:
            epoll.modify(connection.descriptor, wanted)
        else:
            epoll.register(connection.descriptor, wanted)
        connection.registered = wanted

    def _ease(self, connection: Connection) -> None:
        """Resume a connection with a drained queue: process its pending input, and let waiting messages be sent."""
        self._eased = True
        if connection.holds:
            self._list(connection)

    # ----------------------------------------------------------------------------------------------------------- ends

    def _beat(self) -> None:
        """Send heartbeats, and end connections that exceed a time limit. Time without checks does not count."""
        late_ns = self._now_ns - self._beaten_ns - 2 * self._beat_ns
        self._beaten_ns = self._now_ns
        for connection in list(self._by_identity.values()):
            if late_ns > 0:
                connection.put_off(late_ns)
            problem, silent = connection.problem(self._now_ns, self._silence_ns)
            if problem:
                if silent and connection.number:
                    self._on_silent(connection.number)
                self._drop(connection, problem)
            elif connection.reader.ready and not connection.queued_bytes:
                connection.command(connection.reader.sealed(self._ping), self._now_ns)
                self._write(connection)

    def _drop(self, connection: Connection, why: str) -> None:
        """Disconnect a peer that broke a limit, with a line in the log."""
        who = f"connection {connection.number}" if connection.number else "connection that is not admitted"
        log.warning("%s %s dropped: %s", self.kind, who, why, extra={"peer": connection.number})
        self._pace.note_trouble(self._now_ns)
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        """End a connection, to be reported by `take_gone`."""
        if connection.identity in self._by_identity:
            if connection.number:
                self._gone.append(connection.number)
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._remove(connection)
        connection.socket.close()

    def _remove(self, connection: Connection) -> None:
        """Remove all references to a connection; its socket stays open."""
        identity = connection.identity
        del self._by_identity[identity], self._by_descriptor[connection.descriptor]
        self._strangers.pop(identity, None)
        self._by_number.pop(connection.number, None)
        self._partial_bytes -= connection.counted
        self._register(connection)
        connection.head = None
        connection.discard()
