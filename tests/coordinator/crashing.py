"""A coordinator killed at any instant: the real machine, turn loop, journal and recovery over in-memory wires.

The coordinator dies before a turn is written, in the middle of the write, or between any two of the messages that the
turn sends. Its workers keep their KV cache and reconnect, or have died too. Its clients reconnect with their session
and repeat every unanswered command. Each token that a client receives is compared with the correct continuation of its
prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvforge.coordinator.core.events import Boot
from kvforge.coordinator.core.limits import Limits
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.journal import snapshot
from kvforge.coordinator.journal.identity import Origin
from kvforge.coordinator.journal.log import Journal, remove_before, segments
from kvforge.coordinator.journal.recovery import cut_torn, recover
from kvforge.coordinator.publish import publish
from kvforge.coordinator.transport.outbox import Frames, PeerIdentity, Sent
from kvforge.coordinator.turn import TurnLimits, TurnLoop
from kvforge.protocol import codec
from kvforge.protocol.layout import Geometry
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    WORKER_REPLIES,
    Accepted,
    Attach,
    Attached,
    Cancel,
    CreateSequence,
    Ended,
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
from kvforge.protocol.tables import TablesReader, TablesWriter
from tests.coordinator.driver import GREEDY, FakeWorker, continuation, fingerprint, model_info
from tools.simulation.limits import make_limits

BLOCKS, BLOCK_SIZE = 24, 4
REATTACH_US = 1_000_000
CRASHES = ("before", "torn", "send", "send", "send")


class Crash(Exception):
    """The coordinator process died."""


class Wire:
    """The connections of one side; implements kvforge.coordinator.transport.outbox.Transport.

    After `sends_left` further messages the process dies.
    """

    def __init__(self, world: World, decoder: codec.Decoder) -> None:
        self._world, self._decoder = world, decoder
        self._inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self.peers: dict[bytes, Client | Worker] = {}
        self._numbers: dict[bytes, int] = {}
        self._ended: list[bytes] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def connect(self, peer: Client | Worker) -> bytes:
        self._made += 1
        identity = b"%d" % self._made
        self.peers[identity] = peer
        return identity

    def arrive(self, identity: bytes, message: Message) -> None:
        self._inbox.append((identity, [bytes(frame) for frame in codec.encode(message)]))

    def cut(self, identity: bytes) -> None:
        if self.peers.pop(identity, None) is not None:
            self._ended.append(identity)

    def all_gone(self) -> None:
        """Drop all connections: the process at this end died."""
        self._inbox.clear()
        self.peers.clear()
        self._numbers.clear()
        self._ended.clear()

    # the turn loop's side

    @property
    def again_us(self) -> None:
        return None

    def receive(self) -> tuple[bytes, int, list[bytes]] | None:
        while self._inbox:
            identity, frames = self._inbox.popleft()
            if identity in self.peers:
                return identity, 0, frames
        return None

    def number(self, identity: bytes) -> int | None:
        return self._numbers.get(identity)

    def peer_identity(self, _identity: bytes) -> PeerIdentity:
        return PeerIdentity()

    def admit(self, identity: bytes, _descriptor: int, number: int | None = None) -> int | None:
        self._numbers[identity] = self._world.next_number() if number is None else number
        return self._numbers[identity]

    def note_ends(self, turn_over: bool = True) -> bool:
        return bool(self._ended)

    def pop_disconnected(self) -> list[int]:
        gone = [self._numbers.pop(identity) for identity in self._ended if identity in self._numbers]
        self._ended.clear()
        return gone

    def forget(self, number: int) -> None:
        for identity, own in list(self._numbers.items()):
            if own == number:
                del self._numbers[identity]
                peer = self.peers.pop(identity)
                peer.cut()

    def send(self, number: int, frames: Frames) -> Sent:
        found = [identity for identity, own in self._numbers.items() if own == number]
        return self.send_to(found[0], frames) if found else Sent.GONE

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        self._world.leaves()
        peer = self.peers.get(identity)
        if peer is None:
            return Sent.GONE
        peer.inbox.append(self._decoder.decode([bytes(frame) for frame in frames]))
        return Sent.DONE

    def fault(self, identity: bytes) -> None:
        raise AssertionError("a peer sent an invalid message")

    def flush(self) -> None:
        pass


class CrashingJournal(Journal):
    """A journal that may die with its process while it writes a turn."""

    world: World

    def commit(self) -> None:
        how = self.world.dies if self._noted else ""
        if how == "before":
            raise Crash
        before = self._end
        super().commit()
        if how == "torn":
            left = self.world.random.randrange(before, self._end)
            path = max(segments(self.folder).items())[1]
            with path.open("r+b") as file:
                file.truncate(left)
            raise Crash

    def _acknowledge(self) -> None:
        """Acknowledge, unless the process dies in the middle of the record."""
        if not hasattr(self, "world") or self.world.dies != "torn":
            super()._acknowledge()


class Worker(FakeWorker):
    """A worker that reads block tables where the coordinator publishes them, and keeps its results."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.machine, 0, name, BLOCKS, model_info())
        self.world = world
        self.inbox: deque[Any] = deque()
        self.steps_due: deque[Step] = deque()
        self.answered: deque[StepResult] = deque(maxlen=16)
        self.boot, self.done, self.epoch = "", 0, 0
        self.identity: bytes | None = None
        self.registered = False

    def connect(self) -> None:
        self.inbox.clear()
        self.registered = False
        self.identity = self.world.workers_wire.connect(self)
        hello = WorkerHello(rid=1, name=self.name, pid=1, boot=self.boot, epoch=self.epoch)
        self.world.workers_wire.arrive(self.identity, hello)

    def cut(self) -> None:
        self.identity = None

    def die(self) -> None:
        """Die; the successor has none of the KV."""
        if self.identity is not None:
            self.world.workers_wire.cut(self.identity)
            self.identity = None
        self.boot, self.epoch = "", 0
        self.steps_due.clear()

    def send(self, message: Message) -> None:
        if self.identity is not None:
            self.world.workers_wire.arrive(self.identity, message)

    def hear(self) -> None:
        """Process all received messages."""
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, WorkerWelcome):
                self.reader = TablesReader(Path(message.tables_path), message.boot)
                if message.epoch == 0:
                    self.kv, self.last_token, self.begins, self.done = {}, {}, {}, 0
                    self.steps_due.clear()
                    self.answered.clear()
                    self.boot = message.boot
                    ready = {"bytes_per_block": 64, "kv_dtype": "float32", "device": "cpu"}
                    self.send(WorkerReady(rid=2, model=self.model, blocks=self.blocks, **ready))  # type: ignore[arg-type]
                else:
                    assert (message.epoch, message.boot) == (self.epoch, self.boot)
            elif isinstance(message, PoolRegistered):
                self.epoch, self.registered = message.epoch, True
                for answer in self.answered:
                    if answer.step_id > message.done:
                        self.send(answer)
            elif isinstance(message, Step):
                self._take(message)
            else:
                raise AssertionError(f"{self.name} was refused: {message}")

    def _take(self, step: Step) -> None:
        if step.step_id > self.done:
            self.done = step.step_id
            self.steps_due.append(step)

    def work(self) -> None:
        """Execute the oldest step, connected or not."""
        if self.steps_due:
            self.answered.append(self.execute(self.steps_due.popleft()))
            if self.registered:
                self.send(self.answered[-1])

    def _feed(self, slot: int, start: int, tokens: list[int]) -> int:
        width = -(-(start + len(tokens)) // BLOCK_SIZE)
        table = self.reader.rows(np.array([slot], np.int32), width)[0][0].tolist()
        # The row of an ended request may read any context: its result is discarded.
        context = self.kv.get((table[(start - 1) // BLOCK_SIZE], (start - 1) % BLOCK_SIZE), 0) if start else 1
        for position, token in enumerate(tokens, start):
            context = fingerprint(context, token)
            self.kv[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = context
        return context


class Client:
    """A client that reconnects with its session.

    Attributes:
        received: tokens received, by request.
        ends: the end of each request.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.session = world, name * 8
        self.inbox: deque[Any] = deque()
        self.identity: bytes | None = None
        self.pending: dict[int, Message] = {}
        self.prompts: dict[int, tuple[tuple[int, ...], int]] = {}
        self.received: dict[int, list[int]] = {}
        self.ends: dict[int, Ended] = {}
        self.cancelled: set[int] = set()
        self.sequences: list[int] = []
        self._resuming: dict[int, int] = {}
        self._rid = 0
        self.boot, self.greeted = "", False

    def connect(self) -> None:
        self.inbox.clear()
        self.identity = self.world.clients_wire.connect(self)
        self._resuming.clear()
        self.greeted = False
        self._rid += 1
        self._send(Hello(rid=self._rid, boot=self.boot, session=self.session))

    def cut(self) -> None:
        self.identity = None

    def _send(self, message: Message) -> None:
        if self.identity is not None:
            self.world.clients_wire.arrive(self.identity, message)

    def ask(self, cls: type[Message], **fields: Any) -> None:
        """Send a command, and repeat it until it is answered."""
        self._rid += 1
        message = cls(rid=self._rid, **fields)
        self.pending[self._rid] = message
        if self.greeted:
            self._send(message)

    def hear(self) -> None:
        """Process all received messages."""
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Stream):
                self._stream(message)
            elif isinstance(message, Welcome):
                assert message.resumed or not self.boot, "the session was lost before its lease expired"
                self.boot, self.greeted = message.boot, True
                for command in self.pending.values():
                    self._send(command)
                for request in self.received:
                    self._attach(request)
            else:
                self._answered(self.pending.pop(message.rid, None), message)

    def _attach(self, request: int) -> None:
        if request not in self.ends:
            self._rid += 1
            self._resuming[request] = self._rid
            self._send(Attach(rid=self._rid, request_id=request, offset=len(self.received[request]), resume=True))

    def _answered(self, command: Any, message: Any) -> None:
        if isinstance(message, Accepted):
            assert isinstance(command, Submit)
            self.world.accepted(self, message.request_id, message.repeated)
            self.prompts[message.request_id] = (tuple(command.prompt.tolist()), command.max_tokens)
            self.received.setdefault(message.request_id, [])
        elif isinstance(message, Attached):
            assert self._resuming.pop(message.request_id) == message.rid
        elif isinstance(command, CreateSequence) and not isinstance(message, Refused):
            assert message.sequence_id not in self.sequences, "one command created two sequences"
            self.sequences.append(message.sequence_id)
        elif isinstance(message, Refused):
            assert message.error.code in ("already_finished", "capacity_exceeded"), message

    def _stream(self, message: Stream) -> None:
        for request in message.paused:
            self._attach(request)
        rows = zip(message.request_ids.tolist(), message.offsets.tolist(), message.tokens.tolist(), strict=True)
        for request, offset, token in rows:
            if request in self._resuming:
                continue
            tokens = self.received[request]
            assert offset == len(tokens), f"request {request}: expected token {len(tokens)}, got {offset}"
            tokens.append(token)
            prompt, count = self.prompts[request]
            right = continuation(prompt, count)[: len(tokens)]
            assert tokens == right, f"request {request} of {prompt} has {tokens}, expected {right}"
        for ended in message.ended:
            if ended.request_id not in self._resuming:
                assert ended.request_id not in self.ends, "a request ended twice"
                assert ended.generated_tokens == len(self.received[ended.request_id])
                self.ends[ended.request_id] = ended


class World:
    """Processes, a clock, and the owner of each request."""

    def __init__(self, seed: int, folder: Path, limits: Limits | None = None) -> None:
        self.random, self.folder = Random(seed), folder
        self.dies, self.sends_left = "", -1
        self.now_us, self.crashes, self.lost_records = 1_000, 0, 0
        self._number = 0
        self.owners: dict[int, Client] = {}
        self.limits = limits or make_limits(
            sequences_max=8, blocks_max=64, blocks_per_sequence_max=8, block_size=BLOCK_SIZE, step_tokens_max=16,
            step_rows_max=4, queue_max=100, reattach_us=REATTACH_US, answers_kept_max=64,
        )  # fmt: skip
        self.clients_wire = Wire(self, codec.Decoder(CLIENT_REPLIES))
        self.workers_wire = Wire(self, codec.Decoder(WORKER_REPLIES))
        boot = Boot("b" * 32, b"key", self.limits, 100)
        self.journal = self._journal(1)
        self.journal.note(boot, self.now_us)
        self.journal.commit()
        self.machine = Machine(boot, self.now_us)
        self._begin()
        self.workers = [Worker(self, f"w{i}") for i in range(2)]
        self.clients = [Client(self, f"c{i}") for i in range(2)]
        for peer in (*self.workers, *self.clients):
            peer.connect()

    def _journal(self, number: int, origin: Origin | None = None) -> CrashingJournal:
        journal = CrashingJournal(self.folder, number, origin=origin)
        journal.world = self
        return journal

    def _begin(self) -> None:
        bounds = self.limits.bounds
        geometry = Geometry(
            slots=bounds.sequences_max,
            blocks=bounds.blocks_max,
            blocks_per_sequence=bounds.blocks_per_sequence_max,
            block_size=BLOCK_SIZE,
            pools=bounds.pools_max,
        )
        publish_all = partial(publish, self.machine, now_us=self.now_us)
        self.tables = TablesWriter(self.folder / "tables", geometry, self.machine.boot, publish_all)
        sides = (self.clients_wire, self.workers_wire)
        self.loop = TurnLoop(
            self.machine, self.tables, *sides, lambda: 7, lambda: 0, TurnLimits(), journal=self.journal
        )

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def leaves(self) -> None:
        """Count down the messages until the process dies."""
        if self.sends_left == 0:
            raise Crash
        self.sends_left -= self.sends_left > 0

    def accepted(self, client: Client, request: int, repeated: bool) -> None:
        """Check that the accepted request belongs to this command of this client."""
        assert self.owners.get(request, client) is client, "two clients have one request"
        assert request not in self.owners or repeated, "two commands have one request"
        self.owners[request] = client

    # ------------------------------------------------------------------------------------------------------------ time

    def turn(self, dies: str = "") -> None:
        """Run one turn; `dies` is how the process dies in it, or ""."""
        self.now_us += self.random.choice((10, 200, 3_000))
        self.dies, self.sends_left = dies, self.random.randrange(6) if dies == "send" else -1
        try:
            self.loop.turn(self.now_us)
        except Crash:
            self.recover()
        self.dies, self.sends_left = "", -1
        self.machine.check_invariants()

    def cut_journal(self) -> None:
        """Write a snapshot as the child process would."""
        number = self.journal.rotate()
        head = snapshot.Head.of(self.journal, self.now_us, self._number)
        snapshot.write(self.folder / snapshot.STATE.format(number), self.machine, head)
        remove_before(self.folder, number, durable=False)

    def recover(self) -> None:
        """Replace the killed process by one that recovers from the journal."""
        self.crashes += 1
        self.dies, self.sends_left = "", -1
        self.journal.close()
        self.tables.close()
        self.clients_wire.all_gone()
        self.workers_wire.all_gone()
        for worker in self.workers:
            worker.cut()
        for client in self.clients:
            client.cut()
        found = recover(self.folder)
        assert found is not None
        cut_torn(found)
        self.machine, self._number = found.machine, max(self._number, found.numbers)
        self.machine.check_invariants()
        self.journal = self._journal(found.number, found.origin)
        self._begin()
        self.now_us += 1_000
        self.loop.restarted(self.now_us)

    def peers_act(self) -> None:
        """Let the peers receive, work, send commands, and reconnect."""
        peers: Sequence[Worker | Client] = [*self.workers, *self.clients]
        for peer in self.random.sample(peers, len(peers)):
            if peer.identity is None and self.random.random() < 0.5:
                peer.connect()
            peer.hear()
        for worker in self.workers:
            if self.random.random() < 0.7:
                worker.work()

    def client_asks(self) -> None:
        """Send a random new command."""
        client = self.random.choice(self.clients)
        chance = self.random.random()
        if chance < 0.75:
            prompt = [self.random.randrange(6) for _ in range(self.random.randint(1, 10))]
            count = self.random.randint(1, 32 - len(prompt))
            client.ask(Submit, prompt=np.array(prompt, np.int32), max_tokens=min(count, 14), sampling=GREEDY)
        elif chance < 0.85 and client.received:
            request = self.random.choice(sorted(client.received))
            client.cancelled.add(request)
            client.ask(Cancel, request_id=request)
        else:
            client.ask(CreateSequence, idle_ttl_ms=1, tokens=np.arange(3, dtype=np.int32))

    def settle(self, turns_max: int = 3_000) -> None:
        """Run without new commands and crashes until all work has ended."""
        for _ in range(turns_max):
            self.peers_act()
            self.turn()
            waiting = any(client.pending or client.received.keys() - client.ends.keys() for client in self.clients)
            if not waiting and not self.machine.requests.live:
                return
        raise AssertionError(f"still busy after {turns_max} turns")

    def close(self) -> None:
        self.journal.close()
        self.tables.close()


def live(seed: int, folder: Path, turns: int = 150, crash_share: float = 0.12) -> World:
    """Run a world with many crashes to its end and check the final state."""
    world = World(seed, folder)
    random = world.random
    try:
        for _ in range(turns):
            if random.random() < 0.4:
                world.client_asks()
            world.peers_act()
            if random.random() < 0.02:
                random.choice(world.workers).die()
            if random.random() < 0.05 and not world.journal._noted:
                world.cut_journal()
            world.turn(random.choice(CRASHES) if random.random() < crash_share else "")
        world.settle()
        for client in world.clients:
            for request, tokens in client.received.items():
                count = client.prompts[request][1]
                whole = len(tokens) == count and client.ends[request].reason == "length"
                assert whole or (request in client.cancelled and client.ends[request].reason == "cancelled")
        known = set(world.machine.requests.finished)
        assert known <= {request for client in world.clients for request in client.received}, (
            "a request without an owner"
        )
        for group in world.machine.cache.groups.values():
            held = world.machine.cache.blocks.refcount[group.pool.base : group.pool.base + group.pool.count]
            assert not held.any(), "leaked blocks"
    finally:
        world.close()
    return world
