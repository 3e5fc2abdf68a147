"""One turn over sockets that apply back-pressure: what waits, what is lost, what is dropped; the core is scripted."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.events import (
    Applied,
    BeginDrain,
    Boot,
    ClientCame,
    ClientFull,
    ClientGone,
    DropWorker,
    Effect,
    Event,
    FromClient,
    FromWorker,
    Log,
    ReplaceWorker,
    ToClient,
    ToWorker,
    Turn,
    WorkerGone,
)
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.workers.reports import Worker
from kvforge.coordinator.journal.entries import Reader
from kvforge.coordinator.journal.log import Journal, segments
from kvforge.coordinator.server import PROGRESS_US, GracefulStop
from kvforge.coordinator.transport.outbox import BACKLOG_BYTES_MAX, PeerIdentity, Sent
from kvforge.coordinator.turn import BEAT_US, RETRY_US, TurnLimits, TurnLoop
from kvforge.protocol import codec
from kvforge.protocol.layout import Geometry
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    WORKER_REPLIES,
    Done,
    FindPrefix,
    GetStats,
    Goodbye,
    Hello,
    Message,
    Refused,
    SequenceTokens,
    Stop,
    Stream,
    Submit,
    Welcome,
    WorkerHello,
    WorkerLoading,
    WorkerWelcome,
)
from kvforge.protocol.tables import TablesReader, TablesWriter
from tests.coordinator.journal.files import records_of
from tests.coordinator.net import Net, fill, short_lived_net, until
from tools.simulation.limits import make_limits

Frames = Sequence[bytes | memoryview]
BACKLOG = 4


class Scripted(Machine):
    """A core that records its events and returns the test's prepared effects."""

    def __init__(self) -> None:
        limits = make_limits(sequences_max=4, blocks_max=64, blocks_per_sequence_max=8)
        super().__init__(Boot("b" * 32, bytes(32), limits), 0)
        self.events: list[Event] = []
        self.answers: dict[type, list[Effect]] = {}
        self.due: int | None = None
        self.turned_at: list[int] = []
        self.took_us = 0  # time that all events so far took
        self.takes_us = 0  # time that one command takes

    def clock(self) -> int:
        return self.took_us

    def apply(self, event: Event, now_us: int) -> Applied:
        if isinstance(event, Turn):
            self.turned_at.append(now_us)
        elif not isinstance(event, BeginDrain):
            self.events.append(event)
        if isinstance(event, Turn | ClientFull):
            return Applied(self.answers.pop(type(event), []), self.due)
        if isinstance(event, ClientGone | WorkerGone | BeginDrain):
            return Applied(self.answers.pop(type(event), []), now_us)
        if isinstance(event, FromClient):
            self.took_us += self.takes_us
            return Applied([ToClient(event.client, Done(rid=getattr(event.message, "rid", 0)))], now_us)
        return super().apply(event, now_us)


class Wire:
    """An in-memory transport that identifies connections by their numbers.

    A connection that replaces another one takes over its number. The test sets `full` and `gone`.
    """

    def __init__(self, replies: Any) -> None:
        self.sent: dict[int, list[Message]] = {}
        self.inbox: deque[tuple[bytes, int, list[bytes]]] = deque()
        self.full: set[int] = set()
        self.gone: set[int] = set()
        self.known: set[int] = set()
        self.dead: set[int] = set()  # connections that ended before their handshake was read
        self.numbers: dict[int, int] = {}
        self._ended: list[int] = []
        self._decoder = codec.Decoder(replies)

    def __len__(self) -> int:
        return len(self.known)

    def arrive(self, number: int, message: Message) -> None:
        self.inbox.append((b"%d" % number, 100 + number, [bytes(frame) for frame in codec.encode(message)]))

    def receive(self) -> tuple[bytes, int, list[bytes]] | None:
        return self.inbox.popleft() if self.inbox else None

    def number(self, identity: bytes) -> int | None:
        number = self.numbers.get(int(identity), int(identity))
        return number if number in self.known else None

    def peer_identity(self, _identity: bytes) -> PeerIdentity:
        return PeerIdentity()

    def admit(self, identity: bytes, _descriptor: int, number: int | None = None) -> int | None:
        if int(identity) in self.dead:
            return None
        found = self.numbers[int(identity)] = int(identity) if number is None else number
        self.known.add(found)
        return found

    def note_ends(self, turn_over: bool = True) -> bool:
        return bool(self._ended)

    def end(self, number: int) -> None:
        """End a connection from the peer's side."""
        self.forget(number)
        self._ended.append(number)

    @property
    def again_us(self) -> None:
        return None

    def pop_disconnected(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def forget(self, number: int) -> None:
        self.known.discard(number)

    def send(self, number: int, frames: Frames) -> Sent:
        if number in self.known and number in self.gone:
            self.end(number)
        return self.send_to(b"%d" % number, frames) if number in self.known else Sent.GONE

    def send_to(self, identity: bytes, frames: Frames) -> Sent:
        if int(identity) in self.full:
            return Sent.FULL
        message = self._decoder.decode([bytes(frame) for frame in frames])
        self.sent.setdefault(int(identity), []).append(message)
        return Sent.DONE

    def flush(self) -> None:
        pass

    def fault(self, identity: bytes) -> None:
        pass

    def take(self, number: int) -> list[Message]:
        """Return the messages sent to a connection since the last call."""
        return self.sent.pop(number, [])


class Noted:
    """A stand-in for the process replacer that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.due: int | None = None
        self.dead: set[int] = set()

    def ended(self, worker: int) -> bool:
        return worker in self.dead

    def watch(self, worker: int, pid: int, descriptor: int) -> None:
        self.calls.append(("watch", worker, pid, descriptor))

    def leave(self, worker: int) -> None:
        self.calls.append(("leave", worker))

    def replace(self, worker: int, pid: int, reason: str, now_us: int) -> None:
        self.calls.append(("replace", worker, pid, reason, now_us))

    def act(self, now_us: int) -> int | None:
        self.calls.append(("act", now_us))
        return self.due


class Bench:
    """A turn loop over two wires, with clients 1 and 2 and worker 3 connected.

    Attributes:
        wait_us: time from the last turn until the next one is due.
    """

    def __init__(self, folder: Path) -> None:
        self.machine, self.processes = Scripted(), Noted()
        self.clients, self.workers = Wire(CLIENT_REPLIES), Wire(WORKER_REPLIES)
        geometry = Geometry(slots=4, blocks=64, blocks_per_sequence=8, block_size=16)
        self.tables = TablesWriter(folder / "tables", geometry, self.machine.boot)
        limits = TurnLimits(
            client_backlog_max=BACKLOG,
            messages_per_turn_max=20,
            client_bytes_per_turn_max=10_000,
            client_ms_per_turn_max=2,
        )
        sockets = (self.clients, self.workers)
        self.loop = TurnLoop(self.machine, self.tables, *sockets, lambda: 7, self.machine.clock, limits, self.processes)
        self.now_us = self.wait_us = 0
        self.clients.known |= {1, 2}
        self.workers.known.add(3)

    def turn(self, *effects: Effect) -> None:
        """Run a turn in which the core returns these effects."""
        self.now_us += 1_000
        self.loop.begin_drain(self.now_us, 0)  # any event makes a turn due
        self.machine.answers[Turn] = list(effects)
        self.wait_us = self.loop.turn(self.now_us) - self.now_us


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.tables.close()


@pytest.fixture
def net() -> Iterator[Net]:
    with short_lived_net() as made:
        yield made


def done(*rids: int, client: int = 1) -> list[Effect]:
    return [ToClient(client, Done(rid=rid)) for rid in rids]


def rows(*request_ids: int) -> Stream:
    count = len(request_ids)
    return Stream(
        request_ids=np.array(request_ids, np.int64),
        offsets=np.zeros(count, np.int32),
        tokens=np.zeros(count, np.int32),
        logprobs=np.zeros(count, np.float32),
    )


def rids(messages: list[Message]) -> list[int]:
    return [getattr(message, "rid", -1) for message in messages]


# ----------------------------------------------------------------------------------------------------- slow consumers


def test_replies_to_a_full_client_wait_in_order_and_nobody_else_does(bench: Bench) -> None:
    bench.clients.full.add(1)
    bench.turn(*done(1, 2), *done(9, client=2))
    assert rids(bench.clients.take(2)) == [9]
    assert bench.wait_us == RETRY_US
    bench.clients.full.clear()
    bench.turn(*done(3))
    assert rids(bench.clients.take(1)) == [1, 2, 3]
    assert bench.wait_us == BEAT_US
    assert bench.machine.events == []


def test_what_the_last_effect_of_a_turn_made_the_core_be_told_is_written_with_it(bench: Bench, tmp_path: Path) -> None:
    """A snapshot may begin between two turns: the journal after it must not repeat events that the snapshot covers."""
    journal = bench.loop._journal = Journal(tmp_path, 1)
    bench.clients.full.add(1)
    bench.turn(ToClient(1, rows(4)))
    assert [type(event) for event in bench.machine.events] == [ClientFull]
    journal.rotate()
    journal.close()
    first, second = segments(tmp_path).values()
    records = records_of(first)
    assert [type(entry.event) for found in records for entry in Reader().entries(found.payload)][-1] is ClientFull
    assert records_of(second) == []


def test_what_only_asks_is_answered_and_not_written(bench: Bench, tmp_path: Path) -> None:
    """A gateway queries all its replicas about every prompt."""
    journal = bench.loop._journal = Journal(tmp_path, 1)
    bench.clients.known.add(1)
    for rid in (7, 8):
        bench.clients.arrive(1, FindPrefix(rid=rid, prompt=np.arange(1000, dtype=np.int32)))
    bench.turn()
    assert rids(bench.clients.take(1)) == [7, 8]
    bench.clients.arrive(1, GetStats(rid=9))
    bench.turn()
    journal.close()
    (segment,) = segments(tmp_path).values()
    records = records_of(segment)
    events = [entry.event for found in records for entry in Reader().entries(found.payload)]
    assert [type(event.message) for event in events if isinstance(event, FromClient)] == [GetStats]


def test_a_reply_waits_behind_what_waits_even_if_it_could_be_sent(bench: Bench) -> None:
    """The client may begin to read between the retry at the start of a turn and the end of the turn."""
    bench.clients.full.add(1)
    bench.turn(*done(1))
    real = bench.clients.receive
    bench.clients.receive = lambda: (bench.clients.full.clear(), real())[1]  # type: ignore[func-returns-value, method-assign]
    bench.turn(*done(2), ToClient(1, rows(5)))
    assert bench.clients.take(1) == []
    assert [type(event) for event in bench.machine.events] == [ClientFull]
    bench.turn()
    assert rids(bench.clients.take(1)) == [1, 2]


def test_a_client_that_goes_on_reading_in_the_middle_of_its_backlog_keeps_the_order(bench: Bench) -> None:
    bench.clients.full.add(1)
    bench.turn(*done(1, 2, 3))
    send = bench.clients.send

    def one(number: int, frames: Frames) -> Sent:
        outcome = send(number, frames)
        bench.clients.full.add(1)
        return outcome

    bench.clients.full.clear()
    bench.clients.send = one  # type: ignore[method-assign]
    bench.turn(*done(4))
    assert rids(bench.clients.take(1)) == [1]
    bench.clients.send = send  # type: ignore[method-assign]
    bench.clients.full.clear()
    bench.turn()
    assert rids(bench.clients.take(1)) == [2, 3, 4]


def test_an_end_that_was_found_as_something_was_sent_is_not_that_of_who_comes_in_its_place(bench: Bench) -> None:
    """Otherwise a client that reconnects this early would count as gone, and its requests would end with its lease."""
    bench.clients.arrive(4, Hello(rid=1, session="mine"))
    bench.turn()
    bench.clients.gone.add(4)
    bench.turn(*done(9, client=4))
    bench.clients.gone.clear()
    bench.clients.arrive(5, Hello(rid=2, session="mine"))
    bench.turn()
    assert bench.clients.number(b"5") == 4
    told = [type(event) for event in bench.machine.events if isinstance(event, ClientCame | ClientGone)]
    assert told == [ClientCame, ClientGone, ClientCame]
    assert bench.machine.sessions.away == {}


def test_a_session_whose_next_connection_ended_before_it_was_admitted_is_away(bench: Bench) -> None:
    """Its former connection had made place; otherwise the session would count as connected forever."""
    bench.clients.arrive(4, Hello(rid=1, session="mine"))
    bench.turn()
    bench.clients.dead = {5, 6}
    bench.clients.arrive(5, Hello(rid=2, session="mine"))
    bench.turn()
    assert bench.clients.known == {1, 2}
    assert bench.machine.events[-1] == ClientGone(4, goodbye=False)
    gone = bench.machine.events.count(ClientGone(4, goodbye=False))
    Machine.apply(bench.machine, ClientGone(4, goodbye=False), 0)
    bench.clients.arrive(6, Hello(rid=3, session="mine"))
    bench.turn()
    assert bench.machine.events.count(ClientGone(4, goodbye=False)) == gone == 1, "an absent client is not away twice"


def test_what_waits_for_a_client_that_does_not_read_is_bounded_in_bytes(bench: Bench) -> None:
    """A single reply may exceed the bound, because its request was accepted; nothing more is kept beside it."""
    tokens = np.zeros(BACKLOG_BYTES_MAX // 4, np.int32)
    bench.clients.full.add(1)
    bench.turn(ToClient(1, SequenceTokens(rid=1, tokens=tokens)))
    assert 1 in bench.clients.known
    bench.turn(*done(2))
    assert 1 not in bench.clients.known
    assert ClientGone(1, False) in bench.machine.events
    bench.clients.full.add(2)
    half = SequenceTokens(rid=1, tokens=tokens[: len(tokens) // 2 - 100])
    bench.turn(ToClient(2, half), ToClient(2, half))
    bench.clients.full.clear()
    bench.turn()
    bench.clients.full.add(2)
    bench.turn(ToClient(2, half), ToClient(2, half), *done(3, client=2))
    assert 2 in bench.clients.known
    bench.turn(ToClient(2, half))
    assert 2 not in bench.clients.known


def test_a_stream_that_is_not_taken_is_the_cores_and_what_it_says_then_is_done(bench: Bench) -> None:
    bench.clients.full.add(1)
    lost = rows(4, 5)
    bench.machine.answers[ClientFull] = [ToWorker(3, Stop(reason="marker"))]
    bench.turn(ToClient(1, lost), ToClient(2, rows(6)))
    assert bench.machine.events == [ClientFull(1, lost)]
    assert [message.request_ids.tolist() for message in bench.clients.take(2) if isinstance(message, Stream)] == [[6]]
    assert [type(message) for message in bench.workers.take(3)] == [Stop]
    assert bench.wait_us == BEAT_US  # the core decides when to retry
    bench.clients.full.clear()
    bench.turn(ToClient(1, rows(7)))
    assert [message.request_ids.tolist() for message in bench.clients.take(1) if isinstance(message, Stream)] == [[7]]


def test_what_waits_is_a_copy(bench: Bench) -> None:
    bench.clients.full.add(1)
    tokens = np.arange(4, dtype=np.int32)
    bench.turn(ToClient(1, SequenceTokens(rid=1, tokens=tokens)))
    tokens[:] = -1
    bench.clients.full.clear()
    bench.turn()
    [message] = bench.clients.take(1)
    assert isinstance(message, SequenceTokens)
    assert message.tokens.tolist() == [0, 1, 2, 3]


def test_a_client_for_which_too_much_waits_is_dropped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.clients.full.add(1)
    bench.turn(*done(*range(BACKLOG)))
    assert bench.machine.events == []
    bench.machine.answers[ClientGone] = done(8, client=2)
    with caplog.at_level(logging.WARNING):
        bench.turn(*done(98, 99))
    assert bench.machine.events == [ClientGone(1, goodbye=False)]
    assert [record.getMessage() for record in caplog.records] == [
        f"client connection 1 dropped: slow consumer, {BACKLOG} replies of 52 bytes are queued"
    ]
    assert bench.clients.known == {2}
    assert rids(bench.clients.take(2)) == [8]
    assert bench.wait_us == 0  # the released data may unblock others
    bench.clients.full.clear()
    bench.turn()
    assert bench.clients.take(1) == []
    assert bench.wait_us == BEAT_US


def test_a_refusal_and_a_welcome_wait_like_any_reply(bench: Bench) -> None:
    bench.clients.full.add(1)
    bench.turn(*done(1))
    bench.clients.arrive(1, Stop(reason="not a client message"))
    bench.clients.arrive(1, Hello(rid=2))
    bench.turn(*done(3))
    bench.clients.full.clear()
    bench.turn()
    assert [type(message) for message in bench.clients.take(1)] == [Done, Refused, Welcome, Done]


def test_who_names_another_boot_is_told_that_its_state_is_lost_and_may_come_without_one(bench: Bench) -> None:
    boot = bench.machine.boot
    for rid, named in enumerate((boot, "", "a" * 32, ""), 1):
        bench.clients.arrive(8, Hello(rid=rid, boot=named))
    bench.turn()
    first, second, lost, third = bench.clients.take(8)
    assert [type(message) for message in (first, second, third)] == [Welcome] * 3
    assert isinstance(lost, Refused)
    assert (lost.rid, lost.error.code, lost.error.fields) == (3, "state_lost", {"boot": boot})
    bench.clients.arrive(9, Hello(rid=1, boot="a" * 32))
    bench.turn()
    assert [type(message) for message in bench.clients.take(9)] == [Refused]
    assert 9 not in bench.clients.known


def test_over_real_sockets_one_that_does_not_read_stalls_nobody(net: Net, bench: Bench) -> None:
    slow, slow_number = net.connect()
    reader, reader_number = net.connect()
    loop = TurnLoop(bench.machine, bench.tables, net.peers, bench.workers, lambda: 7, bench.machine.clock, TurnLimits())

    def full(number: int, *request_ids: int) -> bool:
        """Return whether a turn with a stream for this client cannot deliver it."""
        bench.machine.events.clear()
        bench.machine.answers[Turn] = [ToClient(number, rows(*request_ids))]
        loop.begin_drain(0, 0)
        loop.turn(0)
        return bool(bench.machine.events)

    count = fill(lambda i: not full(slow_number, *[i] * 1000))
    bench.machine.answers[Turn] = done(77, client=slow_number)
    loop.begin_drain(0, 0)
    loop.turn(0)
    for i in range(100):
        until(lambda i=i: not full(reader_number, i))  # type: ignore[misc]
        assert decoded(net.read(reader)) == i
        assert full(slow_number, count)
    assert [decoded(net.read(slow)) for _ in range(count)] == list(range(count))
    until(lambda: not full(slow_number, count))
    message = codec.Decoder(CLIENT_REPLIES).decode(net.read(slow))
    assert isinstance(message, Done)  # the queued reply precedes the later stream
    assert (message.rid, decoded(net.read(slow))) == (77, count)


def decoded(frames: Frames) -> int:
    """The request of the rows that a client has read."""
    message = codec.Decoder(CLIENT_REPLIES).decode(frames)
    assert isinstance(message, Stream)
    return int(message.request_ids[0])


# ------------------------------------------------------------------------------------------------------- busy clients


def answered(bench: Bench) -> int:
    """The number of commands that the last turn answered."""
    return len(bench.clients.take(1))


def test_a_turn_takes_so_many_messages_of_clients(bench: Bench) -> None:
    for rid in range(50):
        bench.clients.arrive(1, GetStats(rid=rid))
    taken = []
    for _ in range(3):
        bench.turn()
        taken.append(answered(bench))
    assert taken == [20, 20, 10]


def test_a_turn_takes_so_much_time_for_clients_and_goes_on_with_one_of_them_at_least(bench: Bench) -> None:
    for rid in range(9):
        bench.clients.arrive(1, GetStats(rid=rid))
    taken = []
    for bench.machine.takes_us in (700, 2_000, 30_000, 1):
        bench.turn()
        taken.append(answered(bench))
    assert taken == [3, 1, 1, 4]


def test_a_turn_takes_so_many_bytes_of_clients_and_goes_on_with_one_message_at_least(bench: Bench) -> None:
    small, large = np.zeros(1_000, np.int32), np.zeros(100_000, np.int32)
    for tokens in (small, small, small, small, large, large, small):
        bench.clients.arrive(1, Submit(rid=1, max_tokens=1, prompt=tokens))
    taken = []
    for _ in range(4):
        bench.turn()
        taken.append(answered(bench))
    assert taken == [3, 2, 1, 1]


def test_the_results_of_workers_come_before_whatever_clients_have_waiting(bench: Bench) -> None:
    bench.machine.takes_us = 5_000
    bench.machine.workers[3] = Worker(3, "w3", 4321)
    for rid in range(4):
        bench.clients.arrive(1, GetStats(rid=rid))
    bench.turn()
    bench.workers.arrive(3, WorkerLoading(phase="reading", progress=0.5))
    bench.turn()
    assert [type(event) for event in bench.machine.events] == [FromClient, FromWorker, FromClient]


def test_a_message_that_is_refused_counts_too(bench: Bench) -> None:
    for _ in range(30):
        bench.clients.arrive(1, Stop(reason="not a client message"))
    bench.turn()
    assert answered(bench) == 20


# --------------------------------------------------------------------------------------------------------------- ends


def test_a_goodbye_is_told_from_an_end(bench: Bench) -> None:
    bench.clients.full |= {1, 2}
    bench.turn(*done(1), *done(2, client=2))
    bench.clients.arrive(1, Goodbye())
    bench.clients.end(2)
    bench.turn()
    assert bench.machine.events == [ClientGone(1, goodbye=True), ClientGone(2, goodbye=False)]
    assert bench.wait_us == BEAT_US  # nothing is kept for them


def test_a_client_that_is_gone_when_it_is_sent_to_is_reported_in_the_next_turn(bench: Bench) -> None:
    bench.clients.gone.add(1)
    bench.turn(*done(1))
    bench.turn()
    assert bench.machine.events == [ClientGone(1, goodbye=False)]


def test_a_client_that_goes_while_replies_wait_is_forgotten(bench: Bench) -> None:
    bench.clients.full.add(1)
    bench.turn(*done(1))
    bench.clients.gone.add(1)
    bench.turn()
    assert bench.machine.events == [ClientGone(1, goodbye=False)]
    assert bench.wait_us == BEAT_US


def test_a_client_that_was_never_admitted_is_refused_and_not_kept(bench: Bench) -> None:
    bench.clients.arrive(5, GetStats(rid=4))
    bench.clients.arrive(6, GetStats(rid=4))
    bench.clients.full.add(6)
    bench.turn()
    [refused] = bench.clients.take(5)
    assert isinstance(refused, Refused)
    assert (refused.rid, refused.error.code) == (4, "protocol_error")
    assert bench.wait_us == BEAT_US


# ------------------------------------------------------------------------------------------------------------ workers


def test_a_worker_that_takes_no_step_is_gone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.workers.full.add(3)
    bench.turn(ToWorker(3, Stop(reason="first")), ToWorker(3, Stop(reason="second")))
    assert bench.machine.events == [WorkerGone(3, goodbye=False)]
    assert bench.workers.known == set()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "worker connection 3 dropped: slow consumer"
    ]
    assert ("leave", 3) in bench.processes.calls
    assert bench.wait_us == 0  # its requests can run elsewhere now


def test_a_worker_is_watched_from_its_hello_to_its_end(bench: Bench) -> None:
    bench.workers.arrive(4, WorkerHello(rid=1, name="w4", pid=4321))
    bench.workers.arrive(5, WorkerHello(rid=1, name="w4", pid=4322))  # refused: the name is taken
    bench.turn()
    [welcome] = bench.workers.take(4)
    assert isinstance(welcome, WorkerWelcome)
    limits = bench.machine.limits
    assert welcome.drafts_max == limits.schedule.drafts_max
    assert welcome.draft_rows_max == limits.draft_rows_max
    assert [type(message) for message in bench.workers.take(5)] == [Refused]
    assert [call for call in bench.processes.calls if call[0] == "watch"] == [("watch", 4, 4321, 104)]
    bench.processes.calls.clear()
    bench.workers.end(3)
    bench.workers.arrive(4, Goodbye())
    bench.turn()
    assert [event for event in bench.machine.events if isinstance(event, WorkerGone)] == [
        WorkerGone(4, goodbye=True),
        WorkerGone(3, goodbye=False),
    ]
    assert bench.processes.calls == [("leave", 4), ("leave", 3), ("act", bench.now_us)]


@pytest.mark.parametrize("count", range(1, 10))
def test_a_burst_of_hellos_leaves_no_worker_behind(bench: Bench, count: int) -> None:
    """The second handshake is a protocol violation; later messages of the turn must not reopen the connection."""
    for _ in range(count):
        bench.workers.arrive(4, WorkerHello(rid=1, name="ghost", pid=4321))
    bench.turn()
    assert len(bench.machine.workers) == (count == 1)
    if count == 1:
        bench.workers.end(4)
        bench.machine.answers.pop(WorkerGone, None)
    assert (4 in bench.workers.known) is False
    bench.turn()


def test_a_hung_worker_is_forgotten_and_its_process_replaced(bench: Bench) -> None:
    bench.turn(DropWorker(3, "no step"), ReplaceWorker(3, 4321, "no step"), Log("info", "marker"))
    now_us = bench.now_us
    assert bench.workers.known == set()
    assert bench.processes.calls == [("leave", 3), ("replace", 3, 4321, "no step", now_us), ("act", now_us)]


def test_it_wakes_at_the_earliest_of_what_waits(bench: Bench) -> None:
    bench.turn()
    assert bench.wait_us == BEAT_US
    bench.machine.due = 900_000
    bench.turn()
    assert bench.now_us + bench.wait_us == 900_000
    bench.processes.due = 100_000
    bench.turn()
    assert bench.now_us + bench.wait_us == 100_000
    bench.clients.full.add(1)
    bench.turn(*done(1))
    assert bench.wait_us == RETRY_US


def test_a_time_that_was_told_stays_what_it_is(bench: Bench) -> None:
    """A due time that is recomputed from the present never arrives."""
    bench.machine.due = 900_000
    bench.turn()
    for now_us in (300_000, 600_000, 899_999):
        assert bench.loop.turn(now_us) == 900_000
    assert bench.machine.turned_at == [1_000]
    bench.machine.due = None
    assert bench.loop.turn(900_000) == 900_000 + BEAT_US
    assert bench.machine.turned_at == [1_000, 900_000]


def test_the_gauges_are_never_old_though_the_core_has_nothing_to_do(bench: Bench) -> None:
    """Publishing the gauges is not a turn of the core and must not affect one."""
    bench.turn()
    reader = TablesReader(bench.tables.path, bench.machine.boot)
    for now_us in (bench.now_us + BEAT_US, bench.now_us + 2 * BEAT_US):
        assert bench.loop.turn(now_us) == now_us + BEAT_US
        assert reader.gauges()["uptime_us"] == now_us
    assert bench.machine.turned_at == [1_000]


def test_what_a_drain_by_signal_brings_is_sent_by_the_next_turn(bench: Bench) -> None:
    bench.machine.answers[BeginDrain] = done(4)
    bench.loop.begin_drain(5_000, 9_000)
    assert bench.clients.take(1) == []
    bench.loop.turn(6_000)
    assert rids(bench.clients.take(1)) == [4]
    assert bench.machine.turned_at == [6_000]
    bench.loop.turn(7_000)
    assert bench.clients.take(1) == []


# ------------------------------------------------------------------------------------------------------------ shutdown


def test_an_end_waits_for_what_runs_and_for_the_turn_that_hands_the_rest_back() -> None:
    ending = GracefulStop(now_us=5_000_000, drain_us=10_000_000)
    assert ending.deadline_us == 15_000_000
    assert not ending.over(turned_us=5_000_000, live=2)
    assert not ending.over(turned_us=14_999_999, live=2)
    assert ending.over(turned_us=15_000_000, live=2)
    assert ending.over(turned_us=5_000_000, live=0)
    at_once = GracefulStop(now_us=5_000_000, drain_us=0)
    assert not at_once.over(turned_us=4_999_999, live=1)  # the turn before the signal
    assert at_once.over(turned_us=5_000_000, live=1)


def test_an_end_says_now_and_then_how_far_it_is() -> None:
    ending = GracefulStop(now_us=0, drain_us=12_000_000)
    assert ending.progress(0, 3) == "draining: 3 requests left, 12.0 s until the rest is handed back"
    assert ending.due_us == PROGRESS_US
    assert ending.progress(PROGRESS_US - 1, 3) is None
    assert ending.progress(PROGRESS_US, 1) == "draining: 1 request left, 9.0 s until the rest is handed back"
    assert ending.progress(20_000_000, 0) is None
    assert ending.progress(20_000_000, 1) == "draining: 1 request left, 0.0 s until the rest is handed back"
    assert ending.due_us == ending.deadline_us
