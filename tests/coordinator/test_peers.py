"""The coordinator's sockets over real ZeroMQ: who takes a message, who does not for now, who is gone."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coordinator.outbox import Sent
from protocol import transport
from tests.coordinator.net import QUEUE, Net, short_lived_net, until


@pytest.fixture
def net() -> Iterator[Net]:
    with short_lived_net() as made:
        yield made


@pytest.fixture
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """For sockets that are made from now on."""
    monkeypatch.setattr(transport, "HEARTBEAT_INTERVAL_MS", 100)
    monkeypatch.setattr(transport, "HEARTBEAT_TIMEOUT_MS", 1000)


def test_one_that_does_not_read_is_full_and_nobody_else_notices(net: Net) -> None:
    _slow, slow_number = net.connect()
    reader, reader_number = net.connect()
    assert net.fill(slow_number) >= QUEUE
    for i in range(200):
        # ZeroMQ hears with a delay that a queue has room again, and these are short.
        until(lambda i=i: net.peers.send(reader_number, [b"%d" % i]) is Sent.DONE)  # type: ignore[misc]
        assert reader.recv() == b"%d" % i
        assert net.peers.send(slow_number, [b"more"]) is Sent.FULL
    net.peers.note_ends()
    assert net.peers.take_gone() == []
    assert len(net.peers) == 2


def test_one_that_reads_again_takes_again_and_has_lost_nothing(net: Net) -> None:
    slow, number = net.connect()
    count = net.fill(number)
    assert [slow.recv_multipart()[0] for _ in range(count)] == [b"%d" % i for i in range(count)]
    until(lambda: net.peers.send(number, [b"again"]) is Sent.DONE)
    assert slow.recv() == b"again"


def test_one_that_is_gone_is_told_apart_and_reported_once(net: Net) -> None:
    dealer, number = net.connect()
    dealer.close()
    until(lambda: net.peers.send(number, [b"x"]) is Sent.GONE)
    net.peers.note_ends()
    assert net.peers.take_gone() == [number]
    assert net.peers.take_gone() == []
    assert len(net.peers) == 0
    assert net.peers.send(number, [b"x"]) is Sent.GONE
    assert net.peers.send_to(b"nobody", [b"x"]) is Sent.GONE


def test_a_reader_that_stalls_keeps_its_connection_beyond_the_heartbeats(short_heartbeats: None, net: Net) -> None:
    """ZeroMQ takes in nothing, heartbeats neither, for a peer whose queue is full."""
    slow, number = net.connect()
    select.select([], [], [], 0.5)  # the first heartbeats pass
    count = net.fill(number)
    select.select([], [], [], 3.0)  # long enough that an unanswered heartbeat would have ended it
    net.peers.note_ends()
    assert net.peers.take_gone() == []
    assert [slow.recv_multipart()[0] for _ in range(count)] == [b"%d" % i for i in range(count)]


SILENT = """
import sys, time, zmq
from protocol.transport import dealer
socket = dealer(zmq.Context())
socket.connect(sys.argv[1])
socket.send(b"hello")
time.sleep(120)
"""


def test_a_peer_whose_process_stands_still_is_noticed(short_heartbeats: None, net: Net) -> None:
    gone: list[int] = []

    def noticed() -> bool:
        net.peers.note_ends()
        gone.extend(net.peers.take_gone())
        return bool(gone)

    with subprocess.Popen([sys.executable, "-c", SILENT, net.endpoint]) as process:
        try:
            number = net.admit()
            process.send_signal(signal.SIGSTOP)
            until(noticed)
        finally:
            process.kill()
    assert gone == [number]
