"""Edge cases: real model output that no template specifies, parsed without loss."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvforge.gateway.parse import Parser, choose
from kvforge.gateway.parse.events import ToolCall
from kvforge.gateway.parse.formats import FORMATS

from .written import TOOLS, Read, events_of, joined

WEATHER = '{"name": "weather", "arguments": {"city": "K"}}'
LLAMA_4 = "<|header_start|>assistant<|header_end|> <|python_start|> {{ tools | tojson }} <|python_end|>"
GEMMA_4 = "<|turn>model {{ '<|tool_call>call:' }} <|channel>thought"
FUNCTION_GEMMA = "<start_of_turn>model {{ '<start_function_call>call:' }}"


def read(name: str, text: str, *, tools: Any = TOOLS, in_reasoning: bool = False) -> Read:
    """Return the message after checking that it is the same whole and by character, and valid UTF-8."""
    whole = joined(events_of(name, [text], tools=tools, in_reasoning=in_reasoning))
    assert joined(events_of(name, list(text), tools=tools, in_reasoning=in_reasoning)) == whole
    for part in (whole.content, whole.reasoning, *(part for call in whole.calls for part in call)):
        part.encode()
    return whole


@pytest.mark.parametrize(
    ("name", "text", "called", "content"),
    [
        # An unmatched or missing closing mark.
        ("hermes", f"<tool_call>{WEATHER}\n<tool_call>{WEATHER}</tool_call>", [("weather", {"city": "K"})] * 2, ""),
        ("hermes", f"<tool_call>{WEATHER[:-1]}</tool_call>ok", [("weather", {"city": "K"})], "ok"),
        (
            "hermes",
            f'<tool_call>{{"name": "now", "arguments": {{"a": [1</tool_call><tool_call>{WEATHER}</tool_call>',
            [("now", None), ("weather", {"city": "K"})],
            "",
        ),
        (
            "deepseek_v3",
            '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1<｜tool▁call▁end｜>ok',
            [("now", None)],
            "ok",
        ),
        ("qwen3_coder", "the mark <tool_call> begins it", [], "the mark <tool_call> begins it"),
        ("deepseek_v3", "a <｜tool▁calls▁begin｜> b", [], "a <｜tool▁calls▁begin｜> b"),
        (
            "qwen3_coder",
            "<tool_call><function=weather><parameter=city>\nK\n</parameter>\nlost?</function></tool_call>",
            [("weather", {"city": "K"})],
            "lost?",
        ),
        # Mistral's three formats, and text between calls that is no call.
        ("mistral", '[TOOL_CALLS]weather{"city": "K"}', [("weather", {"city": "K"})], ""),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]now{}', [("now", {})] * 2, ""),
        ("mistral", f'[TOOL_CALLS][{WEATHER}, {{"x": 1}}]', [("weather", {"city": "K"})], ', {"x": 1}]'),
        # Missing arguments mean no arguments.
        ("deepseek_v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", [("now", {})], ""),
        ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", [("now", {})], ""),
        ("mistral", "[TOOL_CALLS]now[ARGS]", [("now", {})], ""),
        # Line breaks in a string of JSON.
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\n\tc"}}</tool_call>',
            [("weather", {"city": "a\nb\n\tc"})],
            "",
        ),
        # Literals.
        ("llama_pythonic", '[weather(city="K", days=null, tags=[true, None])]',
         [("weather", {"city": "K", "days": None, "tags": [True, None]})], ""),
        ("llama_pythonic", "[unknown(a=1)]", [], "[unknown(a=1)]"),
        ("llama_pythonic", "[weather(days=1e999)]", [], "[weather(days=1e999)]"),
        ("llama_pythonic", r"[weather(city='\ud83d\ude00')]", [("weather", {"city": "😀"})], ""),
        ("llama_pythonic", '{"name": "now", "parameters": {}}', [("now", {})], ""),
        ("llama3_json", "[now()]", [("now", {})], ""),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', [("now", {})], ""),
    ],
)  # fmt: skip
def test_what_models_write_is_read_and_nothing_of_it_is_lost(
    name: str, text: str, called: list[tuple[str, Any]], content: str
) -> None:
    found = read(name, text)
    assert ([(name, _value(arguments)) for name, arguments in found.calls], found.content) == (called, content)


def _value(arguments: str) -> Any:
    """Return the JSON value, or None for truncated JSON, which is passed on unchanged."""
    try:
        return json.loads(arguments)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/code"}, "007", "007"),
        ({"$ref": "#/$defs/code"}, "7", "7"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "boolean"}, "True", True),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "words", "words"),
    ],
)
def test_an_argument_between_tags_has_the_type_of_the_schema(schema: Any, text: str, value: Any) -> None:
    tools = {"f": {"properties": {"x": schema}, "$defs": {"code": {"type": "string"}}}}
    found = read(
        "glm45", f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>", tools=tools
    )
    assert found.called == [("f", {"x": value})]


def test_half_a_surrogate_pair_harms_nobody() -> None:
    read("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>')
    read("hermes", "<tool_call>" + json.dumps({"name": "now", "arguments": '{"a": "\ud83d"}'}) + "</tool_call>")
    read("llama_pythonic", r"[weather(city='\ud83d')]")


def test_an_answer_in_json_is_streamed_though_it_might_have_been_a_call() -> None:
    assert joined(Parser(FORMATS["llama3_json"], TOOLS).feed('{"title": "a lo')).content == '{"title": "a lo'


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (GEMMA_4, '<|tool_call>call:weather{city:<|"|>{}"<|"|>,days:3,tags:[<|"|>x<|"|>,<|"|>y{<|"|>]}<tool_call|>'),
        (
            FUNCTION_GEMMA,
            '<start_function_call>call:weather{city:<escape>{}"<escape>,days:3,'
            "tags:[<escape>x<escape>,<escape>y{<escape>]}<end_function_call>",
        ),
    ],
)
def test_gemma_s_calls_with_strings_between_marks(template: str, written: str) -> None:
    name = choose(template).name
    found = read(name, f"Well.\n{written}{written}")
    assert found.content == "Well."
    assert found.called == [("weather", {"city": '{}"', "days": 3, "tags": ["x", "y{"]})] * 2
    text = written.replace("city:", "").replace("weather{", "weather(")
    assert read(name, text).content == text
    cut = written[: written.index("{}") + 1]
    assert read(name, cut).calls == [["weather", '{"city": "{']]
    opened = choose(template).calls
    assert set(opened) <= choose(template).special_tokens


def test_gemma_4_thinks_on_a_channel() -> None:
    name = choose(GEMMA_4).name
    found = read(name, "<|channel>thought\nhm\n<channel|>Hello")
    assert (found.reasoning, found.content) == ("hm", "Hello")
    assert not choose(GEMMA_4).starts_in_reasoning("<|turn>model\n<|channel>thought\n<channel|>")


def test_llama_4_writes_either_way() -> None:
    name = choose(LLAMA_4).name
    assert (name, choose(f"[func_name1(a=1)] {LLAMA_4}").name) == ("llama3_json", "llama_pythonic")
    for text in ("<|python_start|>[now()]<|python_end|>", "[now()]", '{"name": "now", "parameters": {}}'):
        assert [event for event in events_of(name, list(text)) if isinstance(event, ToolCall)] == [ToolCall(0, "now")]


def test_blanks_without_end_cost_no_more_each() -> None:
    parser = Parser(FORMATS["hermes"], TOOLS)
    parser.feed("word")
    for _ in range(1000):
        parser.feed("\n")
    assert joined([*parser.feed("end"), *parser.finish()]).content == "\n" * 1000 + "end"
