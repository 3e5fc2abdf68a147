"""The write side: at once or batched, and what happens when a queue is full or its peer is gone."""

from __future__ import annotations

import select

from kvforge.coordinator.transport.connection import ConnectionLimits
from kvforge.coordinator.transport.outbox import Sent
from kvforge.coordinator.transport.sender import BATCH_MAX
from tests.coordinator.transport.parts import Parts
from tests.hostile.raw import part


def text(number: int) -> bytes:
    return b"\x00\x01%d" % number


def test_messages_are_written_at_once(parts: Parts) -> None:
    connection = parts.connect(1)
    assert parts.sender.send(connection, [b"1"]) is Sent.DONE
    assert parts.peers[connection.identity].recv(100) == text(1)
    assert not parts.sender.unsent


def test_a_batch_is_written_when_it_is_large_or_flushed() -> None:
    parts = Parts(batch=True)
    connection = parts.connect(1)
    peer = parts.peers[connection.identity]
    for i in range(BATCH_MAX - 1):
        parts.sender.send(connection, [b"%d" % i])
    assert select.select([peer], [], [], 0)[0] == []
    parts.sender.send(connection, [b"7"])
    assert peer.recv(100) == b"".join(map(text, range(BATCH_MAX)))
    parts.sender.send(connection, [b"8"])
    gone = parts.connect(2)
    parts.sender.send(gone, [b"8"])
    parts.table.end(gone)
    parts.sender.flush()
    assert peer.recv(100) == text(8) and not parts.sender.unsent
    parts.close()


def test_a_full_connection_is_resumed_with_its_pending_input(parts: Parts) -> None:
    connection = parts.connect(1, ConnectionLimits(queue_messages_max=2, queue_bytes_max=1 << 20))
    peer = parts.peers[connection.identity]
    parts.reader.read_available(1)
    peer.send(part(b"asked", more=False) * 2)
    parts.reader.read_available(1)
    assert connection.holds and list(parts.queue.fair.ready) == [connection]
    parts.queue.fair.ready.clear()
    connection.listed = False
    while parts.sender.send(connection, [b"x" * 100_000]) is not Sent.FULL:
        pass
    assert connection.full and not parts.sender.resumed
    peer.send(part(b"more", more=False))
    parts.reader.read_available(1)
    assert connection.registered == select.EPOLLOUT, "a full connection is not read"
    while connection.queued_bytes:
        assert peer.recv(1 << 20)
        parts.sender.write(connection)
    assert parts.sender.resumed and not connection.full
    assert list(parts.queue.fair.ready) == [connection]


def test_writing_to_one_that_has_ended_removes_it(parts: Parts) -> None:
    connection = parts.connect(1)
    parts.peers[connection.identity].close()
    assert parts.sender.send(connection, [b"x"]) is Sent.DONE, "its input may still hold messages"
    assert parts.sender.send(connection, [b"x"]) is Sent.GONE
    connection.ended = True
    parts.sender.write(connection)
    assert connection.removed and parts.table.gone == [1]
