"""A newcomer with a key is served within a few turns during a flood of connections without one.

The clock is manual, and the tests count turns.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Iterator
from functools import partial

import pytest

from kvforge.coordinator.transport import zmtp
from kvforge.coordinator.transport.curve import SealedReader
from kvforge.coordinator.transport.listener import Endpoint
from kvforge.coordinator.transport.router_socket import PeerLimits, RouterSocket
from tests.coordinator.curve_client import CLIENT, CurveClient, raw, server_keys
from tests.coordinator.net import set_clock, until

TURN_NS = 5_000_000  # 200 turns, and as many connections without a key, per second
AT_ONCE, KEPT = 300, 600
TURNS_MAX = 100  # half a second
GREETING = zmtp.greeting(b"CURVE", as_server=False)


class Flood:
    """The coordinator's TCP socket, connections without a key, and one newcomer with a key of the allow-list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
        self._now_ns, self._says = 1_000_000_000, says
        set_clock(monkeypatch, lambda: self._now_ns)
        numbers = itertools.count(1)
        endpoint = Endpoint("tcp://127.0.0.1:0", partial(SealedReader, keys=server_keys()))
        self.peers = RouterSocket((endpoint,), lambda: next(numbers), PeerLimits())
        host, port = self.peers.endpoints[0].removeprefix("tcp://").split(":")
        self._address = host, int(port)
        self._strangers: deque[socket.socket] = deque()
        self.heard: list[tuple[bytes, int, list[zmtp.Frame]]] = []

    def stranger(self) -> None:
        """Connect one more client without a key, which sends the same bytes as the others."""
        self._strangers.append(socket.create_connection(self._address))
        if self._says:
            self._strangers[-1].send(self._says)
        if len(self._strangers) > KEPT:
            self._strangers.popleft().close()

    def turn(self) -> None:
        """Run one turn, in which another client without a key connects."""
        self.stranger()
        self._now_ns += TURN_NS
        while (message := self.peers.receive()) is not None:
            self.heard.append(message)
        self.peers.note_ends()

    def newcomer(self) -> socket.socket:
        made = socket.create_connection(self._address)
        made.setblocking(False)
        return made

    def close(self) -> None:
        for stranger in self._strangers:
            stranger.close()
        self.peers.close()


HELLO = CurveClient().hello()


SAY = {
    "nothing": b"",
    "half a greeting": b"\xff",
    "a greeting": GREETING,
    "a HELLO": GREETING + HELLO,
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.fixture(params=SAY.values(), ids=SAY)
def flood(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flood]:
    made = Flood(monkeypatch, request.param)
    yield made
    made.close()


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_one_that_proves_a_key_is_heard_beside_two_hundred_strangers_a_second(flood: Flood) -> None:
    for _ in range(KEPT):
        flood.turn()
    for _ in range(AT_ONCE):
        flood.stranger()
    client, newcomer, came, step = CurveClient(), flood.newcomer(), b"", 0
    newcomer.send(GREETING + client.hello())
    turns = 0
    with newcomer:
        while not flood.heard:
            assert turns < TURNS_MAX, f"not heard after {turns} turns, step {step} of its handshake"
            flood.turn()
            turns += 1
            came += received(newcomer)
            if step == 0 and len(came) > len(GREETING) + 2:
                client.take_welcome(came[len(GREETING) :])
                newcomer.send(client.initiate())
                came, step = b"", 1
            elif step == 1 and came:
                newcomer.send(client.message(b"hello"))
                step = 2
        identity, descriptor, frames = flood.heard[0]
        assert [bytes(frame) for frame in frames] == [b"hello"]
        assert flood.peers.peer_identity(identity).key == raw(CLIENT.public)
        for _ in range(KEPT):  # pending handshakes of others do not evict a slow newcomer
            flood.turn()
        assert flood.peers.admit(identity, descriptor) == 1


def test_of_those_that_proved_a_key_and_say_no_hello_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = Flood(monkeypatch, b"")
    flood.peers._acceptor.pending_max = 2
    proved: list[socket.socket] = []
    try:
        for _ in range(3):
            client, peer = CurveClient(), flood.newcomer()
            proved.append(peer)
            peer.send(GREETING + client.hello())
            came = bytearray()

            def welcome(peer: socket.socket = peer, came: bytearray = came) -> bool:
                flood.peers.note_ends()
                came.extend(received(peer))
                return len(came) > len(GREETING) + 2

            until(welcome)
            client.take_welcome(bytes(came[len(GREETING) :]))
            peer.send(client.initiate())
            before = sum(bool(each.reader.key) for each in flood.peers._table.pending.values())

            def counted(before: int = before) -> bool:
                flood.peers.note_ends()
                return sum(bool(each.reader.key) for each in flood.peers._table.pending.values()) == min(2, before + 1)

            until(counted)
        assert len(flood.peers._table.pending) == 2
    finally:
        for peer in proved:
            peer.close()
        flood.close()
