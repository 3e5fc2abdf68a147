"""The two nested epolls: registration, and a limited time for serving them."""

from __future__ import annotations

import select

import pytest

from kvforge.coordinator.transport import poll_set
from tests.coordinator.net import set_clock
from tests.coordinator.transport.parts import NOW_NS, Parts


def ready(epoll: select.epoll) -> dict[int, int]:
    return dict(epoll.poll(0))


def test_untrusted_input_is_reported_through_the_inner_epoll(parts: Parts) -> None:
    connection = parts.connect()
    polled = parts.poll_set
    assert ready(polled.inner) == {connection.descriptor: select.EPOLLIN}
    assert ready(polled.outer) == {polled.inner.fileno(): select.EPOLLIN}
    polled.set_trusted(connection, True)
    assert ready(polled.inner) == {}
    assert ready(polled.outer) == {connection.descriptor: select.EPOLLIN}


def test_the_outer_epoll_does_not_report_untrusted_input_during_the_backoff(parts: Parts) -> None:
    trusted, _untrusted = parts.connect(1), parts.connect()
    parts.poll_set.set_backoff(True)
    assert ready(parts.poll_set.outer) == {trusted.descriptor: select.EPOLLIN}
    parts.poll_set.set_backoff(False)
    assert set(ready(parts.poll_set.outer)) == {trusted.descriptor, parts.poll_set.inner.fileno()}


def test_the_events_of_interest_follow_the_state_of_a_connection(parts: Parts) -> None:
    connection = parts.connect(1)

    def registered(**state: object) -> int:
        for name, value in state.items():
            setattr(connection, name, value)
        parts.poll_set.update(connection)
        return connection.registered

    assert registered() == select.EPOLLIN
    assert registered(queued_bytes=1) == select.EPOLLIN | select.EPOLLOUT
    assert registered(full=True) == select.EPOLLOUT
    assert registered(full=False, queued_bytes=0, slowed=True) == 0
    assert registered(slowed=False) == select.EPOLLIN
    assert registered(ended=True) == 0
    assert ready(parts.poll_set.outer) == {}


def test_the_time_is_limited_and_the_rest_is_served_next(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_set, "EVENTS_MAX", 2)
    set_clock(monkeypatch, lambda: NOW_NS + 5_000)
    descriptors = [parts.connect(number).descriptor for number in range(1, 6)]
    served: list[int] = []

    def serve(for_us: int) -> bool:
        return parts.poll_set.serve(parts.poll_set.outer, lambda d, _: served.append(d), 5, NOW_NS, for_us)

    assert serve(for_us=5) and len(served) == 2, "the time ended after two events"
    assert serve(for_us=5) and serve(for_us=5)
    assert set(served) == set(descriptors), "each descriptor has its turn"
    served.clear()
    assert not serve(for_us=6)
    assert len(served) >= 5
