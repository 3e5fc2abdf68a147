"""However a text is split, its joined events give the same message, which is the written one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from kvforge.gateway.openai.chat import delta_of
from kvforge.gateway.parse import choose
from kvforge.gateway.parse.formats import FORMATS
from kvforge.protocol.errors import InvalidConfiguration
from tests.amount import examples

from .written import TOOLS, WAYS, Call, events_of, joined

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
PLAIN = st.text("abc é☕.,-\n", min_size=1, max_size=12).map(str.strip).filter(bool)
CITIES = st.one_of(TEXTS, st.sampled_from(['a"b', "</tool_cal", "{", "}\\", "\\u00e9", "line\nline", "[ARGS", "<arg"]))
ARGUMENTS = st.fixed_dictionaries(
    {"city": CITIES},
    optional={"days": st.integers(0, 99), "tags": st.lists(st.sampled_from(["x", "y{", '"']), max_size=2)},
)
CALLS = st.lists(
    st.one_of(ARGUMENTS.map(lambda found: ("weather", found)), st.just(("now", dict[str, Any]()))),
    min_size=1,
    max_size=3,
)
MARKERS = [marker for one in FORMATS.values() for marker in (*one.calls, *one.special_tokens, *one.think) if marker]
GARBAGE = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *MARKERS,
                "{",
                "}",
                '"',
                '{"name": "now"',
                "arguments",
                ":",
                "\\",
                " ",
                "now(",
                ")",
                "\\ud83d",
                "[",
                "call:now{",
                "'",
            ]
        ),
        TEXTS,
    ),
    max_size=8,
).map("".join)


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)] or [""]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def writable(way: str, calls: list[Call]) -> list[Call]:
    """Return the part that the format can express: tag formats exclude their own marks and blanks around a value."""
    if way in ("qwen3_coder", "glm45", "minimax", "deepseek_v32", "seed_oss"):
        for _, arguments in calls:
            city = str(arguments.get("city", ""))
            arguments.update({"city": city.replace("<", "(").strip()} if "city" in arguments else {})
    if way == "gemma":
        return calls[:1]
    return calls


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=examples(60))
@given(calls=CALLS, before=PLAIN, cuts=CUTS)
def test_what_was_written_is_read_however_it_is_split(
    way: str, calls: list[Call], before: str, cuts: list[int]
) -> None:
    name, write, mixed = WAYS[way]
    calls = writable(way, calls)
    text = (f"{before}\n" if mixed else "") + write(calls)
    read = joined(events_of(name, split(text, cuts)))
    assert read.called == calls
    assert (read.content, read.reasoning) == (before if mixed else "", "")
    assert joined(events_of(name, list(text))) == joined(events_of(name, [text])) == read


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(80))
@given(text=GARBAGE, cuts=CUTS, in_reasoning=st.booleans(), tools=st.sampled_from([TOOLS, None]))
def test_any_text_at_all_is_the_same_however_it_is_split(
    name: str, text: str, cuts: list[int], in_reasoning: bool, tools: Any
) -> None:
    whole = joined(events_of(name, [text], tools=tools, in_reasoning=in_reasoning))
    assert joined(events_of(name, split(text, cuts), tools=tools, in_reasoning=in_reasoning)) == whole
    assert joined(events_of(name, list(text), tools=tools, in_reasoning=in_reasoning)) == whole


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.think[0]])
@settings(max_examples=examples(30))
@given(thought=PLAIN, said=PLAIN, cuts=CUTS, opened=st.booleans())
def test_reasoning_is_not_content(name: str, thought: str, said: str, cuts: list[int], opened: bool) -> None:
    opening, closing = FORMATS[name].think
    text = f"{'' if opened else opening}\n{thought}\n{closing}\n\n{said}"
    read = joined(events_of(name, split(text, cuts), tools=None, in_reasoning=opened))
    assert (read.reasoning, read.content) == (thought, said)


@pytest.mark.parametrize("way", WAYS)
def test_every_chunk_is_one_that_openais_client_knows(way: str) -> None:
    name, write, _ = WAYS[way]
    for event in events_of(name, list(write([("weather", {"city": "Köln"})]))):
        choice = {"index": 0, "delta": delta_of(event, "n"), "finish_reason": None, "logprobs": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_arguments_come_before_the_call_is_whole() -> None:
    events = events_of("hermes", ['<tool_call>{"name": "weather", "arguments": {"city": "Kö'])
    assert joined(events).calls == [["weather", '{"city": "Kö']]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>nothing</tool_call> and more"),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", "a <tool_cal"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"a": 1} is JSON'),
        ("llama_pythonic", "[1, 2] is a list"),
        ("mistral", "[TOOL_CALLS]nothing"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>nothing"),
        ("glm45", "<tool_call>{}</tool_call>"),
        ("gemma", "```tool_code\nx = 1\n```"),
    ],
)
def test_what_is_no_call_is_content_and_nothing_of_it_is_lost(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        read = joined(events_of(name, pieces))
        assert (read.content, read.calls) == (text, [])


def test_a_call_that_is_cut_off_stays_one() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "K'
    assert joined(events_of("hermes", list(text))).calls == [["weather", '{"city": "K']]


def test_arguments_that_are_a_text_of_json_are_that_json() -> None:
    text = "<tool_call>" + json.dumps({"name": "now", "arguments": '{"a": 1}'}) + "</tool_call>"
    assert joined(events_of("hermes", list(text))).called == [("now", {"a": 1})]


def test_work_grows_with_the_text_and_not_with_its_square() -> None:
    """Measured by the characters that a reader buffers: it drops them after reading."""
    from kvforge.gateway.parse import Parser

    parser = Parser(FORMATS["hermes"], TOOLS)
    held = 0
    for _ in range(20_000):
        parser.feed("word ")
        held = max(held, len(parser.reader.text))
    assert held < 100


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }} {{ '<think>' }}", "hermes"),
        ("<tool_call><function=f>", "qwen3_coder"),
        ("<arg_key> <tool_call>", "glm45"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<｜tool▁call▁begin｜>", "deepseek_v3"),
        ("<|start_header_id|>", "llama3_json"),
        ("<|channel|>analysis", "harmony"),
        ("<start_of_turn>model", "gemma"),
        ("<|im_start|>{{ content.split('</think>') }}", "think"),
        ("<|im_start|>", "plain"),
        ("", "plain"),
    ],
)
def test_the_format_is_known_by_the_template(template: str, name: str) -> None:
    assert choose(template).name == name
    assert choose(template, "harmony").name == "harmony"


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfiguration, match=r"tool_format.*hermes"):
        choose("", "xml")
