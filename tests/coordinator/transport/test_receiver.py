"""Reception in turns."""

from __future__ import annotations

import pytest

from kvforge.coordinator.transport.rate_limit import Rate
from tests.coordinator.net import set_clock
from tests.coordinator.transport.parts import NOW_NS, Parts
from tests.hostile.raw import part


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, which stands still."""
    made = [NOW_NS]
    set_clock(monkeypatch, lambda: made[0])
    return made


def received(parts: Parts) -> list[bytes]:
    """The messages of the rest of a turn."""
    messages = [bytes(message[2][0]) for message in iter(parts.receiver.receive, None)]
    parts.receiver.turn_begun = False
    return messages


def test_messages_are_taken_from_each_connection_in_turn(parts: Parts, now: list[int]) -> None:
    for number in (1, 2):
        connection = parts.connect(number)
        parts.peers[connection.identity].send(part(b"%d" % number, more=False) * 3)
    messages = received(parts)
    assert sorted(messages) == [b"1"] * 3 + [b"2"] * 3
    assert {messages[0], messages[1]} == {messages[2], messages[3]} == {b"1", b"2"}


def test_a_turn_has_a_time_limit_and_one_message_at_least(parts: Parts, now: list[int]) -> None:
    connection = parts.connect(1)
    parts.peers[connection.identity].send(part(b"x", more=False) * 3)
    parts.receiver.turn_us = 0
    assert [received(parts) for _ in range(4)] == [[b"x"], [b"x"], [b"x"], []]


def test_full_and_removed_connections_are_skipped(parts: Parts, now: list[int]) -> None:
    full, removed, other = (parts.connect(number) for number in (1, 2, 3))
    for connection in (full, removed, other):
        parts.peers[connection.identity].send(part(b"%d" % connection.number, more=False))
    parts.reader.read_available(NOW_NS)
    full.full = True
    parts.table.end(removed)
    assert received(parts) == [b"3"]
    full.full = False
    parts.sender.resume(full)
    assert received(parts) == [b"1"]


def test_a_connection_above_its_rate_waits_and_is_not_polled(parts: Parts, now: list[int]) -> None:
    connection = parts.connect(1)
    connection.rate = Rate(0.5)
    parts.peers[connection.identity].send(part(b"x", more=False) * 2)
    assert received(parts) == [b"x"]
    assert parts.queue.throttled.connections == [connection] and connection.registered == 0
    assert received(parts) == []
    now[0] = connection.rate.ready_ns
    assert received(parts) == [b"x"]
    assert connection.registered


def test_during_the_backoff_few_messages_of_untrusted_peers_are_handed_out(parts: Parts, now: list[int]) -> None:
    for _ in range(100):
        parts.backoff.note_trouble(NOW_NS)
    connection = parts.connect()
    parts.reader.read_available(NOW_NS)
    parts.peers[connection.identity].send(part(b"x", more=False) * 3)
    assert received(parts) == []
    now[0] = parts.backoff.again_ns
    assert received(parts) == [b"x"] * 2
    now[0] = parts.backoff.again_ns
    assert received(parts) == [b"x"]
