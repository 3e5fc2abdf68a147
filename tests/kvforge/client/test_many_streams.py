"""`AsyncStreams`: many requests without a task each, against real sockets and scripted behaviour."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from kvforge import AsyncClient, CoordinatorUnavailable, QueueFull, WorkerError
from kvforge.client import session
from kvforge.client.aio import AsyncStream, AsyncStreams
from kvforge.client.options import RequestOptions
from kvforge.protocol.messages import Message
from tests.kvforge.fake_coordinator import DEADLINE_S, Running

PROMPT = np.array([1, 2], np.int32)


class One:
    """A stream and its events."""

    def __init__(self, streams: AsyncStreams, tenant: str = "default", max_tokens: int = 4) -> None:
        self.counts: list[int] = []
        self.tokens_wanted = asyncio.Event()
        self.over = asyncio.Event()
        self.stream: AsyncStream = streams.submit(
            PROMPT, RequestOptions(max_tokens=max_tokens, tenant=tenant), self.changed
        )
        assert not self.counts

    def changed(self) -> None:
        self.counts.append(len(self.stream.tokens))
        if self.stream.tokens:
            self.tokens_wanted.set()
        if self.stream.done:
            self.over.set()


def within(fake: Running, play: Callable[[AsyncStreams], Awaitable[None]], *, reconnect_s: float = 10) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), AsyncClient(fake.endpoint, reconnect_s=reconnect_s) as client:
            await client.health()
            streams = AsyncStreams(client)
            await play(streams)
            streams.close()

    asyncio.run(main())


def test_each_stream_is_told_of_its_acceptance_its_tokens_and_its_end(fake: Running) -> None:
    async def play(streams: AsyncStreams) -> None:
        several = [One(streams) for _ in range(3)]
        for one in several:
            await one.over.wait()
            assert one.stream.tokens == [3, 4, 5, 6]
            assert one.counts[0] == 0 and one.counts[-1] == 4 and one.counts == sorted(one.counts)
            assert one.stream.ended is not None and one.stream.ended.reason == "length"
        assert [one.stream.request_id for one in several] == [1, 2, 3]

    within(fake, play)


def test_a_refusal_and_a_failure_are_errors(fake: Running) -> None:
    async def play(streams: AsyncStreams) -> None:
        refused, failed = One(streams, "refused"), One(streams, "fails")
        await refused.over.wait()
        await failed.over.wait()
        assert isinstance(refused.stream.error, QueueFull) and not refused.stream.request_id
        assert isinstance(failed.stream.error, WorkerError) and failed.stream.tokens == [3, 4, 5, 6]

    within(fake, play)


def test_what_is_given_up_is_cancelled_and_not_told_of_again(fake: Running) -> None:
    async def play(streams: AsyncStreams) -> None:
        running, unanswered = One(streams, "hang"), One(streams, "late")
        await running.tokens_wanted.wait()
        running.stream.cancel()
        running.stream.cancel()
        unanswered.stream.cancel()
        counts = list(running.counts)
        after = One(streams)
        await after.over.wait()
        assert running.counts == counts and not unanswered.counts

    within(fake, play)
    fake.expect("Cancel")


def test_streams_go_on_after_the_coordinator_was_away_and_new_ones_wait_for_it(fake: Running) -> None:
    async def play(streams: AsyncStreams) -> None:
        running = One(streams, "waits")
        await running.tokens_wanted.wait()
        fake.signal(signal.SIGHUP, "away")
        while streams.calls.session.welcome is not None:
            await asyncio.sleep(0.01)
        meanwhile = One(streams)
        fake.signal(signal.SIGHUP, "back")
        await running.over.wait()
        await meanwhile.over.wait()
        assert running.stream.tokens == meanwhile.stream.tokens == [3, 4, 5, 6]

    within(fake, play)


@pytest.mark.parametrize("tenant", ["hang", "silent"])
def test_all_that_waits_fails_when_nobody_comes_back(fake: Running, tenant: str) -> None:
    async def play(streams: AsyncStreams) -> None:
        running = One(streams, tenant)
        await asyncio.sleep(0.05)
        fake.kill()
        await running.over.wait()
        assert isinstance(running.stream.error, CoordinatorUnavailable)

    within(fake, play, reconnect_s=0.1)


def test_more_than_may_be_unanswered_at_once_are_sent_in_their_order(
    fake: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "UNANSWERED_MAX", 3)

    async def play(streams: AsyncStreams) -> None:
        several = [One(streams, max_tokens=1) for _ in range(20)]
        for one in several:
            await one.over.wait()
        assert [one.stream.request_id for one in several] == list(range(1, 21))

    within(fake, play)


def test_an_answer_that_arrives_while_a_waker_sends_is_read(fake: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ signals an arrived message once, and a call that sends takes the signal."""

    async def play(streams: AsyncStreams) -> None:
        link = streams.calls.link
        send = link.send

        def answered(message: Message) -> bool:
            monkeypatch.setattr(link, "send", send)
            sent, deadline = send(message), time.monotonic() + DEADLINE_S
            while not link._readable():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return sent

        monkeypatch.setattr(link, "send", answered)
        monkeypatch.setattr(session, "UNANSWERED_MAX", 0)
        one = One(streams, max_tokens=1)
        await asyncio.sleep(0)  # the look at the socket that follows a submission
        monkeypatch.setattr(session, "UNANSWERED_MAX", 1000)
        await one.over.wait()

    within(fake, play)
