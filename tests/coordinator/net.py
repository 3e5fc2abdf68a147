"""Real ZeroMQ sockets for tests: the coordinator's socket, and peers that read or do not."""

from __future__ import annotations

import itertools
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest
import zmq

from kvforge.coordinator.transport import poll_set, receiver, router_socket
from kvforge.coordinator.transport.connection import ConnectionLimits
from kvforge.coordinator.transport.listener import Endpoint
from kvforge.coordinator.transport.outbox import Frames, Sent
from kvforge.coordinator.transport.router_socket import PeerLimits, RouterSocket
from kvforge.protocol import transport

PAYLOAD = b"x" * 8192  # large, to fill the kernel's buffers quickly
QUEUE = 8
DEADLINE_S = 60.0


def until(done: Callable[[], bool]) -> None:
    """Wait until `done` returns True."""
    deadline = monotonic() + DEADLINE_S
    while not done():
        assert monotonic() < deadline, f"condition not met within {DEADLINE_S} s"
        select.select([], [], [], 0.01)


def set_clock(monkeypatch: pytest.MonkeyPatch, monotonic_ns: Callable[[], int]) -> None:
    """Replace the clock of the coordinator's sockets."""
    for module in (poll_set, receiver, router_socket):
        monkeypatch.setattr(module, "monotonic_ns", monotonic_ns)


def fill(send: Callable[[int], bool]) -> int:
    """Call `send` with 0, 1, 2, ... until it refuses for good; return how many it took."""
    count, refusals = 0, 0
    while refusals < 10:
        if send(count):
            count, refusals = count + 1, 0
        else:
            refusals += 1
            select.select([], [], [], 0.02)  # gives the kernel time to accept more
    return count


class Net:
    """A coordinator's socket and the peers that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/s"
        self._theirs: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers: list[zmq.Socket[bytes]] = []
        numbers = itertools.count(1)
        idle_timeout_ms = transport.HEARTBEAT_TIMEOUT_MS  # read now, because a test may have shortened it
        limits = PeerLimits(connection=ConnectionLimits(queue_messages_max=QUEUE), idle_timeout_ms=idle_timeout_ms)
        self.silent: list[int] = []
        self.peers = RouterSocket(
            (Endpoint(self.endpoint),), lambda: next(numbers), limits, on_silent=self.silent.append
        )

    def connect(self) -> tuple[zmq.Socket[bytes], int]:
        """Connect a peer with a short queue; return its socket and its number."""
        dealer = transport.dealer(self._theirs)
        dealer.setsockopt(zmq.RCVHWM, QUEUE)
        dealer.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self._dealers.append(dealer)
        dealer.connect(self.endpoint)
        until(lambda: (self.peers.note_ends(), bool(dealer.poll(0, zmq.POLLOUT)))[1])  # type: ignore[func-returns-value]  # the handshake is ours to answer
        dealer.send(b"hello")
        return dealer, self.admit()

    def admit(self) -> int:
        """Admit the next peer."""
        received: list[tuple[bytes, int, Frames]] = []

        def came() -> bool:
            if (message := self.peers.receive()) is not None:
                received.append(message)
            self.peers.note_ends()  # end of the turn
            return bool(received)

        until(came)
        identity, descriptor, _ = received[0]
        number = self.peers.admit(identity, descriptor)
        assert number is not None
        return number

    def read(self, dealer: zmq.Socket[bytes]) -> list[bytes]:
        """Return the peer's next message while our side writes what it holds for it."""
        until(lambda: (self.peers.note_ends(), bool(dealer.poll(0)))[1])  # type: ignore[func-returns-value]
        return dealer.recv_multipart()

    def fill(self, number: int) -> int:
        """Fill a peer that does not read; each message starts with its index. Return how many it took."""
        return fill(lambda i: self.peers.send(number, [b"%d" % i, PAYLOAD]) is Sent.DONE)

    def close(self) -> None:
        for dealer in self._dealers:
            dealer.close(0)
        self._theirs.term()
        self.peers.close()


@contextmanager
def short_lived_net() -> Iterator[Net]:
    """A Net that is closed and removed at the end; its socket path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
    net = Net(folder)
    yield net
    net.close()
    shutil.rmtree(folder)
