"""The coordinator's sockets over real ZeroMQ: peers that read, slow consumers, and disconnected peers."""

from __future__ import annotations

import itertools
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
import zmq

from kvforge.coordinator.transport import connections, zmtp
from kvforge.coordinator.transport.connection import UNREAD_PONGS_BYTES, ConnectionLimits
from kvforge.coordinator.transport.fairness import MESSAGES_MAX, PACE_US, TROUBLED_S
from kvforge.coordinator.transport.listener import Endpoint
from kvforge.coordinator.transport.outbox import Sent
from kvforge.coordinator.transport.router_socket import PeerLimits, RouterSocket
from kvforge.protocol import transport
from tests.coordinator.net import QUEUE, Net, set_clock, short_lived_net, until
from tests.hostile.raw import RawPeer, part


@pytest.fixture
def net() -> Iterator[Net]:
    with short_lived_net() as made:
        yield made


@pytest.fixture
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten heartbeats for sockets created from now on."""
    monkeypatch.setattr(transport, "HEARTBEAT_INTERVAL_MS", 100)
    monkeypatch.setattr(transport, "HEARTBEAT_TIMEOUT_MS", 1000)


def test_one_that_does_not_read_is_full_and_nobody_else_notices(net: Net) -> None:
    _slow, slow_number = net.connect()
    reader, reader_number = net.connect()
    assert net.fill(slow_number) >= QUEUE
    for i in range(200):
        # ZeroMQ learns with a delay that a queue has room again, and these queues are short.
        until(lambda i=i: net.peers.send(reader_number, [b"%d" % i]) is Sent.DONE)  # type: ignore[misc]
        assert net.read(reader)[0] == b"%d" % i
        assert net.peers.send(slow_number, [b"more"]) is Sent.FULL
    net.peers.note_ends()
    assert net.peers.pop_disconnected() == []
    assert len(net.peers) == 2


def test_one_that_reads_again_takes_again_and_has_lost_nothing(net: Net) -> None:
    slow, number = net.connect()
    count = net.fill(number)
    assert [net.read(slow)[0] for _ in range(count)] == [b"%d" % i for i in range(count)]
    until(lambda: net.peers.send(number, [b"again"]) is Sent.DONE)
    assert net.read(slow) == [b"again"]


def test_one_that_is_gone_is_told_apart_and_reported_once(net: Net) -> None:
    dealer, number = net.connect()
    dealer.close()
    until(lambda: net.peers.send(number, [b"x"]) is Sent.GONE)
    net.peers.note_ends()
    assert net.peers.pop_disconnected() == [number]
    assert net.peers.pop_disconnected() == []
    assert len(net.peers) == 0
    assert net.peers.send(number, [b"x"]) is Sent.GONE
    assert net.peers.send_to(b"nobody", [b"x"]) is Sent.GONE


@pytest.mark.parametrize("linger_s", [0.0, 60.0])
def test_one_that_is_told_why_and_disconnected_hears_it_though_it_reads_later(
    net: Net, monkeypatch: pytest.MonkeyPatch, linger_s: float
) -> None:
    """libzmq drops undelivered messages when its connection ends, so the coordinator's side closes later."""
    monkeypatch.setattr(connections, "LINGER_S", linger_s)
    dealer, number = net.connect()
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    assert net.peers.send(number, [b"why"]) is Sent.DONE
    net.peers.forget(number)
    assert len(net.peers) == 0
    heard = []

    def over() -> bool:
        net.peers.note_ends()
        if linger_s and dealer.poll(0):
            heard.append(dealer.recv())
        return bool(heard or monitor.poll(0))

    until(over)
    assert heard == ([b"why"] if linger_s else [])
    dealer.disable_monitor()
    monitor.close(0)


def test_a_reader_that_stalls_keeps_its_connection_beyond_the_heartbeats(short_heartbeats: None, net: Net) -> None:
    """libzmq reads nothing, heartbeats included, from a peer with a full queue."""
    slow, number = net.connect()
    select.select([], [], [], 0.5)  # the first heartbeats pass
    count = net.fill(number)
    select.select([], [], [], 3.0)  # long enough for an unanswered heartbeat to end the connection
    net.peers.note_ends()
    assert net.peers.pop_disconnected() == []
    assert [net.read(slow)[0] for _ in range(count)] == [b"%d" % i for i in range(count)]


SILENT = """
import sys, time, zmq
from kvforge.protocol.transport import dealer
socket = dealer(zmq.Context())
socket.connect(sys.argv[1])
socket.send(b"hello")
time.sleep(120)
"""


def test_a_peer_whose_process_stands_still_is_noticed(short_heartbeats: None, net: Net) -> None:
    gone: list[int] = []

    def noticed() -> bool:
        net.peers.note_ends()
        gone.extend(net.peers.pop_disconnected())
        return bool(gone)

    with subprocess.Popen([sys.executable, "-c", SILENT, net.endpoint]) as process:
        try:
            number = net.admit()
            process.send_signal(signal.SIGSTOP)
            until(noticed)
        finally:
            process.kill()
    assert gone == [number]
    assert net.silent == [number]  # its process is alive


class Hostile:
    """A socket with tight limits, and raw peers."""

    def __init__(self, folder: str, limits: PeerLimits) -> None:
        self.path = f"{folder}/s"
        numbers = itertools.count(1)
        self.peers = RouterSocket((Endpoint(f"ipc://{self.path}"),), lambda: next(numbers), limits)
        self._raw: list[RawPeer] = []

    def connect(self, hello: bool = True) -> RawPeer:
        """Connect a peer; with `hello`, it sends a message and is admitted."""
        peer = RawPeer(self.path)
        self._raw.append(peer)
        if hello:
            peer.send(part(b"hello", more=False))
            identity, descriptor, _ = self.receive()
            assert self.peers.admit(identity, descriptor) is not None
        return peer

    def receive(self) -> tuple[bytes, int, list[zmtp.Frame]]:
        """Wait for the next message and return it."""
        found: list[tuple[bytes, int, list[zmtp.Frame]]] = []

        def came() -> bool:
            if (message := self.peers.receive()) is not None:
                found.append(message)
            self.peers.note_ends()
            return bool(found)

        until(came)
        return found[0]

    def texts(self, count: int) -> list[bytes]:
        """Return the next messages of one part each."""
        return [bytes(self.receive()[2][0]) for _ in range(count)]

    def close(self) -> None:
        for peer in self._raw:
            peer.close()
        self.peers.close()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    limits = PeerLimits(
        admitted_max=8,
        pending_handshakes_max=3,
        partial_bytes_max=1 << 20,
        connection=ConnectionLimits(message_bytes_max=800_000, queue_messages_max=QUEUE, queue_bytes_max=1 << 20),
    )
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        made = Hostile(folder, limits)
        yield made
        made.close()


def ends(hostile: Hostile, peer: RawPeer) -> list[int]:
    """Wait until a peer's connection ends; return the peers reported as gone by then."""
    until(lambda: (hostile.peers.note_ends(), peer.ended())[1])  # type: ignore[func-returns-value]
    return hostile.peers.pop_disconnected()


def test_messages_are_taken_from_each_connection_in_turn(hostile: Hostile) -> None:
    busy, other = hostile.connect(), hostile.connect()
    busy.send(part(b"busy", more=False) * 1000)
    assert hostile.texts(3) == [b"busy"] * 3
    other.send(part(b"other", more=False))
    assert b"other" in hostile.texts(3)  # though hundreds of messages arrived before it


class StoppedTime:
    """A clock that advances by a microsecond per reading."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, hostile: Hostile) -> StoppedTime:
    """Long turns, with a millisecond per connection."""
    made = StoppedTime()
    set_clock(monkeypatch, made.monotonic_ns)
    hostile.peers._heartbeats.sent_ns = made.now_ns
    hostile.peers._receiver.turn_us = 1_000_000
    hostile.peers._queue.fair.share_ns = 1_000_000
    return made


def in_one_turn(hostile: Hostile, clock: StoppedTime) -> list[bytes]:
    """Return the messages of one turn; a costly one takes 20 ms."""
    heard = []
    while (received := hostile.peers.receive()) is not None:
        heard.append(bytes(received[2][0]))
        clock.now_ns += 20_000_000 if heard[-1] == b"costly" else 0
    hostile.peers.note_ends()
    return heard


def come(hostile: Hostile, count: int) -> None:
    """Wait until this many peers have sent something."""
    until(lambda: (hostile.peers.note_ends(), len(hostile.peers._queue.fair.ready) == count)[1])  # type: ignore[func-returns-value]


def test_who_floods_has_a_share_of_a_turn_and_ends_it(hostile: Hostile, clock: StoppedTime) -> None:
    busy, other = hostile.connect(), hostile.connect()
    busy.send(part(b"costly", more=False) * 50)
    come(hostile, 1)
    assert in_one_turn(hostile, clock) == [b"costly"], "one message per turn, although the turn has time left"
    assert hostile.peers.waiting, "the next turn is due at once"
    other.send(part(b"other", more=False))
    come(hostile, 1)
    assert in_one_turn(hostile, clock) == [b"other"]
    assert in_one_turn(hostile, clock) == [b"costly"], "without other peers it continues"


def test_who_is_alone_is_not_held_back(hostile: Hostile, clock: StoppedTime) -> None:
    busy, other = hostile.connect(), hostile.connect()
    busy.send(part(b"costly", more=False) * 30)
    come(hostile, 1)
    assert [len(in_one_turn(hostile, clock)) for _ in range(4)] == [1] * 4, "other peers may have messages"
    assert in_one_turn(hostile, clock) == [b"costly"] * 26, "no other peer had messages for a while"
    busy.send(part(b"costly", more=False) * 30)
    other.send(part(b"other", more=False))
    come(hostile, 2)
    assert in_one_turn(hostile, clock) in ([b"costly", b"other"], [b"other", b"costly"], [b"other"])


def test_what_a_costly_message_took_is_owed_in_later_turns(hostile: Hostile, clock: StoppedTime) -> None:
    costly, cheap = hostile.connect(), hostile.connect()
    costly.send(part(b"costly", more=False) * 20)
    cheap.send(part(b"cheap", more=False) * 5000)
    come(hostile, 2)
    heard = list(itertools.chain.from_iterable(in_one_turn(hostile, clock) for _ in range(4)))
    assert heard.count(b"costly") == 1
    assert heard.count(b"cheap") > 1000


def test_a_turn_takes_messages_for_a_while_and_at_least_one(hostile: Hostile) -> None:
    busy = hostile.connect()
    hostile.peers._receiver.turn_us = 0
    busy.send(part(b"busy", more=False) * 3)
    for _ in range(3):
        assert hostile.texts(1) == [b"busy"]
        assert hostile.peers.waiting or hostile.peers.receive() is None
        hostile.peers.note_ends()


def test_an_end_is_seen_before_another_is_admitted_also_beside_those_that_are_paced(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed worker's successor has the same name and would otherwise be refused."""
    monkeypatch.setattr("kvforge.coordinator.transport.fairness.TROUBLES_MAX", 0)
    killed, wrong, busy = hostile.connect(), hostile.connect(), hostile.connect()
    wrong.send(b"\x08\x00")
    assert ends(hostile, wrong) == [2]
    busy.send(part(b"hello of the next", more=False))
    assert hostile.texts(1) == [b"hello of the next"]
    busy.send(part(b"more", more=False))
    until(lambda: hostile.peers.waiting)
    assert hostile.peers.receive() is not None
    killed.close()
    hostile.peers.note_ends(turn_over=False)
    assert hostile.peers.pop_disconnected() == [1]


def test_admitting_another_gives_a_turn_no_more_time(hostile: Hostile) -> None:
    """Without this bound, a worker that repeats its handshake could make a turn endless."""
    hostile.connect().send(part(b"busy", more=False) * 3)
    stranger = hostile.connect(hello=False)
    hostile.peers._receiver.turn_us = 0
    assert hostile.texts(1) == [b"busy"]
    until(lambda: hostile.peers.waiting)
    assert hostile.peers.receive() is not None
    stranger.send(part(b"hello", more=False))
    hostile.peers.note_ends(turn_over=False)
    assert hostile.peers.receive() is None
    hostile.peers.note_ends()
    assert hostile.peers.receive() is not None


def test_those_without_standing_are_paced_while_bounds_are_broken_more_than_now_and_then(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still except where the test advances it."""
    monkeypatch.setattr("kvforge.coordinator.transport.fairness.TROUBLES_MAX", 1)
    honest, faulty, wrong = (hostile.connect() for _ in range(3))
    now_ns = time.monotonic_ns()
    set_clock(monkeypatch, lambda: now_ns)

    def heard(*, honest_sends: int = 0, faulty_sends: int = 0) -> list[bytes]:
        """Return the messages of one turn."""
        honest.send(part(b"honest", more=False) * honest_sends)
        faulty.send(part(b"faulty", more=False) * faulty_sends)
        hostile.peers.note_ends()
        return [bytes(message[2][0]) for message in iter(hostile.peers.receive, None)]

    def breaks_a_bound() -> None:
        peer = RawPeer(hostile.path, shake=False)
        peer.send(b"no ZMTP at all")
        until(lambda: (hostile.peers.note_ends(), peer.ended())[1])  # type: ignore[func-returns-value]
        peer.close()

    faulty.send(part(b"no message", more=False))
    hostile.peers.fault(hostile.receive()[0])
    assert sorted(heard(honest_sends=9, faulty_sends=9)) == 9 * [b"faulty"] + 9 * [b"honest"], (
        "one violation must not throttle"
    )
    breaks_a_bound()
    assert hostile.peers.again_us is None
    hostile.peers.note_ends()
    heard(faulty_sends=3 * MESSAGES_MAX)
    for _ in range(3):
        again_us = hostile.peers.again_us
        assert again_us is not None
        assert heard(honest_sends=9) == 9 * [b"honest"]
        assert not hostile.peers.waiting, "the throttled peer must not make a turn due"
        now_ns += PACE_US * 1000
        assert now_ns // 1000 <= again_us
        assert heard(honest_sends=9) == 9 * [b"honest"] + MESSAGES_MAX * [b"faulty"]
    heard(faulty_sends=9)
    now_ns += int(TROUBLED_S * 1e9)
    assert heard() == 9 * [b"faulty"]
    assert hostile.peers.again_us is None
    assert not wrong.ended()


def test_where_reading_takes_too_long_the_rest_is_read_in_the_next_look(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.coordinator.transport.poll_set.EVENTS_MAX", 1)
    monkeypatch.setattr("kvforge.coordinator.transport.receiver.READ_US", 0)
    peers = [hostile.connect() for _ in range(4)]
    for i, peer in enumerate(peers):
        peer.send(part(b"%d" % i, more=False) * 2)
    for rounds in range(1, 5):
        hostile.peers.note_ends()
        assert len(hostile.peers._queue.fair.ready) == rounds and hostile.peers._reader.due
    assert sorted(hostile.texts(8)) == sorted(2 * [b"0", b"1", b"2", b"3"])


def test_one_that_closes_before_it_is_greeted_leaves_nothing(hostile: Hostile) -> None:
    peer = RawPeer(hostile.path, shake=False)
    peer.close()
    until(lambda: (hostile.peers.note_ends(), hostile.peers._acceptor.accepted)[1] == 1)  # type: ignore[func-returns-value]
    until(lambda: (hostile.peers.note_ends(), not hostile.peers._table.by_identity)[1])  # type: ignore[func-returns-value]
    assert hostile.peers._table.pending == {} and hostile.peers._table.by_descriptor == {}


def test_a_small_frame_that_does_not_end_is_not_waited_for(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvforge.coordinator.transport.connection.MESSAGE_S", 0.1)
    slow = hostile.connect()
    slow.send(part(b"a part", more=False)[:-2])
    hostile.peers._heartbeats.interval_ns = 20_000_000
    assert ends(hostile, slow) == [1]


def test_heartbeats_of_one_that_reads_nothing_are_not_answered_without_end(hostile: Hostile) -> None:
    pinging = hostile.connect()
    connection = hostile.peers._table.by_number[1]
    while connection.queued_bytes < UNREAD_PONGS_BYTES:
        pinging.send(b"\x04\x17\x04PING\x00\x64" + b"c" * 16)
        hostile.peers.note_ends()
    for _ in range(100):
        pinging.send(b"\x04\x17\x04PING\x00\x64" + b"c" * 16)
        hostile.peers.note_ends()
    assert connection.queued_bytes < UNREAD_PONGS_BYTES + 64


def test_a_message_whose_parts_never_end_ends_its_connection_alone(hostile: Hostile) -> None:
    endless, other = hostile.connect(), hostile.connect()
    endless.send(part(b"x" * 200) * 3)
    assert ends(hostile, endless) == [1]
    other.send(part(b"other", more=False))
    assert hostile.texts(1) == [b"other"]


def test_what_all_unfinished_messages_hold_is_bounded_and_the_oldest_goes(hostile: Hostile) -> None:
    peers = [hostile.connect() for _ in range(3)]
    for i, peer in enumerate(peers[:2]):
        peer.send(part(bytes([i]) * 600_000)[:500_000])
        while peer.waits:
            hostile.peers.note_ends()
            peer.send(b"")
        hostile.peers.note_ends()
    assert hostile.peers.pop_disconnected() == []
    peers[2].send(part(b"x" * 600_000)[:100_000])
    assert ends(hostile, peers[0]) == [1]
    peers[1].send(bytes([1]) * 100_009 + part(b"", more=False))
    assert hostile.texts(1)[0][:600_000] == bytes([1]) * 600_000


def test_what_is_announced_and_not_sent_costs_nothing_and_more_than_the_bound_ends_it(hostile: Hostile) -> None:
    for _ in range(5):
        hostile.connect().send(b"\x02" + (800_000).to_bytes(8, "big"))
    greedy = hostile.connect()
    greedy.send(b"\x02" + (800_001).to_bytes(8, "big"))
    assert ends(hostile, greedy) == [6]


def test_strangers_are_few_and_the_oldest_makes_room(hostile: Hostile) -> None:
    known = hostile.connect()
    strangers = [hostile.connect(hello=False) for _ in range(10)]
    for peer in strangers[:7]:
        assert ends(hostile, peer) == []
    assert [peer.ended() for peer in [known, *strangers[7:]]] == [False] * 4
    strangers[9].send(part(b"hello", more=False))
    assert hostile.texts(1) == [b"hello"]


def test_one_that_asks_and_does_not_read_is_not_looked_at_until_it_does(hostile: Hostile) -> None:
    deaf, other = hostile.connect(), hostile.connect()
    while hostile.peers.send(1, [b"y" * 100_000]) is Sent.DONE:
        pass
    for _ in range(5):
        deaf.send(part(b"deaf", more=False))
        other.send(part(b"other", more=False))
        assert hostile.texts(1) == [b"other"]
    assert hostile.peers.receive() is None
    until(lambda: (deaf.ended(), hostile.peers.note_ends(), hostile.peers.waiting)[2])  # type: ignore[func-returns-value]
    assert hostile.texts(5) == [b"deaf"] * 5
    assert hostile.peers.send(1, [b"again"]) is Sent.DONE


def test_what_was_said_before_the_end_is_heard(hostile: Hostile) -> None:
    peer = hostile.connect()
    peer.send(part(b"last", more=False) * 3 + part(b"cut")[:-1])
    peer.close()
    assert hostile.texts(3) == [b"last"] * 3
    assert hostile.peers.receive() is None
    until(lambda: (hostile.peers.note_ends(), len(hostile.peers) == 0)[1])  # type: ignore[func-returns-value]
    assert hostile.peers.pop_disconnected() == [1]


def test_what_was_said_before_the_end_is_heard_also_where_we_write_first(hostile: Hostile) -> None:
    """As from a client that cancels its stream and disconnects."""
    peer = hostile.connect()
    peer.send(part(b"last", more=False) * 3)
    peer.close()
    assert hostile.peers.send(1, [b"a token"] * 4) is not Sent.FULL
    assert hostile.peers.send(1, [b"another"]) is Sent.GONE
    assert hostile.texts(3) == [b"last"] * 3
    assert hostile.peers.receive() is None
    until(lambda: (hostile.peers.note_ends(), len(hostile.peers) == 0)[1])  # type: ignore[func-returns-value]
    assert hostile.peers.pop_disconnected() == [1]
    assert hostile.peers.send(1, [b"another"]) is Sent.GONE
