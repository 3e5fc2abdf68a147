"""Events on the page about lost and restarted processes, and about failed requests."""

from __future__ import annotations

from typing import Any

import msgspec

from kvforge.gateway.page.event_log import KEPT_MAX, TOGETHER_MS, EventLog
from kvforge.protocol.messages import Health, RequestStats, Stats, WorkerHealth

ZERO = RequestStats(**dict.fromkeys(RequestStats.__struct_fields__, 0))
WORKER = WorkerHealth(name="w0", pid=7, state="ready")


def stats(boot: str = "b", **counts: int) -> Stats:
    requests = msgspec.structs.replace(ZERO, **counts)
    return Stats(rid=0, boot=boot, uptime_us=0, clients=1, sequences=0, requests=requests, pools=(), tenants=())


def health(**fields: Any) -> Health:
    return Health(rid=0, **{"live": True, "ready": True, "reason": "", "workers": (WORKER,)} | fields)


def texts(happenings: EventLog) -> list[str]:
    return [one.text for one in happenings.entries()]


def test_nothing_is_told_of_what_was_there_before() -> None:
    seen = EventLog()
    seen.process(7, now_ms=0)
    seen.answered(stats(failed_total=7), health(gone={"w1": "killed"}), 1)
    assert seen.entries() == []


def test_a_coordinator_that_goes_on_and_one_that_has_lost_all() -> None:
    seen = EventLog()
    seen.process(7, now_ms=0)
    seen.answered(stats(), health(), 0)
    for now_ms in (1000, 1500):
        seen.process(0, now_ms=now_ms)
    seen.process(8, now_ms=2000)
    seen.answered(stats(), health(), 3500)
    seen.process(9, now_ms=5000)  # it restarted between two polls
    seen.answered(stats(boot="c"), health(), 6000)
    assert texts(seen) == [
        "the coordinator restarted without its journal after 1.0 s: its state is lost",
        "the coordinator is gone",
        "the coordinator recovered after 2.5 s with its state intact",
        "the coordinator is gone",
    ]
    assert [one.at_ms for one in seen.entries()] == [6000, 5000, 3500, 1000]


def test_workers_that_go_and_come() -> None:
    seen = EventLog()
    seen.answered(stats(), health(), 0)
    gone = health(workers=(), ready=False, reason="no worker is ready", gone={"w0": "killed by signal 9"})
    seen.answered(stats(), gone, 1)
    seen.answered(stats(), gone, 2)
    seen.answered(stats(), health(workers=(msgspec.structs.replace(WORKER, pid=9),)), 3)
    assert texts(seen) == [
        "ready to serve",
        "w0 is ready (process 9)",
        "not ready: no worker is ready",
        "w0 is gone: killed by signal 9",
    ]


def test_a_drain_is_told_and_its_not_being_ready_is_not() -> None:
    seen = EventLog()
    seen.answered(stats(), health(), 0)
    seen.answered(stats(), health(draining=True, ready=False, reason="draining"), 1)
    assert texts(seen) == ["draining: no new requests"]


def test_what_comes_again_and_again_is_one_line() -> None:
    seen = EventLog()
    seen.answered(stats(failed_total=5), health(), 0)
    seen.answered(stats(failed_total=6), health(), 10)
    seen.answered(stats(failed_total=6, refused_total=2), health(), 20)
    seen.answered(stats(failed_total=9, refused_total=2), health(), 30)
    assert texts(seen) == ["4 requests failed", "2 requests refused"]
    seen.answered(stats(failed_total=10, refused_total=2), health(), 31 + TOGETHER_MS)
    assert texts(seen) == ["1 request failed", "4 requests failed", "2 requests refused"]


def test_the_oldest_are_forgotten() -> None:
    seen = EventLog()
    for at in range(2 * KEPT_MAX):
        seen.answered(stats(), health(workers=(msgspec.structs.replace(WORKER, pid=at),)), at)
    assert len(seen.entries()) == KEPT_MAX and seen.entries()[0].at_ms == 2 * KEPT_MAX - 1


def test_a_time_without_viewers_leaves_no_lines_with_false_times() -> None:
    seen = EventLog()
    seen.process(7, now_ms=0)
    seen.answered(stats(), health(), 0)
    seen.answered(stats(failed_total=2), health(), 1)
    seen.resume()
    seen.process(8, now_ms=9000)
    seen.answered(stats(failed_total=40), health(gone={"w1": "killed"}), 9001)
    assert texts(seen) == ["2 requests failed"]
    seen.answered(stats(failed_total=41), health(gone={"w1": "killed"}), 9002)
    assert texts(seen) == ["1 request failed", "2 requests failed"]
