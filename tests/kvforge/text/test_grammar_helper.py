"""A separate process tries grammars, within limits of time and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvforge.text.grammar_helper import GrammarHelper, TrialLimits

llguidance = pytest.importorskip("llguidance")
from llguidance import LLMatcher  # noqa: E402

from tests.worker.characters import EOS, characters_json  # noqa: E402


@pytest.fixture
def helper() -> Iterator[GrammarHelper]:
    made = GrammarHelper(characters_json(), 131, (EOS,), TrialLimits(cpu_s=0.5))
    yield made
    made.close()


def schema(**fields: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": fields}]})


def multiples(*primes: int) -> str:
    return schema(allOf=[{"type": "integer", "multipleOf": prime} for prime in primes])


def test_a_grammar_that_takes_long_is_refused_and_the_next_is_not(helper: GrammarHelper) -> None:
    for _ in range(2):
        assert "takes longer than 0.5 s of a core" in helper.problem(multiples(997, 991))
        assert helper.problem(schema(type="object", properties={"a": {"type": "integer"}})) == ""


def test_a_grammar_that_takes_memory_is_refused() -> None:
    helper = GrammarHelper(characters_json(), 131, (EOS,), TrialLimits(cpu_s=30.0, memory_bytes=32 << 20))
    try:
        assert "bytes of memory" in helper.problem(multiples(997, 991))
        assert helper.problem(schema(type="integer")) == ""
    finally:
        helper.close()


def test_text_that_is_forced_for_long_is_refused(helper: GrammarHelper) -> None:
    """Each mask recomputes the forced text; only the first is quick."""
    assert "takes longer" in helper.problem(LLMatcher.grammar_from_lark("start: a{1000}\na: /x{1000}/"))


@pytest.mark.parametrize("text", ["", "{", "null", '{"grammars": [{"json_schema": {"type": "unheard"}}]}'])
def test_what_is_wrong_with_a_grammar_is_left_to_the_worker(helper: GrammarHelper, text: str) -> None:
    assert helper.problem(text) == ""


def test_a_helper_that_was_killed_is_started_again(helper: GrammarHelper) -> None:
    assert helper.problem(schema(type="integer")) == ""
    process = helper._process
    assert process is not None
    process.kill()
    process.wait()
    assert helper.problem(schema(type="integer")) == ""
    assert helper._process is not process
