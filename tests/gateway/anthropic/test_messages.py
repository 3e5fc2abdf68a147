"""/v1/messages with scripted answers; Anthropic's own types validate the responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from kvforge.protocol.errors import QueueFull, WorkerError
from tests.gateway.openai.test_chat import CALL
from tests.gateway.scripted import NAME, Script, application, ask, prompt_text

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BODY: dict[str, Any] = {"model": NAME, "max_tokens": 400, "messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]


def create(script: Script, **fields: Any) -> Message:
    response = ask(application(script), "/v1/messages", {**BODY, **fields})
    assert response.status_code == 200, response.text
    return Message.model_validate(response.json())


def streamed(script: Script, **fields: Any) -> list[Any]:
    response = ask(application(script), "/v1/messages", {**BODY, "stream": True, **fields})
    assert response.status_code == 200, response.text
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [EVENTS.validate_python(json.loads(data.removeprefix("data: "))) for _, data in blocks]
    assert [kind.removeprefix("event: ") for kind, _ in blocks] == [event.type for event in events]
    return events


def test_a_whole_message_with_its_counts() -> None:
    script = Script(["Hello ☕"], cached=5)
    message = create(script, system=[{"type": "text", "text": "Be kind", "cache_control": {"type": "ephemeral"}}])
    assert [block.text for block in message.content] == ["Hello ☕"]  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt = len(script.asked[0][0])
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (prompt - 5, 5)
    assert prompt_text(script).startswith("<|im_start|>system\nBe kind<|im_end|>")


def test_the_same_as_events() -> None:
    events = streamed(Script(["Hello ☕"], step=2, cached=5))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == "Hello ☕"
    assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.cache_read_input_tokens == 5


def test_thinking_and_calls_are_blocks() -> None:
    message = create(Script([CALL]), tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    call = message.content[1]
    assert call.input == {"city": "Köln ☕"} and message.stop_reason == "tool_use"  # type: ignore[union-attr]
    events = streamed(Script([CALL], step=1), tools=TOOLS)
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == ["thinking", "tool_use"] and stops == [0, 1]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"city": "Köln ☕"}


def test_a_stop_sequence_is_named() -> None:
    message = create(Script(["one two three"], step=1), stop_sequences=["xyz", "two"])
    assert message.content[0].text == "one "  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    assert create(Script(["abcdef"], reason="length"), max_tokens=3).stop_reason == "max_tokens"


def test_a_conversation_with_results_of_tools() -> None:
    script = Script()
    messages = [
        *BODY["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "warm"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    create(script, messages=messages, tools=TOOLS)
    text = prompt_text(script)
    assert "<think>hm</think><tool_call>weather:{}</tool_call>" in text
    assert text.index("tool\nwarm") < text.index("user\nSo?")


def test_an_answer_that_was_begun_goes_on() -> None:
    script = Script()
    create(script, messages=[*BODY["messages"], {"role": "assistant", "content": "It is"}])
    assert prompt_text(script).endswith("assistant\nIt is")


def test_thinking_is_told_to_the_template() -> None:
    script = Script(["hm</think>yes"])
    message = create(script, thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt_text(script).endswith("<think>\n")
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_tokens_are_counted_as_they_would_be_sent() -> None:
    script = Script()
    body = {"model": NAME, "messages": BODY["messages"], "tools": TOOLS}
    counted = ask(application(script), "/v1/messages/count_tokens", body).json()
    assert not script.asked
    create(script, tools=TOOLS)
    assert counted == {"input_tokens": len(script.asked[0][0])}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0]"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    script = Script()
    response = ask(application(script), "/v1/messages", {**BODY, **fields})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error["error"]["message"].startswith(f"{field}: "), error
    assert not script.asked


def test_errors_before_and_in_the_middle() -> None:
    refused = ask(application(Script(refusal=QueueFull(8, 10))), "/v1/messages", BODY)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert refused.headers["retry-after"] == "1"
    broken = ask(application(Script(error=WorkerError("gone"))), "/v1/messages", {**BODY, "stream": True})
    last = broken.text.strip().split("\n\n")[-1].split("\n")
    assert last[0] == "event: error" and json.loads(last[1][6:])["error"]["type"] == "api_error"
