"""Attaching to a request at any offset, losing its stream to another connection, and slow consumers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvforge.protocol.errors import Conflict, InvalidRequest, RequestNotFound
from kvforge.protocol.messages import FinishAt, SamplingParams, Stream
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation, logprob_of
from tests.coordinator.test_sampling import TopDriver, top_logprobs_of, with_tops

PROMPT = [3, 1, 4, 1, 5]
ANSWER = continuation(PROMPT, 12)
TOPS = dict.fromkeys(range(16), 2)


def finish_at(driver: Driver, request: int, tokens: int) -> None:
    driver.ask(FinishAt(rid=driver.rid(), request_id=request, tokens=tokens))


def read(driver: Driver, client: int, request: int) -> list[tuple[int, int]]:
    """(offset, token) pairs that the client received since its last attach."""
    return list(driver.tokens_read(client, request).items())


def answer_from(offset: int, count: int = 12) -> list[tuple[int, int]]:
    return list(enumerate(continuation(PROMPT, count)))[offset:]


def in_state(state: str, stream: bool = True, **fields: Any) -> tuple[TopDriver, int]:
    """A request of client 1 with two top log-probabilities, in the given state: (driver, request)."""
    driver = TopDriver(steps_in_flight_max=1, **fields)
    worker = driver.add_worker(32) if state != "pending" else None
    sampling = SamplingParams(temperature=0.0, seed=1, logprobs=2)
    request = driver.submit(PROMPT, max_tokens=12, stream=stream, sampling=sampling)
    if worker is not None:
        for _ in range(20 if state == "finished" else 5):
            driver.step_with_tops(TOPS)
        driver.turn()
        if state == "preempted":
            driver.lose(worker)
    assert driver.request(request).state == state
    return driver, request


def run(driver: TopDriver) -> None:
    """Run until everything has ended, with top log-probabilities."""
    for worker in driver.workers:
        while worker.inbox:
            driver.report(worker, with_tops(worker.execute(worker.inbox.popleft()), TOPS, False))
    for _ in range(40):
        driver.step_with_tops(TOPS)
    assert not driver.machine.busy
    driver.turn()


# ------------------------------------------------------------------------------------------------------------- attach


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("client", [1, 2])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("state", ["pending", "running", "preempted", "finished"])
def test_rows_from_the_offset_come_exactly_once_with_all_that_is_known_of_them(
    state: str, offset: int, client: int, stream: bool
) -> None:
    offset = 0 if state == "pending" else offset
    driver, request = in_state(state, stream)
    driver.tops.clear()
    reply = driver.attach(request, offset, client)
    assert reply.seed == 1
    if state in ("pending", "preempted"):
        driver.add_worker(32)
    run(driver)
    assert read(driver, client, request) == answer_from(offset)
    assert [logprob for _, logprob in driver.read[client, request].values()] == list(map(logprob_of, ANSWER[offset:]))
    assert driver.tops[request] == top_logprobs_of(ANSWER[offset:], 2)
    assert (driver.ended[request].reason, driver.ended[request].generated_tokens) == ("length", 12)
    assert driver.notices == ([(1, "taken", request)] if client == 2 else [])


def test_an_attach_in_the_turn_in_which_tokens_came_repeats_none(make_pool: MakePool) -> None:
    driver, worker = make_pool(steps_in_flight_max=1)
    other = driver.submit([8, 8], max_tokens=12)
    request = driver.submit(PROMPT, max_tokens=12)
    driver.step()
    driver.step()  # two tokens; the next turn streams the second
    driver.attach(request, 1)
    driver.turn()
    assert read(driver, 1, request) == answer_from(1, 2)
    assert driver.streamed[other] == continuation([8, 8], 2)
    driver.answer(worker)
    driver.attach(request, 0, client=2)
    driver.attach(request, 3, client=1)
    driver.turn()
    assert read(driver, 1, request) == []
    assert driver.streamed[other] == continuation([8, 8], 3)
    assert driver.notices == [(2, "taken", request)]
    driver.run_until_idle()
    assert read(driver, 1, request) == answer_from(3)


def test_an_attach_in_the_turn_in_which_the_request_ended_is_told_one_end() -> None:
    driver, request = in_state("running")
    driver.attach(request)
    while driver.request(request).state == "running":
        for worker in driver.workers:
            while worker.inbox:
                driver.report(worker, with_tops(worker.execute(worker.inbox.popleft()), TOPS, False))
        if driver.request(request).state == "running":
            driver.turn()
    driver.attach(request, 10)
    driver.turn()
    assert read(driver, 1, request) == answer_from(10)
    assert driver.ended[request].generated_tokens == 12


# behaviour 27
@pytest.mark.parametrize("state", ["pending", "running", "preempted", "finished"])
def test_an_offset_beyond_what_was_generated_is_refused(state: str) -> None:
    driver, request = in_state(state)
    generated = driver.request(request).generated_tokens
    assert generated == {"pending": 0, "finished": 12}.get(state, 5)
    for wrong in (-1, generated + 1, 1 << 40):
        for client in (1, 2):
            error = driver.refused(driver.attach_message(request, wrong), InvalidRequest, client)
            assert error.field == "offset"
    driver.attach(request, generated)
    assert driver.refused(driver.attach_message(77), RequestNotFound).request_id == 77


def test_the_one_whose_stream_was_taken_is_told_so_after_what_it_still_gets(make_pool: MakePool) -> None:
    driver, worker = make_pool(steps_in_flight_max=1)
    request = driver.submit(PROMPT, max_tokens=12)
    driver.step()
    driver.step()
    driver.attach(request, 0, client=2)
    driver.turn()
    assert driver.notices == [(1, "taken", request)]
    assert read(driver, 1, request) == answer_from(0, 2)
    assert read(driver, 2, request) == answer_from(0, 2)
    driver.answer(worker)
    driver.gone(1, goodbye=True)  # the request belongs to another client now
    driver.run_until_idle()
    assert read(driver, 2, request) == answer_from(0)
    assert driver.request(request).state == "finished"


# ------------------------------------------------------------------------------------------------------ slow consumers


def three_readers() -> tuple[Driver, int, int, int]:
    """Two requests of client 1 and one of client 2, a few tokens in: (driver, request, request, request)."""
    driver = Driver(steps_in_flight_max=1)
    driver.add_worker(32)
    one, other = driver.submit(PROMPT, max_tokens=12), driver.submit([8, 8], max_tokens=12, stream=False)
    theirs = driver.submit([9, 9], max_tokens=12, client=2)
    for _ in range(3):
        driver.step()
    return driver, one, other, theirs


def test_what_a_full_client_lost_is_paused_and_nothing_else(make_pool: MakePool) -> None:
    driver, one, other, theirs = three_readers()
    driver.full.add(1)
    driver.turn()
    driver.full.clear()
    assert driver.wake_us() == 50_000  # the stream is retried without any event
    assert driver.streamed[one] == ANSWER[:2]
    driver.turn()
    assert driver.notices == [(1, "paused", one)]
    for _ in range(2):
        driver.step()
    assert driver.streamed[one] == ANSWER[:2]
    driver.attach(one, 2)
    driver.run_until_idle()
    assert read(driver, 1, one) == answer_from(2)
    assert driver.streamed[other] == continuation([8, 8], 12)
    assert driver.streamed[theirs] == continuation([9, 9], 12)
    assert driver.notices == [(1, "paused", one)]
    assert driver.stats().requests.streams_paused_total == 1
    assert set(driver.ended) == {one, other, theirs}


def test_a_client_that_stays_full_is_told_when_it_reads_again() -> None:
    driver, one, other, theirs = three_readers()
    driver.full.add(1)
    driver.run_until_idle()
    for _ in range(3):
        driver.turn()
    assert driver.notices == []
    assert set(driver.ended) == {theirs}
    assert driver.streamed[theirs] == continuation([9, 9], 12)
    assert driver.stats().requests.streams_paused_total == 2
    driver.full.clear()
    driver.turn()
    assert driver.notices == [(1, "paused", one), (1, "paused", other)]
    driver.turn()
    assert driver.notices == [(1, "paused", one), (1, "paused", other)]
    assert set(driver.ended) == {theirs}
    driver.attach(one, 2)
    driver.attach(other, 0)
    driver.turn()
    assert read(driver, 1, one) == answer_from(2)
    assert list(driver.tokens_read(1, other).values()) == continuation([8, 8], 12)
    assert driver.ended[one].generated_tokens == driver.ended[other].generated_tokens == 12
    assert driver.nothing_due()


@pytest.mark.parametrize("how", ["cancelled", "failed", "expired", "stop"])
def test_an_end_while_paused_is_told_only_after_the_attach(how: str) -> None:
    driver, one, _, _ = three_readers()
    driver.full.add(1)
    driver.turn()
    driver.full.clear()
    driver.turn()
    generated = len(driver.answer_of(one))
    if how == "cancelled":
        driver.cancel(one)
    elif how == "expired":
        driver.advance(86_400_000_000)
    elif how == "failed":
        driver.workers[0].poison = set(ANSWER)
    else:
        finish_at(driver, one, 1)
    driver.step()
    driver.step()
    driver.turn()
    assert one not in driver.ended
    kept = 1 if how == "stop" else driver.request(one).generated_tokens
    assert kept >= 1
    driver.attach(one, 2)
    driver.turn()
    assert driver.ended[one].reason == how
    assert driver.ended[one].generated_tokens == kept
    assert driver.ended[one].cut_tokens == (1 if how == "stop" else 0)
    assert read(driver, 1, one) == answer_from(2, kept if how != "stop" else 0)
    assert generated >= 2


def test_who_lost_the_news_that_a_stream_was_taken_is_told_again() -> None:
    driver, one, _, _ = three_readers()
    driver.full.add(1)
    driver.attach(one, 0, client=2)
    driver.turn()
    driver.turn()
    assert driver.notices == []
    driver.full.clear()
    driver.turn()
    assert (1, "taken", one) in driver.notices
    assert driver.notices.count((1, "taken", one)) == 1
    driver.run_until_idle()
    assert read(driver, 2, one) == answer_from(0)
    assert driver.notices.count((1, "taken", one)) == 1


def test_who_takes_a_stream_back_is_not_told_late_that_it_was_taken() -> None:
    driver, one, _, _ = three_readers()
    driver.full.add(1)
    driver.attach(one, 0, client=2)
    driver.turn()
    driver.attach(one, 2, client=1)
    driver.full.clear()
    driver.run_until_idle()
    assert driver.notices == [(2, "taken", one)]
    assert read(driver, 1, one) == answer_from(2)


def test_a_full_client_that_goes_leaves_nothing_to_be_told(make_pool: MakePool) -> None:
    driver, one, _, theirs = three_readers()
    driver.full.add(1)
    driver.turn()
    driver.gone(1)
    assert driver.machine.streams.due_us is None
    driver.run_until_idle()
    assert driver.notices == []
    assert driver.streamed[theirs] == continuation([9, 9], 12)
    driver.attach(one, 0, client=3)
    driver.turn()
    assert driver.ended[one].reason == "cancelled"  # no lease


def test_a_paused_request_that_is_preempted_stays_paused() -> None:
    driver, one, _, _ = three_readers()
    driver.full.add(1)
    driver.turn()
    driver.full.clear()
    driver.turn()
    driver.lose(driver.workers[0])
    driver.add_worker(32)
    driver.run_until_idle()
    assert driver.streamed[one] == ANSWER[:2]
    driver.attach(one, 0)
    driver.turn()
    assert read(driver, 1, one) == answer_from(0)


@pytest.mark.parametrize("ended", [False, True])
def test_going_on_with_a_stream_does_not_take_it_back_from_who_reads_it_now(ended: bool) -> None:
    driver, one, _, _ = three_readers()
    driver.full.add(1)
    driver.turn()
    driver.full.clear()
    driver.turn()
    resume = msgspec.structs.replace(driver.attach_message(one, 2), resume=True)
    driver.ask(resume)
    driver.turn()
    assert read(driver, 1, one) == answer_from(2, 3)
    driver.attach(one, 0, client=2)
    if ended:
        driver.run_until_idle()
    assert driver.refused(resume, Conflict, 1).fields["request_id"] == one
    driver.run_until_idle()
    assert read(driver, 2, one) == answer_from(0)
    assert driver.notices == [(1, "paused", one), (1, "taken", one)]


# ------------------------------------------------------------------------------------------------------ with FinishAt


@pytest.mark.parametrize("offset", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("stream", [True, False])
def test_who_holds_more_than_a_finish_left_is_told_how_many_do_not_count(offset: int, stream: bool) -> None:
    driver, request = in_state("running", stream)
    assert driver.request(request).generated_tokens == 5
    finish_at(driver, request, 3)
    for client in (1, 2):
        driver.attach(request, offset, client)
        driver.turn()
        assert read(driver, client, request) == answer_from(offset, 3)
        assert driver.ended[request].generated_tokens == 3
        assert driver.ended[request].cut_tokens == max(0, offset - 3)
    assert driver.refused(driver.attach_message(request, 6), InvalidRequest).field == "offset"


def test_who_attached_and_then_finishes_early_is_told_what_it_holds_too_many() -> None:
    driver, request = in_state("running", stream=False)
    driver.attach(request, 4)
    finish_at(driver, request, 2)
    driver.turn()
    assert read(driver, 1, request) == answer_from(4, 5)
    assert (driver.ended[request].generated_tokens, driver.ended[request].cut_tokens) == (2, 3)


def test_nothing_is_streamed_of_a_request_whose_reader_is_gone() -> None:
    driver, request = in_state("running", lease_us=1_000_000)
    driver.gone(1)
    streams = [e for e in driver.turn() if isinstance(getattr(e, "message", None), Stream)]
    assert streams == []
    driver.attach(request, 5, client=2)
    run(driver)
    assert read(driver, 2, request) == answer_from(5)
