"""Heartbeats, and the ends of peers that exceed a time limit."""

from __future__ import annotations

import pytest

from kvforge.coordinator.transport import zmtp
from kvforge.coordinator.transport.connection import STRANGER_S
from kvforge.coordinator.transport.heartbeats import Heartbeats
from kvforge.protocol import transport
from tests.coordinator.transport.parts import NOW_NS, Parts

S = 1_000_000_000


@pytest.fixture
def silent() -> list[int]:
    return []


@pytest.fixture
def heartbeats(parts: Parts, silent: list[int]) -> Heartbeats:
    return Heartbeats(parts.table, parts.sender, 8_000, silent.append, NOW_NS)


def test_four_heartbeats_fall_within_the_timeout(parts: Parts) -> None:
    short = Heartbeats(parts.table, parts.sender, 2_000, lambda _: None, NOW_NS)
    assert short.interval_ns == S // 2
    long = Heartbeats(parts.table, parts.sender, 3_600_000, lambda _: None, NOW_NS)
    assert long.interval_ns == transport.HEARTBEAT_INTERVAL_MS * 1_000_000


def test_peers_that_have_shaken_hands_get_a_heartbeat(parts: Parts, heartbeats: Heartbeats) -> None:
    shaken, other = parts.connect(1), parts.connect()
    parts.reader.next_message(shaken)
    shaken.read(NOW_NS)
    parts.reader.next_message(shaken)
    assert shaken.reader.ready and not other.reader.ready
    heartbeats.beat(NOW_NS + S)
    assert heartbeats.sent_ns == NOW_NS + S
    assert parts.peers[shaken.identity].recv(100) == zmtp.ping(transport.HEARTBEAT_TIMEOUT_MS)
    with pytest.raises(BlockingIOError):
        parts.peers[other.identity].recv(100)


def beat_each_second(heartbeats: Heartbeats, seconds: int) -> None:
    for _ in range(seconds):
        heartbeats.beat(heartbeats.sent_ns + S)


def test_a_silent_peer_is_dropped_and_reported_if_it_was_admitted(
    parts: Parts, heartbeats: Heartbeats, silent: list[int]
) -> None:
    admitted, pending = parts.connect(1), parts.connect()
    beat_each_second(heartbeats, 8)
    assert not admitted.removed
    beat_each_second(heartbeats, 1)
    assert admitted.removed and pending.removed
    assert silent == [1] == parts.table.gone


def test_a_handshake_has_a_time_limit(parts: Parts, heartbeats: Heartbeats) -> None:
    admitted, pending = parts.connect(1), parts.connect()
    for _ in range(int(STRANGER_S) + 1):
        admitted.heard_ns = pending.heard_ns = heartbeats.sent_ns
        beat_each_second(heartbeats, 1)
    assert pending.removed and not admitted.removed


def test_time_in_which_nothing_was_checked_does_not_count(
    parts: Parts, heartbeats: Heartbeats, silent: list[int]
) -> None:
    connection = parts.connect(1)
    heartbeats.beat(NOW_NS + 3600 * S)
    assert not connection.removed and silent == []
