"""Deprecated names of the public API: they work for one version, with a warning that names the new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import kvforge
from kvforge import AsyncClient, Client, Finished, InvalidRequest, Tables, Timings, Token
from kvforge.client.operations import Operations
from kvforge.client.session import ClientSession
from kvforge.protocol import messages
from kvforge.protocol.codec import encode
from tests.kvforge.client.test_session import take


def test_the_old_name_of_sampling_parameters_gives_the_class_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="use SamplingParams"):
        from kvforge import Sampling
    assert Sampling is kvforge.SamplingParams
    assert "Sampling" not in dir(kvforge), "completion offers the new name only"


class Sent(Exception):
    """Replaces the answer; holds the sent bytes."""


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(_self: Operations, build: Callable[[int], messages.Message], *_: Any) -> Any:
        raise Sent(b"|".join(bytes(frame) for frame in encode(build(1))))

    monkeypatch.setattr(Operations, "_ask", ask)


def sent(method: str, *arguments: Any, **options: Any) -> bytes:
    """Return the bytes that a method of both clients sends."""
    with Client("ipc:///nobody") as kv, pytest.raises(Sent) as blocking:
        getattr(kv, method)(*arguments, **options)

    async def again() -> bytes:
        async with AsyncClient("ipc:///nobody") as other:
            with pytest.raises(Sent) as found:
                await getattr(other, method)(*arguments, **options)
            return cast("bytes", found.value.args[0])

    assert asyncio.run(again()) == blocking.value.args[0]
    return cast("bytes", blocking.value.args[0])


RENAMED = [
    ("submit", ([1],), "salt", "cache_salt"),
    ("submit", ([1],), "key", "idempotency_key"),
    ("submit_samples", ([1], 2), "salt", "cache_salt"),
    ("submit_samples", ([1], 2), "key", "idempotency_key"),
    ("find_prefix", ([1],), "salt", "cache_salt"),
    ("find_prefix", ([1],), "key", "idempotency_key"),
    ("create_sequence", ([1],), "salt", "cache_salt"),
]


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(("method", "arguments", "old", "new"), RENAMED)
def test_an_old_keyword_sends_what_the_new_one_sends(
    method: str, arguments: tuple[Any, ...], old: str, new: str
) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{method}\({old}=\) is deprecated .* use {new}=") as warned:
        message = sent(method, *arguments, **{old: "x"})
    assert {Path(warning.filename) for warning in warned} == {Path(__file__)}, "they point at the caller"
    assert len(warned) == 2, "one of each client"
    assert message == sent(method, *arguments, **{new: "x"}) != sent(method, *arguments)


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("method", ["generate", "generate_stream"])
def test_calls_with_text_accept_the_old_keyword(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def encoded(_self: Operations, _prompt: object, _raw: bool) -> list[int]:
        return [1]

    monkeypatch.setattr(Operations, "encode", encoded)
    with pytest.warns(DeprecationWarning, match=rf"{method}\(key=\) is deprecated .* use idempotency_key="):
        message = sent(method, "text", key="x")
    assert message == sent(method, "text", idempotency_key="x")


@pytest.mark.parametrize(("method", "arguments", "old", "new"), RENAMED)
def test_an_old_keyword_beside_the_new_one_is_an_error(
    method: str, arguments: tuple[Any, ...], old: str, new: str
) -> None:
    both = {old: "x", new: "x"}
    with Client("ipc:///nobody") as kv, pytest.raises(TypeError, match=rf"both '{new}' and '{old}'"):
        getattr(kv, method)(*arguments, **both)

    async def again() -> None:
        async with AsyncClient("ipc:///nobody") as other:
            with pytest.raises(TypeError, match=rf"both '{new}' and '{old}'"):
                await getattr(other, method)(*arguments, **both)

    asyncio.run(again())


@pytest.mark.usefixtures("nobody")
def test_samples_is_the_old_name_of_submit_samples() -> None:
    with pytest.warns(DeprecationWarning, match=r"samples\(\) is deprecated .* use submit_samples\(\)") as warned:
        message = sent("samples", [1], count=2, max_tokens=3)
    assert {Path(warning.filename) for warning in warned} == {Path(__file__)}
    assert message == sent("submit_samples", [1], n=2, max_tokens=3)


def test_numbers_is_the_old_name_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, found = Tables.__new__(Tables), object()
    monkeypatch.setattr(Tables, "metrics", lambda _: found)
    with pytest.warns(DeprecationWarning, match=r"Tables\.numbers\(\) is deprecated .* use metrics\(\)") as warned:
        assert tables.numbers() is found
    assert warned[0].filename == __file__


def test_top_is_the_old_name_of_top_logprobs() -> None:
    best = ((5, -0.5),)
    token = Token(offset=0, token_id=5, logprob=-0.5, top_logprobs=best)
    with pytest.warns(DeprecationWarning, match=r"Token\.top is deprecated .* use top_logprobs") as warned:
        assert token.top == best
    assert warned[0].filename == __file__
    finished = Finished(1, (5,), "stop", 1, 0, Timings(), (-0.5,), (best,))
    with pytest.warns(DeprecationWarning, match=r"Finished\.top is deprecated .* use top_logprobs"):
        assert finished.top == (best,)


@pytest.mark.parametrize(
    ("message", "field", "argument"),
    [
        (messages.Submit(rid=1, max_tokens=1), "salt", "cache_salt"),
        (messages.Submit(rid=1, max_tokens=1), "key", "idempotency_key"),
        (messages.Submit(rid=1, max_tokens=1), "count", "n"),
        (messages.Submit(rid=1, max_tokens=1), "tenant", "tenant"),
        (messages.Fork(rid=1, sequence_id=1, count=1), "count", "count"),
    ],
)
def test_an_error_of_the_coordinator_names_the_argument(message: Any, field: str, argument: str) -> None:
    session = ClientSession("ipc:///nowhere")
    pending = session.expect(message.rid, messages.Message, type(message).__name__)
    error = messages.ErrorInfo.of(InvalidRequest(field, "is wrong", most=3))
    take(session, messages.Refused(rid=message.rid, error=error))
    with pytest.raises(InvalidRequest, match=f"^{argument}: is wrong") as raised:
        pending.answer(messages.Message)
    assert (raised.value.field, raised.value.most) == (argument, 3)
