"""`cache_control` with a time to live pins the beginning of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import Message

from tests.gateway.anthropic.test_messages import streamed
from tests.gateway.scripted import Script, application, ask, tokenizer

FIVE, HOUR = {"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1h"}
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
SYSTEM = "Be kind, be brief, and answer in the language of the question."


def text(words: str, control: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": words, **({"cache_control": control} if control else {})}


def pins(script: Script, **fields: Any) -> list[tuple[str, float]]:
    """Send a request, and return the text and the seconds of each pin."""
    body = {"model": "scripted", "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}], **fields}
    response = ask(application(script), "/v1/messages", body)
    assert response.status_code == 200, response.text
    Message.model_validate(response.json())
    prompt, _, options = script.asked[0]
    stream = tokenizer().table().stream(continues=True, keep=frozenset({"<|im_start|>", "<|im_end|>"}))
    whole = [stream.push([token]) for token in prompt]
    return [("".join(whole[:tokens]), seconds) for tokens, seconds in options.pins]


def test_a_breakpoint_on_the_system_prompt_covers_tools_and_system() -> None:
    (pin,) = pins(Script(), system=[text(SYSTEM, HOUR)])
    assert pin == (f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n", 3600.0)


def test_one_on_a_tool_covers_the_same() -> None:
    found = pins(Script(), system=SYSTEM, tools=[TOOL | {"cache_control": HOUR}])
    assert found == [(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n", 3600.0)]


@pytest.mark.parametrize("first", ["Hi", ".", "-", ". and more"])
def test_the_first_message_is_no_part_of_it(first: str) -> None:
    (pin,) = pins(Script(), system=[text(SYSTEM, FIVE)], messages=[{"role": "user", "content": first}])
    assert pin[0].endswith("<|im_start|>user\n")


def test_a_breakpoint_on_the_last_block_covers_the_prompt() -> None:
    (pin,) = pins(Script(), messages=[{"role": "user", "content": [text("Hi", FIVE)]}])
    assert pin == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 300.0)
    assert pins(Script(), cache_control=FIVE) == [pin]


def test_a_breakpoint_inside_covers_what_comes_before() -> None:
    messages = [
        {"role": "user", "content": [text("One", FIVE)]},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": [text("Three", FIVE), text("Four")]},
    ]
    (pin,) = pins(Script(), messages=messages)
    assert pin[0].endswith("assistant\nTwo<|im_end|>\n<|im_start|>user\nThree"), "the last one covers the first"


def test_two_times_are_two_pins() -> None:
    found = pins(Script(), system=[text(SYSTEM, HOUR)], messages=[{"role": "user", "content": [text("Hi", FIVE)]}])
    assert [seconds for _, seconds in found] == [3600.0, 300.0] and found[1][0].startswith(found[0][0])


@pytest.mark.parametrize("control", [None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": None}])
def test_without_a_time_nothing_is_pinned(control: dict[str, Any] | None) -> None:
    assert pins(Script(), system=[text(SYSTEM, control)]) == []


@pytest.mark.parametrize("ttl", ["10m", "", 5, ["5m"]])
def test_another_time_is_refused_by_name(ttl: Any) -> None:
    body = {
        "model": "scripted",
        "max_tokens": 5,
        "system": [text("s", {"type": "ephemeral", "ttl": ttl})],
        "messages": [{"role": "user", "content": "Hi"}],
    }
    response = ask(application(Script()), "/v1/messages", body)
    assert response.status_code == 400 and "system[0].cache_control.ttl" in response.text


def usage(script: Script, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}], **fields}
    found: dict[str, Any] = ask(application(script), "/v1/messages", body).json()["usage"]
    return found


def test_the_usage_counts_what_was_computed_and_pinned() -> None:
    script = Script(cached=16)
    found = usage(script, system=[text(SYSTEM, HOUR)], cache_control=FIVE)
    prompt, (system, _) = len(script.asked[0][0]), script.asked[0][2].pins[0]
    system, whole = system // 16 * 16, prompt // 16 * 16
    assert found["cache_creation"] == {
        "ephemeral_5m_input_tokens": whole - system,
        "ephemeral_1h_input_tokens": system - 16,
    }
    assert found["cache_creation_input_tokens"] == whole - 16 and found["cache_read_input_tokens"] == 16
    assert found["input_tokens"] == prompt - whole


def test_a_pin_that_is_refused_counts_nothing() -> None:
    found = usage(Script(pinned_max=0), cache_control=FIVE)
    assert found["cache_creation_input_tokens"] == 0 and found["cache_creation"]["ephemeral_5m_input_tokens"] == 0
    assert "cache_creation" not in usage(Script())


def test_a_stream_ends_with_the_same_usage() -> None:
    script = Script(cached=16)
    events = streamed(script, system=[text(SYSTEM, HOUR)])
    assert events[-2].usage.cache_creation_input_tokens == script.asked[0][2].pins[0][0] // 16 * 16 - 16
