"""The report's arithmetic, on outcomes written by hand."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.protocol.messages import PoolStats, RequestStats, Stats, TenantStats
from loadtest import one_report as report
from loadtest.driver import FAILED, FINISHED, INTERRUPTED, REFUSED, TIMED_OUT, Depth, Measured, Outcome


def zeros(kind: type[msgspec.Struct], **values: Any) -> Any:
    """A structure whose numbers are 0 but for those given."""
    empty = {field.name: "" if field.type is str else 0 for field in msgspec.structs.fields(kind)}
    return kind(**{**empty, **values})


def stats(scale: int, boot: str = "b", **requests: int) -> Stats:
    return Stats(
        rid=1,
        boot=boot,
        uptime_us=0,
        clients=1,
        sequences=0,
        requests=zeros(RequestStats, **requests),
        pools=(zeros(PoolStats, worker="w0", steps=3 * scale), zeros(PoolStats, worker="w1", steps=scale)),
        tenants=(
            zeros(TenantStats, tenant="a", prefix_queried_tokens_total=10 * scale, prefix_hit_tokens_total=4 * scale),
        ),
    )


def finished(due_s: float, *tokens_s: float) -> Outcome:
    return Outcome(
        due_s,
        state=FINISHED,
        awake_s=due_s + 0.001,
        sent_s=due_s + 0.001,
        accepted_s=due_s + 0.002,
        ended_s=tokens_s[-1],
        prompt_tokens=10,
        asked_tokens=len(tokens_s),
        tokens_s=array("d", tokens_s),
    )


def run() -> Measured:
    """Two finished requests, and one of every other end."""
    outcomes = [
        finished(1.0, 1.5, 1.6, 1.8),
        finished(2.0, 2.1),
        Outcome(3.0, state=REFUSED, code="queue_full", awake_s=3.0, sent_s=3.0),
        Outcome(3.0, state=FAILED, code="worker_error", awake_s=3.0, sent_s=3.2, tokens_s=array("d", [3.5])),
        Outcome(3.0, state=TIMED_OUT, code="deadline_exceeded", awake_s=3.0, sent_s=3.0),
        Outcome(3.0, state=INTERRUPTED, awake_s=3.0),
        Outcome(9.0),
    ]
    depths = [Depth(1, 2), Depth(3, 2)]
    before, after = stats(1, refused_total=5), stats(3, refused_total=6, computed_tokens_total=9)
    return Measured(outcomes=outcomes, depths=depths, before=before, after=after, wall_s=4.0, cpu_s=1.0)


def test_percentiles_are_values_that_were_seen() -> None:
    found = report.summary(np.arange(1, 101, dtype=np.float64)[::-1])
    assert found == {"count": 100, "mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert report.summary(np.array([7.0])) == {
        "count": 1, "mean": 7, "p50": 7, "p90": 7, "p95": 7, "p99": 7, "max": 7
    }  # fmt: skip
    two = report.summary(np.array([1.0, 2.0]))
    assert two is not None and (two["p50"], two["p90"]) == (1, 2)
    assert report.summary(np.zeros(0)) is None


def test_latency_counts_from_the_intended_arrival() -> None:
    found = report.latencies_ms(run().outcomes)
    first, gaps, whole = found["time_to_first_token"], found["inter_token"], found["end_to_end"]
    assert first is not None and gaps is not None and whole is not None
    assert (first["count"], first["max"]) == (3, pytest.approx(500))
    assert (gaps["count"], gaps["p50"], gaps["max"]) == (2, pytest.approx(100), pytest.approx(200))
    assert (whole["count"], whole["max"]) == (2, pytest.approx(800))
    each = found["per_output_token"]
    assert each is not None and (each["count"], each["mean"]) == (1, pytest.approx(150))


def test_every_request_is_counted_once() -> None:
    found = report.counts(run().outcomes)
    assert found == {
        "planned": 7,
        "finished": 2,
        "refused": 1,
        "failed": 1,
        "timed_out": 1,
        "interrupted": 1,
        "unsent": 1,
    }
    with pytest.raises(AssertionError):
        report.counts([Outcome(0.0, state="running")])


def test_throughput_is_per_second_of_the_run() -> None:
    found = report.throughput(run())
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (0.5, 1.25)
    assert found["total_tokens_per_s"] == (5 + 20) / 4


def test_the_coordinators_counters_are_differences() -> None:
    found = report.coordinator(run().before, run().after, run().depths)
    assert found["counters"]["refused_total"] == 1
    assert (found["prefix_queried_tokens"], found["prefix_hit_tokens"], found["steps"]) == (20, 8, 8)
    assert found["pending"] == {"mean": 2.0, "max": 3}
    for before, after in ((None, stats(1)), (stats(1), None), (stats(1), stats(1, boot="another"))):
        assert report.coordinator(before, after, [])["counters"] is None


def test_a_late_generator_is_named() -> None:
    measured = run()
    assert report.generator(measured)["bottleneck"] is False
    assert report.generator(measured)["held_back"] == 1
    measured.outcomes[0].awake_s = measured.outcomes[0].due_s + 0.5
    found = report.document({}, None, measured)
    assert found["generator"]["bottleneck"] and found["generator"]["slip_ms"]["max"] == pytest.approx(500)
    assert any("bottleneck" in sentence for sentence in found["warnings"])
    measured = run()
    measured.cpu_s = 3.9
    assert report.generator(measured)["bottleneck"] is True


def test_the_document_is_json_and_a_table_even_of_nothing() -> None:
    for measured in (run(), Measured(outcomes=[Outcome(1.0)], interrupted=True)):
        found = report.document({"rate": 1.0}, None, measured)
        assert json.loads(json.dumps(found)) == found
        assert f"{found['requests']['planned']} requests in" in report.text(found)
    assert found["latency_ms"]["end_to_end"] is None
    assert "interrupted" in report.text(found)
    full = report.document({}, None, run())
    assert full["errors"] == {"deadline_exceeded": 1, "queue_full": 1, "worker_error": 1}
    assert full["queue_full"] == 1
