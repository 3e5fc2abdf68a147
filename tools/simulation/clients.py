"""Simulated clients: they send the commands of the actions and record the replies."""

from __future__ import annotations

from typing import Any, Protocol

from kvforge.protocol import codec
from kvforge.protocol.messages import (
    Accepted,
    Attach,
    Attached,
    Cancel,
    CreateSequence,
    FinishAt,
    Forked,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Goodbye,
    Hello,
    ListRequests,
    Message,
    Refused,
    SequenceInfo,
    Stream,
    Submit,
    Welcome,
)
from tools.simulation.draws import Draws
from tools.simulation.network import Clock, Connection, SimulatedPeers
from tools.simulation.readings import Readings
from tools.simulation.workers import Violation

# commands that are safe to send twice
REPEATABLE = (Hello, Cancel, FinishAt, GetRequest, ListRequests, GetStats, GetHealth, GetSequence, GetTokens)


PROBE = "a probe"  # the label of an Attach with a possibly invalid offset
SEEK_US = 2_000  # delay before it looks for another coordinator
NOT_GREETED = "the first message of a client must be hello"


def first_offset(command: Any) -> int:
    """Return the offset of the first row of the first request of a Submit."""
    return 1 - command.prompt.size if command.sampling.prompt_logprobs is not None else 0


class Host(Protocol):
    """A client's view of the world."""

    clock: Clock

    def delivered(self) -> None:
        """Count a message that reached a peer."""

    def is_over(self, request_id: int) -> bool:
        """Return whether the core may have evicted an accepted request."""


class SimulatedClient:
    """One client process.

    A `lasting` client has a session. It reconnects when the coordinator has died, repeats unanswered commands, and
    attaches to the rest of its streams.

    Attributes:
        ids: label -> id.
    """

    def __init__(self, name: str, peers: SimulatedPeers, seed: str, host: Host, lasting: bool = False) -> None:
        self.name, self._peers, self._seed, self._host, self._lasting = name, peers, seed, host, lasting
        self.connection: Connection | None = None
        self.connections = 0
        self._session, self._greeted, self._seeks = "", False, 0
        self._commands: dict[int, tuple[Message, tuple[str, ...]]] = {}
        self.duplicate_share = 0.0
        self.ids: dict[str, int] = {}
        self.unanswered: set[int] = set()
        self.readings = Readings()
        self._owed: dict[int, tuple[tuple[str, ...], dict[str, Any]]] = {}
        self._rids = 0

    def connect(self, resume: bool) -> None:
        """Open a connection and send the handshake; with `resume`, the process keeps its session."""
        if self.connection is None:
            self.connections += 1
            self._random = Draws(f"{self._seed}/{self.name}/{self.connections}")
            self.connection = self._peers.connect(self._random, self._receive, int(self.name[1:]), self._lost)
            if self._lasting:
                self._begin(self.connection, resume)
                return
            self.unanswered = set()
            self.send(Hello)
            if resume:
                self._resume()
            else:
                self.readings = Readings()
                self._owed.clear()

    # -------------------------------------------------------------------------------------------------------- sessions

    def _begin(self, connection: Connection, resume: bool) -> None:
        """Send the handshake; commands sent before its answer wait."""
        if not (resume and self._session):
            self._session = f"{self.name}/{self.connections}"
            self.readings, self._commands, self.unanswered = Readings(), {}, set()
        connection.commands = self._commands
        self._greeted = False
        self._rids += 1
        self._hello = self._rids
        hello = Hello(rid=self._rids, session=self._session)
        self._commands[self._rids] = (hello, ())
        connection.send(codec.encode(hello))

    def _welcomed(self, message: Welcome) -> None:
        if self._greeted:
            return
        self._greeted = True
        for rid in sorted(self.unanswered):
            command, _ = self._commands[rid]
            keyed = isinstance(command, Submit) and bool(command.key)
            if isinstance(command, Attach) or not (message.resumed or keyed or rid > self._hello):
                self.unanswered.discard(rid)
            else:
                self._transmit(command)
        for request_id in self.readings.unfinished():
            self.attach(request_id, resume=message.resumed)

    def _lost(self) -> None:
        """Handle the death of the coordinator's process."""
        self.connection = None
        self._seeks += 1
        seeks = self._seeks
        delay_us = 1 + self._random.randrange(SEEK_US)
        self._host.clock.after(delay_us, lambda: self.connect(True) if seeks == self._seeks else None)

    def _resume(self) -> None:
        """Attach to the rest of each stream, and repeat unanswered commands that have a key."""
        for request_id in self.readings.unfinished():
            self.attach(request_id)
        owed, self._owed = self._owed, {}
        for labels, fields in owed.values():
            self.send(Submit, labels, **fields)

    def attach(self, request_id: int, resume: bool = False) -> None:
        """Attach to the missing tokens of a request; with `resume`, unless another client has taken it meanwhile."""
        self.send(Attach, request_id=request_id, offset=self.readings.at(request_id), resume=resume)

    def stall(self, room: int) -> None:
        """Stop reading; `room` more messages fit into the buffers."""
        if self.connection is not None:
            self.connection.stall(room)

    def read_on(self) -> None:
        """Resume reading."""
        if self.connection is not None:
            self.connection.read_on()

    def disconnect(self) -> None:
        """Drop the connection, as when the process dies."""
        self._seeks += 1
        if self.connection is not None:
            self.connection.cut()
            self.connection = None

    def goodbye(self) -> None:
        """Send a goodbye and disconnect."""
        if self.connection is not None:
            self.connection.send(codec.encode(Goodbye()))
            self.disconnect()
            self.readings, self._session = Readings(), ""

    def send(self, cls: type[Message], labels: tuple[str, ...] = (), **fields: Any) -> None:
        """Send a command; `labels` name what it creates."""
        if self.connection is None:
            return
        self._rids += 1
        message = cls(rid=self._rids, **fields)
        self.connection.commands[self._rids] = (message, labels)
        self.unanswered.add(self._rids)
        if isinstance(message, Submit) and message.key:
            self._owed[self._rids] = (labels, fields)
        if self._greeted or not self._lasting:
            self._transmit(message)

    def _transmit(self, message: Message) -> None:
        assert self.connection is not None
        frames = codec.encode(message)
        self.connection.send(frames)
        repeatable = isinstance(message, REPEATABLE) or (isinstance(message, Submit) and bool(message.key))
        if repeatable and self._random.random() < self.duplicate_share:
            self.connection.send(frames)

    def send_raw(self, frames: list[bytes]) -> None:
        """Send frames that are not a message."""
        if self.connection is not None:
            self.connection.send(frames)

    def _receive(self, message: Any) -> None:
        self._host.delivered()
        if self.connection is None:
            return
        if isinstance(message, Stream):
            for request_id in self.readings.stream(message):
                self.attach(request_id, resume=True)
            return
        found = self.connection.commands.get(message.rid)
        if found is None and message.rid:
            raise Violation(f"{self.name} got a reply without a command: {message}")
        self.unanswered.discard(message.rid)
        self._owed.pop(message.rid, None)
        if found is not None:
            self._answered(*found, message)

    def _answered(self, command: Any, labels: tuple[str, ...], message: Any) -> None:
        if isinstance(message, Welcome) and self._lasting:
            self._welcomed(message)
        elif isinstance(message, Accepted):
            for i in range(message.count):
                self.ids[labels[i]] = message.request_id + i
                self.readings.begin(message.request_id + i, 0 if i else first_offset(command))
        elif isinstance(message, Attached):
            self.readings.begin(message.request_id, message.offset)
        elif isinstance(message, Refused):
            self._refused(command, labels, message)
        elif isinstance(message, SequenceInfo) and isinstance(command, CreateSequence):
            self.ids[labels[0]] = message.sequence_id
        elif isinstance(message, Forked):
            self.ids.update(zip(labels, message.sequence_ids.tolist(), strict=True))

    def _refused(self, command: Any, labels: tuple[str, ...], message: Refused) -> None:
        if NOT_GREETED in message.error.message:  # the coordinator dropped us as a slow consumer
            self.disconnect()
            self.connect(resume=True)
        elif isinstance(command, Attach) and PROBE not in labels:
            if message.error.code not in ("request_not_found", "conflict" if command.resume else ""):
                raise Violation(f"{self.name} could not resume its stream: {command} -> {message.error}")
            if message.error.code == "request_not_found" and not self._host.is_over(command.request_id):
                raise Violation(f"{self.name} has request {command.request_id}, but the core lost it")
            self.readings.drop(command.request_id)
