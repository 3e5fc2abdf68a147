"""Requests of the blocking client, against a fake coordinator: options, samples, keys, attaching, time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq

from kvforge import (
    AlreadyFinished,
    AsyncClient,
    Client,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    KeyReused,
    ProtocolError,
    QueueFull,
    RequestNotFound,
    SamplingParams,
    WorkerError,
)
from tests.kvforge.fake_coordinator import Running


def test_waiting_until_it_is_ready(tmp_path: Path) -> None:
    seen: list[str] = []
    with Running(tmp_path, loads=True) as fake, Client(fake.endpoint) as kv:
        assert kv.wait_ready(timeout_s=10, progress=lambda health: seen.append(health.reason)).ready
    assert seen == ["no worker is ready: w0 is loading"] * 2 + [""]


def test_one_request_from_submit_to_result(fake: Running, kv: Client) -> None:
    request = kv.submit([1, 2, 3], max_tokens=4, sampling=SamplingParams(temperature=0.0, seed=9))
    assert request.seed == 9
    tokens = list(request)
    assert [(token.offset, token.token_id, token.logprob) for token in tokens] == [(i, 6 + i, -0.5) for i in range(4)]
    done = request.result(timeout_s=60)
    assert (done.tokens, done.reason, done.prompt_tokens, done.request_id) == ((6, 7, 8, 9), "length", 3, request.id)
    assert done.timings.first_token_us == 20
    assert list(request) == tokens
    assert kv.status(request.id, with_tokens=True).tokens.tolist() == [6, 7, 8, 9]
    assert kv.requests().requests[0].request_id == request.id
    assert kv.stats().pools[0].blocks == 64
    kv.drain()
    kv.close()
    fake.expect("Hello")
    fake.expect("Drain")
    fake.expect("Goodbye")


def test_tokens_of_one_request_wait_while_another_is_read(kv: Client) -> None:
    a, b, c = (kv.submit([start], max_tokens=5) for start in (10, 20, 30))
    assert b.result().tokens == (20, 21, 22, 23, 24)
    assert [token.token_id for token in a] == [10, 11, 12, 13, 14]
    assert c.result().tokens == (30, 31, 32, 33, 34)
    assert a.done


def test_merge_gives_every_token_with_its_request(kv: Client) -> None:
    requests = [kv.submit([start], max_tokens=count) for start, count in ((10, 3), (20, 5))]
    rows = [(request.id, token.token_id) for request, token in kv.merge(*requests)]
    for request in requests:
        assert tuple(token for owner, token in rows if owner == request.id) == request.result().tokens


@pytest.mark.parametrize("tenant", ["twice"])
def test_repeated_rows_are_read_once(kv: Client, tenant: str) -> None:
    assert kv.submit([5], max_tokens=4, tenant=tenant).result().tokens == (5, 6, 7, 8)


def test_errors_come_back_as_the_class_that_was_raised(kv: Client) -> None:
    with pytest.raises(QueueFull) as full:
        kv.submit([1], tenant="refused")
    assert (full.value.limit, full.value.retry_after_ms) == (4, 250)
    with pytest.raises(RequestNotFound) as missing:
        kv.status(12345)
    assert missing.value.request_id == 12345
    request = kv.submit([1], max_tokens=1)
    request.result()
    with pytest.raises(AlreadyFinished) as finished:
        kv.cancel(request.id)
    assert finished.value.fields == {"request_id": request.id, "state": "finished"}
    with pytest.raises(WorkerError, match="the worker broke"):
        kv.submit([1], max_tokens=2, tenant="fails").result()
    with pytest.raises(ProtocolError, match="answered Submit with Done"):
        kv.submit([1], tenant="odd")


def test_an_argument_that_is_wrong_is_never_sent(folder: Path) -> None:
    with Client(f"ipc://{folder}/nobody.sock") as kv, pytest.raises(InvalidRequest) as raised:
        kv.submit([1, -1])
    assert raised.value.field == "prompt"


def test_no_wait_is_so_long_that_a_signal_that_came_just_before_it_seems_lost(
    kv: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []

    def poll(_poller: zmq.Poller, timeout: int) -> list[object]:
        waits.append(timeout)
        if len(waits) == 100:
            raise KeyboardInterrupt
        return []

    request = kv.submit([1], max_tokens=9, tenant="hang")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zmq.Poller, "poll", poll)
        request.result()
    assert max(waits) <= 1000


def test_cancelling_ends_a_request_as_cancelled(kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="hang")
    tokens = iter(request)
    assert [next(tokens).token_id, next(tokens).token_id] == [1, 2]
    kv.cancel(request.id)
    done = request.result(timeout_s=60)
    assert (done.reason, done.tokens) == ("cancelled", (1, 2))
    assert list(tokens) == []


def test_a_result_that_does_not_come_can_be_waited_for_again(kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="hang")
    with pytest.raises(DeadlineExceeded, match=f"request {request.id} has not ended within 0.05 s"):
        request.result(timeout_s=0.05)
    assert not request.done
    kv.cancel(request.id)
    assert request.result(timeout_s=60).reason == "cancelled"


def test_options_are_sent_in_milliseconds_rounded_up(fake: Running, kv: Client) -> None:
    options: dict[str, Any] = {
        "priority": -5,
        "deadline_s": 1.1,
        "first_token_s": 0.0001,
        "idempotency_key": "a b",
        "detached": True,
    }
    request = kv.submit([1], max_tokens=1, **options)
    fake.expect("asked count=1 priority=-5 deadline_ms=1100 first_token_ms=1 detached=True key=a b")
    info = kv.status(request.id)
    assert (info.priority, info.detached) == (-5, True)
    kv.submit([1], max_tokens=1)
    fake.expect("asked count=1 priority=0 deadline_ms=0 first_token_ms=0 detached=False key=")
    kv.drain(0.25)
    fake.expect("deadline_ms=250")


WRONG_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("priority", {"priority": 101}),
    ("priority", {"priority": -101}),
    ("priority", {"priority": 1.0}),
    ("priority", {"priority": True}),
    ("deadline_s", {"deadline_s": 0}),
    ("deadline_s", {"deadline_s": float("nan")}),
    ("deadline_s", {"deadline_s": 31 * 24 * 3600}),
    ("first_token_s", {"first_token_s": -1.0}),
    ("first_token_s", {"first_token_s": "1"}),
    ("first_token_s", {"first_token_s": float("inf")}),
    ("retry_s", {"retry_s": False}),
    ("detached", {"detached": 1}),
    ("idempotency_key", {"idempotency_key": None}),
    ("idempotency_key", {"idempotency_key": "k" * 129}),
    ("idempotency_key", {"idempotency_key": "a\nb"}),
]


@pytest.mark.parametrize(("field", "options"), WRONG_OPTIONS)
def test_wrong_options_are_named_and_never_sent(folder: Path, field: str, options: dict[str, Any]) -> None:
    with Client(f"ipc://{folder}/nobody.sock") as kv:
        calls: list[Callable[[], object]] = [
            lambda: kv.submit([1], **options),
            lambda: kv.submit_samples([1], 2, **options),
            lambda: kv.generate("text", **options),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest) as raised:
                call()
            assert raised.value.field == field


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("n", lambda kv: kv.submit_samples([1], 0)),
        ("n", lambda kv: kv.submit_samples([1], 257)),
        ("n", lambda kv: kv.submit_samples([1], 2.0)),
        ("prompt", lambda kv: kv.submit_samples([], 2)),
        ("request_id", lambda kv: kv.attach(0)),
        ("request_id", lambda kv: kv.attach("7")),
        ("offset", lambda kv: kv.attach(7, -1)),
        ("offset", lambda kv: kv.attach(7, True)),
        ("deadline_s", lambda kv: kv.drain(0.0)),
    ],
)
def test_wrong_arguments_of_the_other_calls_are_named(folder: Path, field: str, call: Callable[[Any], Any]) -> None:
    with Client(f"ipc://{folder}/nobody.sock") as kv, pytest.raises(InvalidRequest) as raised:
        call(kv)
    assert raised.value.field == field

    async def main() -> None:
        async with AsyncClient(f"ipc://{folder}/nobody.sock") as nobody:
            with pytest.raises(InvalidRequest) as again:
                await call(nobody)
            assert again.value.field == field

    asyncio.run(main())


def test_samples_are_several_answers_to_one_prompt(fake: Running, kv: Client) -> None:
    requests = kv.submit_samples([1, 2], 3, max_tokens=2, sampling=SamplingParams(seed=40), priority=3)
    fake.expect("asked count=3 priority=3 deadline_ms=0 first_token_ms=0 detached=False key=")
    first = requests[0].id
    assert [(request.id, request.seed) for request in requests] == [(first + i, 40 + i) for i in range(3)]
    assert [request.result().tokens for request in requests] == [(3, 4)] * 3


def test_samples_whose_caller_gave_up_are_all_cancelled(fake: Running, kv: Client) -> None:
    kv.health()  # connected: only the samples use the tenth of a second
    with pytest.raises(DeadlineExceeded):
        kv.submit_samples([1], 2, tenant="late", timeout_s=0.1)
    kv.health()
    fake.expect("Cancel")
    fake.expect("Cancel")
    assert [row.reason for row in kv.requests().requests] == ["cancelled"] * 2


def test_a_coordinator_that_knows_no_samples(fake: Running, kv: Client) -> None:
    with pytest.raises(ProtocolError, match="started 1 requests for a Submit of 2"):
        kv.submit_samples([1], 2, tenant="old")
    fake.expect("Cancel")
    assert kv.submit([3], max_tokens=1).result().tokens == (3,)


def test_a_full_queue_is_tried_again_only_where_that_is_asked_for(fake: Running, kv: Client) -> None:
    with pytest.raises(QueueFull):
        kv.submit([1], tenant="busy")  # refuses twice
    assert kv.submit([1], max_tokens=1, tenant="busy", retry_s=20).result().tokens == (1,)
    with pytest.raises(QueueFull) as full:
        kv.submit_samples([1], 2, tenant="refused", retry_s=0.6)
    assert full.value.retry_after_ms == 250
    for _ in range(5):  # the original; its repetition; the first and a later try
        fake.expect("Submit")
    with pytest.raises(ProtocolError):
        kv.submit([1], tenant="odd", retry_s=20)  # only a full queue is retried


def test_another_client_reads_a_detached_request_on(fake: Running, kv: Client) -> None:
    with Client(fake.endpoint, timeout_s=60) as other:
        request = other.submit([10], max_tokens=9, tenant="hang", detached=True, sampling=SamplingParams(seed=3))
        left = other.submit([10], max_tokens=9, tenant="hang")
        for one in (request, left):
            assert len([token for _, token in zip(range(2), one, strict=False)]) == 2
    # Its goodbye uses another connection than the request.
    deadline = monotonic() + 10
    while kv.status(left.id).reason != "cancelled":
        assert monotonic() < deadline, "the other client's goodbye was not heard"
    again = kv.attach(request.id)
    assert (again.id, again.seed, again.start) == (request.id, 3, 0)
    assert next(iter(again)).token_id == 10
    rest = kv.attach(request.id, 1)  # the stream is already buffered
    token = next(iter(rest))
    assert (token.offset, token.token_id) == (1, 11)
    fake.expect("offset=0")
    kv.cancel(request.id)
    assert (again.result().tokens, rest.result().tokens, rest.tokens) == ((10, 11), (11,), (11,))


def test_a_request_that_ended_is_attached_to(fake: Running, kv: Client) -> None:
    request = kv.submit([10], max_tokens=4)
    request.result()
    late = kv.attach(request.id, 2)
    assert [(token.offset, token.token_id) for token in late] == [(2, 12), (3, 13)]
    done = late.result()
    assert (done.tokens, done.logprobs, done.reason) == ((12, 13), (-0.5, -0.5), "length")
    fake.expect("offset=2")
    with pytest.raises(InvalidRequest) as raised:
        late.text()
    assert raised.value.field == "offset"
    with pytest.raises(RequestNotFound):
        kv.attach(4242)


def test_a_request_that_another_connection_took_can_be_taken_back(fake: Running, kv: Client) -> None:
    request = kv.submit([10], max_tokens=9, tenant="hang")
    assert [token.token_id for _, token in zip(range(2), request, strict=False)] == [10, 11]
    with Client(fake.endpoint, timeout_s=60) as other:
        other.attach(request.id)
        with pytest.raises(Conflict, match="attach again to take it back"):
            request.result(timeout_s=60)
        assert request.tokens == (10, 11)
        back = kv.attach(request.id, len(request.tokens))
        kv.cancel(request.id)
        assert back.result().reason == "cancelled"


def test_a_stream_that_paused_goes_on_by_itself(fake: Running, kv: Client) -> None:
    request = kv.submit([10], max_tokens=7, tenant="slow")
    assert [token.token_id for token in request] == list(range(10, 17))
    fake.expect("offset=2")
    assert request.result().reason == "length"


def test_the_same_key_is_the_same_request(fake: Running, kv: Client) -> None:
    first = kv.submit([10], max_tokens=9, tenant="hang", idempotency_key="k")
    again = kv.submit([10], max_tokens=9, tenant="hang", idempotency_key="k")
    assert again.id == first.id
    with Client(fake.endpoint, timeout_s=60) as other:
        taken = other.submit([10], max_tokens=9, tenant="hang", idempotency_key="k")
        assert (taken.id, next(iter(taken)).token_id) == (first.id, 10)
        with pytest.raises(KeyReused) as reused:
            other.submit([11], max_tokens=9, tenant="hang", idempotency_key="k")
        assert (reused.value.key, reused.value.request_id) == ("k", first.id)
        with pytest.raises(Conflict):
            again.result(timeout_s=60)


def test_a_command_with_a_key_outlives_its_caller_and_one_without_does_not(fake: Running, kv: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        kv.submit([1], tenant="late", idempotency_key="k", timeout_s=0.1)
    kv.health()  # the answer arrives now
    again = kv.submit([1], tenant="late", idempotency_key="k")
    assert kv.status(again.id).reason == "late"  # the fake's reason: the request was not cancelled
    with pytest.raises(DeadlineExceeded):
        kv.submit([1], tenant="late", detached=True, timeout_s=0.1)
    kv.health()
    fake.expect("Cancel")
    assert kv.requests().requests[0].reason == "cancelled"


def test_no_token_within_the_streams_time(fake: Running) -> None:
    with Client(fake.endpoint, stream_timeout_s=0.2) as kv:
        request = kv.submit([1], max_tokens=9, tenant="hang")
        with pytest.raises(DeadlineExceeded, match="no token of request"):
            list(request)
        assert request.tokens == (1, 2)


def test_a_command_that_is_not_answered_in_time(kv: Client) -> None:
    with pytest.raises(DeadlineExceeded, match=r"did not answer Submit within 0.1 s"):
        kv.submit([1], tenant="silent", timeout_s=0.1)
    assert kv.submit([1], max_tokens=1).result().tokens == (1,)


def test_a_request_accepted_too_late_is_cancelled(fake: Running, kv: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        kv.submit([1], tenant="late", timeout_s=0.1)
    kv.health()
    fake.expect("Cancel")
    assert kv.requests().requests[0].reason == "cancelled"
