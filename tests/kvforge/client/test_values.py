"""Client methods accept numbers of any type; errors name other values, which are never sent.

The methods and their arguments come from the signatures, so that later additions are tested too.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvforge import AsyncClient, CachedSequence, Client, InvalidRequest, SamplingParams
from kvforge.client.operations import Operations
from kvforge.client.sequences import sequence_id
from kvforge.protocol import messages
from kvforge.protocol.codec import Decoder, encode

WHOLE: list[Callable[[int], Any]] = [np.int64, np.int32, np.uint8, np.uint64, lambda value: np.array([value])[0]]
NO_WHOLE = [1.0, np.float32(1), "1", True, np.True_, None, -(1 << 70)]
# Other arguments of a call; the tests pass the numbers.
ALSO: dict[str, Any] = {"prompt": [1], "tokens": [1], "holder": "h"}
# Methods that send another message first, or none.
APART = {"generate", "generate_stream", "encode", "wait_ready", "merge", "close", "tables", "samples"}


class Sent(Exception):
    """Replaces the answer; holds the sent bytes."""


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def ask(_self: Operations, build: Callable[[int], messages.Message], *_: Any) -> Any:
        frames = encode(build(1))
        Decoder(messages.CLIENT_MESSAGES).decode(frames)
        raise Sent(b"|".join(bytes(frame) for frame in frames))

    monkeypatch.setattr(Operations, "_ask", ask)
    yield


def numbers_of(method: str) -> list[tuple[str, inspect.Parameter]]:
    """Return the arguments of a method that may be integers."""
    parameters = inspect.signature(getattr(Client, method)).parameters.items()
    return [(name, p) for name, p in parameters if {"int", "SequenceRef"} & set(str(p.annotation).split(" | "))]


def numeric() -> list[tuple[str, str]]:
    methods = [name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")]
    return [(method, name) for method in methods if method not in APART for name, _ in numbers_of(method)]


def call(method: str, name: str, value: Any) -> bytes:
    """Return the bytes that a method sends when one of its arguments is `value`."""
    arguments = {name: value}
    for other, parameter in inspect.signature(getattr(Client, method)).parameters.items():
        if other != "self" and other != name and parameter.default is inspect.Parameter.empty:
            arguments[other] = ALSO.get(other, 7)
    if method == "submit" and name != "sequence":
        arguments["prompt"] = [1]
    with Client("ipc:///nobody") as kv, pytest.raises(Sent) as sent:
        getattr(kv, method)(**arguments)

    async def again() -> bytes:
        async with AsyncClient("ipc:///nobody") as other:
            with pytest.raises(Sent) as sent:
                await getattr(other, method)(**arguments)
            return sent.value.args[0]  # type: ignore[no-any-return]

    assert asyncio.run(again()) == sent.value.args[0]
    return sent.value.args[0]  # type: ignore[no-any-return]


def test_the_arguments_are_found() -> None:
    found = {method for method, _ in numeric()}
    siblings = {"explain", "block", "ref", "unref", "cancel", "attach", "status", "requests", "fork", "info", "tokens"}
    assert found >= siblings | {"submit", "submit_samples", "append", "remove"}


@pytest.mark.parametrize(("method", "name"), numeric())
def test_an_integer_of_any_type_is_sent_as_itself(nobody: None, method: str, name: str) -> None:
    expected = call(method, name, 5)
    for kind in WHOLE:
        assert call(method, name, kind(5)) == expected


@pytest.mark.parametrize(("method", "name"), numeric())
def test_what_is_no_integer_is_named_and_never_sent(nobody: None, method: str, name: str) -> None:
    optional = numbers_of(method)
    for wrong in NO_WHOLE:
        may_be_none = any(n == name and "None" in str(p.annotation) for n, p in optional)
        if wrong is None and may_be_none:
            continue
        with pytest.raises(InvalidRequest) as raised, pytest.raises(Sent):
            call(method, name, wrong)
        assert raised.value.field in (name, f"{name}s"), (method, name, wrong)


def test_sampling_takes_numbers_of_any_type_and_a_bias_as_a_dictionary() -> None:
    plain = SamplingParams(
        temperature=0.5, seed=3, stop_tokens=(7, 8), top_k=4, top_p=0.5, min_p=0.5, logprobs=2, logit_bias=((5, 1.0),)
    )
    numpys = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint64(3),  # type: ignore[arg-type]
        stop_tokens=np.array([7, 8]),  # type: ignore[arg-type]
        top_k=np.int32(4),  # type: ignore[arg-type]
        top_p=np.float64(0.5),
        min_p=np.float16(0.5),  # type: ignore[arg-type]
        logprobs=np.int8(2),  # type: ignore[arg-type]
        logit_bias={np.int64(5): 1},  # type: ignore[dict-item]
    )
    assert encode(submit(numpys)) == encode(submit(plain))
    assert SamplingParams(logit_bias={5: 1, 6: -math.inf}).message().logit_bias == ((5, 1.0), (6, -math.inf))


def submit(sampling: SamplingParams) -> messages.Submit:
    return messages.Submit(rid=1, max_tokens=1, sampling=sampling.message(), model_defaults=sampling.unnamed)


def test_what_sampling_does_not_name_is_left_to_the_model() -> None:
    assert SamplingParams().unnamed == messages.MODEL_DEFAULTS
    assert SamplingParams().message() == messages.SamplingParams()
    assert SamplingParams(temperature=1.0, top_p=1).unnamed == ("top_k", "min_p", "repetition_penalty")


WRONG_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", True),
    ("temperature", "hot"),
    ("seed", 1 << 64),
    ("seed", 1.0),
    ("stop_tokens", 5),
    ("stop_tokens", "5"),
    ("stop_tokens", [1.5]),
    ("ignore_eos", 1),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_p", 0),
    ("top_p", 1.1),
    ("min_p", math.inf),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", None),
    ("logprobs", 21),
    ("logit_bias", 5),
    ("logit_bias", {5: "much"}),
    ("logit_bias", {5: math.inf}),
    ("logit_bias", {5: 101}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {5.5: 1}),
    ("logit_bias", [(5, 1), (5, 2)]),
    ("logit_bias", [(5,)]),
    ("logit_bias", dict.fromkeys(range(301), 1)),
]


@pytest.mark.parametrize(("field", "value"), WRONG_SAMPLING)
def test_a_wrong_field_of_sampling_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{field: value}).message()
    assert raised.value.field == f"sampling.{field}"


def test_a_handle_is_as_good_as_its_id() -> None:
    assert sequence_id(CachedSequence(np.int64(4))) == sequence_id(4) == 4  # type: ignore[arg-type]
