"""Restarts of the coordinator and lost connections are invisible to callers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from kvforge import AsyncClient, Client, Conflict, CoordinatorUnavailable, DeadlineExceeded, InvalidRequest
from kvforge.client.link import CoordinatorLink
from tests.kvforge.fake_coordinator import Running

ANEW, FORGETFUL, AWAY = signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP


@pytest.mark.parametrize("again", [ANEW, FORGETFUL])
def test_a_stream_goes_on_with_the_next_token(fake: Running, kv: Client, again: int) -> None:
    request = kv.submit([4], max_tokens=300, tenant="waits")
    stream = iter(request)
    assert [next(stream).token_id for _ in range(2)] == [4, 5]
    fake.signal(again, "back")
    assert [token.token_id for token in stream] == list(range(6, 304))
    assert request.result().reason == "length"
    fake.expect(f"resumed={again == ANEW}")
    fake.expect("offset=2")


def test_a_client_that_is_idle_meanwhile_goes_on_at_its_next_call(fake: Running, kv: Client) -> None:
    requests = [kv.submit([start], max_tokens=50, tenant="waits") for start in (1, 100)]
    fake.signal(ANEW, "back")
    assert kv.stats().boot == "b"
    fake.expect("resumed=True")
    assert [request.result().tokens for request in requests] == [tuple(range(1, 51)), tuple(range(100, 150))]


def test_a_submit_whose_answer_was_lost_is_one_request(fake: Running, kv: Client) -> None:
    request = kv.submit([7], max_tokens=20, tenant="dropped")
    assert request.result().tokens == tuple(range(7, 27))
    fake.expect("again")
    assert kv.requests().total == 1


def test_a_command_without_an_answer_is_sent_again(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=20) as kv:
        kv.health()
        fake.signal(AWAY, "away")
        back = threading.Timer(0.3, os.kill, (fake.process.pid, AWAY))
        back.start()
        assert kv.submit([3], max_tokens=2).result().tokens == (3, 4)
        back.join()
        assert kv.requests().total == 1


def test_a_coordinator_that_has_forgotten_us_gets_what_may_be_done_twice(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=20) as kv:
        kv.health()
        fake.expect("GetHealth")
        killer = threading.Timer(0.3, os.kill, (fake.process.pid, FORGETFUL))
        killer.start()
        with pytest.raises(CoordinatorUnavailable, match=r"before Submit was answered.*outcome is unknown.*with a key"):
            kv.submit([3], tenant="silent")
        killer.join()
        assert kv.submit([3], max_tokens=1).result().tokens == (3,)


def test_another_coordinator_in_its_place_fails_what_waits(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=20) as kv:
        request = kv.submit([4], max_tokens=9, tenant="hang")
        assert next(iter(request)).token_id == 4
        fake.kill()
        fake.start()
        with pytest.raises(CoordinatorUnavailable, match=r"is gone: .*started without its earlier state"):
            request.result()
        assert kv.submit([8], max_tokens=2).result(timeout_s=60).tokens == (8, 9)


def test_one_that_does_not_come_back_is_given_up(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=20, connect_timeout_s=0.2, reconnect_s=0.3) as kv:
        request, other = (kv.submit([4], max_tokens=9, tenant="hang") for _ in range(2))
        fake.kill()
        with pytest.raises(CoordinatorUnavailable, match=r"is gone: .*tried again for 0.3 s \(reconnect_s\)"):
            request.result()
        assert other.done
        with pytest.raises(CoordinatorUnavailable, match="does not answer"):
            kv.stats()
        fake.start()
        assert kv.stats().boot == "b"


def test_the_callers_own_limit_ends_the_wait_and_the_request_goes_on(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=20) as kv:
        request = kv.submit([4], max_tokens=9, tenant="waits")
        assert next(iter(request)).token_id == 4
        fake.signal(AWAY, "away")
        with pytest.raises(DeadlineExceeded, match="it goes on"):
            request.result(timeout_s=0.2)
        with pytest.raises(CoordinatorUnavailable):
            kv.stats(timeout_s=0.2)
        fake.signal(AWAY, "back")
        assert request.result().tokens == tuple(range(4, 13))


def test_what_is_abandoned_while_there_is_no_connection_is_cancelled_on_the_next(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=20) as kv:
        kv.health()
        with pytest.raises(DeadlineExceeded):
            kv.submit([1], tenant="silent", timeout_s=0.1)
        fake.expect("Submit")
        fake.signal(ANEW, "back")
        kv.stats()
        fake.expect("Submit")  # to learn its fate


def test_closing_while_there_is_no_connection(fake: Running) -> None:
    kv = Client(fake.endpoint, timeout_s=20)
    request = kv.submit([4], max_tokens=9, tenant="hang")
    fake.signal(AWAY, "away")
    with pytest.raises(DeadlineExceeded):
        request.result(timeout_s=0.1)
    kv.close()
    with pytest.raises(Conflict, match="closed"):
        request.result()


def test_ctrl_c_while_there_is_no_connection(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=60, stream_timeout_s=60) as kv:
        request = kv.submit([4], max_tokens=9, tenant="waits")
        assert next(iter(request)).token_id == 4
        fake.signal(AWAY, "away")
        interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            request.result()
        interrupt.join()
        fake.signal(AWAY, "back")
        assert request.result().tokens == tuple(range(4, 13))


@pytest.mark.parametrize("where", ["receive", "interrupt"])
def test_ctrl_c_in_the_middle_of_a_message_costs_nothing(
    fake: Running, kv: Client, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = kv.submit([4], max_tokens=300, tenant="waits")
    assert next(iter(request)).token_id == 4
    session = kv._calls.session

    def broken(*arguments: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(session, where, broken)
    fake.signal(ANEW, "back")
    with pytest.raises(KeyboardInterrupt):
        request.result()
    assert request.result().tokens == tuple(range(4, 304))


def test_the_wait_for_a_coordinator_does_not_spin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attempts there is no socket to poll."""
    turns: list[CoordinatorLink] = []
    pump = CoordinatorLink.pump

    def counted(self: CoordinatorLink) -> bool:
        turns.append(self)
        return pump(self)

    monkeypatch.setattr(CoordinatorLink, "pump", counted)
    absent = f"ipc://{tmp_path}/absent.sock"
    with Client(absent, connect_timeout_s=0.5) as kv, pytest.raises(CoordinatorUnavailable):
        kv.health()
    assert 3 < len(turns) < 100


def test_a_wrong_reconnect_s_is_named() -> None:
    for wrong in (-1, float("nan"), float("inf"), "5", None, True):
        with pytest.raises(InvalidRequest) as raised:
            Client("ipc:///nowhere", reconnect_s=wrong)  # type: ignore[arg-type]
        assert raised.value.field == "reconnect_s"


def test_asyncio_streams_go_on_and_commands_are_sent_again(fake: Running) -> None:
    async def read(kv: AsyncClient, start: int) -> list[int]:
        request = await kv.submit([start], max_tokens=300, tenant="waits")
        return [token.token_id async for token in request]

    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=20, stream_timeout_s=20) as kv:
            await kv.health()
            fake.expect("GetHealth")
            reads = [asyncio.ensure_future(read(kv, 1000 * start)) for start in range(5)]
            for _ in reads:
                await asyncio.to_thread(fake.expect, "Submit")
            await asyncio.to_thread(fake.signal, AWAY, "away")
            calls = [asyncio.ensure_future(kv.stats()) for _ in range(3)]
            lost = asyncio.ensure_future(kv.submit([1], max_tokens=3, tenant="dropped"))
            await asyncio.sleep(0)
            await asyncio.to_thread(fake.signal, AWAY, "back")
            got = await asyncio.gather(*reads)
            assert got == [list(range(1000 * start, 1000 * start + 300)) for start in range(5)]
            assert [(await call).boot for call in calls] == ["b"] * 3
            assert (await (await lost).result()).tokens == (1, 2, 3)
            assert (await kv.requests()).total == 6

    asyncio.run(main(), debug=True)


def test_asyncio_a_task_that_is_cancelled_while_there_is_no_connection(fake: Running) -> None:
    async def main() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=20, stream_timeout_s=20) as kv:
            request = await kv.submit([4], max_tokens=9, tenant="hang")
            reader = asyncio.ensure_future(request.result())
            await asyncio.to_thread(fake.signal, AWAY, "away")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await kv.stats()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await asyncio.to_thread(fake.signal, AWAY, "back")
            await kv.health()
            await asyncio.to_thread(fake.expect, "Cancel")
            assert (await request.result()).reason == "cancelled"

    asyncio.run(main(), debug=True)


def test_asyncio_closing_while_tasks_wait_for_a_connection(fake: Running) -> None:
    async def main() -> None:
        kv = AsyncClient(fake.endpoint, timeout_s=20, stream_timeout_s=20)
        request = await kv.submit([4], max_tokens=9, tenant="hang")
        await asyncio.to_thread(fake.signal, AWAY, "away")
        waits = [asyncio.ensure_future(request.result()), asyncio.ensure_future(kv.stats())]
        with pytest.raises(DeadlineExceeded):
            await request.result(timeout_s=0.1)
        await kv.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 10)
        assert [type(outcome) for outcome in outcomes] == [Conflict] * 2
        assert kv._calls._timer is None

    asyncio.run(main(), debug=True)
