"""Shares of a turn, message rates, the back-off against abuse, and the queue that combines them."""

from __future__ import annotations

from kvforge.coordinator.transport.fairness import MESSAGES_MAX, PACE_US, TROUBLED_S, TROUBLES_MAX, AbuseBackoff
from kvforge.coordinator.transport.rate_limit import Rate
from kvforge.coordinator.transport.receive_queue import ReceiveQueue
from tests.coordinator.transport.parts import NOW_NS, Parts


def test_a_connection_pays_in_later_turns_for_what_it_used_beyond_its_share(parts: Parts) -> None:
    fair, costly, other = parts.queue.fair, parts.connect(1), parts.connect(2)
    fair.begin_turn()
    assert fair.has_share(costly)
    fair.serve(costly, NOW_NS)
    fair.charge(NOW_NS + 2 * fair.share_ns)
    assert not fair.has_share(costly) and list(fair.spent) == [costly]
    assert fair.has_share(other)
    fair.serve(other, NOW_NS)
    fair.forgive(NOW_NS)
    assert list(fair.spent) == [costly], "another connection was served in this turn"
    fair.begin_turn()
    assert list(fair.ready) == [costly] and not fair.spent
    assert not fair.has_share(costly), "its debt is one share"
    fair.begin_turn()
    assert fair.has_share(costly)


def test_a_connection_without_competition_is_not_held_back(parts: Parts) -> None:
    fair, alone = parts.queue.fair, parts.connect(1)
    alone.share_ns = -1
    assert not fair.has_share(alone)
    fair.forgive(NOW_NS)
    assert list(fair.ready) == [alone] and fair.has_share(alone)


def test_a_throttled_connection_is_due_when_its_rate_permits(parts: Parts) -> None:
    throttled, slow = parts.queue.throttled, parts.connect(1)
    slow.rate = Rate(0.5)
    assert slow.rate.consume(NOW_NS) and not slow.rate.consume(NOW_NS)
    throttled.add(slow)
    parts.poll_set.update(slow)
    assert slow.slowed and slow.registered == 0
    (ready_ns,) = throttled.ready_ns()
    assert ready_ns == NOW_NS + 2_000_000_000
    assert throttled.pop_due(ready_ns - 1) == [] and throttled.connections == [slow]
    assert throttled.pop_due(ready_ns) == [slow] and throttled.connections == []
    assert not slow.slowed and slow.heard_ns == ready_ns, "its input was not observed meanwhile"


def test_the_backoff_begins_with_many_violations_and_ends_after_a_calm_second() -> None:
    backoff = AbuseBackoff()
    for _ in range(TROUBLES_MAX):
        backoff.note_trouble(NOW_NS)
    assert not backoff.troubled and backoff.begin_round(NOW_NS) and backoff.again_ns == 0
    backoff.note_trouble(NOW_NS)
    assert backoff.troubled and backoff.begin_round(NOW_NS)
    assert backoff.again_ns == NOW_NS + PACE_US * 1000
    assert not backoff.begin_round(backoff.again_ns - 1)
    for _ in range(MESSAGES_MAX):
        assert backoff.may_receive
        backoff.count_message()
    assert not backoff.may_receive
    assert backoff.begin_round(NOW_NS + int(TROUBLED_S * 1e9))
    assert not backoff.troubled and backoff.again_ns == 0 and backoff.may_receive


def test_violations_over_a_long_time_do_not_add_up() -> None:
    backoff = AbuseBackoff()
    for i in range(10 * TROUBLES_MAX):
        backoff.note_trouble(NOW_NS + i * int(TROUBLED_S * 1e9))
    assert not backoff.troubled


def test_only_untrusted_connections_are_held_back_and_only_during_the_backoff(parts: Parts) -> None:
    queue = ReceiveQueue(1000, AbuseBackoff())
    trusted, untrusted, proved, early = parts.connect(1), parts.connect(), parts.connect(), parts.connect()
    queue.add(early)
    queue.set_backoff(True)
    for connection in (trusted, untrusted, proved, trusted, untrusted):
        queue.add(connection)
    assert list(queue.fair.ready) == [early, trusted] and list(queue.backoff.held_back) == [untrusted, proved]
    queue.release(proved)
    queue.release(trusted)
    assert list(queue.fair.ready) == [early, trusted, proved]
    queue.set_backoff(False)
    assert list(queue.fair.ready) == [early, trusted, proved, untrusted] and not queue.backoff.held_back
