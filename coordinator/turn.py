"""One turn of the coordinator, without its sockets: messages in, core, tables, messages out.

Always in this order: drain what has arrived (a bounded number of messages from each side), apply every event to the
core, apply Turn, write the journal, publish the tables, send. The server runs it over ZeroMQ, the simulator over a
simulated network; both call it when something arrived and when the turn before said, and never otherwise.

Nobody is waited for. What a client that does not read should have been streamed is the core's to send again; replies
wait for it here, so many and no more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Annotated, Protocol

from kvforge.protocol import codec
from kvforge.protocol.errors import (
    CapacityExceeded,
    KvforgeError,
    MessageRefused,
    NotAllowed,
    ProtocolError,
    StateLost,
    VersionMismatch,
)
from kvforge.protocol.handover import StepMail
from kvforge.protocol.logs import tell
from kvforge.protocol.messages import (
    CLIENT_MESSAGES,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    WORKER_MESSAGES,
    ErrorInfo,
    FindPrefix,
    Goodbye,
    Hello,
    Message,
    PoolRegistered,
    Refused,
    Step,
    StepResult,
    Stream,
    Submit,
    Welcome,
    WorkerHello,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.tables import TablesWriter

from .access import Gate
from .core.commands.sessions import OWNER_END
from .core.events import (
    BeginDrain,
    Boot,
    ClientCame,
    ClientFull,
    ClientGone,
    CommandRefused,
    DropWorker,
    Effect,
    Event,
    FromClient,
    FromWorker,
    Log,
    Restarted,
    ToClient,
    ToWorker,
    Turn,
    WorkerGone,
)
from .core.limits import DURATION_S_MAX, Bounds, Count, Range
from .core.machine import Machine
from .outbox import Frames, Outbox, Sent, Transport
from .oversized import Oversized, check_size
from .publish import publish

MESSAGE_BYTES = Range(codec.BODY_BYTES_MAX, codec.BODY_BYTES_MAX + codec.FRAME_BYTES_MAX)
RETRY_US = 50_000  # nothing tells when a client that took nothing more reads again
RESULT_BYTES_MAX = 16 << 20  # of a result in which each of thousands of rows has an error to tell
CUT_OFF_US = 5_000_000  # after a standstill: the ends of connections are noticed by then
BEAT_US = 1_000_000  # the published gauges are never older: whoever reads them sees that the loop lives
log = logging.getLogger("coordinator")


class Processes(Protocol):
    """The workers' processes by connection number: the interface of `kvforge.coordinator.replacing.Replacer`."""

    def watch(self, worker: int, pid: int, descriptor: int) -> None:
        """A worker connected."""

    def leave(self, worker: int) -> None:
        """Its connection ended; in this turn its process may still have to be replaced."""

    def replace(self, worker: int, pid: int, reason: str, now_us: int) -> None:
        """Ends a process that hangs, without waiting for it."""

    def ended(self, worker: int) -> bool:
        """Return whether a worker's process is known to have ended."""

    def act(self, now_us: int) -> int | None:
        """Does what is due. Returns when it must be called again though nothing happens; None: not before."""


class MessageInHand(Protocol):
    """Notes the message that is worked on: what `kvforge.coordinator.journal.in_hand.InHand` is."""

    def take(self, frames: Frames) -> None:
        """A message is worked on from now on. Raises MessageRefused."""

    def handled(self) -> None:
        """It was applied."""

    def turned(self) -> None:
        """The turn is written."""


class Writer(Protocol):
    """What is written of the events before anything follows from them: what `kvforge.coordinator.journal.log.Journal`
    is.

    bytes: since the last snapshot. number: of the next record.
    """

    bytes: int
    number: int
    in_hand: MessageInHand | None

    def note(self, event: Event | Boot, now_us: int, frames: Frames = ()) -> None:
        """It enters the core at that time. frames: those of its message."""

    def commit(self) -> None:
        """Writes what was noted since the last call."""


class Listeners(Protocol):
    """Those who are told what the prefix indexes hold: what `kvforge.coordinator.kv_events.stream.EventStream` is."""

    def turned(self) -> bool:
        """A turn is over and written. Returns whether somebody waits for more than it took."""


class TurnLimits(Bounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The core's bounds, those of one turn, and those of the connections that it admits.

    message_bytes_max: of one message of a client, its frames together; a larger one is read past and refused.
    messages_per_turn_max: of clients, and as many of workers. client_bytes_per_turn_max, client_ms_per_turn_max: then
    no more is taken from clients in this turn; one message is always taken. clients_max: connections of clients
    after their handshake, as pools_max of workers. client_backlog_max: replies that wait for one client.
    """

    message_bytes_max: Annotated[int, MESSAGE_BYTES] = 16 << 20
    messages_per_turn_max: Count = 1024
    client_bytes_per_turn_max: Count = 8 << 20
    client_ms_per_turn_max: Annotated[float, Range(1e-3, DURATION_S_MAX)] = 2.0
    clients_max: Count = 256
    client_backlog_max: Count = 1024


class Mail:
    """Where one worker's steps are put, from its registration on."""

    def __init__(self, mail: StepMail, pool: int, epoch: int) -> None:
        self._mail, self._pool, self._epoch = mail, pool, epoch
        self._number = 0

    def put(self, frames: Frames) -> None:
        """The next step."""
        self._number += 1
        self._mail.put(self._pool, self._epoch, self._number, frames)


class TurnLoop:
    """What happens in one turn. Time and entropy (64 bit, for seeds) come from the caller.

    clock_us: says how long clients have been served in this turn. processes: ends worker processes that hang; None:
    nobody does. journal: what enters is written there; None: nowhere. gate: who is let in; None: everybody. listeners:
    are told what the prefix indexes hold; None: nobody is.
    """

    def __init__(
        self,
        machine: Machine,
        tables: TablesWriter,
        clients: Transport,
        workers: Transport,
        entropy: Callable[[], int],
        clock_us: Callable[[], int],
        limits: TurnLimits,
        processes: Processes | None = None,
        journal: Writer | None = None,
        gate: Gate | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        self.machine, self.tables = machine, tables
        self.clients, self.workers = clients, workers
        self._entropy, self._clock_us, self._limits, self._processes = entropy, clock_us, limits, processes
        self._journal, self._unwritten = journal, False
        self._gate, self._listeners = gate or Gate(), listeners
        self._outbox = Outbox(clients, limits.client_backlog_max)
        self._watching: set[int] = set()  # workers that look for their steps in shared memory too
        self._mail: dict[int, Mail] = {}
        self._effects: deque[Effect] = deque()  # what is still to be done, in order
        self._now_us = 0  # of this turn
        self._cut_off_until_us = 0  # connections of workers that end by then may have ended while this process stood
        self._core_due_us: int | None = None
        self._client_decoder = codec.Decoder(CLIENT_MESSAGES)
        self._worker_decoder = codec.Decoder(WORKER_MESSAGES, body_bytes_max=RESULT_BYTES_MAX)

    def begin_drain(self, now_us: int, deadline_us: int) -> None:
        """The process is told to stop: what follows is done by the next turn, which is due at once."""
        self._now_us = now_us
        self._apply(BeginDrain(deadline_us))

    def restarted(self, now_us: int) -> None:
        """The machine was made anew from its journal, and nobody is connected: the next turn is due at once."""
        self._now_us = now_us
        self._apply(Restarted())

    def stood_still(self, now_us: int) -> None:
        """Note that this process stood still: workers that gave it up meanwhile may come back with their pools.

        Args:
            now_us: When it went on, in microseconds of the steady clock.
        """
        self._cut_off_until_us = now_us + CUT_OFF_US

    def turn(self, now_us: int) -> int:
        """One turn at `now_us` (microseconds, monotonic); does not wait.

        Returns when the next must be run though nothing arrives: an absolute time.
        """
        self._now_us = now_us
        if self._outbox.waiting:
            self._outbox.retry()
        self._hear_workers()
        self._hear_clients()
        self._note_ends()
        if self._core_due_us is not None and self._core_due_us <= now_us:
            self._apply(Turn())
        self._write()
        if self._journal is not None and self._journal.in_hand is not None:
            self._journal.in_hand.turned()
        kept = (0, 0) if self._journal is None else (self._journal.bytes, self._journal.number)
        publish(self.machine, self.tables, now_us, kept)
        self._carry_out()
        self.clients.flush()
        due_us = now_us + BEAT_US
        if self._listeners is not None and self._listeners.turned():
            due_us = now_us + RETRY_US
        if self._core_due_us is not None:
            due_us = min(due_us, self._core_due_us)
        for peers in (self.clients, self.workers):
            if (again_us := peers.again_us) is not None:
                due_us = min(due_us, again_us)
        if self._processes is not None and (act_us := self._processes.act(now_us)) is not None:
            due_us = min(due_us, act_us)
        return min(due_us, now_us + RETRY_US) if self._outbox.waiting else due_us

    def _apply(self, event: Event, frames: Frames = ()) -> None:
        """Every event after Boot comes through here: the core's last word on when a turn is due is what counts.

        frames: those of its message.
        """
        effects, self._core_due_us = self.machine.apply(event, self._now_us)
        self._effects += effects
        if self._journal is not None and not _only_asks(event):
            if (refused := _refused(event, effects)) is not None:
                event, frames = refused, ()  # its frames, of any size, changed nothing
            self._journal.note(event, self._now_us, frames)
            self._unwritten = True

    def _write(self) -> None:
        """Nothing that follows from an event may be seen by anybody before this."""
        if self._unwritten:
            assert self._journal is not None
            self._journal.commit()
            self._unwritten = False

    # -------------------------------------------------------------------------------------------------------- effects

    def _carry_out(self) -> None:
        """Does what is to be done, and what follows from it."""
        while self._effects:
            self._write()  # a client that does not read makes events while effects are carried out
            effect = self._effects.popleft()
            if isinstance(effect, ToClient):
                self._to_client(effect.client, effect.message)
            elif isinstance(effect, ToWorker):
                self._to_worker(effect.worker, effect.message)
            elif isinstance(effect, Log):
                tell(log, effect.level, effect.text, effect.event, effect.fields)
            elif isinstance(effect, DropWorker):
                log.debug("worker connection %d dropped: %s", effect.worker, effect.reason)  # the core has told why
                self.workers.forget(effect.worker)
                self._left(effect.worker)
            elif self._processes is not None:
                self._processes.replace(effect.worker, effect.pid, effect.reason, self._now_us)
        self._write()  # a snapshot may follow: what it holds must not come again behind it

    def _to_client(self, client: int, message: Message) -> None:
        frames = codec.encode(message)
        if isinstance(message, Stream):
            if not self._outbox.stream(client, frames):
                self._apply(ClientFull(client, message))
        elif not self._outbox.reply(client, frames):
            log.warning("client connection %d dropped: it does not read, and %s", client, self._outbox.kept(client))
            self.clients.forget(client)
            self._client_gone(client, goodbye=False)

    def _to_worker(self, worker: int, message: Message) -> None:
        frames = codec.encode(message)
        if isinstance(message, Step) and (mail := self._mail.get(worker)) is not None:
            mail.put(frames)
        elif isinstance(message, PoolRegistered) and worker in self._watching:
            self._mail[worker] = Mail(self.tables.mail, message.pool, message.epoch)
        if self.workers.send(worker, frames) is Sent.FULL:
            log.warning("worker connection %d dropped: it does not read its messages", worker)
            self.workers.forget(worker)
            self._worker_gone(worker, goodbye=False)

    # ----------------------------------------------------------------------------------------------------------- ends

    def _note_ends(self, turn_over: bool = True) -> None:
        self.clients.note_ends(turn_over)
        self.workers.note_ends(turn_over)
        for number in self.clients.take_gone():
            self._client_gone(number, goodbye=False)
        for number in self.workers.take_gone():
            self._worker_gone(number, goodbye=False)

    def _client_gone(self, number: int, *, goodbye: bool) -> None:
        self._outbox.forget(number)
        self._apply(ClientGone(number, goodbye))

    def _worker_gone(self, number: int, *, goodbye: bool) -> None:
        away = not goodbye and self._now_us < self._cut_off_until_us
        away = away and (self._processes is None or not self._processes.ended(number))
        self._left(number)
        self._apply(WorkerGone(number, goodbye, away))

    def _left(self, worker: int) -> None:
        self._watching.discard(worker)
        self._mail.pop(worker, None)
        if self._processes is not None:
            self._processes.leave(worker)

    # -------------------------------------------------------------------------------------------------------- clients

    def _hear_clients(self) -> None:
        """Takes messages of clients as far as the turn's budget goes: workers must not wait longer for their next turn.

        The connections share it: of those that have any waiting the socket hands out one message each, in turn.
        """
        limits, bytes_left = self._limits, self._limits.client_bytes_per_turn_max
        until_us = self._clock_us() + limits.client_ms_per_turn_max * 1000
        for _ in range(limits.messages_per_turn_max):
            received = self.clients.receive()
            if received is None:
                return
            self._from_client(*received)
            bytes_left -= sum(map(len, received[2]))
            if bytes_left <= 0 or self._clock_us() >= until_us:
                return

    def _from_client(self, identity: bytes, descriptor: int, frames: Frames) -> None:
        message: Message | None = None
        in_hand = self._journal.in_hand if self._journal is not None else None
        try:
            check_size(frames, self._limits.message_bytes_max)
            if in_hand is not None:
                in_hand.take(frames)
            message = self._client_decoder.decode(frames)
            number = self.clients.number(identity)
            if isinstance(message, Hello):
                self._greet_client(identity, descriptor, number, message)
            elif isinstance(message, Goodbye) and number is None:
                return  # the end of its connection was noticed first
            elif number is None:
                raise ProtocolError("a client's first message is hello")
            elif isinstance(message, Goodbye):
                self.clients.forget(number)
                self._client_gone(number, goodbye=True)
            else:
                entropy = self._entropy() if isinstance(message, Submit) else 0
                self._apply(FromClient(number, message, entropy), frames)
        except KvforgeError as error:
            number = self.clients.number(identity)
            refused = _refusal("client", number, error, message)
            if isinstance(error, MessageRefused | Oversized):
                refused = Refused(rid=codec.rid_of(frames), error=refused.error)
            if isinstance(error, ProtocolError):
                self.clients.fault(identity)
            if number is None:
                self.clients.send_to(identity, codec.encode(refused))
            else:
                self._effects.append(ToClient(number, refused))
        if in_hand is not None:
            in_hand.handled()

    def _greet_client(self, identity: bytes, descriptor: int, number: int | None, message: Hello) -> None:
        version = negotiate(message.version_min, message.version_max)
        if message.boot not in ("", self.machine.boot):
            raise StateLost(message.boot, self.machine.boot)
        access = self._gate.client(self.clients.who(identity))
        # A session is its owner's: whoever else names it means another one.
        session = f"{access.name}{OWNER_END}{message.session}" if message.session else ""
        if session and number is None:
            self._note_ends(turn_over=False)  # one that was found before must not end what takes its place
        before = self.machine.sessions.number(session) if session else None
        if number is None:
            if before is not None:
                self._take_place(before)
            if len(self.clients) >= self._limits.clients_max:
                raise CapacityExceeded("clients", 1, 0, "raise limits.clients_max")
            number = self.clients.admit(identity, descriptor, before)
            if number is None:
                return
            self._apply(ClientCame(number, session, access))
        welcome = Welcome(
            rid=message.rid,
            version=version,
            boot=self.machine.boot,
            tables_path=str(self.tables.path),
            resumed=number == before,
        )
        self._effects.append(ToClient(number, welcome))
        if number == before:
            tell(log, "debug", "client is back", "client_back", {"client": number})

    def _take_place(self, number: int) -> None:
        """Another connection takes the place of this one, where it is still there: what was kept for it is lost."""
        self.clients.forget(number)
        self._outbox.forget(number)
        self._effects = deque(e for e in self._effects if not (isinstance(e, ToClient) and e.client == number))

    # -------------------------------------------------------------------------------------------------------- workers

    def _hear_workers(self) -> None:
        for _ in range(self._limits.messages_per_turn_max):
            received = self.workers.receive()
            if received is None:
                return
            self._from_worker(*received)

    def _from_worker(self, identity: bytes, descriptor: int, frames: Frames) -> None:
        message: Message | None = None
        try:
            message = self._worker_decoder.decode(frames)
            number = self.workers.number(identity)
            if isinstance(message, WorkerHello) and number is None:
                self._greet_worker(identity, descriptor, message, frames)
            elif isinstance(message, StepResult) and number is None:
                return  # meant for the process before this one: it says hello next, and then is asked for it
            elif number is None:
                raise ProtocolError("a worker's first message is worker_hello")
            elif number not in self.machine.workers:
                return  # the core has given it up: what it had sent already could register it again
            elif isinstance(message, Goodbye):
                self.workers.forget(number)
                self._worker_gone(number, goodbye=True)
            else:
                if isinstance(message, WorkerReady) and message.watches:
                    self._watching.add(number)
                self._apply(FromWorker(number, message), frames)
        except KvforgeError as error:
            refused = _refusal("worker", self.workers.number(identity), error, message)
            self.workers.send_to(identity, codec.encode(refused))
            if isinstance(error, ProtocolError | NotAllowed):
                self.workers.fault(identity)

    def _greet_worker(self, identity: bytes, descriptor: int, message: WorkerHello, frames: Frames) -> None:
        version = negotiate(message.version_min, message.version_max)
        self._gate.check_worker(self.workers.who(identity), message.token)
        self._note_ends(turn_over=False)  # a successor of the same name may be faster than its end
        if len(self.workers) >= self._limits.pools_max:
            raise CapacityExceeded("workers", 1, 0, "raise limits.pools_max")
        number = self.workers.admit(identity, descriptor)
        if number is None:
            return
        place = len(self._effects)
        if message.watches:
            self._watching.add(number)
        self._apply(FromWorker(number, message), frames)
        if number in self.machine.workers:
            if self._processes is not None:
                self._processes.watch(number, message.pid, descriptor)
            self._effects.insert(place, ToWorker(number, self._worker_welcome(number, message.rid, version)))

    def _worker_welcome(self, number: int, rid: int, version: int) -> Message:
        group = self.machine.workers[number].group
        limits = self.machine.limits
        return WorkerWelcome(
            rid=rid,
            version=version,
            boot=self.machine.boot,
            tables_path=str(self.tables.path),
            block_size=limits.cache.block_size,
            slots_max=limits.bounds.sequences_max,
            blocks_per_sequence_max=limits.bounds.blocks_per_sequence_max,
            step_tokens_max=limits.schedule.step_tokens_max,
            step_rows_max=limits.schedule.step_rows_max,
            epoch=group.epoch if group is not None else 0,
        )


def _only_asks(event: Event) -> bool:
    """What changes nothing whatever it says, and comes once for each request of every replica: nothing to be kept."""
    return isinstance(event, FromClient) and isinstance(event.message, FindPrefix)


def _refused(event: Event, effects: list[Effect]) -> CommandRefused | None:
    """Return the refusal of a command; None where the event was no command or was accepted."""
    if not isinstance(event, FromClient) or not effects:
        return None
    last = effects[-1]
    if not isinstance(last, ToClient) or last.client != event.client or not isinstance(last.message, Refused):
        return None
    return CommandRefused(event.client, isinstance(event.message, Submit))


def _refusal(kind: str, number: int | None, error: KvforgeError, message: Message | None) -> Refused:
    rid = error.rid if isinstance(error, codec.InvalidMessage) else getattr(message, "rid", 0)
    log.warning("refused a message of %s connection %s: %s", kind, number or "(new)", error, extra={"peer": number})
    return Refused(rid=rid, error=ErrorInfo.of(error))


def negotiate(version_min: int, version_max: int) -> int:
    """The highest protocol version that both sides speak. Raises VersionMismatch naming both ranges."""
    version = min(version_max, PROTOCOL_VERSION)
    if version < max(version_min, PROTOCOL_VERSION_MIN):
        raise VersionMismatch(
            f"the peer speaks protocol {version_min} to {version_max}, "
            f"this coordinator {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}",
            peer_min=version_min,
            peer_max=version_max,
            own_min=PROTOCOL_VERSION_MIN,
            own_max=PROTOCOL_VERSION,
        )
    return version
