"""/v1/responses with scripted answers; OpenAI's own types validate the responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.scripted import Script, application, ask, prompt_text

from .test_chat import CALL

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


def respond(script: Script, **fields: Any) -> Response:
    response = ask(application(script), "/v1/responses", {"input": "Hi", **fields})
    assert response.status_code == 200, response.text
    return Response.model_validate(response.json())


def streamed(script: Script, **fields: Any) -> list[Any]:
    response = ask(application(script), "/v1/responses", {"input": "Hi", "stream": True, **fields})
    assert response.status_code == 200, response.text
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [EVENTS.validate_python(json.loads(data.removeprefix("data: "))) for _, data in blocks]
    assert [kind.removeprefix("event: ") for kind, _ in blocks] == [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_a_whole_response() -> None:
    script = Script(["Hello ☕"], cached=3)
    answer = respond(script, instructions="Be kind", metadata={"a": "b"})
    assert (answer.output_text, answer.status) == ("Hello ☕", "completed")
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 3
    assert prompt_text(script).startswith("<|im_start|>system\nBe kind<|im_end|>")


def test_the_same_as_events() -> None:
    events = streamed(Script(["Hello ☕"], step=2))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello ☕"
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "Hello ☕"


def test_reasoning_text_and_calls_are_items() -> None:
    answer = respond(Script([CALL]), tools=[TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    call = answer.output[1]
    assert json.loads(call.arguments) == {"city": "Köln ☕"} and call.call_id  # type: ignore[union-attr]
    events = streamed(Script([CALL], step=1), tools=[TOOL])
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments  # type: ignore[union-attr]
    own = {"id", "call_id"}
    whole, last = (
        [item.model_dump(exclude=own) for item in each] for each in (answer.output, events[-1].response.output)
    )
    assert last == whole


def test_an_answer_that_is_too_long_is_incomplete() -> None:
    script = Script(["abcdef"], reason="length")
    answer = respond(script, max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "abc")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert streamed(Script(["abcdef"], reason="length"))[-1].type == "response.incomplete"


def test_a_conversation_of_items() -> None:
    script = Script()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "warm"},
    ]
    respond(script, input=items, tools=[TOOL])
    assert "<think>hm</think><tool_call>weather:{}</tool_call>" in prompt_text(script)
    assert "tool\nwarm" in prompt_text(script)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}}, "text.format.schema"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    script = Script()
    response = ask(application(script), "/v1/responses", {"input": "Hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not script.asked
