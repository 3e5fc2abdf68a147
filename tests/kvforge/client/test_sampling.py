"""Sampling parameters given by a caller, and the resulting message."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from kvforge import SamplingParams
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Grammar

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}, "required": ["ä"]}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"json_schema": SCHEMA}, ("json_schema", SCHEMA)),
        ({"json_schema": MappingProxyType(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"json_schema": {}}, ("json_schema", {})),
        ({"json_object": True}, ("json_object", "")),
        ({"regex": "[ab]+"}, ("regex", "[ab]+")),
        ({"grammar": 'start: "a"'}, ("lark", 'start: "a"')),
    ],
)
def test_each_shape_is_a_grammar_on_the_wire(given: dict[str, Any], sent: tuple[str, Any]) -> None:
    grammar = SamplingParams(**given).message().grammar
    assert grammar is not None
    text = json.loads(grammar.text) if grammar.kind == "json_schema" else grammar.text
    assert (grammar.kind, text) == sent


def test_without_a_shape_there_is_no_grammar() -> None:
    assert SamplingParams().message().grammar is None
    assert SamplingParams(json_object=False, regex=None).message().grammar is None


@pytest.mark.parametrize(
    ("field", "given", "words"),
    [
        ("json_schema", {"json_schema": SCHEMA, "regex": "a"}, "json_schema and regex"),
        ("json_object", {"json_object": True, "grammar": "start: A"}, "json_object and grammar"),
        ("json_object", {"json_object": 1}, "True or False"),
        ("json_schema", {"json_schema": [1]}, "mapping, or its JSON text"),
        ("json_schema", {"json_schema": {"a": object()}}, "is not JSON"),
        ("json_schema", {"json_schema": {"const": float("nan")}}, "is not JSON"),
        ("json_schema", {"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems: "),
        ("regex", {"regex": b"a"}, "must be a text"),
        ("regex", {"regex": ""}, "is empty"),
        ("grammar", {"grammar": "start: nothing"}, "nothing"),
        ("ignore_eos", {"regex": "a", "ignore_eos": True}, "cannot be combined with regex"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(field: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as raised:
        SamplingParams(**given).message()
    assert raised.value.field == f"sampling.{field}"


def test_the_message_says_only_what_there_is() -> None:
    assert SamplingParams(json_object=True, temperature=0).message().grammar == Grammar(kind="json_object")
