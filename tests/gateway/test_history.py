"""Invariant: an API accepts everything in its answers as history on the next turn.

The SDKs themselves send the requests, whole and streamed. An answer is sent back as the SDK's own object, in its dumped
form with nulls, and without unset fields. Requests are read strictly, so that the API must know each field of an
answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Self

import anthropic
import httpx
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from starlette.applications import Starlette

from kvforge.gateway.config import Settings
from kvforge.gateway.parse.formats import FORMATS
from tests.amount import examples

from .parse.test_arguments import PLACES
from .parse.test_law import GARBAGE
from .parse.written import WAYS
from .scripted import NAME, Script, application

FUNCTION = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
USER, MORE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And now?"}
# Texts in place of a call's arguments.
WRITTEN = [
    "",
    "{}",
    '{"a": 1}',
    '{"a": "b',
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": "\\ud83d"}',
    "path=/tmp/x",
    '["a"]',
    "null",
]
CALLS = st.one_of(
    st.builds(
        lambda place, text: (place.partition(",")[0], PLACES[place].replace("TEXT", text)),
        st.sampled_from(sorted(PLACES)),
        st.sampled_from(WRITTEN),
    ),
    st.builds(
        lambda way, count: (WAYS[way][0], WAYS[way][1]([("now", {"city": 'Kö"ln ☕'})] * count)),
        st.sampled_from([way for way in WAYS if way != "gemma"]),
        st.integers(1, 3),
    ),
    st.tuples(st.sampled_from(sorted(FORMATS)), GARBAGE),
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str]:
    """A format and a text in it: reasoning, content and calls, each present or not, cut off anywhere or not."""
    name, called = draw(CALLS)
    opening, closing = FORMATS[name].think
    thought = f"{opening}hm{closing}" if opening and draw(st.booleans()) else ""
    text = thought + draw(st.sampled_from(["", "Well.\n"])) + called
    return name, text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


class Asked:
    """Both SDKs over one application. turns: answers of `Script`; the second is one word."""

    def __init__(self, app: Starlette) -> None:
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        self.openai = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=self.http
        )
        other = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        self.anthropic = anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="none", max_retries=0, http_client=other
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.openai.close()
        await self.anthropic.close()

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """The next turn, with the bytes that a client of dictionaries sends."""
        answer = await self.http.post(path, content=json.dumps(body, allow_nan=False).encode())
        assert answer.status_code == 200, (answer.text, body)


def forms(found: Any) -> list[Any]:
    """Return the forms in which a client sends its own object back, as dictionaries."""
    return [found.model_dump(mode="json"), found.model_dump(mode="json", exclude_unset=True), found.to_dict()]


def results(ids: list[str | None]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": one, "content": "cut off"} for one in ids]


async def chat(asked: Asked, streamed: bool, offered: bool) -> None:
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]} if offered else {}
    body: dict[str, Any] = {"model": NAME, "logprobs": True, "top_logprobs": 2, **tools}
    if streamed:
        state = ChatCompletionStreamState()
        async for chunk in await asked.openai.chat.completions.create(messages=[USER], stream=True, **body):
            state.handle_chunk(chunk)
        message: Any = state.current_completion_snapshot.choices[0].message
    else:
        message = (await asked.openai.chat.completions.create(messages=[USER], **body)).choices[0].message
    after = [*results([call.id for call in message.tool_calls or ()]), MORE]
    await asked.openai.chat.completions.create(messages=[USER, message, *after], **body)
    for form in forms(message):
        await asked.post("/v1/chat/completions", {**body, "messages": [USER, form, *after]})


async def completions(asked: Asked, streamed: bool, offered: bool) -> None:
    body: dict[str, Any] = {"model": NAME, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    text, ids = "", list[int]()
    if streamed:
        async for chunk in await asked.openai.completions.create(prompt="Hi", stream=True, **body):
            text += chunk.choices[0].text
            ids += getattr(chunk.choices[0], "token_ids", None) or []
    else:
        choice = (await asked.openai.completions.create(prompt="Hi", **body)).choices[0]
        text, ids = choice.text, choice.token_ids  # type: ignore[attr-defined]
    await asked.openai.completions.create(prompt="Hi" + text, **body)
    await asked.openai.completions.create(prompt=[72, *ids], **body)


async def responses(asked: Asked, streamed: bool, offered: bool) -> None:
    tools: dict[str, Any] = {"tools": [{"type": "function", "strict": False, **FUNCTION}]} if offered else {}
    body: dict[str, Any] = {"model": NAME, **tools}
    if streamed:
        async with asked.openai.responses.stream(input=[USER], **body) as stream:
            events = [event async for event in stream]
        output: list[Any] = events[-1].response.output
    else:
        output = list((await asked.openai.responses.create(input=[USER], **body)).output)
    after = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "cut off"}
        for item in output
        if item.type == "function_call"
    ]
    await asked.openai.responses.create(input=[USER, *output, *after, MORE], **body)
    for items in zip(*map(forms, output), strict=True):
        await asked.post("/v1/responses", {**body, "input": [USER, *items, *after, MORE]})


async def messages(asked: Asked, streamed: bool, offered: bool) -> None:
    tools: dict[str, Any] = {"tools": [{"name": "now", "input_schema": FUNCTION["parameters"]}]} if offered else {}
    body: dict[str, Any] = {"model": NAME, "max_tokens": 400, **tools}
    if streamed:
        async with asked.anthropic.messages.stream(messages=[USER], **body) as stream:
            message: Any = await stream.get_final_message()
    else:
        message = await asked.anthropic.messages.create(messages=[USER], **body)
    given: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "is_error": True, "content": "cut off"}
        for block in message.content
        if block.type == "tool_use"
    ]
    after = {"role": "user", "content": [*given, {"type": "text", "text": "And now?"}]}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    await asked.anthropic.messages.create(
        messages=[USER, {"role": "assistant", "content": message.content}, after], **body
    )
    for content in [message.content, *zip(*map(forms, message.content), strict=True)]:
        blocks = [redacted, *(block if isinstance(block, dict) else block.to_dict() for block in content)]
        history = [USER, {"role": "assistant", "content": blocks}, after]
        await asked.post("/v1/messages", {**body, "messages": history})
        await asked.post("/v1/messages/count_tokens", {"model": NAME, "messages": history, **tools})


Turn = Callable[[Asked, bool, bool], Awaitable[None]]


@pytest.mark.parametrize("turn", [chat, completions, responses, messages])
@settings(max_examples=examples(40))
@given(
    answer=answers(),
    reason=st.sampled_from(["stop", "length"]),
    streamed=st.booleans(),
    offered=st.sampled_from([True, True, True, False]),
    step=st.sampled_from([1, 7, 1000]),
)
def test_an_answer_is_accepted_as_history(
    turn: Turn, answer: tuple[str, str], reason: str, streamed: bool, offered: bool, step: int
) -> None:
    name, text = answer
    app = application(Script([text], reason=reason, step=step), Settings(tool_format=name, strict_fields=True))

    async def ask() -> None:
        async with Asked(app) as asked:
            await turn(asked, streamed, offered and FORMATS[name].has_calls)  # otherwise tools are refused

    asyncio.run(ask())
