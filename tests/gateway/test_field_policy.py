"""Fields that no structure reads, in all three APIs: known ones are harmless or refused, unknown ones are ignored."""

from __future__ import annotations

import logging
import typing
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from kvforge.gateway.anthropic.messages import COUNT, CREATE
from kvforge.gateway.config import Settings
from kvforge.gateway.http import ignored
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import HEADER, NAMES_MAX, Ignored, Logged
from kvforge.gateway.openai import chat, completions, responses
from kvforge.protocol.errors import InvalidRequest
from tests.gateway.scripted import NAME, Script, application, ask, prompt_text

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": NAME, "max_tokens": 9, "messages": HELLO},
    "/v1/messages/count_tokens": {"model": NAME, "messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
STRICT = Settings(strict_fields=True)
PARAMETERS = {"type": "object", "properties": {}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [1, None, {"a": 1}, [1]])
def test_an_unknown_field_is_ignored_and_named_unless_fields_are_strict(path: str, value: Any) -> None:
    body = {**BODIES[path], "foo_bar": value}
    answer = ask(application(Script()), path, body)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, "foo_bar"), answer.text
    refused = ask(application(Script(), STRICT), path, body)
    assert refused.status_code == 400 and "foo_bar" in refused.json()["error"]["message"]
    assert HEADER not in ask(application(Script()), path, BODIES[path]).headers


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"messages": [{**HELLO[0], "x": 1}, {**HELLO[0], "x": 2}]}, "messages[0].x"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "y": 1}]}]},
            "messages[0].content[0].y",
        ),
        (CHAT, {"stream_options": {"z": 1}, "stream": True}, "stream_options.z"),
        (CHAT, {"response_format": {"type": "text", "w": 1}}, "response_format.w"),
        (RESPONSES, {"input": [{"role": "user", "content": "a", "v": 1}]}, "input[0].v"),
        (RESPONSES, {"text": {"u": 1}, "reasoning": {"t": 1}}, "text.u, reasoning.t"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "s": 1}]}]},
            "messages[0].content[0].s",
        ),
        (MESSAGES, {"thinking": {"type": "enabled", "r": 1}}, "thinking.r"),
        (MESSAGES, {"q, r\n\u20ac": 1}, "q??r??"),
    ],
)
def test_nested_fields_are_named_by_their_first_place(path: str, fields: dict[str, Any], named: str) -> None:
    answer = ask(application(Script()), path, {**BODIES[path], **fields})
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, named), answer.text


def test_a_refusal_and_a_stream_name_what_was_ignored_too() -> None:
    refused = ask(application(Script()), CHAT, {"messages": HELLO, "foo": 1, "temperature": -1})
    assert (refused.status_code, refused.headers[HEADER]) == (400, "foo")
    streamed = ask(application(Script()), CHAT, {"messages": HELLO, "foo": 1, "stream": True})
    assert (streamed.status_code, streamed.headers[HEADER]) == (200, "foo")


def test_names_of_strangers_are_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignored, "LOGGED", Logged(names_max=3))
    with caplog.at_level(logging.WARNING, "kvforge.gateway.http.ignored"):
        for turn in range(2):
            many = {f"{number}{'a' * 500}": 1 for number in range(500)} | {"b": turn}
            answer = ask(application(Script()), CHAT, {"messages": HELLO, **many})
            assert answer.status_code == 200
            assert len(answer.headers[HEADER]) < 4000 and answer.headers[HEADER].endswith("more")
            ask(application(Script()), CHAT, {"messages": HELLO, "b": 1, "c": 1, "d": 1, "e": 1})
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 4 and "no further names are logged" in logged[-1]


def test_a_name_is_counted_and_logged_once_for_all_items() -> None:
    notes = Ignored()
    for at in range(5):
        notes.add(f"messages[{at}].x", "")
    assert (notes.count, notes.header) == (1, "messages[0].x")
    for number in range(NAMES_MAX + 5):
        notes.add(f"n{number}", "")
    assert notes.header.endswith(", and 6 more")


@pytest.mark.parametrize("path", BODIES)
def test_the_fields_of_a_body_are_bounded_before_any_is_looked_at(path: str) -> None:
    few = Settings(body_fields_max=1024)
    many = {f"a{number}\\" if number % 2 else "": number for number in range(2)} | {
        f"{number}\\\n": {"": [{"": 1}]} for number in range(600)
    }
    refused = ask(application(Script(), few), path, BODIES[path] | many)
    assert refused.status_code == 400 and "body_fields_max" in refused.json()["error"]["message"], refused.text


def test_colons_of_a_text_are_no_fields() -> None:
    few = Settings(body_fields_max=1024)
    text = '{"a": "b:c", "d\\": ' * 500
    answer = ask(application(Script(), few), CHAT, {"messages": [{"role": "user", "content": text[:3000]}]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [
        {"x": 1, "messages": [[]] * 500_000},
        {"model": None, "messages": [1] * 500_000},
        {"x": 1, "messages": HELLO, "tools": [[]] * 500_000},
    ],
)
def test_the_items_that_are_looked_at_are_bounded(body: dict[str, Any]) -> None:
    answer = ask(application(Script()), CHAT, body)
    assert answer.status_code == 400 and "fields and items" in answer.json()["error"]["message"], answer.text[:300]


def parameters(*kinds: type) -> set[str]:
    """The fields that a client library has for a request."""
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


@pytest.mark.parametrize(
    ("reader", "names"),
    [
        (chat.READER, parameters(chat_create_params.CompletionCreateParamsBase)),
        (completions.READER, parameters(completion_create_params.CompletionCreateParamsBase)),
        (responses.READER, parameters(response_create_params.ResponseCreateParamsBase)),
        (
            CREATE,
            parameters(message_create_params.MessageCreateParamsBase, beta_create_params.MessageCreateParamsBase),
        ),
        (COUNT, parameters(message_count_tokens_params.MessageCountTokensParams)),
    ],
)
def test_every_field_of_the_published_specifications_is_known(reader: Reader[Any], names: set[str]) -> None:
    assert sorted(names - reader.names) == []


@pytest.mark.parametrize(
    ("path", "reader"),
    [(CHAT, chat.READER), ("/v1/completions", completions.READER), (RESPONSES, responses.READER), (MESSAGES, CREATE)],
)
def test_null_is_a_field_that_was_not_given(path: str, reader: Reader[Any]) -> None:
    body = dict.fromkeys(reader.names) | BODIES[path]
    answer = ask(application(Script(), STRICT), path, body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"verbosity": "low"}),
        (CHAT, {"modalities": ["text"], "prediction": {"type": "content", "content": "a"}}),
        (CHAT, {"functions": [], "function_call": "auto", "store": False, "top_p": 0}),
        (CHAT, {"tools": [], "stream_options": {"include_usage": None}, "stream": True}),
        (
            CHAT,
            {"min_tokens": 0, "use_beam_search": False, "guided_decoding_backend": "xgrammar", "length_penalty": 1.0},
        ),
        (CHAT, {"return_tokens_as_token_ids": False, "bad_words": [], "n": None, "echo": False, "cache_prompt": True}),
        (RESPONSES, {"max_tool_calls": 5, "top_logprobs": 0, "store": False, "background": False}),
        (
            RESPONSES,
            {"client_metadata": {"a": "b"}, "truncation": "auto", "stream_options": {"include_obfuscation": False}},
        ),
        (RESPONSES, {"reasoning": {"effort": None, "generate_summary": "auto", "summary": "auto"}}),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "defer_loading": True, "strict": None}]}),
        (MESSAGES, {"mcp_servers": [], "betas": ["x"], "metadata": {"user_id": "a"}, "top_p": 0}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (MESSAGES, {"n": 1, "presence_penalty": 0.0}),
    ],
)
def test_what_says_what_happens_anyway_is_accepted_also_strictly(path: str, fields: dict[str, Any]) -> None:
    answer = ask(application(Script(), STRICT), path, {**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"audio": {"voice": "a"}}, "audio"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (RESPONSES, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (CHAT, {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        (CHAT, {"min_tokens": 5}, "min_tokens"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"best_of": True}, "best_of"),
        (CHAT, {"max_output_tokens": 5}, "max_output_tokens"),
        (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ("/v1/completions", {"use_beam_search": True}, "use_beam_search"),
        ("/v1/completions", {"messages": HELLO}, "messages"),
        (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation"),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"top_logprobs": 3}, "top_logprobs"),
        (RESPONSES, {"max_tokens": 3}, "max_tokens"),
        (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
        (MESSAGES, {"container": "c"}, "container"),
        (MESSAGES, {"thread": {"id": "t"}}, "thread"),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 3}]}},
            "context_management.edits[0].keep",
        ),
        (MESSAGES, {"stop": ["a"]}, "stop"),
        (MESSAGES, {"seed": 1}, "seed"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(path: str, fields: dict[str, Any], field: str) -> None:
    script = Script()
    answer = ask(application(script), path, {**BODIES[path], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{field}: "), answer.text
    assert not script.asked


@pytest.mark.parametrize("name", ["regex", "guided_regex"])
def test_other_servers_names_of_a_shape(name: str) -> None:
    script = Script()
    assert ask(application(script), CHAT, {"messages": HELLO, name: "a+"}).status_code == 200
    assert script.asked[0][2].sampling.regex == "a+"  # type: ignore[union-attr]
    two = ask(application(script), CHAT, {"messages": HELLO, name: "a+", "structured_outputs": {"regex": "b"}})
    assert (two.status_code, two.json()["error"]["param"]) == (400, name)


PROVIDERS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        CHAT,
        {"type": "web_search"},
        {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
        "web_search",
    ),
    (RESPONSES, {"type": "web_search", "external_web_access": False}, {"type": "function", "name": "f"}, "web_search"),
    (RESPONSES, {"type": "mcp", "server_label": "a", "server_url": "b"}, {"type": "function", "name": "f"}, "mcp"),
    (
        RESPONSES,
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "function", "name": "f"},
        "code_interpreter",
    ),
    (
        MESSAGES,
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"name": "f", "input_schema": PARAMETERS},
        "web_search_20250305",
    ),
    (
        MESSAGES,
        {"type": "mcp_toolset", "mcp_server_name": "a"},
        {"name": "f", "input_schema": PARAMETERS},
        "mcp_toolset",
    ),
]


@pytest.mark.parametrize(("path", "tool", "own", "kind"), PROVIDERS)
def test_a_tool_that_its_provider_runs_is_left_out_and_named(
    path: str, tool: dict[str, Any], own: dict[str, Any], kind: str
) -> None:
    script = Script()
    body = {**BODIES[path], "tools": [own, tool]}
    answer = ask(application(script), path, body)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, f"tools[1].type={kind}"), answer.text
    assert "[f]" in prompt_text(script) and kind not in prompt_text(script)
    alone = ask(application(script), path, {**BODIES[path], "tools": [tool]})
    assert (alone.status_code, alone.headers.get(HEADER)) == (200, f"tools[0].type={kind}"), alone.text
    strict = ask(application(Script(), STRICT), path, body)
    assert strict.status_code == 400 and strict.json()["error"]["message"].startswith("tools[1].type: ")


@pytest.mark.parametrize(
    ("path", "tool", "choice"),
    [
        (CHAT, {"type": "web_search"}, "required"),
        (CHAT, {"type": "web_search"}, {"type": "web_search"}),
        (RESPONSES, {"type": "web_search"}, "required"),
        (RESPONSES, {"type": "web_search"}, {"type": "web_search"}),
        (RESPONSES, {"type": "mcp", "server_label": "a"}, {"type": "mcp", "server_label": "a"}),
        (
            RESPONSES,
            {"type": "web_search"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        ),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}, {"type": "any"}),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}, {"type": "tool", "name": "web_search"}),
    ],
)
def test_a_tool_that_is_left_out_cannot_be_forced(path: str, tool: dict[str, Any], choice: Any) -> None:
    script = Script()
    answer = ask(application(script), path, {**BODIES[path], "tools": [tool], "tool_choice": choice})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("tool_choice"), answer.text
    assert not script.asked


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": PARAMETERS}


def test_functions_within_a_namespace_are_functions() -> None:
    tools = [
        function("open"),
        {"type": "namespace", "name": "agents", "description": "d", "tools": [function("open"), function("close")]},
    ]
    script = Script(['<tool_call>\n{"name": "agents__open", "arguments": {}}\n</tool_call>'])
    called = {"type": "function_call", "call_id": "c", "name": "open", "namespace": "agents", "arguments": "{}"}
    items = [*HELLO, called, {"type": "function_call_output", "call_id": "c", "output": "ok"}]
    answer = ask(application(script), RESPONSES, {"input": items, "tools": tools})
    assert answer.status_code == 200 and HEADER not in answer.headers, answer.text
    prompt = prompt_text(script)
    assert all(f"[{name}]" in prompt for name in ("open", "agents__open", "close")) and "agents__open:{}" in prompt
    (item,) = [item for item in answer.json()["output"] if item["type"] == "function_call"]
    assert (item["name"], item["namespace"]) == ("open", "agents")


@pytest.mark.parametrize(
    ("path", "tools", "choice"),
    [
        (
            CHAT,
            [{"type": "function", "function": {"name": name}} for name in "fg"],
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
        ),
        (
            RESPONSES,
            [function("f"), function("g")],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        ),
    ],
)
def test_of_the_tools_only_the_allowed_ones_are_offered(path: str, tools: list[Any], choice: Any) -> None:
    script = Script()
    answer = ask(application(script), path, {**BODIES[path], "tools": tools, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert "[g]" in prompt_text(script) and "[f]" not in prompt_text(script)


def test_thinking_of_earlier_turns_is_taken_out_where_that_is_asked() -> None:
    def turn(text: str) -> list[dict[str, Any]]:
        blocks = [{"type": "thinking", "thinking": text, "signature": ""}, {"type": "text", "text": "so"}]
        return [*HELLO, {"role": "assistant", "content": blocks}]

    def prompt(edit: dict[str, Any] | None) -> str:
        script = Script()
        body = {**BODIES[MESSAGES], "messages": [*turn("first"), *turn("second"), *HELLO]}
        managed = {} if edit is None else {"context_management": {"edits": [edit]}}
        answer = ask(application(script), MESSAGES, body | managed)
        assert answer.status_code == 200, answer.text
        return prompt_text(script)

    kind = {"type": "clear_thinking_20251015"}
    assert "first" in prompt(None) and "first" in prompt({**kind, "keep": "all"})
    for keep in ({}, {"keep": {"type": "thinking_turns", "value": 1}}):
        assert "first" not in prompt(kind | keep) and "second" in prompt(kind | keep)


def test_a_value_of_another_type_is_another_value() -> None:
    reader = Reader(Plain, {Plain: {"one": chat_known()}})
    assert reader.read(b'{"one": 1.0}', Ignored()) == Plain()
    with pytest.raises(InvalidRequest, match="one"):
        reader.read(b'{"one": true}', Ignored())


class Plain(msgspec.Struct, forbid_unknown_fields=True):
    """Reads nothing."""


def chat_known() -> Any:
    from kvforge.gateway.http.fields import only

    return only("counts", 1)
