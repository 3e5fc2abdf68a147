"""One request among fake replicas: its routing, its reader's view of a failover, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest

from kvforge import SamplingParams
from kvforge.client.options import RequestOptions
from kvforge.client.prompt_stream import PromptStream
from kvforge.gateway.config import Replica as Place
from kvforge.gateway.config import Settings
from kvforge.gateway.replicas import failover
from kvforge.gateway.replicas.failover import FailoverRequest, seeded
from kvforge.gateway.replicas.replica import Replica
from kvforge.protocol.errors import (
    CoordinatorUnavailable,
    Draining,
    InternalError,
    InvalidConfiguration,
    InvalidRequest,
    KvforgeError,
    NotReady,
    QueueFull,
)
from kvforge.protocol.messages import Ended, Timings
from kvforge.protocol.steady_clock import monotonic
from kvforge.routing import seed_of

PROMPT = np.array([1, 2, 3], np.int32)
OPTIONS = RequestOptions(max_tokens=8, sampling=SamplingParams(temperature=0.0, seed=1))


class Inner:
    """A fake `AsyncStream`."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.request_id, self.ended, self.error = 0, cast(Ended | None, None), cast(KvforgeError | None, None)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Any] = []
        self.prompt_logprobs: PromptStream | None = None
        self.said: list[Any] = []

    @property
    def done(self) -> bool:
        return self.ended is not None or self.error is not None

    def cancel(self) -> None:
        self.said.append("cancel")

    def leave(self) -> None:
        self.said.append("leave")

    def finish_at(self, tokens: int) -> None:
        self.said.append(tokens)

    def gives(self, *tokens: int) -> None:
        self.request_id = self.request_id or id(self)
        self.tokens += tokens
        self.logprobs += [-0.5] * len(tokens)
        self.top_logprobs += [()] * len(tokens)
        self._changed()

    def ends(self, reason: str = "length") -> None:
        self.ended = Ended(
            request_id=self.request_id,
            reason=reason,
            generated_tokens=len(self.tokens),
            prompt_tokens=3,
            cached_tokens=0,
            timings=Timings(),
        )
        self._changed()

    def fails(self, error: KvforgeError) -> None:
        self.error = error
        self._changed()


class Played:
    """A replica."""

    def __init__(self, name: str) -> None:
        self.name, self.guests = name, cast(dict[Any, None], {})
        self.streams = self
        self.given: list[list[Inner]] = []
        self.options: list[RequestOptions] = []
        self.refusals: list[str] = []

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def submit_samples(
        self, prompt: Any, count: int, options: RequestOptions, changed: Callable[[], None]
    ) -> list[Inner]:
        self.options.append(options)
        self.given.append([Inner(changed) for _ in range(count)])
        return self.given[-1]

    @property
    def inner(self) -> Inner:
        return self.given[-1][0]


class Both:
    """Two replicas; the first available one is chosen."""

    def __init__(self) -> None:
        self.a, self.b = Played("a"), Played("b")
        self.there = [self.a, self.b]
        self.reason = "nobody"
        self.patient_until = 0.0

    async def choose(self, prompt: Any, options: Any, session: str, without: frozenset[str]) -> Replica | None:
        return cast(Any, next((one for one in self.there if one.name not in without), None))


def start(both: Both, options: RequestOptions = OPTIONS, count: int = 1) -> tuple[FailoverRequest, list[int]]:
    told: list[int] = []
    made = FailoverRequest(both, PROMPT, count, options, lambda: told.append(1), "")
    return made, told


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("error", [CoordinatorUnavailable("gone"), Draining("it drains")])
def test_it_goes_on_elsewhere_and_gives_no_token_twice(error: KvforgeError) -> None:
    async def test() -> None:
        both = Both()
        made, told = start(both)
        (stream,) = made.streams
        await settle()
        both.a.inner.gives(5, 6)
        await settle()
        name = stream.request_id
        assert list(stream.tokens) == [5, 6] and told
        both.a.inner.fails(error)
        await settle()
        assert list(stream.tokens) == [5, 6] and not stream.done and not both.a.guests
        assert both.a.refusals == (["it drains"] if isinstance(error, Draining) else [])
        both.b.inner.gives(5)
        await settle()
        assert list(stream.tokens) == [5, 6]
        both.b.inner.gives(6, 7)
        both.b.inner.ends()
        await settle()
        assert list(stream.tokens) == [5, 6, 7] and stream.ended is not None and stream.error is None
        assert stream.request_id == name and both.a.options == both.b.options and not both.b.guests

    run(test)


def test_the_log_probabilities_of_a_prompt_come_from_the_replica_that_finishes() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both)
        (stream,) = made.streams
        await settle()
        both.a.inner.prompt_logprobs = PromptStream(2)
        both.a.inner.gives()
        await settle()
        both.a.inner.fails(CoordinatorUnavailable("gone"))
        await settle()
        both.b.inner.prompt_logprobs = PromptStream(2)
        both.b.inner.gives(5)
        both.b.inner.ends()
        await settle()
        assert stream.ended is not None and stream.prompt_logprobs is both.b.inner.prompt_logprobs

    run(test)


def test_other_tokens_are_an_error_and_not_given_out() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both)
        (stream,) = made.streams
        await settle()
        both.a.inner.gives(5, 6)
        await settle()
        made.evicted("silent")
        await settle()
        assert both.a.inner.said == ["cancel"]
        both.b.inner.gives(5, 9, 9)
        await settle()
        assert list(stream.tokens) == [5, 6] and isinstance(stream.error, InternalError)
        assert both.b.inner.said == ["cancel"]

    run(test)


def test_a_stop_that_was_found_is_found_again() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both)
        (stream,) = made.streams
        await settle()
        both.a.inner.gives(5, 6, 7)
        await settle()
        stream.finish_at(2)
        assert both.a.inner.said == [2]
        both.a.inner.fails(CoordinatorUnavailable("gone"))
        await settle()
        both.b.inner.gives(5, 6)
        await settle()
        assert both.b.inner.said == [], "it has not as many yet"
        both.b.inner.gives(7)
        await settle()
        assert both.b.inner.said == [2]

    run(test)


def test_what_a_key_names_is_left_and_not_cancelled() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both, RequestOptions(idempotency_key="k", detached=True))
        await settle()
        both.a.inner.gives(5)
        await settle()
        made.evicted("silent")
        await settle()
        assert both.a.inner.said == ["leave"] and both.b.options[0].idempotency_key == "k"
        assert both.b.options[0].sampling == SamplingParams(seed=seed_of("default", "k"))

    run(test)


def test_a_full_replica_is_not_the_last_word() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both)
        (stream,) = made.streams
        await settle()
        both.a.inner.fails(QueueFull(1, 100))
        await settle()
        assert not stream.done
        both.b.inner.fails(QueueFull(2, 200))
        await settle()
        assert isinstance(stream.error, QueueFull) and stream.error.retry_after_ms == 100

    run(test)


def test_what_is_wrong_is_refused_once() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both)
        await settle()
        both.a.inner.fails(InvalidRequest("prompt", "is wrong"))
        await settle()
        assert isinstance(made.streams[0].error, InvalidRequest) and not both.b.given and not both.a.guests

    run(test)


def test_without_a_replica_it_is_refused_and_one_that_ran_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "AGAIN_S", 0.0)

    async def test() -> None:
        both = Both()
        both.there = []
        made, _ = start(both)
        await settle()
        assert isinstance(made.streams[0].error, NotReady)
        both.there = [both.a]
        made, _ = start(both)
        await settle()
        both.a.inner.gives(5)
        await settle()
        both.there = []
        both.a.inner.fails(CoordinatorUnavailable("gone"))
        await settle()
        assert not made.streams[0].done
        both.there = [both.b]
        await settle()
        both.b.inner.gives(5, 6)
        await settle()
        assert list(made.streams[0].tokens) == [5, 6]

    run(test)


def test_who_comes_in_a_moment_without_replicas_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that it is refused, also if an available replica refused it."""
    monkeypatch.setattr(failover, "AGAIN_S", 0.0)

    async def test() -> None:
        both = Both()
        both.there, both.patient_until = [], monotonic() + 60
        made, _ = start(both)
        await settle()
        assert not made.streams[0].done
        both.there = [both.b]
        await settle()
        both.b.inner.gives(5)
        await settle()
        assert list(made.streams[0].tokens) == [5]

        both.there = []
        made, _ = start(both)
        await settle()
        assert not made.streams[0].done
        both.patient_until = monotonic()
        await settle()
        assert isinstance(made.streams[0].error, NotReady)

        both.there, both.patient_until = [both.a], monotonic() + 60
        made, _ = start(both)
        await settle()
        both.there = []
        both.a.inner.fails(QueueFull(1, 100))
        await settle()
        assert isinstance(made.streams[0].error, QueueFull)

    run(test)


def test_several_answers_move_together_and_what_has_ended_stays() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both, count=2)
        first, second = made.streams
        await settle()
        for inner in both.a.given[0]:
            inner.gives(5)
        both.a.given[0][0].ends()
        await settle()
        both.a.given[0][1].fails(CoordinatorUnavailable("gone"))
        await settle()
        again = both.b.given[0]
        assert again[0].said == ["cancel"] and first.ended is not None
        again[1].gives(5, 6)
        again[1].ends()
        await settle()
        assert list(first.tokens) == [5] and list(second.tokens) == [5, 6] and second.done

    run(test)


def test_who_gives_up_ends_it_wherever_it_is() -> None:
    async def test() -> None:
        both = Both()
        made, _ = start(both)
        made.streams[0].cancel()
        await settle()
        assert not both.a.given
        made, _ = start(both)
        await settle()
        both.a.inner.gives(5)
        made.streams[0].cancel()
        await settle()
        assert both.a.inner.said == ["cancel"] and not both.a.guests
        both.a.inner.fails(CoordinatorUnavailable("gone"))
        await settle()
        assert not both.b.given

    run(test)


def test_a_seed_is_fixed_before_anybody_draws() -> None:
    assert seeded(OPTIONS) is OPTIONS
    drawn = seeded(RequestOptions(sampling=SamplingParams(top_p=0.5)))
    assert drawn.sampling is not None and drawn.sampling.seed is not None and drawn.sampling.top_p == 0.5
    assert seeded(RequestOptions()) != seeded(RequestOptions())
    assert seeded(RequestOptions(idempotency_key="k", tenant="t")) == seeded(
        RequestOptions(idempotency_key="k", tenant="t")
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"replicas": {"a": Place()}}, "replicas.a"),
        ({"replicas": {"a": Place(endpoint="ipc://x", runtime_dir="/y")}}, "replicas.a"),
        ({"replicas": {"a": Place(endpoint="ipc://x")}, "endpoint": "ipc://y"}, "endpoint"),
        ({"answer_s": 0.0}, "answer_s"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfiguration) as error:
        Settings(**settings)
    assert error.value.field == field
