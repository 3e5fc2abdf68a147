"""Early checks of a grammar: unsupported parts are named, and excessive ones are refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import GRAMMAR_BYTES_MAX, Grammar
from kvforge.text.grammar import check, compiled_text
from kvforge.text.grammar_bounds import DEPTH_MAX, MULTIPLES_MAX, NESTING_MAX, PROPERTIES_MAX, RULES_MAX


def schema(document: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(document))


def problem(grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as raised:
        check(grammar)
    return raised.value.message


def tagged(kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}


def chain(count: int) -> dict[str, Any]:
    """Return a schema in which each definition refers to the next."""
    definitions: dict[str, Any] = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{count}": {}}}


@pytest.mark.parametrize(
    "grammar",
    [
        schema({}),
        schema({"type": "object", "properties": {"a": {"$ref": "#"}}}),
        schema({"type": "string", "description": "said of it", "examples": ["x"], "minLength": 2}),
        schema({"oneOf": [{"type": "string"}, {"type": "integer"}]}),
        schema({"oneOf": [tagged("cat"), tagged("dog")]}),
        schema({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "number", "multipleOf": 0.01}}}),
        schema(chain((DEPTH_MAX - 6) // 2 - 1)),
        schema({"type": "object", "properties": {f"p{i}": {} for i in range(PROPERTIES_MAX)}}),
        Grammar(kind="json_object"),
        Grammar(kind="regex", text=r"[0-9]{4}-[0-9]{2}/(a|b)"),
        Grammar(kind="lark", text='start: "a" rest\nrest: /[b-d]+/'),
        Grammar(kind="lark", text='start: <|tool|> %json {"type": "object", "properties": {"a": {"type": "null"}}}'),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.text[:40]}",
)
def test_what_can_be_enforced_passes(grammar: Grammar) -> None:
    check(grammar)


@pytest.mark.parametrize(
    ("keyword", "document"),
    [
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("not", {"properties": {"a": {"not": {"type": "string"}}}}),
        ("if, then", {"if": {"type": "string"}, "then": {"minLength": 3}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
        ("contains", {"type": "array", "contains": {"type": "integer"}}),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
        ("$dynamicRef", {"$dynamicRef": "#node"}),
        ("oneOf", {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
        ("oneOf", {"oneOf": [tagged("cat"), {"type": "object", "required": ["name"]}]}),
        ("format", {"type": "string", "format": "idn-email"}),
        ("pattern", {"type": "string", "pattern": "^(?=a)b"}),
        ("$ref", {"$ref": "https://example.org/schema.json"}),
        ("$ref", {"$ref": "#/$defs/none"}),
        ("$schema", {"$schema": "https://example.org/dialect#"}),
        ("properties", {"properties": {f"p{i}": {} for i in range(PROPERTIES_MAX + 1)}}),
        ("multipleOf", {"properties": {"a": {"multipleOf": MULTIPLES_MAX}, "b": {"multipleOf": 0.5}}}),
        ("multipleOf", {"multipleOf": 1e300}),
        ("$ref", chain(DEPTH_MAX // 2 + 1)),
        ("x-guidance", {"x-guidance": 1}),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_keyword(keyword: str, document: dict[str, Any]) -> None:
    assert problem(schema(document)).startswith(f"sampling.json_schema: {keyword}: ")


@pytest.mark.parametrize("option", ["lenient", "coerce_one_of"])
def test_a_schema_cannot_ask_to_look_away(option: str) -> None:
    overlapping = [{"type": "string"}, {"type": "string", "maxLength": 3}]
    document = {"x-guidance": {option: True}, "oneOf": overlapping, "uniqueItems": True}
    assert "sampling.json_schema: " in problem(schema(document))
    inline = json.dumps({"x-guidance": {option: True}, "uniqueItems": True})
    assert problem(Grammar(kind="lark", text=f"start: %json {inline}")).startswith("sampling.grammar: uniqueItems")


@pytest.mark.parametrize(
    ("words", "grammar"),
    [
        ("sampling.json_schema: is not JSON", Grammar(kind="json_schema", text="{")),
        ("sampling.json_schema: is not JSON", Grammar(kind="json_schema", text="[" * 100_000)),
        ("sampling.json_schema: must be a JSON object", Grammar(kind="json_schema", text="true")),
        ("sampling.json_schema: is empty", Grammar(kind="json_schema")),
        ("sampling.json_schema: Invalid type", schema({"type": "dict"})),
        ("sampling.json_schema: Unsatisfiable", schema({"type": "integer", "minimum": 2, "maximum": 1})),
        (
            "sampling.json_schema: nests more than",
            Grammar(kind="json_schema", text='{"items":' * 200 + "{}" + "}" * 200),
        ),
        ("sampling.json_schema: has ", Grammar(kind="json_schema", text=" " * (GRAMMAR_BYTES_MAX + 1))),
        ("sampling.json_schema: is not text", Grammar(kind="json_schema", text='{"const": "\ud800"}')),
        ("sampling.regex: ", Grammar(kind="regex", text="a(b")),
        ("sampling.regex: is empty", Grammar(kind="regex")),
        ("sampling.grammar: ", Grammar(kind="lark", text="start: unknown")),
        ("sampling.grammar: %json: must be followed by JSON", Grammar(kind="lark", text="start: %json {")),
        ("sampling.grammar: $ref: ", Grammar(kind="lark", text=f"start: %json {json.dumps(chain(DEPTH_MAX))}")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_is_no_grammar_or_too_much_is_refused(words: str, grammar: Grammar) -> None:
    assert problem(grammar).startswith(words)


def test_what_would_need_more_stack_than_there_is_never_reaches_the_compiler() -> None:
    """llguidance recurses from rule to rule: three thousand rules crash the process."""
    rules = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(20_000)) + 'a20000: "x"'
    groups = "start: a0\n" + "".join(f"a{i}: {'(' * 10}a{i + 1}{')' * 10}\n" for i in range(500)) + 'a500: "x"'
    for text in (rules[:GRAMMAR_BYTES_MAX], groups):
        assert f"at most {RULES_MAX}" in problem(Grammar(kind="lark", text=text))
    check(Grammar(kind="lark", text="start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(500)) + 'a500: "x"'))
    levels = NESTING_MAX - 5
    deep = ['{"items":' * levels + f'{{"$ref": "#/$defs/{i + 1}"}}' + "}" * levels for i in range(11)]
    named = ", ".join(f'"{i}": {each}' for i, each in enumerate(deep))
    text = f'{{"$ref": "#/$defs/0", "$defs": {{{named}}}}}'
    assert "$ref: " in problem(Grammar(kind="json_schema", text=text))


def test_between_two_parts_of_a_document_there_are_not_blanks_without_end() -> None:
    given = {"x-guidance": {"whitespace_flexible": False}}
    for document, options in (({}, "whitespace_pattern"), (given, "whitespace_flexible")):
        said = json.loads(compiled_text(schema(document)))["grammars"][0]["json_schema"]["x-guidance"]
        assert said.keys() == {options, "lenient", "coerce_one_of"}


def test_the_field_is_what_the_caller_calls_it() -> None:
    with pytest.raises(InvalidRequest) as raised:
        check(schema({"not": {}}), "response_format.json_schema.schema")
    assert raised.value.field == "response_format.json_schema.schema"


def test_without_the_library_only_the_bounds_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    check(schema({"not": {}}))
    assert "is not JSON" in problem(Grammar(kind="json_schema", text="{"))
    with pytest.raises(ImportError):
        compiled_text(schema({}))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "integer", "multipleOf": 499}, {"type": "integer", "multipleOf": 491}]},
        {"type": "integer", "multipleOf": 499, "allOf": [{"multipleOf": 491}]},
        {"$defs": {"a": {"type": "integer", "multipleOf": 499}}, "$ref": "#/$defs/a", "multipleOf": 491},
        {"allOf": [{"type": "number", "multipleOf": 0.499}, {"type": "number", "multipleOf": 0.491}]},
        {"allOf": [{"type": "integer", "multipleOf": factor} for factor in (64, 81, 125)]},
    ],
    ids=str,
)
def test_what_multiplies_is_bounded_as_a_product(schema: dict[str, Any]) -> None:
    """A conjunction tracks the remainders of all its divisors at once."""
    with pytest.raises(InvalidRequest, match="multipleOf: the least common multiple has"):
        check(Grammar(kind="json_schema", text=json.dumps(schema)))


@pytest.mark.parametrize("multiples", [[100, 50, 1000], [0.01, 0.05, 5], [7, 9, 60, 24], [9973], [1e300, 2]])
def test_usual_multiples_are_accepted_side_by_side(multiples: list[float]) -> None:
    properties = {f"p{number}": {"type": "number", "multipleOf": each} for number, each in enumerate(multiples)}
    if 1e300 in multiples:
        with pytest.raises(InvalidRequest, match="multipleOf"):
            check(Grammar(kind="json_schema", text=json.dumps({"type": "object", "properties": properties})))
        return
    check(Grammar(kind="json_schema", text=json.dumps({"type": "object", "properties": properties})))
