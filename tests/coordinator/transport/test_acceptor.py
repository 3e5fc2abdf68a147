"""Admission of newcomers, and which pending handshake is evicted."""

from __future__ import annotations

import errno
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.coordinator.transport import listener
from kvforge.coordinator.transport.acceptor import SPEAK_S
from kvforge.coordinator.transport.listener import ACCEPT_PAUSE_S, ACCEPTS_MAX
from kvforge.protocol.errors import InvalidConfiguration
from tests.coordinator.transport.parts import Parts


class Listening:
    """A listening endpoint, and peers that connect to it."""

    def __init__(self, parts: Parts, folder: str) -> None:
        self._parts, self._path = parts, parts.listen(Path(folder))
        self.peers: list[socket.socket] = []
        ((self.descriptor, _),) = parts.acceptor._listeners.items()

    def connect(self, count: int = 1) -> None:
        for _ in range(count):
            self.peers.append(socket.socket(socket.AF_UNIX))
            self.peers[-1].connect(self._path)

    def accept(self) -> bool:
        return self._parts.acceptor.accept(self.descriptor)


@pytest.fixture
def endpoint(parts: Parts) -> Iterator[Listening]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        made = Listening(parts, folder)
        yield made
        for peer in made.peers:
            peer.close()


def test_a_new_connection_is_pending_and_gets_the_greeting(parts: Parts, endpoint: Listening) -> None:
    endpoint.connect()
    assert endpoint.accept() and not parts.acceptor.accept(-1)
    (connection,) = parts.table.pending.values()
    assert not connection.trusted and not connection.number and connection.registered
    assert endpoint.peers[0].recv(1 << 10) == connection.reader.greeting


def test_few_are_accepted_at_once_and_more_in_a_round_of_the_backoff(parts: Parts, endpoint: Listening) -> None:
    parts.acceptor.pending_max = 100
    endpoint.connect(2 * ACCEPTS_MAX + 2)
    endpoint.accept()
    assert parts.acceptor.accepted == ACCEPTS_MAX
    parts.backoff.active = True
    endpoint.accept()
    assert parts.acceptor.accepted == 2 * ACCEPTS_MAX + 2


def test_the_oldest_silent_connection_is_evicted_then_the_oldest_without_a_key(
    parts: Parts, endpoint: Listening
) -> None:
    endpoint.connect(2)
    endpoint.accept()
    first, second = parts.table.pending.values()
    parts.table.now_ns += int(SPEAK_S * 1e9)
    first.reader._greeted = True
    endpoint.connect()
    endpoint.accept()
    assert second.removed and not first.removed, "the silent one"
    endpoint.connect()
    endpoint.accept()
    assert first.removed, "both have a greeting, or time to send it, and the oldest has no key"
    third, fourth = parts.table.pending.values()
    third.reader.key, third.reader._greeted, fourth.reader._greeted = b"k" * 32, True, True
    endpoint.connect()
    endpoint.accept()
    assert fourth.removed and not third.removed, "the one without a key"
    (_, fifth) = parts.table.pending.values()
    fifth.reader.key = b"k" * 32
    endpoint.connect()
    endpoint.accept()
    assert third.removed, "all have a key: the oldest"


def test_an_endpoint_that_fails_is_paused_and_resumed(
    parts: Parts, endpoint: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts.acceptor._listeners[endpoint.descriptor]
    real = made._socket

    class Failing:
        def accept(self) -> None:
            raise OSError(errno.ENOMEM, "out of memory")

        def fileno(self) -> int:
            return real.fileno()

    monkeypatch.setattr(made, "_socket", Failing())
    endpoint.connect()
    endpoint.accept()
    assert parts.acceptor.paused and parts.acceptor.accepted == 0
    monkeypatch.undo()
    parts.acceptor.resume()
    assert parts.acceptor.paused, "not yet"
    parts.table.now_ns += int(ACCEPT_PAUSE_S * 1e9)
    parts.acceptor.resume()
    assert not parts.acceptor.paused
    endpoint.accept()
    assert parts.acceptor.accepted == 1


def test_an_endpoint_that_cannot_be_used_is_an_error(parts: Parts) -> None:
    with pytest.raises(InvalidConfiguration, match="cannot be used"):
        parts.acceptor.listen((listener.Endpoint("ipc:///nowhere/at/all"),))
    assert parts.acceptor.endpoints == []
