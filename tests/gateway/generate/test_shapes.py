"""Response formats together with tools, in all APIs: an answer is calls, or a text of that format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.scripted import Script, application, ask

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
JSON = {"json_schema": {"name": "city", "schema": SCHEMA}, "type": "json_schema"}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CHAT = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "response_format": JSON,
}
RESPONSES = {
    "model": "scripted",
    "input": "hi",
    "tools": [{"type": "function", **FUNCTION}],
    "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
}
MESSAGES = {
    "model": "scripted",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}
APIS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "chat": ("/v1/chat/completions", CHAT, "required", {"type": "function", "function": {"name": "weather"}}),
    "responses": ("/v1/responses", RESPONSES, "required", {"type": "function", "name": "weather"}),
    "messages": ("/v1/messages", MESSAGES, {"type": "any"}, {"type": "tool", "name": "weather"}),
}


def enforced(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return the kind and text of the grammar sent to the coordinator."""
    script = Script()
    response = ask(application(script), path, body)
    assert response.status_code == 200, response.text
    ((_, count, options),) = script.asked
    found = options.command(1, [], 0, count).sampling.grammar  # type: ignore[arg-type]
    assert found is not None
    return found.kind, found.text


@pytest.mark.parametrize("api", APIS)
def test_an_answer_is_calls_or_has_its_shape(api: str) -> None:
    path, body, _, _ = APIS[api]
    kind, text = enforced(path, body)
    assert kind == "lark" and text.count("%json") == 2
    assert " | " in text.splitlines()[0], "calls, or the text"


@pytest.mark.parametrize("api", APIS)
def test_a_call_that_must_be_made_has_no_other_shape(api: str) -> None:
    path, body, *choices = APIS[api]
    for choice in choices:
        kind, text = enforced(path, {**body, "tool_choice": choice})
        assert kind == "lark" and text.count("%json") == 1


@pytest.mark.parametrize("api", APIS)
def test_without_calls_the_shape_remains(api: str) -> None:
    path, body, _, _ = APIS[api]
    none = {"type": "none"} if api == "messages" else "none"
    kind, _ = enforced(path, {**body, "tool_choice": none})
    assert kind == "json_schema"


def test_a_grammar_of_the_callers_own_is_refused_beside_tools() -> None:
    body = {**CHAT, "response_format": None, "structured_outputs": {"grammar": 'start: "a"'}}
    response = ask(application(Script()), "/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "structured_outputs.grammar"
    forced = {**body, "tool_choice": "required"}
    assert ask(application(Script()), "/v1/chat/completions", forced).status_code == 200


def test_a_schema_that_cannot_be_enforced_is_named_by_its_own_field() -> None:
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    response = ask(application(Script()), "/v1/chat/completions", {**CHAT, "response_format": wrong})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"
