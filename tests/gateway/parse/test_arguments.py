"""Arguments of calls: no text of a model is lost, and each gives an object."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge.gateway.chat.arguments import DEPTH_MAX, UNPARSED, ObjectText, object_of
from tests.amount import examples

from .written import WAYS, events_of, joined

# A call of `now` in each format, with a text in place of its arguments.
PLACES = {
    "hermes": '<tool_call>{"name": "now", "arguments": TEXT}</tool_call>',
    "hermes, beside the name": '<tool_call>{"name": "now", "path": "TEXT"}</tool_call>',
    "mistral": "[TOOL_CALLS]now[ARGS]TEXT",
    "mistral, listed": '[TOOL_CALLS][{"name": "now", "path": "TEXT"}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>TEXT<｜tool▁call▁end｜>",
    "deepseek_v3, fenced": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\nTEXT\n```<｜tool▁call▁end｜>",
    "qwen3_coder": "<tool_call><function=now>TEXT</function></tool_call>",
    "glm45": "<tool_call>now\nTEXT</tool_call>",
    "harmony": "<|channel|>commentary to=functions.now<|message|>TEXT<|call|>",
    "gemma4": "<|tool_call>call:now{TEXT}<tool_call|>",
    "functiongemma": "<start_function_call>call:now{TEXT}<end_function_call>",
    "gemma": "```tool_code\nnow(TEXT)\n```",
    "llama3_json": '{"name": "now", "parameters": TEXT}',
    "llama_pythonic": "[now(TEXT)]",
}
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)
PIECES = ["{", "}", "[", "]", '"', ",", ":", "\\", "\\u", "d83d", "\\ude00", "NaN", "-Infinity", "true", "1", "e999"]
ANYTHING = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


def made_of(text: str, cuts: list[int]) -> str:
    """Return the object's text for a text that arrives in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    made = ObjectText()
    return "".join(made.feed(text[a:b]) for a, b in pairwise(places)) + made.finish()


def refused(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=examples(25))
@given(text=st.text("abcdxyz/=._- ", min_size=1).map(str.strip).filter(bool))
def test_a_tool_is_not_called_with_less_than_was_written(place: str, text: str) -> None:
    name = place.partition(",")[0]
    read = joined(events_of(name, list(PLACES[place].replace("TEXT", text))))
    held = read.content + "".join(arguments for _, arguments in read.calls)
    assert all(word in held for word in text.split()), (read.content, read.calls)
    assert all(arguments != "{}" for _, arguments in read.calls)


@pytest.mark.parametrize("place", [place for place in PLACES if "path" not in PLACES[place]])
def test_a_tool_without_arguments_is_called_with_none(place: str) -> None:
    name = place.partition(",")[0]
    text = PLACES[place].replace("TEXT", "{}" if name in ("hermes", "llama3_json") else "")
    assert joined(events_of(name, list(text))).called == [("now", {})]


@given(found=OBJECTS, cuts=CUTS, indent=st.sampled_from([None, 2]), ascii_=st.booleans())
def test_an_object_comes_out_as_it_is(found: dict[str, Any], cuts: list[int], indent: Any, ascii_: bool) -> None:
    text = json.dumps(found, indent=indent, ensure_ascii=ascii_)
    if ascii_ or "\\ud" not in text:
        assert json.loads(made_of(text, cuts)) == json.loads(text)


@settings(max_examples=examples(500))
@given(text=st.one_of(ANYTHING, OBJECTS.map(json.dumps)), cuts=CUTS, cut=st.integers(0, 10_000))
def test_of_any_text_an_object_is_made_that_every_client_reads(text: str, cuts: list[int], cut: int) -> None:
    for shown in (text, text[: cut % (len(text) + 1)]):
        made = made_of(shown, cuts)
        assert made == made_of(shown, [])
        found = json.loads(made, parse_constant=refused)
        assert isinstance(found, dict)
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
        assert object_of(shown) == found
        assert made_of(made, []) == made, "a valid object must stay unchanged"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("null", {}),
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": [1, {"b": "x\\', {"a": [1, {"b": "x"}]}),
        ('{"a": 12', {}),  # 12 may be the beginning of 123
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("path=/tmp/x", {UNPARSED: "path=/tmp/x"}),
        ("{path=/tmp/x}", {UNPARSED: "path=/tmp/x}"}),
        ('{"a": 1, oops}', {"a": 1, UNPARSED: ", oops}"}),
        ('{"a": 1} and more', {"a": 1, UNPARSED: " and more"}),
        ("[1]", {UNPARSED: "[1]"}),
        ('{"a": NaN, "b": True, "c": 1e999}', {"a": "NaN", "b": True, "c": "1e999"}),
        ('{"a": "C:\\dir\nb"}', {"a": "C:\\dir\nb"}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    ],
)
def test_texts_that_models_write(text: str, found: dict[str, Any]) -> None:
    assert object_of(text) == found


def test_depth_and_digits_are_bounded() -> None:
    deep = '{"a": ' * (DEPTH_MAX + 1) + "1" + "}" * (DEPTH_MAX + 1)
    assert UNPARSED in object_of(deep)
    assert UNPARSED in object_of('{"a": ' + "9" * 5000 + "}")


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(120))
@given(start=st.integers(0, 200), length=st.integers(0, 12), put=st.sampled_from(["", "x", '"', "}", "{", "=", "<"]))
def test_a_damaged_call_is_not_one_without_arguments(way: str, start: int, length: int, put: str) -> None:
    name, write, _ = WAYS[way]
    text = write([("weather", {"city": "qqqqq", "days": 77777})])
    start = start % len(text)
    text = text[:start] + put + text[start + length :]
    read = joined(events_of(name, list(text)))
    held = read.content + read.reasoning + "".join(part for call in read.calls for part in call)
    lost = [word for word in ("qqqqq", "77777") if word in text and word not in held]
    assert not lost or all(arguments.strip() not in ("", "{}") for _, arguments in read.calls), (text, read)


# Written as a JSON object with the name and the arguments.
OBJECT_WAYS = [
    way for way in WAYS if re.search(r'"(arguments|parameters)": {', WAYS[way][1]([("weather", {"city": "x"})]))
]


@pytest.mark.parametrize("way", OBJECT_WAYS)
@pytest.mark.parametrize("behind", ['}"city": "qqqqq"', '}, "city": "qqqqq"', '} "qqqqq"', '}\n"qqqqq'])
def test_arguments_behind_a_closed_object_are_not_lost(behind: str, way: str) -> None:
    name, write, _ = WAYS[way]
    text = write([("weather", {"city": "qqqqq"})]).replace('"city": "qqqqq"', behind)
    read = joined(events_of(name, list(text)))
    assert read.calls == [] and "qqqqq" in read.content


@pytest.mark.parametrize("way", OBJECT_WAYS)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_call_with_an_empty_object_may_lack_its_last_brace(missing: int, way: str) -> None:
    name, write, _ = WAYS[way]
    text = write([("now", {})]).replace("{}}", "{}" + "}" * (1 - missing))
    assert joined(events_of(name, list(text))).called == [("now", {})]
    until = text[: text.index("{}") + 2]
    assert joined(events_of(name, list(until))).called == [("now", {})]
