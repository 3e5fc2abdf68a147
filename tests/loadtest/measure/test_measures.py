"""The measures, on outcomes written by hand."""

from __future__ import annotations

import json
import math
from array import array

import numpy as np
import pytest

from kvforge.loadtest.drive.outcome import FAILED, Outcome, RunResult
from kvforge.loadtest.measure.document import Context, document
from kvforge.loadtest.measure.group import group
from kvforge.loadtest.measure.objective import Objective
from kvforge.loadtest.measure.outcome_columns import OutcomeColumns
from kvforge.loadtest.measure.percentiles import DIGITS, HIGHEST_US, LOWEST_US, Distribution
from kvforge.loadtest.measure.server import counters, prefix
from kvforge.loadtest.measure.span import Span, measured_span
from kvforge.loadtest.measure.windows import interval, student95, windows
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Timings
from tests.loadtest.synthetic import context, finished, run, stats


def test_percentiles_are_right_to_a_thousandth_and_never_above_what_was_seen() -> None:
    seconds = np.random.default_rng(1).lognormal(-3, 1, 20_000)
    summary = Distribution(seconds).summary_ms()
    assert summary is not None and summary["max"] == pytest.approx(seconds.max() * 1e3)
    for percent in (50, 90, 95, 99, 99.9):
        exact = float(np.sort(seconds)[round(percent * 200) - 1]) * 1e3
        assert summary[f"p{percent:g}"] == pytest.approx(exact, rel=2e-3)
    assert Distribution(np.array([0.25])).summary_ms() == {"count": 1, "mean": 250.0, **dict.fromkeys(
        ("p50", "p90", "p95", "p99", "p99.9", "max"), 250.0)}  # fmt: skip
    assert Distribution(np.zeros(0)).summary_ms() is None and Distribution(np.zeros(0)).curve_ms() == []


def test_values_that_share_a_bucket_are_counted_as_if_one_by_one() -> None:
    from hdrh.histogram import HdrHistogram

    micros = np.random.default_rng(3).lognormal(9, 4, 3000).astype(np.int64)
    one_by_one = HdrHistogram(LOWEST_US, HIGHEST_US, DIGITS)
    for value in np.minimum(micros, HIGHEST_US).tolist():
        one_by_one.record_value(value)
    percents = (1, 10, 50, 90, 99)
    expected = one_by_one.get_percentile_to_value_dict(list(percents))
    assert Distribution(micros / 1e6).percentiles_ms(*percents) == [expected[each] / 1e3 for each in percents]


def test_a_curve_rises_to_nearly_everything() -> None:
    curve = Distribution(np.random.default_rng(2).lognormal(-3, 1, 5000)).curve_ms()
    assert curve == sorted(curve) and len(curve) <= 200
    assert curve[-1][1] == pytest.approx(1 - 1 / 5000)


def test_every_latency_counts_from_the_intended_arrival() -> None:
    outcome = finished(1.0, 1.5, 1.6, 1.8, sent_s=1.2, timings=Timings(first_scheduled_us=100_000))
    requests = OutcomeColumns.of([outcome, Outcome(session=1, due_s=2.0)])
    assert requests.first_s[0] == pytest.approx(0.5)
    assert requests.queue_s[0] == pytest.approx(0.3)  # 0.2 s late, and 0.1 s in the coordinator
    assert requests.whole_s[0] == pytest.approx(0.8)
    assert requests.gaps_s() == pytest.approx([0.1, 0.2])
    assert all(math.isnan(column[1]) for column in (requests.first_s, requests.queue_s, requests.whole_s))


def test_gaps_lie_between_tokens_of_one_request() -> None:
    nothing = Outcome(session=1, due_s=2.0)
    requests = OutcomeColumns.of(
        [nothing, finished(1.0, 1.5, 1.75), nothing, finished(0.0, 9.0), finished(2.0, 3.0, 3.5), nothing]
    )
    assert requests.gaps_s().tolist() == [0.25, 0.5]
    assert requests.where(~requests.finished).gaps_s().size == 0


def test_warm_up_and_drain_are_left_out() -> None:
    outcomes = [finished(due, due + 0.5, due + 3.0, prompt_tokens=100, session=0) for due in (0.0, 2.0, 4.0, 12.0)]
    span = measured_span(outcomes, 1.0, wall_s=15.0)
    assert span == Span(1.0, 12.0)
    found = group(OutcomeColumns.of(outcomes), span, Objective())
    assert found["requests"]["due"] == 3
    # Ended within [1, 12]: at 3, 5 and 7 s. First tokens at 2.5 and 4.5 s. Tokens at 2.5, 3, 4.5, 5 and 7 s.
    assert found["throughput"] == {
        "requests_per_s": pytest.approx(3 / 11),
        "input_tokens_per_s": pytest.approx(200 / 11),
        "output_tokens_per_s": pytest.approx(5 / 11),
    }


def test_what_was_due_after_a_run_was_broken_off_is_not_part_of_it() -> None:
    outcomes = [finished(0.0, 1.0, session=0), finished(2.0, 3.0, session=1), Outcome(session=2, due_s=60.0)]
    assert measured_span(outcomes, 0.0, wall_s=5.0) == Span(0.0, 2.0)
    together = [finished(0.0, 1.0, session=0), finished(0.0, 3.0, session=1)]
    assert measured_span(together, 0.0, wall_s=3.5) == Span(0.0, 3.5)


def test_goodput_takes_requests_that_keep_within_each_bound() -> None:
    objective = Objective.parse("ttft=500ms, itl=50ms,e2e=10s")
    assert objective == Objective(ttft_s=0.5, itl_s=0.05, e2e_s=10.0)
    assert objective.stated_ms() == {"ttft": 500.0, "itl": 50.0, "e2e": 10_000.0}
    good, alone = finished(0.0, 0.4, 0.44, session=0), finished(0.0, 0.4, session=1)
    late, slow = finished(0.0, 0.6, 0.64, session=2), finished(0.0, 0.4, 0.5, session=3)
    failed = finished(0.0, 0.4, 0.44, session=4)
    failed.state = FAILED
    met = objective.met(OutcomeColumns.of([good, alone, late, slow, failed]))
    assert met.tolist() == [True, True, False, False, False]
    assert Objective().met(OutcomeColumns.of([late, failed])).tolist() == [True, False]


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "tpot=5ms", "e2e=0s", "ttft=1s,ttft=2s", "itl=-1ms"])
def test_an_objective_that_cannot_be_read_names_its_option(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^slo: "):
        Objective.parse(text)


def test_intervals_over_windows() -> None:
    found = interval([9.0, 10.0, 11.0, None, 10.0])
    assert found is not None and found["mean"] == 10.0
    assert found["half"] == pytest.approx(3.182 * math.sqrt(2 / 3) / 2)
    assert interval([1.0, None]) is None
    assert student95(30) == 2.042 and student95(31) == pytest.approx(2.040, abs=0.005)
    # A request due at the border of two windows belongs to only one window.
    outcomes = [finished(float(due), due + 0.25, session=due) for due in range(11)]
    repeated = windows(OutcomeColumns.of(outcomes), Span(0.0, 10.0), 5, Objective())
    assert repeated["intervals"]["goodput_per_s"]["values"] == [1, 1, 1, 1, 1.5]


def test_counters_grow_from_before_to_after() -> None:
    after = stats(3, computed_tokens_total=50, recomputed_tokens_total=5, preemptions_total=4)
    found = counters(stats(1), after)
    assert found is not None and (found["preemptions"], found["recomputed_share"], found["steps"]) == (4, 0.1, 800)
    assert counters(stats(1), stats(3, boot="another")) is None and counters(None, after) is None
    hits = prefix(RunResult(outcomes=[], before=stats(1), after=after), (5000, 3500))
    assert (hits["said_by"], hits["queried_tokens"], hits["share"]) == ("coordinator", 2000, 0.4)
    assert hits["infinite"]["share"] == 0.7
    answered = [finished(0.0, 1.0, session=0, cached_tokens=4)]
    assert prefix(RunResult(outcomes=answered), None) == {
        "said_by": "answers", "queried_tokens": 10, "hit_tokens": 4, "share": 0.4
    }  # fmt: skip


def test_a_document_is_json_and_the_same_each_time() -> None:
    measured = run()
    found = document(measured, context(measured))
    assert json.loads(json.dumps(found, allow_nan=False)) == found == document(measured, context(measured))
    assert found["verdict"]["valid"], found["verdict"]["why"]
    assert set(found["tenants"]) == {"alpha", "<b>beta</b>"} and set(found["kinds"]) == {"agent", "chat"}
    for part in ("tenants", "kinds"):
        assert sum(each["requests"]["due"] for each in found[part].values()) == found["all"]["requests"]["due"]
    assert [(error["state"], error["code"]) for error in found["all"]["errors"]] == [
        ("failed", "worker_error"), ("timed_out", "deadline_exceeded")
    ]  # fmt: skip
    assert found["windows"]["intervals"]["ttft_p99_ms"]["half"] > 0
    series = found["series"]
    tokens = sum(len(outcome.tokens_s) for outcome in measured.outcomes)
    assert sum(series["output_tokens"]) * series["slice_s"] == pytest.approx(tokens)
    assert {len(values) for values in series.values() if isinstance(values, list)} == {len(series["at_s"])}


def test_a_run_of_nothing_is_a_document_too() -> None:
    found = document(RunResult(outcomes=[]), Context(options={}))
    assert not found["verdict"]["valid"] and found["all"]["latency_ms"]["ttft"] is None
    unsent = document(RunResult(outcomes=[Outcome(session=0, due_s=0.0)], wall_s=1.0), Context(options={}))
    assert "lag is unknown" in unsent["verdict"]["why"][0]


@pytest.mark.parametrize(
    ("where", "word"), [("late_s", "clock ticks"), ("null", "null server"), ("due", "due requests")]
)
def test_a_late_driver_makes_a_run_invalid(where: str, word: str) -> None:
    measured = run(duration_s=5)
    late = array("d", [0.0] * 80 + [0.0015] * 20)
    if where == "late_s":
        measured.drivers[0].late_s[:] = late
    elif where == "null":
        measured.null_late_s = late
    else:
        for outcome in measured.outcomes[::5]:
            outcome.awake_s = outcome.due_s + 0.0015
    found = document(measured, context(measured))["verdict"]
    assert not found["valid"] and len(found["why"]) == 1 and word in found["why"][0]


def test_one_percent_of_a_short_latency_is_less_than_a_millisecond() -> None:
    def judged(ended_s: float) -> dict[str, object]:
        outcomes = [finished(due, due + ended_s, awake_s=due + 2e-4, session=0) for due in np.arange(10.0).tolist()]
        found: dict[str, object] = document(RunResult(outcomes=outcomes, wall_s=10.5), Context(options={}))["verdict"]
        return found

    assert judged(0.5)["valid"]
    assert not judged(0.01)["valid"] and judged(0.01)["limit_ms"] == pytest.approx(0.1, rel=2e-3)
