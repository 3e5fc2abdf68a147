"""Both clients against a fake coordinator: real sockets, scripted answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

import kvforge
from kvforge import (
    AlreadyFinished,
    AsyncClient,
    Client,
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidRequest,
    KeyReused,
    ProtocolError,
    QueueFull,
    RequestNotFound,
    Sampling,
    VersionMismatch,
    WorkerError,
)
from kvforge.client.blocking.waiting import drive
from kvforge.protocol import errors
from tests.kvforge.fake_coordinator import Running


def test_one_request_from_submit_to_result(fake: Running, kv: Client) -> None:
    seen: list[str] = []
    health = kv.wait_ready(timeout_s=10, progress=lambda health: seen.append(health.reason))
    assert health.ready
    assert seen == ["no worker is ready: w0 is loading"] * 2 + [""]
    request = kv.submit([1, 2, 3], max_tokens=4, sampling=Sampling(temperature=0.0, seed=9))
    assert request.seed == 9
    tokens = list(request)
    assert [(token.offset, token.token_id, token.logprob) for token in tokens] == [(i, 6 + i, -0.5) for i in range(4)]
    done = request.result(timeout_s=1)
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
    done = request.result(timeout_s=5)
    assert (done.reason, done.tokens) == ("cancelled", (1, 2))
    assert list(tokens) == []


def test_a_result_that_does_not_come_can_be_waited_for_again(kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="hang")
    with pytest.raises(DeadlineExceeded, match=f"request {request.id} has not ended within 0.05 s"):
        request.result(timeout_s=0.05)
    assert not request.done
    kv.cancel(request.id)
    assert request.result(timeout_s=5).reason == "cancelled"


def test_options_are_sent_in_milliseconds_rounded_up(fake: Running, kv: Client) -> None:
    options: dict[str, Any] = {
        "priority": -5,
        "deadline_s": 1.1,
        "first_token_s": 0.0001,
        "key": "a b",
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
    ("key", {"key": None}),
    ("key", {"key": "k" * 129}),
    ("key", {"key": "a\nb"}),
]


@pytest.mark.parametrize(("field", "options"), WRONG_OPTIONS)
def test_wrong_options_are_named_and_never_sent(folder: Path, field: str, options: dict[str, Any]) -> None:
    with Client(f"ipc://{folder}/nobody.sock") as kv:
        calls: list[Callable[[], object]] = [
            lambda: kv.submit([1], **options),
            lambda: kv.samples([1], 2, **options),
            lambda: kv.generate("text", **options),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest) as raised:
                call()
            assert raised.value.field == field


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("count", lambda kv: kv.samples([1], 0)),
        ("count", lambda kv: kv.samples([1], 257)),
        ("count", lambda kv: kv.samples([1], 2.0)),
        ("prompt", lambda kv: kv.samples([], 2)),
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
    requests = kv.samples([1, 2], 3, max_tokens=2, sampling=Sampling(seed=40), priority=3)
    fake.expect("asked count=3 priority=3 deadline_ms=0 first_token_ms=0 detached=False key=")
    first = requests[0].id
    assert [(request.id, request.seed) for request in requests] == [(first + i, 40 + i) for i in range(3)]
    assert [request.result().tokens for request in requests] == [(3, 4)] * 3


def test_samples_whose_caller_gave_up_are_all_cancelled(fake: Running, kv: Client) -> None:
    kv.health()  # connected: the tenth of a second is for the samples alone
    with pytest.raises(DeadlineExceeded):
        kv.samples([1], 2, tenant="late", timeout_s=0.1)
    kv.health()
    fake.expect("Cancel")
    fake.expect("Cancel")
    assert [row.reason for row in kv.requests().requests] == ["cancelled"] * 2


def test_a_coordinator_that_knows_no_samples(fake: Running, kv: Client) -> None:
    with pytest.raises(ProtocolError, match="started 1 requests for a Submit of 2"):
        kv.samples([1], 2, tenant="old")
    fake.expect("Cancel")
    assert kv.submit([3], max_tokens=1).result().tokens == (3,)


def test_a_full_queue_is_tried_again_only_where_that_is_asked_for(fake: Running, kv: Client) -> None:
    with pytest.raises(QueueFull):
        kv.submit([1], tenant="busy")  # refuses twice
    assert kv.submit([1], max_tokens=1, tenant="busy", retry_s=20).result().tokens == (1,)
    with pytest.raises(QueueFull) as full:
        kv.samples([1], 2, tenant="refused", retry_s=0.6)
    assert full.value.retry_after_ms == 250
    for _ in range(5):  # one; one and its repetition; the first and a later try
        fake.expect("Submit")
    with pytest.raises(ProtocolError):
        kv.submit([1], tenant="odd", retry_s=20)  # only a full queue is worth another try


def test_another_client_reads_a_detached_request_on(fake: Running, kv: Client) -> None:
    with Client(fake.endpoint, timeout_s=5) as other:
        request = other.submit([10], max_tokens=9, tenant="hang", detached=True, sampling=Sampling(seed=3))
        left = other.submit([10], max_tokens=9, tenant="hang")
        for one in (request, left):
            assert len([token for _, token in zip(range(2), one, strict=False)]) == 2
    fake.expect("Goodbye")  # it comes by another connection than the question
    assert kv.status(left.id).reason == "cancelled"
    again = kv.attach(request.id)
    assert (again.id, again.seed, again.start) == (request.id, 3, 0)
    assert next(iter(again)).token_id == 10
    rest = kv.attach(request.id, 1)  # the stream is here already
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
    with Client(fake.endpoint, timeout_s=5) as other:
        other.attach(request.id)
        with pytest.raises(Conflict, match="attach again to take it back"):
            request.result(timeout_s=5)
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
    first = kv.submit([10], max_tokens=9, tenant="hang", key="k")
    again = kv.submit([10], max_tokens=9, tenant="hang", key="k")
    assert again.id == first.id
    with Client(fake.endpoint, timeout_s=5) as other:
        taken = other.submit([10], max_tokens=9, tenant="hang", key="k")
        assert (taken.id, next(iter(taken)).token_id) == (first.id, 10)
        with pytest.raises(KeyReused) as reused:
            other.submit([11], max_tokens=9, tenant="hang", key="k")
        assert (reused.value.key, reused.value.request_id) == ("k", first.id)
        with pytest.raises(Conflict):
            again.result(timeout_s=5)


def test_a_command_with_a_key_outlives_its_caller_and_one_without_does_not(fake: Running, kv: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        kv.submit([1], tenant="late", key="k", timeout_s=0.1)
    kv.health()  # the answer comes now
    again = kv.submit([1], tenant="late", key="k")
    assert kv.status(again.id).reason == "late"  # as the fake calls it: it was not cancelled
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


def test_nobody_is_there(folder: Path) -> None:
    started = time.monotonic()
    with Client(f"ipc://{folder}/nobody.sock", timeout_s=0.3) as kv:
        with pytest.raises(CoordinatorUnavailable, match=r"nobody.sock does not answer.*kvforge up"):
            kv.stats()
        with pytest.raises(CoordinatorUnavailable):
            kv.wait_ready(timeout_s=0.2)
    assert time.monotonic() - started < 5


def test_a_coordinator_that_takes_the_connection_and_says_nothing(fake: Running, folder: Path) -> None:
    os.kill(fake.process.pid, 19)  # SIGSTOP: the kernel still takes connections
    with Client(fake.endpoint, timeout_s=0.3) as kv, pytest.raises(CoordinatorUnavailable, match="does not answer"):
        kv.stats()


def test_a_coordinator_that_never_gets_ready(folder: Path) -> None:
    with Running(folder, ready=False) as fake, Client(fake.endpoint) as kv:
        with pytest.raises(
            DeadlineExceeded, match=r"not ready to serve after 0.3 s: no worker is ready: w0 is loading"
        ):
            kv.wait_ready(timeout_s=0.3)
        assert kv.stats().boot == "b"


def test_the_coordinator_dies_while_a_stream_is_read(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=5, stream_timeout_s=60) as kv:
        other = kv.submit([4], max_tokens=9, tenant="hang")
        request = kv.submit([4], max_tokens=9, tenant="hang")
        assert [token.token_id for _, token in zip(range(2), request, strict=False)] == [4, 5]
        fake.kill()
        started = time.monotonic()
        with pytest.raises(CoordinatorUnavailable, match="is gone"):
            list(request)
        assert time.monotonic() - started < 5  # noticed, not timed out
        assert request.tokens == (4, 5)
        with pytest.raises(CoordinatorUnavailable):
            other.result(timeout_s=5)
        fake.start()
        assert kv.submit([8], max_tokens=2).result(timeout_s=5).tokens == (8, 9)
        fake.expect("Hello")  # with the boot of the one that died: refused
        fake.expect("Hello")


def test_the_coordinator_is_killed_while_a_command_waits(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=60) as kv:
        kv.health()
        fake.expect("GetHealth")
        killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {fake.process.pid}"])
        started = time.monotonic()
        with pytest.raises(CoordinatorUnavailable, match="is gone"):
            kv.submit([1], tenant="silent")
        assert time.monotonic() - started < 10
        assert killer.wait(10) == 0


def test_a_coordinator_restarted_while_nobody_looked(fake: Running, kv: Client) -> None:
    assert kv.stats().boot == "b"
    fake.kill()
    fake.start()
    assert kv.submit([1], max_tokens=1).result().tokens == (1,)


def test_bytes_that_are_no_message_end_the_connection(kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="garbage")
    with pytest.raises(ProtocolError, match=r"not a coordinator's message .*MessagePack"):
        request.result()
    assert request.tokens == (1, 2)
    assert kv.submit([3], max_tokens=1).result().tokens == (3,)


def test_a_gap_in_a_stream_is_an_error_of_that_request(fake: Running, kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="gap")
    with pytest.raises(ProtocolError, match="gap: token 2 was due and token 3 came"):
        request.result()
    fake.expect("Cancel")
    assert kv.submit([3], max_tokens=1).result().tokens == (3,)


def test_a_link_that_gets_writable_just_before_the_wait_is_noticed(fake: Running) -> None:
    with Client(fake.endpoint) as kv:
        link = kv._calls.link
        link.open()
        assert link.socket is not None
        assert link.socket.poll(10_000, zmq.POLLOUT)
        answers = iter((False, True))  # it was not when asked, and is when the wait begins
        started = time.monotonic()
        assert drive(kv._calls._until(lambda: next(answers), (), started + 60, for_room=True))
        assert time.monotonic() - started < 30


def test_another_protocol_version_is_named(folder: Path) -> None:
    refused = pytest.raises(VersionMismatch, match="7 to 8; you speak 1")
    with Running(folder, version_min=7) as newer, Client(newer.endpoint) as kv, refused:
        kv.stats()


def test_an_endpoint_that_is_none() -> None:
    with Client("nonsense") as kv, pytest.raises(InvalidConfiguration, match="nonsense") as raised:
        kv.stats()
    assert raised.value.field == "endpoint"


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), True, "5", None])
def test_every_wait_has_an_end(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest):
        Client("ipc:///nowhere", timeout_s=timeout_s)


def test_closing_twice_and_using_after(fake: Running) -> None:
    kv = Client(fake.endpoint)
    request = kv.submit([1], max_tokens=9, tenant="hang")
    kv.close()
    kv.close()
    for use in (kv.stats, request.result):
        with pytest.raises(Conflict, match="closed"):
            use()


def test_a_client_does_not_survive_a_fork(fake: Running) -> None:
    script = f"""
import os
from kvforge import Client, Conflict
kv = Client({fake.endpoint!r}, timeout_s=5)
kv.stats()
child = os.fork()
if not child:
    try:
        kv.stats()
    except Conflict as error:
        kv.close()
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kv.stats().boot == "b"
kv.close()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_asyncio_tasks_share_one_client(fake: Running) -> None:
    async def read(kv: AsyncClient, start: int) -> tuple[int, ...]:
        request = await kv.submit([start], max_tokens=6)
        seen = [token.token_id async for token in request]
        assert (await request.result()).tokens == tuple(seen)
        return tuple(seen)

    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=5) as kv:
            got = await asyncio.gather(*(read(kv, 10 * start) for start in range(1, 30)))
            assert got == [tuple(range(10 * start, 10 * start + 6)) for start in range(1, 30)]
            assert (await kv.wait_ready(timeout_s=10)).ready
            requests = [await kv.submit([start], max_tokens=3) for start in (1, 5)]
            merged = [token.token_id async for _, token in kv.merge(*requests)]
            assert sorted(merged) == [1, 2, 3, 5, 6, 7]
            assert (await kv.stats()).uptime_us == 5_000_000
            assert (await kv.requests(count_max=2)).total == 31
            with pytest.raises(QueueFull):
                await kv.submit([1], tenant="refused")
            await kv.drain()
        fake.expect("Goodbye")

    asyncio.run(main(), debug=True)


def test_asyncio_samples_attach_keys_and_retries(fake: Running) -> None:
    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=5, stream_timeout_s=10) as kv:
            requests = await kv.samples([1, 2], 3, max_tokens=2, deadline_s=5)
            fake.expect("asked count=3 priority=0 deadline_ms=5000 first_token_ms=0 detached=False key=")
            assert [(await request.result()).tokens for request in requests] == [(3, 4)] * 3
            late = await kv.attach(requests[1].id, 1)
            assert [token.offset async for token in late] == [1]
            assert (await late.result()).tokens == (4,)
            # At once, at two places: one stream serves both.
            hanging = await kv.submit([10], max_tokens=9, tenant="hang", detached=True)
            async with AsyncClient(fake.endpoint, timeout_s=5, stream_timeout_s=10) as other:
                readers = await asyncio.gather(other.attach(hanging.id, 1), other.attach(hanging.id, 0))
                with pytest.raises(Conflict):
                    await hanging.result()
                assert [await anext(aiter(reader)) for reader in readers] == [
                    kvforge.Token(offset, 10 + offset, -0.5) for offset in (1, 0)
                ]
                await other.cancel(hanging.id)
                assert [(await reader.result()).reason for reader in readers] == ["cancelled"] * 2
            slow = await kv.submit([10], max_tokens=7, tenant="slow")
            assert [token.token_id async for token in slow] == list(range(10, 17))
            with pytest.raises(QueueFull):
                await kv.submit([1], tenant="busy")
            assert (await (await kv.submit([1], max_tokens=1, tenant="busy", retry_s=20)).result()).tokens == (1,)
            keyed = [await kv.submit([1], max_tokens=2, key="k") for _ in range(2)]
            assert keyed[0].id == keyed[1].id
            assert [(await request.result()).tokens for request in keyed] == [(1, 2)] * 2

    asyncio.run(main(), debug=True)


@pytest.mark.parametrize(("field", "options"), WRONG_OPTIONS)
def test_asyncio_names_wrong_options_too(folder: Path, field: str, options: dict[str, Any]) -> None:
    async def main() -> None:
        async with AsyncClient(f"ipc://{folder}/nobody.sock") as kv:
            for call in (kv.submit([1], **options), kv.samples([1], 2, **options), kv.generate("text", **options)):
                with pytest.raises(InvalidRequest) as raised:
                    await call
                assert raised.value.field == field

    asyncio.run(main())


def test_asyncio_hears_that_the_coordinator_died(fake: Running) -> None:
    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=5, stream_timeout_s=60) as kv:
            other = await kv.submit([4], tenant="hang")
            request = await kv.submit([4], max_tokens=9, tenant="hang")
            waits = [asyncio.ensure_future(each.result()) for each in (request, other)]
            async with asyncio.timeout(10):
                while len(request.tokens) < 2:
                    await asyncio.sleep(0)
                fake.kill()
                outcomes = await asyncio.gather(*waits, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [CoordinatorUnavailable] * 2
            assert request.tokens == (4, 5)
            fake.start()
            again = await asyncio.gather(*(kv.submit([8], max_tokens=1) for _ in range(3)))
            assert [(await one.result()).tokens for one in again] == [(8,)] * 3

    asyncio.run(main())


def test_asyncio_timeouts_and_cancelled_tasks(fake: Running, folder: Path) -> None:
    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=5) as kv:
            request = await kv.submit([1], max_tokens=9, tenant="hang")
            with pytest.raises(DeadlineExceeded):
                await request.result(timeout_s=0.05)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await kv.submit([1], tenant="late")
            await kv.health()
            fake.expect("Cancel")
            await kv.cancel(request.id)
            assert (await request.result()).reason == "cancelled"
        async with AsyncClient(f"ipc://{folder}/nobody.sock", timeout_s=0.2) as nobody:
            with pytest.raises(CoordinatorUnavailable):
                await nobody.stats()

    asyncio.run(main())


def test_every_error_can_be_caught_by_its_name() -> None:
    for cls in errors.BY_CODE.values():
        assert getattr(kvforge, cls.__name__, None) is cls, cls
        assert cls.__name__ in kvforge.__all__


def test_the_names_of_the_package_are_found_where_they_are() -> None:
    assert set(kvforge.__all__) <= set(dir(kvforge))
    for name in kvforge.__all__:
        assert getattr(kvforge, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        kvforge.nothing_of_the_kind  # noqa: B018


def test_importing_the_client_loads_neither_torch_nor_transformers() -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import kvforge, kvforge.commands.cli
with kvforge.Client("ipc:///nowhere") as kv:
    assert kv.endpoint
print("imported")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "imported\n", "")
