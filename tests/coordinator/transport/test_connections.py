"""The table of connections, and their ends."""

from __future__ import annotations

import logging

import pytest

from kvforge.coordinator.transport import connections, fairness
from tests.coordinator.transport.parts import NOW_NS, Parts


def test_a_connection_is_pending_until_it_is_admitted(parts: Parts) -> None:
    connection = parts.connect()
    assert parts.table.pending == {connection.identity: connection} and not parts.table.by_number
    parts.table.admit(connection, 7)
    assert parts.table.by_number == {7: connection} and not parts.table.pending
    assert connection.number == 7


def test_an_end_is_reported_once_and_leaves_nothing(parts: Parts) -> None:
    connection = parts.connect(7)
    connection.counted = parts.table.partial_bytes = 100
    parts.table.end(connection)
    parts.table.end(connection)
    table = parts.table
    assert table.gone == [7]
    assert connection.removed and connection.registered == 0 and connection.socket.fileno() == -1
    assert (table.by_identity, table.by_number, table.by_descriptor, table.partial_bytes) == ({}, {}, {}, 0)


def test_the_end_of_a_pending_handshake_is_not_reported(parts: Parts) -> None:
    parts.table.over.append(parts.connect())
    parts.table.end_over()
    assert parts.table.gone == [] and parts.table.over == [] and not parts.table.pending


def test_a_dropped_peer_is_logged_and_counts_as_trouble(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(fairness.TROUBLES_MAX + 1):
            parts.table.drop(parts.connect(number), "a reason")
    assert caplog.messages[0] == "client connection that is not admitted dropped: a reason"
    assert caplog.messages[1] == "client connection 1 dropped: a reason"
    assert parts.backoff.troubled


def test_a_forgotten_peer_gets_what_was_sent_and_its_socket_lingers(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGERING_MAX", 2)
    made = [parts.connect(number) for number in (1, 2, 3)]
    made[2].send([b"last"], NOW_NS)
    for connection in made:
        parts.table.linger(connection)
    assert parts.table.gone == [] and not parts.table.by_number
    assert parts.peers[made[2].identity].recv(100) == b"\x00\x04last"
    assert [connection.socket.fileno() == -1 for connection in made] == [True, False, False], "at most 2 linger"
    parts.table.now_ns += int(connections.LINGER_S * 1e9)
    parts.table.close_lingering()
    assert len(parts.table.lingering) == 2
    parts.table.now_ns += 1
    parts.table.close_lingering()
    assert [connection.socket.fileno() for connection in made] == [-1] * 3
