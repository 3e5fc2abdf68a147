"""Grammars that force calls: every allowed text parses as calls that fit their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance.hf
import llguidance.numpy
import pytest
from llguidance import LLMatcher

from kvforge.gateway.parse.formats import FORMATS
from kvforge.gateway.parse.grammars import WRITTEN, Shaped, after_reasoning, calls_grammar
from kvforge.protocol.errors import InvalidRequest
from tests.amount import examples
from tests.gateway.scripted import SPECIAL, tokenizer

from .written import events_of, joined

SPOKEN = tokenizer()
CITY = {"type": "string", "maxLength": 6}
TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
LENGTH_MAX = 2000


def drawn(grammar: str, seed: int) -> str:
    """Return a random text allowed by the grammar; "": it did not end."""
    hf: Any = SPOKEN._tokenizer
    matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.get_error(), matcher.get_error()
    draw, mask, tokens = random.Random(seed), llguidance.numpy.allocate_token_bitmask(1, len(hf)), []
    while len(tokens) < LENGTH_MAX and not matcher.is_stopped():
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = [token for token in range(len(hf)) if mask[0, token // 32] >> (token % 32) & 1]
        assert allowed
        ends = [token for token in allowed if token == hf.eos_token_id]
        token = ends[0] if ends and draw.random() < 0.5 else draw.choice(allowed)
        if token == hf.eos_token_id:
            break
        assert matcher.consume_token(token)
        tokens.append(token)
    else:
        if not matcher.is_stopped():
            return ""
    return SPOKEN.stream(continues=True, keep=frozenset(SPECIAL)).push(tokens)


_TOKENIZER = llguidance.hf.from_tokenizer(
    SPOKEN._tokenizer, n_vocab=len(SPOKEN._tokenizer), eos_token=SPOKEN._tokenizer.eos_token_id
)


def grammar(name: str, **options: Any) -> str:
    chosen = {"must": True, "parallel": True, "in_reasoning": False, **options}
    return calls_grammar(FORMATS[name], chosen.pop("tools", TOOLS), special=SPOKEN.special_tokens, **chosen)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_must_be_a_call_is_read_back_as_one(name: str) -> None:
    text, read = grammar(name), 0
    for seed in range(6):
        if said := drawn(text, seed):
            message = joined(events_of(name, list(said), tools=TOOLS))
            assert message.calls and not message.content, said
            for called, arguments in message.called:
                jsonschema.validate(arguments, TOOLS[called])
            read += 1
    assert read


@pytest.mark.parametrize("name", WRITTEN)
def test_a_tool_of_choice_is_called_once(name: str) -> None:
    text = grammar(name, tools={"weather": TOOLS["weather"]}, parallel=False)
    said = next(said for seed in range(20) if (said := drawn(text, seed)))
    assert [called for called, _ in joined(events_of(name, [said], tools=TOOLS)).called] == ["weather"]


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3", "harmony"])
def test_what_may_be_a_call_is_text_or_a_right_one(name: str) -> None:
    text = grammar(name, must=False, strict=("weather", "now"))
    matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(text))
    assert not matcher.get_error()
    plain = SPOKEN.encode("Just {text}.", special=False)
    assert matcher.validate_tokens(plain) == len(plain)
    wrong = SPOKEN.encode(WRITTEN[name].begins + 'x{"name": "other"', special=False)
    assert matcher.validate_tokens(wrong) < len(wrong)


@pytest.mark.parametrize("name", WRITTEN)
def test_beside_calls_an_answer_has_its_shape(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    text = grammar(name, must=False, otherwise=Shaped("json_schema", json.dumps(schema)))
    kinds = set()
    for seed in range(30):
        if len(kinds) == 2 and seed >= examples(30):
            break
        if said := drawn(text, seed):
            message = joined(events_of(name, list(said), tools=TOOLS))
            kinds.add(bool(message.calls))
            if message.calls:
                assert not message.content, said
                for called, arguments in message.called:
                    jsonschema.validate(arguments, TOOLS[called])
            else:
                jsonschema.validate(json.loads(message.content), schema)
    assert kinds == {True, False}


@pytest.mark.parametrize("kind, right, wrong", [("json_object", '{"a": 1}', "[1]"), ("regex", "red", "blue")])
def test_shapes_beside_calls(kind: str, right: str, wrong: str) -> None:
    for in_reasoning, before in ((False, ""), (True, "hm</think>\n")):
        text = grammar("hermes", must=False, in_reasoning=in_reasoning, otherwise=Shaped(kind, "red|green"))
        matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(text))
        called = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        for said, allowed in ((right, True), (called, True), (wrong, False)):
            tokens = SPOKEN.encode(before + said, special=False)
            assert (matcher.validate_tokens(tokens) == len(tokens)) == allowed, said


def test_behind_reasoning() -> None:
    text = grammar("hermes", in_reasoning=True)
    matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(text))
    said = SPOKEN.encode('hm { </think>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', special=False)
    assert matcher.validate_tokens(said) == len(said)
    shaped = after_reasoning(FORMATS["hermes"], SPOKEN.special_tokens, Shaped("json_schema", '{"type": "integer"}'))
    matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(shaped))
    right, wrong = (SPOKEN.encode(f"hm</think>\n{end}", special=False) for end in ("42", "no"))
    assert matcher.validate_tokens(right) == len(right)
    assert matcher.validate_tokens(wrong) == len(wrong) - 2


def test_a_schema_that_cannot_be_enforced_is_refused_only_where_it_must_be() -> None:
    tools = {"f": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}
    assert "uniqueItems" not in grammar("hermes", tools=tools)
    with pytest.raises(InvalidRequest, match=r"tools\.f\.parameters.*uniqueItems"):
        grammar("hermes", tools=tools, strict=("f",))


def test_a_pattern_of_text_between_tags_is_refused_where_it_must_hold() -> None:
    tools = {"f": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x$"}}}}
    assert grammar("glm45", tools=tools)
    with pytest.raises(InvalidRequest, match=r"tools\.f\.parameters\.properties\.a.*pattern"):
        grammar("glm45", tools=tools, strict=("f",))


def test_a_format_whose_calls_cannot_be_enforced_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"tool_choice.*gemma"):
        grammar("gemma")
