"""Real ZeroMQ sockets for tests: the coordinator's side, and peers that read or do not."""

from __future__ import annotations

import itertools
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import zmq

from coordinator.outbox import Sent
from coordinator.peers import Peers
from protocol import transport

PAYLOAD = b"x" * 8192  # large enough that the kernel's buffers are soon full
QUEUE = 8
DEADLINE_S = 60.0


def until(done: Callable[[], bool]) -> None:
    """Waits for something that must happen."""
    deadline = monotonic() + DEADLINE_S
    while not done():
        assert monotonic() < deadline, f"it did not happen within {DEADLINE_S} s"
        select.select([], [], [], 0.01)


def fill(send: Callable[[int], bool]) -> int:
    """Calls `send` with 0, 1, 2, ... until nothing is taken any more, also after a moment. Returns how many were."""
    count, refusals = 0, 0
    while refusals < 10:
        if send(count):
            count, refusals = count + 1, 0
        else:
            refusals += 1
            select.select([], [], [], 0.02)  # what the kernel still takes
    return count


class Net:
    """One coordinator's socket and the peers that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/s"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._theirs: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers: list[zmq.Socket[bytes]] = []
        numbers = itertools.count(1)
        self.peers = Peers(self._context, self.endpoint, lambda: next(numbers), QUEUE)

    def connect(self) -> tuple[zmq.Socket[bytes], int]:
        """A peer with a small queue of its own, and its number."""
        dealer = transport.dealer(self._theirs)
        dealer.setsockopt(zmq.RCVHWM, QUEUE)
        dealer.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self._dealers.append(dealer)
        dealer.connect(self.endpoint)
        dealer.send(b"hello")
        return dealer, self.admit()

    def admit(self) -> int:
        """Admits whoever comes next."""
        assert self.peers.socket.poll(int(DEADLINE_S * 1000))
        received = self.peers.receive()
        assert received is not None
        number = self.peers.admit(received[0], received[1])
        assert number is not None
        return number

    def fill(self, number: int) -> int:
        """Fills one that does not read; each message starts with its place. Returns how many it took."""
        return fill(lambda i: self.peers.send(number, [b"%d" % i, PAYLOAD]) is Sent.DONE)

    def close(self) -> None:
        for dealer in self._dealers:
            dealer.close(0)
        self._theirs.term()
        self.peers.close()
        self._context.term()


@contextmanager
def short_lived_net() -> Iterator[Net]:
    """Closed and removed at the end. Its socket's path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
    net = Net(folder)
    yield net
    net.close()
    shutil.rmtree(folder)
