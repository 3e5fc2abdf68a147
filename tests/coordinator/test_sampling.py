"""Sampling in the core: refusals, what workers receive, top log-probabilities, and FinishAt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.journal import snapshot
from kvforge.protocol.errors import AlreadyFinished, InvalidRequest, RequestNotFound
from kvforge.protocol.messages import (
    GRAMMAR_BYTES_MAX,
    NO_INT32,
    FinishAt,
    Grammar,
    RowStart,
    SamplingParams,
    Step,
    StepResult,
    Stream,
)
from tests.coordinator.driver import GREEDY, VOCABULARY, Driver, FakeWorker, continuation, int32
from tests.coordinator.journal.files import head_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
Pairs = tuple[tuple[int, float], ...]


@pytest.fixture
def plain() -> Driver:
    """Return a driver without drafts: they would need the latest tokens of each request too."""
    return Driver(drafts_max=0)


class TopDriver(Driver):
    """A driver that records the top columns of streams per request."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.tops: dict[int, list[Pairs]] = {}

    def _stream(self, message: Stream) -> None:
        super()._stream(message)
        counts = message.top_counts.tolist() or [0] * message.tokens.size
        assert len(counts) == message.tokens.size
        pairs = list(zip(message.top_tokens.tolist(), message.top_logprobs.tolist(), strict=True))
        for request, count in zip(message.request_ids.tolist(), counts, strict=True):
            self.tops.setdefault(request, []).append(tuple(pairs[:count]))
            pairs = pairs[count:]
        assert not pairs

    def step_with_tops(self, width: dict[int, int], shuffled: bool = False) -> None:
        """Run one turn; workers report `width[slot]` tops per row: token t gives (t, 0), (t + 1, -1), ..."""
        self.turn()
        for worker in list(self.workers):
            while worker.inbox:
                self.report(worker, with_tops(worker.execute(worker.inbox.popleft()), width, shuffled))


def with_tops(result: StepResult, width: dict[int, int], shuffled: bool) -> StepResult:
    order = np.arange(result.slots.size)[:: -1 if shuffled else 1]
    slots, tokens = result.slots[order], result.tokens[order]
    counts = [width.get(slot, 0) for slot in slots.tolist()]
    offsets = np.concatenate([np.arange(count) for count in counts] or [NO_INT32])
    return msgspec.structs.replace(
        result,
        slots=slots,
        tokens=tokens,
        logprobs=result.logprobs[order],
        top_counts=int32(counts),
        top_tokens=((np.repeat(tokens, counts) + offsets) % VOCABULARY).astype(np.int32),
        top_logprobs=-offsets.astype(np.float32),
    )


def top_logprobs_of(tokens: list[int], width: int) -> list[Pairs]:
    return [tuple(((token + i) % VOCABULARY, float(-i)) for i in range(width)) for token in tokens]


def started(worker: FakeWorker) -> list[tuple[RowStart, list[int], list[int]]]:
    """Each start that the worker received, with the history of its prompt and its answer."""
    found = []
    for step in worker.steps:
        history = step.history.tolist()
        for begin in step.begins:
            prompt, answer = begin.prompt_history, begin.generated_history
            found.append((begin, history[:prompt], history[prompt : prompt + answer]))
            history = history[prompt + answer :]
        assert not history
    return found


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_k", (-1, 1 << 31)),
        ("top_p", (0.0, -0.1, 1.01, math.nan)),
        ("min_p", (-0.1, 1.1, math.nan)),
        ("repetition_penalty", (0.0, -1.0, 101.0, math.inf, math.nan)),
        ("presence_penalty", (-2.1, 2.1, math.nan)),
        ("frequency_penalty", (-2.1, 2.1, -math.inf)),
        ("logprobs", (-1, 21)),
        (
            "logit_bias",
            (
                ((-1, 0.0),),
                ((VOCABULARY, 0.0),),
                ((1, 100.5),),
                ((1, math.inf),),
                ((1, math.nan),),
                ((1, 0.0), (1, 1.0)),
                tuple((i % VOCABULARY, 0.0) for i in range(301)),
            ),
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, values: tuple[Any, ...], driver: Driver) -> None:
    driver.add_worker(16)
    for value in values:
        error = driver.refused(driver.submit_message([1], sampling=SamplingParams(**{field: value})), InvalidRequest)
        assert error.field == f"sampling.{field}"


def test_a_grammar_that_is_too_large_or_could_not_end_is_refused(driver: Driver) -> None:
    driver.add_worker(16)
    large = Grammar(kind="regex", text="ä" * (GRAMMAR_BYTES_MAX // 2 + 1))
    for field, sampling in (
        ("grammar", SamplingParams(grammar=large)),
        ("ignore_eos", SamplingParams(grammar=Grammar(kind="json_object"), ignore_eos=True)),
    ):
        error = driver.refused(driver.submit_message([1], sampling=sampling), InvalidRequest)
        assert error.field == f"sampling.{field}"
    driver.submit([1], sampling=SamplingParams(grammar=Grammar(kind="regex", text="a" * GRAMMAR_BYTES_MAX)))
    driver.run_until_idle()


def test_the_edges_of_each_range_are_accepted(driver: Driver) -> None:
    driver.add_worker(16)
    for fields in (
        {"top_k": (1 << 31) - 1, "top_p": 1e-9, "min_p": 1.0, "logprobs": 20},
        {"repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 100.0, "logit_bias": ((0, -math.inf), (VOCABULARY - 1, 100.0))},
    ):
        driver.submit([1], sampling=SamplingParams(**fields))  # type: ignore[arg-type]
    driver.run_until_idle()
    assert driver.stats().requests.finished_total == 3


def test_a_bias_is_held_to_the_vocabulary_once_it_is_known(driver: Driver) -> None:
    bad = driver.submit([1], sampling=SamplingParams(logit_bias=((VOCABULARY, 1.0),)))
    good = driver.submit([1], sampling=SamplingParams(logit_bias=((VOCABULARY - 1, 1.0),)))
    driver.add_worker(16)
    driver.run_until_idle()
    assert (driver.ended[bad].reason, driver.ended[good].reason) == ("failed", "length")
    assert driver.ended[bad].error is not None
    assert driver.ended[bad].error.fields["field"] == "sampling.logit_bias"


# ------------------------------------------------------------------------------------------------ sent to workers


def test_a_row_starts_with_all_that_choosing_needs(plain: Driver) -> None:
    driver = plain
    worker = driver.add_worker(32)
    wide = SamplingParams(temperature=0.5, seed=9, stop_tokens=(7,), ignore_eos=True, top_k=5, min_p=0.1, logprobs=2)
    penal = SamplingParams(seed=1, presence_penalty=1.0)
    repeat = SamplingParams(seed=1, repetition_penalty=1.5)
    for sampling in (wide, penal, repeat):
        driver.submit(PROMPT, sampling=sampling)
    driver.run_until_idle()
    starts = {begin.request_id: (begin, prompt, answer) for begin, prompt, answer in started(worker)}
    begin, *history = starts[1]
    assert begin.sampling == SamplingParams(temperature=0.5, top_k=5, min_p=0.1, logprobs=2)
    assert (begin.seed, begin.generated, history) == (9, 0, [[], []])
    assert starts[2][1:] == ([], [])  # only the answer counts, and it is still empty
    assert starts[3][1:] == (PROMPT, [])


def test_a_grammar_goes_with_its_request_to_another_worker_with_the_answer_so_far(plain: Driver) -> None:
    driver = plain
    first = driver.add_worker(32)
    grammar = Grammar(kind="regex", text="[a-z]+")
    request = driver.submit(PROMPT, max_tokens=12, sampling=SamplingParams(seed=1, grammar=grammar))
    for _ in range(3):
        driver.step()
    known = driver.answer_of(request)
    assert known
    driver.lose(first)
    second = driver.add_worker(32)
    driver.run_until_idle()
    for worker, answer in ((first, []), (second, known)):
        begin, prompt, told = started(worker)[0]
        assert (begin.sampling.grammar, begin.generated, prompt, told) == (grammar, len(answer), [], answer)
    assert driver.streamed[request] == continuation(PROMPT, 12)


def test_a_grammar_is_in_a_snapshot(driver: Driver, tmp_path: Path) -> None:
    driver.add_worker(32)
    grammar = Grammar(kind="lark", text='start: "ä"')
    request = driver.submit(PROMPT, max_tokens=12, sampling=SamplingParams(seed=1, grammar=grammar))
    driver.step()
    path = tmp_path / "state"
    snapshot.write(path, driver.machine, head_of(1))
    found = snapshot.Snapshot(path).machine().requests.live[request].sampling
    assert found == driver.machine.requests.live[request].sampling and found.grammar == grammar


def test_history_comes_with_a_prefix_hit_and_after_a_preemption(plain: Driver) -> None:
    driver = plain
    first = driver.add_worker(32)
    sampling = SamplingParams(seed=1, repetition_penalty=1.5, frequency_penalty=0.5)
    driver.submit(PROMPT, max_tokens=2)
    driver.run_until_idle()
    request = driver.submit(PROMPT, max_tokens=12, sampling=sampling)
    other = driver.submit(PROMPT, max_tokens=12, sampling=SamplingParams(seed=2, presence_penalty=0.5))
    for _ in range(3):
        driver.step()
    assert driver.request(request).cached_tokens > 0
    assert started(first)[1][1:] == (PROMPT, [])
    known = driver.answer_of(request), driver.answer_of(other)
    assert known[0]
    driver.lose(first)
    second = driver.add_worker(32)
    driver.run_until_idle()
    starts = {begin.request_id: (begin.generated, prompt, answer) for begin, prompt, answer in started(second)}
    assert starts[request] == (len(known[0]), PROMPT, known[0])
    assert starts[other] == (len(known[1]), [], known[1])
    assert driver.streamed[request] == continuation(PROMPT, 12)


# ---------------------------------------------------------------------------------------------- top log-probabilities


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_tops_follow_their_tokens_and_survive_a_preemption(stream: bool, shuffled: bool) -> None:
    driver = TopDriver()
    worker = driver.add_worker(32)
    asking = driver.submit(PROMPT, max_tokens=6, sampling=SamplingParams(seed=1, logprobs=3), stream=stream)
    plain = driver.submit([1, 2], max_tokens=6)
    one = driver.submit([5], max_tokens=6, sampling=SamplingParams(seed=1, logprobs=1))
    everybody = dict.fromkeys(range(16), 3)  # more than some requests asked for
    for _ in range(2):
        driver.step_with_tops(everybody, shuffled)
    driver.lose(worker)
    driver.add_worker(32)
    for _ in range(12):
        driver.step_with_tops(everybody, shuffled)
    assert not driver.machine.busy
    driver.turn()
    answers = {request: driver.streamed[request] for request in (asking, plain, one)}
    assert answers[asking] == continuation(PROMPT, 6)
    assert driver.tops[asking] == top_logprobs_of(answers[asking], 3)
    assert driver.tops[plain] == [()] * 6
    record = driver.machine.requests.finished[one].tops
    assert record is not None
    assert record.top_logprobs().counts.tolist() == [1] * 6


def test_a_worker_that_sends_no_tops_leaves_them_out() -> None:
    driver = TopDriver()
    driver.add_worker(32)
    request = driver.submit(PROMPT, max_tokens=3, sampling=SamplingParams(seed=1, logprobs=3), stream=False)
    driver.run_until_idle()
    assert driver.tops[request] == [()] * 3


@pytest.mark.parametrize(
    "columns",
    [
        {"top_counts": int32([1, 1])},
        {"top_counts": int32([2])},
        {"top_counts": int32([-1])},
        {"top_counts": int32([21]), "top_tokens": int32([1] * 21), "top_logprobs": np.zeros(21, np.float32)},
        {"top_counts": int32([1]), "top_tokens": int32([VOCABULARY]), "top_logprobs": np.zeros(1, np.float32)},
        {"top_counts": int32([1]), "top_tokens": int32([-1]), "top_logprobs": np.zeros(1, np.float32)},
        {"top_counts": int32([1]), "top_tokens": int32([1])},
        {"top_tokens": int32([1])},
    ],
)
def test_top_columns_that_do_not_fit_end_the_worker(columns: dict[str, Any], driver: Driver) -> None:
    worker = driver.add_worker(16)
    driver.submit([1, 2], max_tokens=3, sampling=SamplingParams(seed=1, logprobs=2))
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    driver.report(worker, msgspec.structs.replace(result, **columns))
    assert "top" in worker.dropped


# ------------------------------------------------------------------------------------------------------------- FinishAt


def finish(driver: Driver, request: int, tokens: int) -> Any:
    return driver.ask(FinishAt(rid=driver.rid(), request_id=request, tokens=tokens))


def refuse(driver: Driver, request: int, tokens: int, error: Any) -> Any:
    return driver.refused(FinishAt(rid=driver.rid(), request_id=request, tokens=tokens), error)


@pytest.mark.parametrize("stream", [True, False])
def test_finish_at_cuts_the_answer_and_gives_everything_back(stream: bool) -> None:
    driver = TopDriver()
    driver.add_worker(32)
    request = driver.submit(PROMPT, max_tokens=20, sampling=SamplingParams(seed=1, logprobs=2), stream=stream)
    for _ in range(6):
        driver.step_with_tops(dict.fromkeys(range(16), 2))
    generated = len(driver.answer_of(request))
    assert generated > 4
    for wrong in (0, -1, generated + 1):
        assert refuse(driver, request, wrong, InvalidRequest).field == "tokens"
    driver.turn()  # a step is in flight, and its token comes too late
    finish(driver, request, 4)
    finish(driver, request, 4)
    refuse(driver, request, 3, AlreadyFinished)
    driver.run_until_idle()
    expected = continuation(PROMPT, 4)
    info, ended = driver.request(request), driver.ended[request]
    assert (info.state, info.reason, info.tokens.tolist()) == ("finished", "stop", expected)
    assert (ended.reason, ended.generated_tokens) == ("stop", 4)
    assert ended.generated_tokens + ended.cut_tokens == len(driver.streamed[request]) == (generated if stream else 4)
    assert driver.streamed[request][:4] == expected
    assert driver.tops[request][:4] == top_logprobs_of(expected, 2)
    record = driver.machine.requests.finished[request].tops
    assert record is not None
    assert record.top_logprobs().counts.tolist() == [2] * 4
    assert driver.free_or_cached() == 32


def test_finish_at_of_a_preempted_request(driver: Driver) -> None:
    worker = driver.add_worker(32)
    request = driver.submit(PROMPT, max_tokens=20)
    for _ in range(5):
        driver.step()
    driver.lose(worker)
    assert driver.request(request).state == "preempted"
    finish(driver, request, 2)
    driver.turn()
    assert driver.answer_of(request) == continuation(PROMPT, 2)
    assert driver.ended[request].reason == "stop"
    assert not driver.machine.busy


def test_finish_at_of_requests_that_cannot_be(driver: Driver) -> None:
    refuse(driver, 77, 1, RequestNotFound)
    pending = driver.submit(PROMPT)
    assert refuse(driver, pending, 1, InvalidRequest).field == "tokens"
    driver.cancel(pending)
    refuse(driver, pending, 1, AlreadyFinished)
    driver.add_worker(16)
    done = driver.submit(PROMPT, max_tokens=3)
    driver.run_until_idle()
    refuse(driver, done, 3, AlreadyFinished)  # it ended by its length, not by a stop
    stops = SamplingParams(temperature=0.0, seed=1, stop_tokens=(continuation(PROMPT, 2)[1],))
    stopped = driver.submit(PROMPT, max_tokens=5, sampling=stops)
    driver.run_until_idle()
    finish(driver, stopped, 2)
    refuse(driver, stopped, 1, AlreadyFinished)


def test_a_client_sequence_keeps_what_was_generated(driver: Driver) -> None:
    driver.add_worker(32)
    sequence = driver.create(PROMPT, idle_ttl_ms=60_000)
    request = driver.submit(sequence_id=sequence, max_tokens=20, sampling=GREEDY)
    for _ in range(6):
        driver.step()
    generated = driver.answer_of(request)
    finish(driver, request, 2)
    driver.run_until_idle()
    assert driver.answer_of(request) == generated[:2]
    assert driver.tokens(sequence) == PROMPT + generated
    again = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(again) == continuation(PROMPT, len(generated) + 3)[-3:]


def test_steps_without_starts_carry_no_history(driver: Driver) -> None:
    worker = driver.add_worker(32)
    driver.submit(PROMPT, max_tokens=8, sampling=SamplingParams(seed=1, repetition_penalty=2.0))
    driver.run_until_idle()
    steps: list[Step] = worker.steps
    assert [step.history.size for step in steps] == [len(PROMPT)] + [0] * (len(steps) - 1)
