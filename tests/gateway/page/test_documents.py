"""Documents, points and latencies are bounded, ordered, and sent when they change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvforge.gateway.page import documents
from kvforge.gateway.page.disconnected_workers import GONE, DisconnectedWorker
from kvforge.gateway.page.document_store import DocumentStore
from kvforge.gateway.page.history import POINTS_MAX, History, Point
from kvforge.gateway.page.latency import ALL, WINDOW_S, Latencies
from kvforge.protocol.messages import (
    Health,
    ModelInfo,
    RequestList,
    RequestRow,
    RequestStats,
    Stats,
    TenantStats,
    WorkerHealth,
)


def row(request_id: int, state: str = "running", **fields: Any) -> RequestRow:
    told = {"tenant": "a", "prompt_tokens": 8, "max_tokens": 9, "generated_tokens": 3, "age_us": 0} | fields
    return RequestRow(request_id=request_id, state=state, **told)


def over(request_id: int, age_s: float, first_s: float, whole_s: float, tenant: str = "a") -> RequestRow:
    times = {"age_us": int(age_s * 1e6), "first_token_us": int(first_s * 1e6), "ended_us": int(whole_s * 1e6)}
    return row(request_id, "finished", generated_tokens=11, tenant=tenant, **times)


# -------------------------------------------------------------------------------------------------------- documents


def test_who_waits_is_first_then_who_runs_then_the_newest_of_the_ended() -> None:
    states = {9: "running", 8: "pending", 7: "finished", 6: "failed", 5: "preempted", 4: "running"}
    listed = RequestList(rid=0, total=900, requests=tuple(row(number, state) for number, state in states.items()))
    told = documents.requests(listed, dict.fromkeys(states, 1000))
    assert [each[0] for each in told["rows"]] == [5, 8, 4, 9, 7, 6] and told["total"] == 900


def test_a_crowd_that_waits_leaves_room_for_who_runs_and_who_has_ended() -> None:
    states = ["pending"] * 300 + ["running"] * 45 + ["finished"] * 5
    listed = RequestList(rid=0, total=350, requests=tuple(row(number, state) for number, state in enumerate(states)))
    told = [each[1] for each in documents.requests(listed, dict.fromkeys(range(350), 0))["rows"]]
    assert told == ["pending"] * 55 + ["running"] * 40 + ["finished"] * 5


def test_a_row_says_when_not_how_long_ago() -> None:
    listed = RequestList(rid=0, total=1, requests=(over(3, age_s=5.0, first_s=0.25, whole_s=2.0),))
    assert documents.requests(listed, {3: 70_000})["rows"][0][-3:] == [70_000, 250.0, 72_000]


def test_all_is_bounded() -> None:
    many = RequestList(rid=0, total=5000, requests=tuple(row(number) for number in range(5000)))
    assert len(documents.requests(many, dict.fromkeys(range(5000), 0))["rows"]) == documents.ROWS_MAX
    requests = RequestStats(**dict.fromkeys(RequestStats.__struct_fields__, 0))
    tenants = tuple(
        TenantStats(tenant=f"t{at}", blocks=at % 500, prefix_queried_tokens_total=0, prefix_hit_tokens_total=0)
        for at in range(1000)
    )
    stats = Stats(rid=0, boot="", uptime_us=0, clients=0, sequences=0, requests=requests, pools=(), tenants=tenants)
    told = documents.tenants(stats)
    assert told["total"] == 1000 and len(told["rows"]) == documents.TENANTS_MAX
    numbers = [each["number"] for each in told["rows"]]
    assert numbers == sorted(numbers) and {500, 1000} <= set(numbers)  # they begin with 1
    last = told["rows"][-1]
    assert (last["tenant"], last["blocks"], last["hits"]) == ("t999", 499, None)
    workers = tuple(WorkerHealth(name=f"w{at}", pid=at, state="ready", kernels={"k": "x" * 5000}) for at in range(100))
    health = Health(
        rid=0,
        live=True,
        ready=True,
        reason="",
        workers=workers,
    )
    shown = documents.workers(health, (DisconnectedWorker("g", GONE, "y" * 5000),) * 100)
    assert len(shown["rows"]) == len(shown["absent"]) == documents.WORKERS_MAX
    assert {len(row["how"]) for row in shown["absent"]} == {documents.TEXT_MAX}
    assert len(msgspec.json.encode(shown)) < 64_000


def test_a_worker_shows_its_drafts_if_it_drafts() -> None:
    drafting = WorkerHealth(name="w0", pid=1, state="ready", drafts=8, drafted_total=145, accepted_total=143)
    health = Health(
        rid=0, live=True, ready=True, reason="", workers=(drafting, WorkerHealth(name="w1", pid=2, state="ready"))
    )
    assert [row["drafts"] for row in documents.workers(health)["rows"]] == [[8, 145, 143], None]


@pytest.mark.parametrize(("layout", "shown"), [("latents", "latents"), ("states", "states"), ("K and V", ""), ("", "")])
def test_the_content_of_an_unusual_cache_is_named(layout: str, shown: str) -> None:
    names = {"name": "m", "source": "/m", "architecture": "llama", "fingerprint": "f"}
    model = ModelInfo(**names, vocab_size=100, context_tokens_max=512, dtype="float32", kv_layout=layout)
    health = Health(rid=0, live=True, ready=True, reason="", workers=(), model=model)
    requests = RequestStats(**dict.fromkeys(RequestStats.__struct_fields__, 0))
    stats = Stats(rid=0, boot="b", uptime_us=0, clients=0, sequences=0, requests=requests, pools=(), tenants=())
    told = documents.about(stats, health, 0)["model"]
    assert told == {"name": "m", "dtype": "float32", "cache": shown, "context": 512}


# ------------------------------------------------------------------------------------------------ board and history


def test_the_board_gives_what_changed_and_nothing_twice() -> None:
    board = DocumentStore()
    board.put("a", {"x": 1})
    board.put("b", "two\nlines")
    assert board.since(0) == b'event: a\ndata: {"x":1}\n\nevent: b\ndata: "two\\nlines"\n\n'
    seen = board.number
    board.put("a", {"x": 1})
    assert board.since(seen) == b""
    board.put("a", {"x": 2})
    assert board.since(seen) == b'event: a\ndata: {"x":2}\n\n'


def test_points_are_given_once_and_the_newest_kept() -> None:
    history, point = History(), Point(0, *[None] * 8)
    assert history.since(0) == []
    for at in range(POINTS_MAX + 10):
        history.add(msgspec.structs.replace(point, at_ms=at))
    assert [each.at_ms for each in history.since(history.number - 2)] == [POINTS_MAX + 8, POINTS_MAX + 9]
    assert len(history.since(0)) == POINTS_MAX and history.since(history.number) == []


# -------------------------------------------------------------------------------------------------------- latencies


def test_latencies_are_of_requests_that_ended_in_the_last_minute_each_once() -> None:
    latencies = Latencies()
    first = over(1, age_s=3.0, first_s=0.2, whole_s=1.2)
    latencies.look([first, row(2), over(3, age_s=500.0, first_s=0.1, whole_s=1.0)], 1000.0)
    latencies.look([first, over(4, age_s=2.0, first_s=0.4, whole_s=1.9, tenant="b")], 1001.0)
    told = latencies.by_tenant()
    assert [(each.tenant, each.count) for each in told] == [(ALL, 2), ("a", 1), ("b", 1)]
    assert told[1].first_ms == (200.0, 200.0) and told[1].between_ms == (100.0, 100.0)
    assert told[0].first_ms == (pytest.approx(300.0), pytest.approx(398.0))
    latencies.look([], 1003.0 + WINDOW_S)
    assert [(each.count, each.first_ms) for each in latencies.by_tenant()] == [(0, None)]


def test_one_without_a_token_has_no_latency() -> None:
    latencies = Latencies()
    latencies.look([row(1, "failed", ended_us=5, age_us=9)], 0.0)
    assert latencies.by_tenant()[0].count == 0
