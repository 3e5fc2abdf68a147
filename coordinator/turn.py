"""One turn of the coordinator, without its sockets: messages in, core, tables, messages out.

The order is fixed: receive messages (a bounded number from each side), apply every event to the core, apply Turn, write
the journal, publish the tables, send to workers, publish the gauges, send to clients. The server runs turns over
ZeroMQ, the simulator over a simulated network; both run one when input arrives and when the previous turn scheduled the
next, and at no other time.

A turn never waits for a peer. If a client does not read, the core resends its stream later; its replies are queued
here, up to a limit.
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
from kvforge.protocol.handover import StepRing
from kvforge.protocol.logs import log_event
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
from .publish import publish_gauges, publish_rows
from .transport.outbox import Frames, Outbox, Sent, Transport
from .transport.oversized import Oversized, check_size

MESSAGE_BYTES = Range(codec.BODY_BYTES_MAX, codec.BODY_BYTES_MAX + codec.FRAME_BYTES_MAX)
RETRY_US = 50_000  # the socket does not signal when a slow client reads again
RESULT_BYTES_MAX = 16 << 20  # a result may have an error for each of thousands of rows
CUT_OFF_US = 5_000_000  # ends of connections are noticed within this time after a suspension
BEAT_US = 1_000_000  # maximum age of the published gauges, which show readers that the loop is alive
log = logging.getLogger("coordinator")


class Processes(Protocol):
    """The processes of the workers, by connection number: implemented by `host.replacing.Replacer`."""

    def watch(self, worker: int, pid: int, descriptor: int) -> None:
        """Identify the process of a worker that connected."""

    def leave(self, worker: int) -> None:
        """Forget a worker that disconnected; in this turn its process may still have to be replaced."""

    def replace(self, worker: int, pid: int, reason: str, now_us: int) -> None:
        """End a process that hangs, without waiting for it."""

    def ended(self, worker: int) -> bool:
        """Return whether a worker's process is known to have ended."""

    def act(self, now_us: int) -> int | None:
        """Do what is due. Return the time of the next action, or None."""


class MessageInFlight(Protocol):
    """Records the message being processed. `kvforge.coordinator.journal.poison_detector` implements it."""

    def begin(self, frames: Frames) -> None:
        """Begin processing a message.

        Raises:
            MessageRefused: Earlier processes died of this message.
        """

    def message_applied(self) -> None:
        """Record that the message was applied."""

    def turn_written(self) -> None:
        """Record that the turn is written."""


class Writer(Protocol):
    """A log of the events, written before any of their effects are visible: `kvforge.coordinator.journal.log.Journal`.

    Attributes:
        bytes: Bytes since the last snapshot.
        number: Number of the next record.
    """

    bytes: int
    number: int
    poison_detector: MessageInFlight | None

    def note(self, event: Event | Boot, now_us: int, frames: Frames = ()) -> None:
        """Add an event that enters the core at `now_us`, with the frames of its message."""

    def commit(self) -> None:
        """Write the events added since the last call."""


class EventSubscribers(Protocol):
    """Subscribers to the prefix indexes: implemented by `kvforge.coordinator.kv_events.stream.EventStream`."""

    def turned(self) -> bool:
        """Publish the changes of a turn that is written. Return whether any subscriber waits for more."""


class TurnLimits(Bounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the core, of one turn, and of admitted connections.

    Attributes:
        message_bytes_max: Bytes of one client message, all frames together; a larger one is skipped and refused.
        messages_per_turn_max: Messages received from clients, and from workers, in one turn.
        client_bytes_per_turn_max: Bytes received from clients in one turn; one message is always received.
        client_ms_per_turn_max: Time for messages of clients in one turn.
        clients_max: Client connections after their handshake; pools_max is the same for workers.
        client_backlog_max: Replies queued for one slow client.
    """

    message_bytes_max: Annotated[int, MESSAGE_BYTES] = 16 << 20
    messages_per_turn_max: Count = 1024
    client_bytes_per_turn_max: Count = 8 << 20
    client_ms_per_turn_max: Annotated[float, Range(1e-3, DURATION_S_MAX)] = 2.0
    clients_max: Count = 256
    client_backlog_max: Count = 1024


class WorkerStepRing:
    """The shared-memory channel for one worker's steps, from its registration on."""

    def __init__(self, ring: StepRing, pool: int, epoch: int) -> None:
        self._ring, self._pool, self._epoch = ring, pool, epoch
        self._number = 0

    def put(self, frames: Frames) -> None:
        """Write the next step."""
        self._number += 1
        self._ring.put(self._pool, self._epoch, self._number, frames)


class TurnLoop:
    """Runs turns. Time and entropy (64 bits, for seeds) come from the caller.

    Args:
        machine: The machine.
        tables: The shared tables.
        clients: The connections of clients.
        workers: The connections of workers.
        entropy: Returns 64 random bits.
        clock_us: Measures how long clients have been served in this turn.
        limits: The limits.
        processes: Ends worker processes that hang; None for no replacement.
        journal: Records events; None for no persistence.
        gate: Decides who may connect; None admits all.
        subscribers: Subscribers to the prefix indexes, if any.
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
        subscribers: EventSubscribers | None = None,
    ) -> None:
        self.machine, self.tables = machine, tables
        self.clients, self.workers = clients, workers
        self._entropy, self._clock_us, self._limits, self._processes = entropy, clock_us, limits, processes
        self._journal, self._unwritten = journal, False
        self._gate, self._subscribers = gate or Gate(), subscribers
        self._outbox = Outbox(clients, limits.client_backlog_max)
        self._watching: set[int] = set()  # workers that also look for steps in shared memory
        self._step_rings: dict[int, WorkerStepRing] = {}
        self._effects: deque[Effect] = deque()  # pending effects, in order
        self._now_us = 0  # time of this turn
        self._cut_off_until_us = 0  # worker connections that end by then may have ended during a suspension
        self._core_due_us: int | None = None
        self._client_decoder = codec.Decoder(CLIENT_MESSAGES)
        self._worker_decoder = codec.Decoder(WORKER_MESSAGES, body_bytes_max=RESULT_BYTES_MAX)

    def begin_drain(self, now_us: int, deadline_us: int) -> None:
        """Begin a drain. The next turn, which is due immediately, acts on it."""
        self._now_us = now_us
        self._apply(BeginDrain(deadline_us))

    def restarted(self, now_us: int) -> None:
        """Continue after a recovery, with no peer connected. The next turn is due immediately."""
        self._now_us = now_us
        self._apply(Restarted())

    def stood_still(self, now_us: int) -> None:
        """Note that this process was suspended: workers that disconnected meanwhile may return with their pools.

        Args:
            now_us: When it continued, in microseconds of the steady clock.
        """
        self._cut_off_until_us = now_us + CUT_OFF_US

    def turn(self, now_us: int) -> int:
        """Run one turn, without waiting.

        Args:
            now_us: Time in microseconds, monotonic.

        Returns:
            The absolute time when the next turn must run without further input.
        """
        self._now_us = now_us
        if self._outbox.backlogs:
            self._outbox.retry()
        self._receive_from_workers()
        self._receive_from_clients()
        clients, workers = self.clients.note_ends(), self.workers.note_ends()
        if clients or workers:
            self._end_disconnected(clients, workers)
        if self._core_due_us is not None and self._core_due_us <= now_us:
            self._apply(Turn())
        if self._unwritten:
            self._write()
        if self._journal is not None and self._journal.poison_detector is not None:
            self._journal.poison_detector.turn_written()
        publish_rows(self.machine, self.tables)
        self._carry_out()
        self.clients.flush()
        due_us = now_us + BEAT_US
        if self._subscribers is not None and self._subscribers.turned():
            due_us = now_us + RETRY_US
        if self._core_due_us is not None:
            due_us = min(due_us, self._core_due_us)
        for peers in (self.clients, self.workers):
            if (again_us := peers.again_us) is not None:
                due_us = min(due_us, again_us)
        if self._processes is not None and (act_us := self._processes.act(now_us)) is not None:
            due_us = min(due_us, act_us)
        return min(due_us, now_us + RETRY_US) if self._outbox.backlogs else due_us

    def _apply(self, event: Event, frames: Frames = ()) -> None:
        """Apply an event after Boot, and journal it. The most recent answer of the core decides when a turn is due.

        `frames` are those of the event's message.
        """
        effects, self._core_due_us = self.machine.apply(event, self._now_us)
        self._effects += effects
        if self._journal is None:
            return
        if isinstance(event, FromClient):
            if isinstance(event.message, FindPrefix):
                return  # a pure query, which comes with every request
            if (refused := _refused(event, effects)) is not None:
                event, frames = refused, ()  # its frames, of any size, changed nothing
        self._journal.note(event, self._now_us, frames)
        self._unwritten = True

    def _write(self) -> None:
        """Write the journal. No effect of an event may be visible before."""
        if self._journal is not None and self._unwritten:
            self._journal.commit()
            self._unwritten = False

    # -------------------------------------------------------------------------------------------------------- effects

    def _carry_out(self) -> None:
        """Carry out pending effects, and those that follow from them, and publish the gauges.

        Workers get theirs before clients: a device that waits for its next step waits for no token to be sent.
        """
        if self._unwritten:
            self._write()
        if first := [effect for effect in self._effects if isinstance(effect, ToWorker)]:
            self._effects = deque(effect for effect in self._effects if not isinstance(effect, ToWorker))
            for each in first:
                self._to_worker(each.worker, each.message)
        # A device that waits for its next step does not wait for monitors either.
        kept = (0, 0) if self._journal is None else (self._journal.bytes, self._journal.number)
        publish_gauges(self.machine, self.tables, self._now_us, kept)
        while self._effects:
            if self._unwritten:
                self._write()  # a slow client causes further events while effects are carried out
            effect = self._effects.popleft()
            if isinstance(effect, ToClient):
                self._to_client(effect.client, effect.message)
            elif isinstance(effect, ToWorker):
                self._to_worker(effect.worker, effect.message)
            elif isinstance(effect, Log):
                log_event(log, effect.level, effect.text, effect.event, effect.fields)
            elif isinstance(effect, DropWorker):
                log.debug("worker connection %d dropped: %s", effect.worker, effect.reason)  # the core logs the reason
                self.workers.forget(effect.worker)
                self._left(effect.worker)
            elif self._processes is not None:
                self._processes.replace(effect.worker, effect.pid, effect.reason, self._now_us)
        if self._unwritten:
            self._write()  # a snapshot may follow, which must not be followed by events that it contains

    def _to_client(self, client: int, message: Message) -> None:
        frames = codec.encode(message)
        if isinstance(message, Stream):
            # While replies are queued for a client, no stream overtakes them.
            if client in self._outbox.backlogs or self.clients.send(client, frames) is Sent.FULL:
                self._apply(ClientFull(client, message))
        elif not self._outbox.reply(client, frames):
            log.warning("client connection %d dropped: slow consumer, %s", client, self._outbox.kept(client))
            self.clients.forget(client)
            self._end_client(client, goodbye=False)

    def _to_worker(self, worker: int, message: Message) -> None:
        frames = codec.encode(message)
        if isinstance(message, Step) and (ring := self._step_rings.get(worker)) is not None:
            ring.put(frames)
        elif isinstance(message, PoolRegistered) and worker in self._watching:
            self._step_rings[worker] = WorkerStepRing(self.tables.step_ring, message.pool, message.epoch)
        if self.workers.send(worker, frames) is Sent.FULL:
            log.warning("worker connection %d dropped: slow consumer", worker)
            self.workers.forget(worker)
            self._end_worker(worker, goodbye=False)

    # ----------------------------------------------------------------------------------------------------------- ends

    def _note_ends_early(self) -> None:
        """Look for ends of connections in the middle of a turn."""
        self._end_disconnected(self.clients.note_ends(turn_over=False), self.workers.note_ends(turn_over=False))

    def _end_disconnected(self, clients: bool, workers: bool) -> None:
        """End the connections that are gone, of either side that has any."""
        for number in self.clients.pop_disconnected() if clients else ():
            self._end_client(number, goodbye=False)
        for number in self.workers.pop_disconnected() if workers else ():
            self._end_worker(number, goodbye=False)

    def _end_client(self, number: int, *, goodbye: bool) -> None:
        self._outbox.forget(number)
        self._apply(ClientGone(number, goodbye))

    def _end_worker(self, number: int, *, goodbye: bool) -> None:
        away = not goodbye and self._now_us < self._cut_off_until_us
        away = away and (self._processes is None or not self._processes.ended(number))
        self._left(number)
        self._apply(WorkerGone(number, goodbye, away))

    def _left(self, worker: int) -> None:
        self._watching.discard(worker)
        self._step_rings.pop(worker, None)
        if self._processes is not None:
            self._processes.leave(worker)

    # -------------------------------------------------------------------------------------------------------- clients

    def _receive_from_clients(self) -> None:
        """Receive messages of clients within the turn's budget, so that workers do not wait.

        The socket hands out one message of each connection in turn.
        """
        limits, bytes_left = self._limits, self._limits.client_bytes_per_turn_max
        until_us = None
        for _ in range(limits.messages_per_turn_max):
            received = self.clients.receive()
            if received is None:
                return
            if until_us is None:
                until_us = self._clock_us() + limits.client_ms_per_turn_max * 1000
            self._from_client(*received)
            bytes_left -= sum(map(len, received[2]))
            if bytes_left <= 0 or self._clock_us() >= until_us:
                return

    def _from_client(self, identity: bytes, descriptor: int, frames: Frames) -> None:
        message: Message | None = None
        poison_detector = self._journal.poison_detector if self._journal is not None else None
        try:
            check_size(frames, self._limits.message_bytes_max)
            if poison_detector is not None:
                poison_detector.begin(frames)
            message = self._client_decoder.decode(frames)
            number = self.clients.number(identity)
            if isinstance(message, Hello):
                self._connect_client(identity, descriptor, number, message)
            elif isinstance(message, Goodbye) and number is None:
                return  # the end of its connection was noticed first
            elif number is None:
                raise ProtocolError("the first message of a client must be hello")
            elif isinstance(message, Goodbye):
                self.clients.forget(number)
                self._end_client(number, goodbye=True)
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
        if poison_detector is not None:
            poison_detector.message_applied()

    def _connect_client(self, identity: bytes, descriptor: int, number: int | None, message: Hello) -> None:
        version = negotiate(message.version_min, message.version_max)
        if message.boot not in ("", self.machine.boot):
            raise StateLost(message.boot, self.machine.boot)
        access = self._gate.client(self.clients.peer_identity(identity))
        # Sessions are scoped to the access entry: another entry with the same name has another session.
        session = f"{access.name}{OWNER_END}{message.session}" if message.session else ""
        if session and number is None:
            self._note_ends_early()  # an end that was detected before must not hit the new connection
        before = self.machine.sessions.number(session) if session else None
        if number is None:
            if before is not None:
                self._drop_replaced(before)
            if len(self.clients) >= self._limits.clients_max:
                raise CapacityExceeded("clients", 1, 0, "raise limits.clients_max")
            number = self.clients.admit(identity, descriptor, before)
            if number is None:
                if before is not None and before not in self.machine.sessions.away:
                    # Its connection made place for this one, which has ended meanwhile: the session has none now.
                    self._end_client(before, goodbye=False)
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
            log_event(log, "debug", "client is back", "client_back", {"client": number})

    def _drop_replaced(self, number: int) -> None:
        """Drop a connection that another one replaces, with the messages queued for it."""
        self.clients.forget(number)
        self._outbox.forget(number)
        self._effects = deque(e for e in self._effects if not (isinstance(e, ToClient) and e.client == number))

    # -------------------------------------------------------------------------------------------------------- workers

    def _receive_from_workers(self) -> None:
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
                self._connect_worker(identity, descriptor, message, frames)
            elif isinstance(message, StepResult) and number is None:
                return  # meant for the previous process: after its handshake, the worker is asked again
            elif number is None:
                raise ProtocolError("the first message of a worker must be worker_hello")
            elif number not in self.machine.workers:
                return  # the core has given the worker up: queued messages must not register it again
            elif isinstance(message, Goodbye):
                self.workers.forget(number)
                self._end_worker(number, goodbye=True)
            else:
                if isinstance(message, WorkerReady) and message.watches:
                    self._watching.add(number)
                self._apply(FromWorker(number, message), frames)
        except KvforgeError as error:
            refused = _refusal("worker", self.workers.number(identity), error, message)
            self.workers.send_to(identity, codec.encode(refused))
            if isinstance(error, ProtocolError | NotAllowed):
                self.workers.fault(identity)

    def _connect_worker(self, identity: bytes, descriptor: int, message: WorkerHello, frames: Frames) -> None:
        version = negotiate(message.version_min, message.version_max)
        self._gate.check_worker(self.workers.peer_identity(identity), message.token)
        self._note_ends_early()  # a successor of the same name may arrive before the end is noticed
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
            state_blocks_max=limits.bounds.state_blocks_max,
            window_ahead=limits.schedule.window_ahead,
            drafts_max=limits.schedule.drafts_max,
            draft_rows_max=limits.draft_rows_max,
        )


def _refused(event: FromClient, effects: list[Effect]) -> CommandRefused | None:
    """Return the event that stands for a refused command; None if it was accepted."""
    if not effects:
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
    """Return the highest protocol version that both sides support.

    Raises:
        VersionMismatch: There is none; the error has both ranges.
    """
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
