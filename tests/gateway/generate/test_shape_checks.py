"""The text helpers check shapes; the event loop never waits for llguidance."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvforge import SamplingParams
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.chat.shapes import Shape
from kvforge.gateway.generate.shape_checks import check_shape
from kvforge.gateway.text import inline
from kvforge.gateway.text.inline import NoTexts
from kvforge.gateway.text.jobs import TextLimits
from kvforge.gateway.text.pool import TextPool
from kvforge.protocol.errors import DeadlineExceeded, InvalidRequest, QueueFull
from kvforge.protocol.messages import Grammar
from kvforge.text import grammar
from tests.gateway.scripted import Script, application, ask

pytest.importorskip("llguidance")
DEADLINE_S = 120.0
SCHEMA = {"type": "object", "properties": {"unlike any other": {"const": "test_shape_checks"}}}
BAD = Shape("json_schema", {"type": "array", "uniqueItems": True}, "response_format")
TOOL = {"name": "f", "parameters": SCHEMA, "strict": True}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    grammar._verdicts.clear()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the grammars that this process validates."""
    validate, words = grammar._validate, list[str]()

    def noted(text: str, dialect: str) -> str:
        words.append(text)
        return validate(text, dialect)

    monkeypatch.setattr(grammar, "_validate", noted)
    return words


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "tools"])
def test_each_shape_of_a_request_is_checked_by_the_helpers_alone(
    path: str, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_helper = list[str]()

    def counted(given: Grammar, field: str) -> str:
        before = len(here)
        answer = grammar.validated(given, field)
        by_helper.extend(here[before:])
        return answer

    monkeypatch.setattr(inline, "validated", counted)
    said = [{"role": "user", "content": "hi"}]
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    called = {"tools": [{"type": "function", "function": TOOL}]}
    body: dict[str, Any] = {
        "/v1/chat/completions": {"messages": said, "response_format": formatted},
        "/v1/completions": {"prompt": "hi", "response_format": formatted},
        "/v1/responses": {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "/v1/messages": {
            "messages": said,
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        "tools": {"messages": said, "response_format": formatted, **called},
    }[path]
    path = "/v1/chat/completions" if path == "tools" else path
    response = ask(application(Script()), path, {"model": "scripted", **body})
    assert response.status_code == 200, response.text
    assert by_helper and here == by_helper


def test_a_helper_without_a_tokenizer_checks_and_this_process_knows_the_answer(here: list[str]) -> None:
    async def main() -> None:
        pool = TextPool(None, TextLimits())
        try:
            good = Shape("json_schema", SCHEMA, "response_format")
            for shape in (good, BAD):
                await check_shape(Prompts(None, pool), shape)
            SamplingParams(**good.named).message()
            with pytest.raises(InvalidRequest, match="uniqueItems"):
                SamplingParams(**BAD.named).message()
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert not here


def test_a_check_that_ends_its_helper_or_takes_too_long_is_refused_by_the_shapes_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The helpers import this in place of llguidance's own.
    (tmp_path / "llguidance.py").write_text(
        "import os, time\n"
        "class LLParserLimits:\n    def __init__(self, **_): pass\n"
        "class LLMatcher:\n"
        "    grammar_from_regex = staticmethod(str)\n"
        "    @staticmethod\n"
        "    def validate_grammar_with_warnings(text, limits):\n"
        "        if text == 'dies': os.abort()\n"
        "        if text == 'hangs': time.sleep(3600)\n"
        "        return False, []\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def main() -> None:
        slow = TextPool(None, TextLimits(text_s=60.0))
        fast = TextPool(None, TextLimits(text_s=1.0), processes=1, waiting_max=1)
        try:
            prompts = Prompts(None, slow)
            with pytest.raises(InvalidRequest, match=r"guided_regex: checking it takes more than .*text_s"):
                await check_shape(prompts, Shape("regex", "dies", "guided_regex"))
            await check_shape(prompts, Shape("regex", "fine", "guided_regex"))
            await fast.start()
            several = [check_shape(Prompts(None, fast), Shape("regex", "hangs", f"field{at}")) for at in range(3)]
            late = await asyncio.gather(*several, return_exceptions=True)
        finally:
            await slow.close()
            await fast.close()
        assert {type(error) for error in late} == {DeadlineExceeded, QueueFull}
        assert any("field0: checking the shape took longer than 1 s (text_s" in str(error) for error in late)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_refused_shape_is_raised_by_the_sampling_that_has_it() -> None:
    asyncio.run(check_shape(Prompts(None, NoTexts()), BAD))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        grammar.check(Grammar(kind="json_schema", text=json.dumps(BAD.value)))


def test_answers_beyond_the_bound_are_forgotten_the_oldest_use_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "VERDICTS_MAX", 2)
    a, b, c = (Grammar(kind="regex", text=text) for text in "abc")
    grammar.note(a, "")
    grammar.note(b, "no")
    assert grammar.known(a)
    grammar.note(c, "")
    assert [grammar.known(each) for each in (a, b, c)] == [True, False, True]
