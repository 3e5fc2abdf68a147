"""Sessions over HTTP: the next turn's part of an answer, for servers with text or token ids in either direction."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvforge.loadtest.drive.http_word_map import WordMap, common_words
from kvforge.loadtest.drive.outcome import FINISHED, Outcome
from kvforge.loadtest.load.texts import Encode
from kvforge.protocol.messages import Int32Array

from .raw_http import DONE, PROMPT, chunked, driving, event, request_of, serving, usage

SAID = " to be,\n\nor "
HISTORY = (("Who?", " Hamlet."), ("When?", " Long ago."))


def play(
    *asks: dict[str, Any], encode: Encode | None = None, ids: tuple[int, ...] = (), **options: Any
) -> tuple[list[Outcome], list[Any]]:
    """Send requests in turn to a server that answers SAID; return the outcomes and the sent bodies. ids: token ids in
    the answer."""
    seen: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append((await request_of(reader))[1])
            extra = {"token_ids": ids} if seen[-1].get("return_token_ids") and ids else {}
            last = extra | {"text": SAID, "delta": {"content": SAID}, "finish_reason": "length"}
            writer.write(chunked(event(None) + event(None, choices=[last]) + event(None, usage=usage(3)) + DONE))

    async def main() -> list[Outcome]:
        async with serving(handle) as url, driving(url, encode, **options) as engine:
            return [await engine.one(**ask) for ask in asks]

    outcomes = asyncio.run(main())
    assert {outcome.state for outcome in outcomes} == {FINISHED}
    return outcomes, seen


def test_a_chat_goes_on_as_messages() -> None:
    (outcome,), (sent,) = play({"text": "Why?", "history": HISTORY, "followed": True}, api="chat", token_ids=True)
    assert sent["messages"] == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": " Hamlet."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": " Long ago."},
        {"role": "user", "content": "Why?"},
    ]
    assert outcome.answer == SAID
    assert "return_token_ids" not in sent


def test_a_text_goes_on_where_the_answer_ended() -> None:
    _, (sent,) = play({"text": "\nWhy?", "history": HISTORY}, prompt_as="text")
    assert sent["prompt"] == "Who? Hamlet.When? Long ago.\nWhy?"


def test_an_answer_that_nobody_follows_is_not_kept() -> None:
    (outcome,), (sent,) = play({}, token_ids=True, ids=(1, 2, 3))
    assert (outcome.answer, list(outcome.tokens)) == ("", [])
    assert "return_token_ids" not in sent


def test_token_ids_of_an_answer_are_the_servers_own_where_it_gives_them() -> None:
    (outcome,), (sent,) = play({"followed": True}, token_ids=True, ids=(1, 2, 3), encode=lambda _: [9])
    assert sent["return_token_ids"] is True
    assert (list(outcome.tokens), outcome.stood_in) == ([1, 2, 3], False)


def test_else_they_are_a_tokenizers() -> None:
    (outcome,), _ = play({"followed": True}, token_ids=True, encode=lambda text: [len(text), 4])
    assert (list(outcome.tokens), outcome.stood_in) == ([len(SAID), 4], False)


def test_else_as_many_stand_in_that_follow_from_the_words() -> None:
    ask = {"followed": True}
    (one, other), (_, sent) = play(ask, ask, vocab=50)
    assert "return_token_ids" not in sent
    assert list(one.tokens) == list(other.tokens) != [one.tokens[0]] * 3
    assert len(one.tokens) == len(one.tokens_s) == 3 and 0 <= min(one.tokens) <= max(one.tokens) < 50
    assert one.stood_in


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_token_ids_are_words_to_a_server_of_text_and_its_answers_their_own(api: str) -> None:
    def said(sent: Any) -> str:
        return str(sent["prompt"] if api == "completions" else sent["messages"][0]["content"])

    (first,), (before,) = play({"followed": True}, api=api, prompt_as="text")
    assert len(said(before).split()) == len(PROMPT)
    assert first.answer == SAID and not first.stood_in
    words = WordMap(1)
    assert words.of_answer(SAID) == list(first.tokens)
    held = np.array([*PROMPT, *first.tokens, 5], np.int32)
    assert words.text(held) == f"{said(before)}{SAID} {said(before).split()[0]}"


def test_words_of_ids_and_answers_come_back() -> None:
    def ids(*numbers: int) -> Int32Array:
        return np.array(numbers, np.int32)

    words, count = WordMap(10), len(common_words())
    assert count > 300
    assert words.text(ids(0, count)) == f"{common_words()[0]} {common_words()[0]}"
    for answer in ("", "a", " a b  a\n", "\n \n", "\tä ö,b"):
        found = words.of_answer(answer)
        assert all(number < 0 for number in found)
        assert words.text(ids(1, *found)) == common_words()[1] + answer
    assert words.of_answer(" a") == words.of_answer(" a") == WordMap(10).of_answer(" a")
    assert len({*words.of_answer("plumless"), *words.of_answer("buckeroo")}) == 2  # equal CRC-32
    assert words.text(ids(0, *words.of_answer("buckeroo"))) == f"{common_words()[0]}buckeroo"
    assert words.ids("", 2) == ([0, 0], True)
