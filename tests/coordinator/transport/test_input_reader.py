"""Reading available input: handshakes, trust, incomplete messages, and violations."""

from __future__ import annotations

import logging

import pytest

from kvforge.coordinator.transport.fairness import TROUBLES_MAX
from tests.coordinator.transport.parts import NOW_NS, Parts
from tests.hostile.raw import part


def test_input_is_read_of_trusted_and_of_untrusted_peers(parts: Parts) -> None:
    trusted, untrusted = parts.connect(1), parts.connect()
    for peer in parts.peers.values():
        peer.send(part(b"asked", more=False))
    parts.reader.note_input()
    parts.reader.read_available(NOW_NS + 1)
    assert set(parts.queue.fair.ready) == {trusted, untrusted}
    assert [trusted.head, untrusted.head] == [[b"asked"]] * 2
    assert parts.table.now_ns == NOW_NS + 1 and not parts.reader.due


def test_earlier_input_is_processed_before_more_is_read(parts: Parts) -> None:
    connection = parts.connect(1)
    peer = parts.peers[connection.identity]
    for message in (b"first", b"second"):
        peer.send(part(message, more=False))
        parts.reader.read_available(NOW_NS)
    assert connection.head == [b"first"] and not connection.reader.left


def test_untrusted_peers_are_read_in_the_rounds_of_the_backoff_alone(parts: Parts) -> None:
    trusted, untrusted = parts.connect(1), parts.connect()
    for _ in range(TROUBLES_MAX + 1):
        parts.backoff.note_trouble(NOW_NS)
    parts.reader.read_available(NOW_NS)
    assert parts.backoff.active
    for peer in parts.peers.values():
        peer.send(part(b"asked", more=False))
    parts.reader.read_available(NOW_NS + 1)
    assert trusted.head == [b"asked"] and untrusted.head is None
    parts.reader.read_available(parts.backoff.again_ns)
    assert untrusted.head == [b"asked"] and list(parts.backoff.held_back) == [untrusted]
    parts.reader.set_trusted(untrusted, True)
    assert untrusted in parts.queue.fair.ready and not parts.backoff.held_back


def test_a_peer_that_proves_a_key_is_trusted_unless_it_sent_something_invalid(parts: Parts) -> None:
    proved, faulty = parts.connect(), parts.connect()
    proved.reader.key = faulty.reader.key = b"k" * 32
    faulty.faults = 1
    parts.reader.read_available(NOW_NS)
    assert proved.trusted and not faulty.trusted


def test_a_violation_ends_the_connection(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    connection = parts.connect(1)
    parts.peers[connection.identity].send(b"\x08\x00")
    with caplog.at_level(logging.WARNING):
        parts.reader.read_available(NOW_NS)
    assert connection.removed and parts.table.gone == [1]
    assert caplog.messages == ["client connection 1 dropped: frame with invalid flags 0x08"]


def test_an_end_is_noted_after_the_last_message(parts: Parts) -> None:
    connection = parts.connect(1)
    peer = parts.peers[connection.identity]
    peer.send(part(b"last", more=False))
    peer.close()
    parts.reader.read_available(NOW_NS)
    assert connection.head == [b"last"] and parts.table.over == []
    connection.head, connection.listed = None, False
    parts.reader.read_available(NOW_NS)
    assert parts.table.over == [connection] and not connection.removed


def test_the_oldest_incomplete_message_ends_when_all_are_too_large() -> None:
    parts = Parts(partial_bytes_max=50_000)
    oldest, newer = parts.connect(1), parts.connect(2)
    for i, connection in enumerate((oldest, newer)):
        parts.peers[connection.identity].send(part(b"x" * 60_000)[:30_000])
        parts.reader.read_available(NOW_NS + i)
    assert oldest.removed and not newer.removed
    assert parts.table.partial_bytes == newer.counted > 0
    parts.close()
