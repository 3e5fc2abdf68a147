"""For all limits, every message fits the size limit of its receiver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core import sizes
from kvforge.coordinator.core.events import Applied, Event, ToClient, ToWorker
from kvforge.coordinator.core.requests import streams
from kvforge.coordinator.turn import RESULT_BYTES_MAX
from kvforge.protocol import codec
from kvforge.protocol.errors import InvalidConfiguration, WorkerError
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    LOGIT_BIAS_MAX,
    WORKER_MESSAGES,
    WORKER_REPLIES,
    Drain,
    ErrorInfo,
    ListRequests,
    RowError,
    SamplingParams,
    StepResult,
    Stream,
)
from kvforge.worker.step.connection import STEP_BYTES_MAX
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation
from tests.coordinator.test_sampling import TopDriver, top_logprobs_of
from tools.simulation.limits import make_limits


class Wired(Driver):
    """A driver that encodes and decodes every message as its peer would."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.streams_sent = 0
        self._client, self._worker = codec.Decoder(CLIENT_REPLIES), codec.Decoder(WORKER_REPLIES, STEP_BYTES_MAX)
        real = self.machine.apply

        def apply(event: Event, now_us: int) -> Applied:
            applied = real(event, now_us)
            return applied._replace(effects=[self._through(effect) for effect in applied.effects])

        self.machine.apply = apply  # type: ignore[method-assign]

    def _through(self, effect: Any) -> Any:
        if isinstance(effect, ToClient | ToWorker):
            frames = [bytes(frame) for frame in codec.encode(effect.message)]
            decoder = self._client if isinstance(effect, ToClient) else self._worker
            self.streams_sent += isinstance(effect.message, Stream)
            return type(effect)(_peer(effect), decoder.decode(frames))
        return effect


def _peer(effect: Any) -> int:
    return int(effect.client if isinstance(effect, ToClient) else effect.worker)


def test_six_thousand_requests_that_are_handed_back_are_told_so_in_messages_that_are_taken() -> None:
    driver = Wired(queue_max=6000, finished_max=8000)
    driver.machine.check_invariants = lambda: None  # type: ignore[method-assign]  # takes a second per event
    made = [driver.submit([i % 9], 3) for i in range(6000)]
    driver.ask(Drain(rid=driver.rid(), deadline_ms=1))
    driver.advance(1000)
    for _ in range(20):
        driver.turn()
    assert set(driver.ended) == set(made)
    assert {end.error.code for end in driver.ended.values() if end.error is not None} == {"draining"}
    assert driver.streams_sent > 1


@pytest.mark.parametrize("room", [24, 60, 100, 1000])
def test_tokens_that_do_not_fit_one_message_follow_in_the_next_in_order(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(streams, "ARRAY_BYTES_MAX", room)
    driver = Driver()
    driver.add_worker(40)
    made = [driver.submit([i], 12, stream=i % 2 == 0) for i in range(4)]
    for _ in range(400):
        driver.step()
        if len(driver.ended) == 4:
            break
    for i, request in enumerate(made):
        assert driver.streamed[request] == continuation([i], 12)
        assert driver.ended[request].generated_tokens == 12
    for request in made:
        driver.attach(request, 5, client=3)
    for _ in range(60):
        driver.turn()
    for i, request in enumerate(made):
        assert driver.tokens_read(3, request) == dict(enumerate(continuation([i], 12)[5:], 5))


def test_the_most_likely_tokens_go_with_their_tokens_through_messages_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "ARRAY_BYTES_MAX", 70)
    driver = TopDriver()
    driver.add_worker(40)
    request = driver.submit([1], 6, sampling=SamplingParams(temperature=0.0, seed=1, logprobs=3))
    everybody = dict.fromkeys(range(16), 3)
    for _ in range(6):
        driver.step_with_tops(everybody)
    for _ in range(12):
        driver.turn()
    assert driver.streamed[request] == continuation([1], 6)
    assert driver.tops[request] == top_logprobs_of(continuation([1], 6), 3)


def test_of_a_lost_message_only_its_own_requests_are_paused_and_nothing_comes_after_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "ARRAY_BYTES_MAX", 24 * 3)
    driver = Driver()
    driver.add_worker(40)
    first, second = (driver.submit([i], 9, stream=False) for i in (1, 2))
    driver.run_until_idle()
    for _ in range(20):
        driver.turn()
    for request in (first, second):
        driver.attach(request, client=3)
    driver.full.add(3)
    driver.turn()  # three tokens of the first are lost, and so is what would have followed
    driver.full.clear()
    for _ in range(20):
        driver.turn()
    driver.advance(streams.RETRY_US)
    driver.turn()
    assert driver.tokens_read(3, second) == dict(enumerate(continuation([2], 9)))
    assert driver.tokens_read(3, first) == {}
    assert (3, "paused", first) in driver.notices
    driver.attach(first, client=3)
    for _ in range(20):
        driver.turn()
    assert driver.tokens_read(3, first) == dict(enumerate(continuation([1], 9)))


def test_rows_with_biases_begin_over_several_steps_and_none_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "BEGINS_BYTES_MAX", 12_000)
    driver = Wired(queue_max=64, step_rows_max=16, blocks_max=256)
    worker = driver.add_worker(200)
    bias = SamplingParams(temperature=0.0, seed=1, logit_bias=tuple((token, 0.5) for token in range(LOGIT_BIAS_MAX)))
    made = [driver.submit([i], 4, sampling=bias) for i in range(20)]
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in made] == [continuation([i], 4) for i in range(20)]
    begun = [len(step.begins) for step in worker.steps]
    assert sum(begun) == 20
    assert max(begun) == 3
    largest = max(len(codec.encode(step)[0]) for step in worker.steps)
    assert largest < 12_000 + sizes.begin_bytes(bias, 1)


def test_a_step_full_of_rows_that_begin_is_one_that_a_worker_takes() -> None:
    bias = SamplingParams(logit_bias=tuple((1 << 30, -99.5) for _ in range(LOGIT_BIAS_MAX)))
    assert sizes.BEGINS_BYTES_MAX + sizes.begin_bytes(bias, 0) < STEP_BYTES_MAX


def test_a_result_in_which_every_row_failed_is_taken_and_what_is_told_of_it_is_short() -> None:
    error = ErrorInfo.of(WorkerError("x" * 50_000, what="y" * 10))
    assert len(error.message) == 2000
    result = StepResult(step_id=1, epoch=1, errors=tuple(RowError(slot, error) for slot in range(4096)))
    codec.Decoder(WORKER_MESSAGES, RESULT_BYTES_MAX).decode([bytes(frame) for frame in codec.encode(result)])


def test_a_worker_that_says_too_much_of_a_row_does_not_make_an_end_too_large(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1], 3)
    driver.turn()
    step = worker.inbox.popleft()
    error = ErrorInfo("worker_error", "z" * 100_000, {f"f{i}": "v" * 5000 for i in range(100)})
    failed = StepResult(step_id=step.step_id, epoch=worker.epoch, errors=(RowError(int(step.slots[0]), error),))
    driver.report(worker, failed)
    driver.turn()
    told = driver.ended[request].error
    assert told is not None
    assert sizes.error_bytes(told) < 30_000


def test_a_list_of_requests_with_long_names_is_cut_to_what_fits() -> None:
    driver = Wired(list_max=4000, queue_max=4000)
    tenant = "\N{GRINNING FACE}" * 128
    driver.machine.check_invariants = lambda: None  # type: ignore[method-assign]
    for i in range(2000):
        driver.submit([i % 9], 3, tenant=tenant)
    reply = driver.ask(ListRequests(rid=driver.rid(), count_max=4000))
    assert reply.total == 2000
    assert 500 < len(reply.requests) < 2000


def test_a_block_that_thousands_hold_names_a_thousand_and_counts_all() -> None:
    driver = Wired(sequences_max=3000, bulk_max=4096, blocks_per_sequence_max=4)
    driver.machine.check_invariants = lambda: None  # type: ignore[method-assign]
    driver.add_worker(8)
    sequence = driver.create([1, 2, 3, 4])
    driver.fork(sequence, 2500)
    (block,) = driver.blocks_of(sequence)
    told = driver.block(block)
    assert (told.refcount, len(told.holders)) == (2501, sizes.HOLDERS_LISTED_MAX)
    sentences = driver.explain(block_id=block).sentences
    assert "and by 1501 more" in sentences


@pytest.mark.parametrize(
    ("field", "value"),
    [("tenants_max", 5_000), ("pools_max", 2_000), ("blocks_per_sequence_max", 1 << 20), ("step_tokens_max", 5 << 20)],
)
def test_limits_with_which_a_message_would_be_too_large_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        make_limits(**{field: value})
    assert caught.value.field.partition(".")[2] == field
    make_limits(
        sequences_max=4096, blocks_per_sequence_max=62_500, queue_max=8192, step_rows_max=4096, step_tokens_max=16384
    )


def test_statistics_of_as_many_tenants_and_pools_as_there_may_be_are_taken() -> None:
    most = codec.BODY_BYTES_MAX // 2 // sizes.TENANT_BYTES
    driver = Wired(tenants_max=most, queue_max=2000)
    driver.machine.check_invariants = lambda: None  # type: ignore[method-assign]
    for i in range(most):
        driver.submit([1], 1, tenant=f"{i:05}" + "\N{GRINNING FACE}" * 123)
    assert len(driver.stats().tenants) == most
    assert np.all([tenant.pending == 1 for tenant in driver.stats().tenants])
