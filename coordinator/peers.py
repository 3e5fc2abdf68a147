"""Where clients, or workers, come in, and who is there: numbers for connections, their messages in turn, their ends.

Whatever a peer does, it costs a bounded amount, and those beside it do not notice:

- so many connections are open at once, each within its process's descriptors; those without a handshake yet are
  few, and one is evicted when there are too many (silent ones first, those that proved a key last), or after
  `connection.STRANGER_S`;
- messages are handed out one from each connection in turn, however many one of them has sent, and in one turn of the
  loop only for a while: what was asked by then is answered before more is looked at. Each connection has a share of
  that while (`shares`). What has come is read for a while only, from each in turn; and while bounds are broken all the
  time, strangers and those who sent something wrong are looked at now and then only (`pace`);
- a message is bounded as a whole, and so is what all unfinished messages hold together: beyond that the oldest of them
  goes with its connection. One that does not end within `connection.MESSAGE_S` goes too;
- what waits to be written to one peer is bounded (`connection.Room`); beyond that nothing more is taken from it, so
  that it costs nothing more until it reads;
- one that sends more messages a second than its entry allows is read later (`rate`, `slowed`);
- one that sends what is no message goes on so `FAULTS_MAX` times;
- one that is disconnected by us hears what it was told before: its end of the connection is closed `LINGER_S` later,
  as its ZeroMQ throws away what it has not handed out when the connection ends;
- a process that is gone is noticed at once, one from which nothing comes (heartbeats neither) after their timeout.
  The time in which this process stood still does not count (`kvforge.protocol.steady_clock`).

A peer that breaks a bound is disconnected, with a line in the log.
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
from .connection import Connection, Room
from .listener import ACCEPTS_MAX, Door, Listener
from .outbox import Frames, Sent, Who
from .pace import ACCEPTS_A_LOOK, Pace
from .pace import LOOK_US as PACED_LOOK_US
from .rate import Rate
from .shares import Shares
from .slowed import Slowed

LINGER_S = 0.5
LINGERING_MAX = 8
FAULTS_MAX = 64
SPEAK_S = 0.1  # so long a stranger has at least before its silence counts
TOGETHER_MAX = 8  # messages to one peer: it begins with the first while the turn writes the next
LOOKS_MAX = 4  # connections that are looked at between two looks at the time
LOOK_US = 100  # for so long what has come is read at once
CLIENT, WORKER = "client", "worker"
log = logging.getLogger("coordinator")


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one side, all its connections together.

    strangers_max: connections that have not said hello. partial_bytes_max: held for messages that have not ended.
    turn_us: for so long messages are handed out in one turn, but for one; share_us: to one connection, while others are
    there. silence_ms: a peer from which nothing comes for so long, heartbeats neither, is taken for gone.
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
        """How many are needed: connections, those that linger, epolls, and for each of two doors its socket and one to
        refuse with."""
        return self.admitted_max + self.strangers_max + LINGERING_MAX + 8


def _nothing(_number: int) -> None: ...


def _unlimited(_who: Who) -> Rate | None:
    return None


class Peers:
    """The connections of one side. A connection has a number once `admit` gave it one.

    kind: what they are, for the log. on_silent: told the number of an admitted one from which nothing came for so long
    that it is taken for gone, though its process may be there, before `take_gone` names it. offset_us: of the loop's
    clock from the steady one.
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
        """Binds each door. together: messages wait for `flush`, and leave together. rates: the message rate of a peer,
        None without a limit. Raises InvalidConfiguration, CoordinatorInUse."""
        self.limits = limits if limits is not None else PeerLimits()
        self.kind = kind
        self._numbers, self._on_silent, self._rates = numbers, on_silent, rates
        # Several of our heartbeats, each of which is answered, fall into the time that a peer may be silent.
        self._beat_ns = min(transport.HEARTBEAT_INTERVAL_MS * 1_000_000, self.limits.silence_ms * 1_000_000 // 4)
        self._silence_ns = self.limits.silence_ms * 1_000_000
        self._ping = zmtp.ping(transport.HEARTBEAT_TIMEOUT_MS)
        self._by_identity: dict[bytes, Connection] = {}
        self._by_number: dict[int, Connection] = {}
        self._by_descriptor: dict[int, Connection] = {}
        self._strangers: dict[bytes, Connection] = {}  # the oldest first
        self._shares = Shares(self.limits.share_us)
        self._ready = self._shares.ready  # may have a message
        self._put_off: deque[Connection] = deque()  # so may these, but they are paced
        self._slowed = Slowed()  # so have these, for which it is too soon
        self._over: list[Connection] = []  # have ended, and their last message was handed out
        self._gone: list[int] = []
        self._lingering: deque[Connection] = deque()  # forgotten, the longest ago first
        self._together = together
        self.offset_us = 0
        self._unsent: set[Connection] = set()
        self._partial_bytes = 0
        self._made = 0
        self._watched, self._stirred, self._turned, self._eased = False, True, False, False
        self._others_came = self._shut = False
        self._pace = Pace()
        self._now_ns = self._beaten_ns = self._turn_ends_ns = monotonic_ns()
        # Those with standing; all others and the doors are in one within it, which is taken out while they are paced.
        self._epoll, self._others = select.epoll(), select.epoll()
        self._listeners: dict[int, Listener] = {}
        try:
            for door in doors:
                listener = Listener(door, self._others)
                self._listeners[listener.fileno()] = listener
        except BaseException:  # the doors that are open already are closed again
            self.close()
            raise
        self._epoll.register(self._others, select.EPOLLIN)
        self._paced = False

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def endpoints(self) -> list[str]:
        """Where they come in."""
        return [listener.endpoint for listener in self._listeners.values()]

    # ------------------------------------------------------------------------------------------------- for the loop

    def fileno(self) -> int:
        """Readable when something may have arrived."""
        return self._epoll.fileno()

    def watch(self, epoll: select.epoll) -> dict[int, Callable[[], None]]:
        """From now on what `epoll` reports is passed on: by descriptor, what to call. It is asked before each turn."""
        self._watched = True
        epoll.register(self._epoll, select.EPOLLIN)
        return {self._epoll.fileno(): self._stir}

    def _stir(self) -> None:
        self._stirred = True

    @property
    def waiting(self) -> bool:
        """Whether a message, the end of a connection, or room for one that had none is there to be looked at."""
        if (self._stirred or not self._watched) and not self._ready:
            self._look(monotonic_ns())
        put_off = self._put_off and self._pace.hears
        return bool(self._ready or put_off or self._shares.spent or self._over or self._gone or self._eased)

    @property
    def again_us(self) -> int | None:
        """When a turn is due though nothing arrives, for those that are paced or slowed; None: nobody is."""
        if not self._paced and not self._slowed:
            return None
        again_ns = [self._pace.again_ns] if self._paced else []
        again_ns += self._slowed.ready_ns()
        return min(again_ns) // 1000 + 1 + self.offset_us if again_ns else None

    # --------------------------------------------------------------------------------------------------- for the turn

    def receive(self) -> tuple[bytes, int, list[zmtp.Frame]] | None:
        """The next message: (identity, descriptor, frames); None where none is waiting."""
        now_ns = monotonic_ns()
        shares = self._shares
        if shares.serving is not None:
            shares.charge(now_ns)
        if not self._turned:
            self._begin_turn(now_ns)
        elif now_ns >= self._turn_ends_ns:
            return None  # what is left is for the next turn: what was asked so far is answered first
        while queue := self._ready or self._next_queue():
            connection = queue.popleft()
            if connection.identity not in self._by_identity or connection.full:
                connection.listed = False
                continue  # one that is full comes again when it is not
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
                if connection.holds:
                    self._list(connection)
                else:
                    self._note_end(connection)
                shares.serve(connection, monotonic_ns())
                return connection.identity, connection.descriptor, frames
            self._note_end(connection)
        return None

    def _begin_turn(self, now_ns: int) -> None:
        self._turned = True
        self._turn_ends_ns = now_ns + self.limits.turn_us * 1000
        if self._stirred or not self._watched or self._shut or self._pace.troubled:
            self._look(now_ns)  # also where messages are left from before: others may have come meanwhile
        self._shares.begin_turn()
        if self._slowed:
            for connection in self._slowed.take_due(now_ns):
                self._register(connection)
                self._ready.append(connection)

    def _next_queue(self) -> deque[Connection]:
        """Where the next message is looked for when nobody is ready; an empty one where nobody has any."""
        if self._stirred or not self._watched:
            self._look(monotonic_ns())
        if not self._ready:
            if self._put_off and self._pace.hears:
                return self._put_off
            if self._shares.spent:
                self._shares.forgive(monotonic_ns())
        return self._ready

    def number(self, identity: bytes) -> int | None:
        """The number of an admitted connection."""
        connection = self._by_identity.get(identity)
        return connection.number or None if connection is not None else None

    def who(self, identity: bytes) -> Who:
        """Who is there; nobody in particular where it has gone."""
        connection = self._by_identity.get(identity)
        return Who(connection.user, connection.reader.key) if connection is not None else Who()

    def admit(self, identity: bytes, descriptor: int, number: int | None = None) -> int | None:
        """Gives a connection its number, that of an earlier one where it takes its place; None where it has ended
        already."""
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

    def note_ends(self, turn_over: bool = True) -> None:
        """Connections that ended are forgotten here and reported by `take_gone`. Heartbeats that are due are sent."""
        self._now_ns = now_ns = monotonic_ns()
        self._shares.charge(now_ns)
        beats = now_ns - self._beaten_ns >= self._beat_ns
        if not self._watched or beats or not turn_over:
            self._look(now_ns)  # otherwise the next turn does, which is due at once where anything has come
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

    def take_gone(self) -> list[int]:
        """Numbers of the connections that ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def forget(self, number: int) -> None:
        """Disconnects: what was sent before still reaches a peer that reads. Idempotent."""
        connection = self._by_number.get(number)
        if connection is not None:
            connection.flush(self._now_ns)
            self._remove(connection)
            connection.moved_ns = self._now_ns
            self._lingering.append(connection)
            if len(self._lingering) > LINGERING_MAX:
                self._lingering.popleft().socket.close()

    def end_where(self, problem: Callable[[Who], str]) -> None:
        """Ends the connections of whom there is something to say. `take_gone` reports those that are admitted."""
        for connection in list(self._by_identity.values()):
            if words := problem(Who(connection.user, connection.reader.key)):
                log.warning("%s connection %s ended: %s", self.kind, connection.number or "(new)", words)
                self._end(connection)

    def send(self, number: int, frames: Frames) -> Sent:
        """Sends without waiting. A peer that is found to be gone is forgotten and reported by `take_gone`."""
        connection = self._by_number.get(number)
        return self._send(connection, frames) if connection is not None else Sent.GONE

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        """Sends to a connection that has no number (yet), without waiting."""
        connection = self._by_identity.get(identity)
        return self._send(connection, frames) if connection is not None else Sent.GONE

    def fault(self, identity: bytes) -> None:
        """What it sent is no message at all, and was refused. One that goes on so is disconnected."""
        connection = self._by_identity.get(identity)
        if connection is not None:
            connection.faults += 1
            self._pace.note_trouble(self._now_ns)
            self._trust(connection, False)
            if connection.faults > FAULTS_MAX:
                self._drop(connection, f"{connection.faults} of its messages were none")

    def flush(self) -> None:
        """Writes what was sent since the last call, where that is to leave together."""
        unsent, self._unsent = self._unsent, set()
        for connection in unsent:
            if connection.identity in self._by_identity:
                self._write(connection)

    def close(self) -> None:
        """Close everything, and remove the sockets' files. Idempotent."""
        for connection in list(self._by_identity.values()):
            self._close(connection)
        while self._lingering:
            self._lingering.popleft().socket.close()
        if not self._epoll.closed:
            self._epoll.close()
            self._others.close()
            for listener in self._listeners.values():
                listener.close()

    # ----------------------------------------------------------------------------------------------------- what comes

    def _look(self, now_ns: int) -> None:
        """Takes in what has come: some of it from each connection."""
        self._now_ns = now_ns
        self._stirred = self._others_came = False
        if self._shut:
            self._open(now_ns)
        self._look_through(self._epoll, now_ns, LOOK_US)
        # Where there was no time to see whether the others came, they are looked at: nobody waits for all the rest.
        if (self._others_came or self._stirred or self._pace.troubled) and self._pace.begins(now_ns):
            self._look_at_others()

    def _open(self, now_ns: int) -> None:
        """Accepts again at the doors where nobody could be accepted, if it is time."""
        for listener in self._listeners.values():
            if listener.again_ns:
                listener.look_again(now_ns)
        self._shut = any(listener.again_ns for listener in self._listeners.values())

    def _look_at_others(self) -> None:
        """Those without standing, and whoever comes in."""
        stirred = self._stirred
        self._look_through(self._others, monotonic_ns(), PACED_LOOK_US if self._paced else LOOK_US)
        if bool(self._pace.again_ns) != self._paced:
            self._change_pace()
        if self._paced:
            self._stirred = stirred

    def _look_through(self, epoll: select.epoll, now_ns: int, for_us: int) -> None:
        """Look at each once, for `for_us` at most."""
        left = len(self._by_descriptor) + 1
        while events := epoll.poll(0, LOOKS_MAX):  # those that were looked at go to the end of its queue
            for descriptor, what in events:
                self._look_at(descriptor, what)
            left -= len(events)
            if len(events) < LOOKS_MAX or left <= 0:
                return
            if monotonic_ns() - now_ns >= for_us * 1000:
                self._stirred = True
                return

    def _change_pace(self) -> None:
        """Those without standing are paced from now on, or are no longer."""
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
            connection.discard()  # it has closed, and reads nothing more
            self._ease(connection)
        elif what & select.EPOLLOUT and connection.flush(now_ns):
            self._ease(connection)
        if connection.ended:
            self._over.append(connection)
        if what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not connection.full:
            self._take_in(connection)
        self._register(connection)

    def _take_in(self, connection: Connection) -> None:
        """Reads from a connection, unless what it sent before was not looked at yet."""
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
        """If nothing more comes from it, it is over with the message that was handed out last."""
        if connection.ended:
            self._over.append(connection)

    def _list(self, connection: Connection) -> None:
        """It may have a message."""
        if not connection.listed:
            connection.listed = True
            (self._put_off if self._paced and not connection.trusted else self._ready).append(connection)

    def _trust(self, connection: Connection, trusted: bool) -> None:
        """It has standing from now on, or has it no longer."""
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
        """It has proved a key of the list: it does not wait among strangers for its hello to be heard."""
        if connection.identity in self._by_identity:
            self._trust(connection, True)

    def _epoll_of(self, connection: Connection) -> select.epoll:
        return self._epoll if connection.trusted else self._others

    def _next(self, connection: Connection) -> list[zmtp.Frame] | None:
        """The next message of a connection. One that breaks the protocol is disconnected."""
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
                self._drop(oldest, f"{self._partial_bytes} bytes are held for messages that have not ended, its first")
        return frames

    def _welcome(self, socket: sockets.socket, door: Door) -> None:
        """A new connection: a stranger until it is admitted."""
        if door.users is not None and (problem := door.users.problem(socket)):
            log.warning("%s connection refused: %s", self.kind, problem)
            self._pace.note_trouble(self._now_ns)
            socket.close()
            return
        if len(self._strangers) >= self.limits.strangers_max:
            self._drop(self._least_promising(), "no handshake yet, and too many are pending")
        socket.setblocking(False)
        self._made += 1
        connection = Connection(socket, b"%d" % self._made, door, self.limits.room, self._now_ns)
        self._by_identity[connection.identity] = self._strangers[connection.identity] = connection
        self._by_descriptor[connection.descriptor] = connection
        connection.command(connection.reader.greeting, self._now_ns)
        self._note_end(connection)
        self._register(connection)

    def _least_promising(self) -> Connection:
        """Return the connection to evict: the oldest that has sent nothing though it had the time, else the oldest of
        those without a proved key, else the oldest."""
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
        assert oldest is not None, "there are strangers"
        return oldest

    # ------------------------------------------------------------------------------------------------------ what goes

    def _send(self, connection: Connection, frames: Frames) -> Sent:
        sent = connection.send(frames, self._now_ns)
        if connection.queued_bytes:
            if connection.registered & select.EPOLLOUT:
                pass  # the one before was not taken: epoll tells when it is
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
        else:
            self._register(connection)

    def _register(self, connection: Connection) -> None:
        """Has epoll look for what is of interest now: nothing more of one that has ended, or that does not read."""
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
        """It takes something again: what it had asked for meanwhile is looked at, what waits for it can be sent."""
        self._eased = True
        if connection.holds:
            self._list(connection)

    # ------------------------------------------------------------------------------------------------------- the ends

    def _beat(self) -> None:
        """Sends heartbeats, and ends whatever has taken too long. Time in which nobody looked does not count."""
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
        """Disconnects a peer that broke a bound, and says so."""
        who = f"connection {connection.number}" if connection.number else "connection that is not admitted"
        log.warning("%s %s dropped: %s", self.kind, who, why, extra={"peer": connection.number})
        self._pace.note_trouble(self._now_ns)
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        """A connection is over, and not because we were told to forget it."""
        if connection.identity in self._by_identity:
            if connection.number:
                self._gone.append(connection.number)
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._remove(connection)
        connection.socket.close()

    def _remove(self, connection: Connection) -> None:
        """It is none of ours any more, but for its descriptor."""
        identity = connection.identity
        del self._by_identity[identity], self._by_descriptor[connection.descriptor]
        self._strangers.pop(identity, None)
        self._by_number.pop(connection.number, None)
        self._partial_bytes -= connection.counted
        self._register(connection)
        connection.head = None
        connection.discard()
