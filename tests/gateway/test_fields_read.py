"""No field is dropped silently: each is read or documented, including all fields of the published specifications."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anthropic.types.beta as anthropics
import msgspec
import openai.types.chat as chats
import openai.types.responses as items
import pytest
from openai.types import shared_params

from kvforge.gateway.anthropic import request_body as messages
from kvforge.gateway.anthropic import unimplemented_fields as anthropic_fields
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.openai import fields, request_body, responses_body, shapes, tokens, unimplemented_fields
from tests.gateway.scripted import NAME, Script, application, ask, prompt_text

ROOT = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "Hi"}]
CREATE = {"model": NAME, "max_tokens": 9, "messages": HELLO}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# Fields of parts, edits and tools that are refused or dropped by their type.
BY_TYPE = {
    "Part": {"image_url", "input_audio", "video_url", "audio_url", "file"},
    "Block": {"source", "title"},
    "Edit": {"trigger", "clear_at_least", "clear_tool_inputs", "exclude_tools", "pause_after_compaction"},
    "NamedTool": {"server_label"},
    "ToolChoice": {"server_label"},
}


def structures(*modules: ModuleType) -> Iterator[type[msgspec.Struct]]:
    for module in modules:
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__module__ == module.__name__:
                yield one


def test_every_field_of_a_structure_is_read_or_documented() -> None:
    used: set[str] = set()
    for file in (path for room in ("openai", "anthropic") for path in (ROOT / "gateway" / room).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value.rpartition(".")[2])
    found = list(structures(request_body, fields, responses_body, shapes, tokens, messages))
    assert len(found) > 30
    dropped = {one.__name__: {*one.__struct_fields__} - used - BY_TYPE.get(one.__name__, set()) for one in found}
    assert {name: names for name, names in dropped.items() if names} == {}


OPENAI: list[tuple[type[msgspec.Struct], tuple[Any, ...]]] = [
    (
        request_body.Message,
        (
            chats.ChatCompletionAssistantMessageParam,
            chats.ChatCompletionDeveloperMessageParam,
            chats.ChatCompletionFunctionMessageParam,
            chats.ChatCompletionSystemMessageParam,
            chats.ChatCompletionToolMessageParam,
            chats.ChatCompletionUserMessageParam,
        ),
    ),
    (request_body.Part, (chats.ChatCompletionContentPartTextParam, chats.ChatCompletionContentPartRefusalParam)),
    (
        request_body.Part,
        (items.ResponseInputTextParam, items.ResponseOutputTextParam, items.ResponseOutputRefusalParam),
    ),
    (request_body.Tool, (chats.ChatCompletionFunctionToolParam,)),
    (request_body.Function, (shared_params.FunctionDefinition,)),
    (request_body.Called, (chats.ChatCompletionMessageFunctionToolCallParam,)),
    (request_body.ToolChoice, (chats.ChatCompletionNamedToolChoiceParam, chats.ChatCompletionAllowedToolChoiceParam)),
    (fields.StreamOptions, (chats.ChatCompletionStreamOptionsParam,)),
    (
        responses_body.Item,
        (
            items.EasyInputMessageParam,
            items.ResponseFunctionToolCallParam,
            items.ResponseOutputMessageParam,
            items.ResponseReasoningItemParam,
            items.response_input_item_param.FunctionCallOutput,
            items.response_input_item_param.Message,
        ),
    ),
    (responses_body.FunctionTool, (items.FunctionToolParam, items.NamespaceToolParam)),
    (responses_body.ToolChoice, (items.ToolChoiceFunctionParam, items.ToolChoiceAllowedParam)),
    (responses_body.Text, (items.ResponseTextConfigParam,)),
    (responses_body.TextFormat, (items.ResponseFormatTextJSONSchemaConfigParam,)),
    (responses_body.Reasoning, (shared_params.Reasoning,)),
]
ANTHROPIC: list[tuple[type[msgspec.Struct], tuple[Any, ...]]] = [
    (messages.Message, typing.get_args(anthropics.BetaMessageParam)),
    (
        messages.Block,
        (
            anthropics.BetaRedactedThinkingBlockParam,
            anthropics.BetaTextBlockParam,
            anthropics.BetaThinkingBlockParam,
            anthropics.BetaToolResultBlockParam,
            anthropics.BetaToolUseBlockParam,
        ),
    ),
    (messages.Tool, (anthropics.BetaToolParam,)),
    (messages.ToolChoice, (anthropics.BetaToolChoiceAutoParam, anthropics.BetaToolChoiceToolParam)),
    (messages.OutputConfig, (anthropics.BetaOutputConfigParam,)),
    (
        messages.Thinking,
        (anthropics.BetaThinkingConfigAdaptiveParam, anthropics.BetaThinkingConfigEnabledParam),
    ),
    (messages.ContextManagement, (anthropics.BetaContextManagementConfigParam,)),
]


@pytest.mark.parametrize(("structure", "published"), OPENAI, ids=[one.__name__ for one, _ in OPENAI])
def test_every_nested_field_of_openais_specification_is_known(
    structure: type[msgspec.Struct], published: tuple[Any, ...]
) -> None:
    names = {name for kind in published for name in typing.get_type_hints(kind)}
    assert (
        sorted(names - Reader(structure, unimplemented_fields.UNIMPLEMENTED, unimplemented_fields.READ_IF).names) == []
    )


@pytest.mark.parametrize(("structure", "published"), ANTHROPIC, ids=[one.__name__ for one, _ in ANTHROPIC])
def test_every_nested_field_of_anthropics_specification_is_known(
    structure: type[msgspec.Struct], published: tuple[Any, ...]
) -> None:
    names = {name for kind in published for name in typing.get_type_hints(kind)}
    assert sorted(names - Reader(structure, anthropic_fields.UNIMPLEMENTED, anthropic_fields.READ_IF).names) == []


@pytest.mark.parametrize(
    ("structure", "reader"),
    [(one, Reader(one, unimplemented_fields.UNIMPLEMENTED, unimplemented_fields.READ_IF)) for one, _ in OPENAI]
    + [(one, Reader(one, anthropic_fields.UNIMPLEMENTED, anthropic_fields.READ_IF)) for one, _ in ANTHROPIC],
    ids=[one.__name__ for one, _ in (*OPENAI, *ANTHROPIC)],
)
def test_a_nested_null_is_a_field_that_was_not_given(structure: type[msgspec.Struct], reader: Reader[Any]) -> None:
    needed = {one.encode_name for one in msgspec.structs.fields(structure) if one.required}
    values: dict[str, Any] = {"role": "user", "content": "a", "type": "text", "function": {"name": "a"}}
    values |= {"type": "auto"} if structure is messages.ToolChoice else {}
    plain = {name: values.get(name, "a") for name in needed}
    strictly = Ignored(strict=True)
    given = reader.read(msgspec.json.encode(dict.fromkeys(reader.names - needed) | plain), strictly)
    without = reader.read(msgspec.json.encode(plain), strictly)
    for name in structure.__struct_fields__:
        assert getattr(given, name) in (None, getattr(without, name)), name


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HELLO}), (RESPONSES, {"input": "a"}), (MESSAGES, CREATE)]
)
def test_all_tokens_and_the_likeliest_one_have_their_names_in_all_apis(path: str, body: dict[str, Any]) -> None:
    script = Script()
    assert ask(application(script), path, {**body, "top_k": -1, "top_p": 0, "priority": 3}).status_code == 200
    options = script.asked[0][2]
    assert options.sampling is not None and options.priority == 3
    assert options.sampling.top_k == 0 and 0 < float(options.sampling.top_p or 0) < 1e-6


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_where_it_is_not_wanted(stream: bool) -> None:
    def answered(**more: Any) -> str:
        body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}, "stream": stream, **more}
        answer = ask(application(Script(["hm</think>yes"], step=2)), CHAT, body)
        assert answer.status_code == 200, answer.text
        return answer.text

    assert '"reasoning_content"' in answered() and '"reasoning_content"' in answered(include_reasoning=True)
    without = answered(include_reasoning=False)
    assert '"reasoning_content"' not in without and "stop" in without


def test_the_words_of_a_refusal_are_given_to_the_model() -> None:
    script = Script()
    refusal = {"role": "assistant", "content": None, "refusal": "I will not"}
    assert ask(application(script), CHAT, {"messages": [*HELLO, refusal, *HELLO]}).status_code == 200
    assert "assistant\nI will not<" in prompt_text(script)


def test_special_tokens_of_a_conversation_are_the_templates() -> None:
    answer = ask(application(Script()), CHAT, {"messages": HELLO, "add_special_tokens": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "add_special_tokens")
    assert ask(application(Script()), CHAT, {"messages": HELLO, "add_special_tokens": False}).status_code == 200


def test_a_message_of_the_system_that_holds_for_one_turn_is_read_in_it_alone() -> None:
    def prompt(*after: dict[str, Any]) -> str:
        script = Script()
        once = {"role": "system", "content": "be brief", "clear_at": "next_user_message"}
        body = {"model": NAME, "max_tokens": 9, "messages": [*HELLO, once, *after]}
        answer = ask(application(script), MESSAGES, body)
        assert answer.status_code == 200, answer.text
        return prompt_text(script)

    assert "be brief" in prompt() and "be brief" not in prompt({"role": "assistant", "content": "a"}, *HELLO)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_model_has_no_tokens_here(path: str, body: dict[str, Any]) -> None:
    assert ask(application(Script()), path, {**body, "model": "gpt-5"}).status_code == 404
    assert ask(application(Script()), path, {**body, "model": NAME}).status_code == 200
