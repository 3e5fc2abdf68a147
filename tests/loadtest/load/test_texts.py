"""Text prompts have the requested length with and without a tokenizer, with words beside the tokens."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from kvforge.loadtest.load.build import LoadOptions, build
from kvforge.loadtest.load.files import sample_lines
from kvforge.loadtest.load.texts import PASSAGES, QUESTIONS, Text, encoder
from kvforge.loadtest.load.workload import ALL, prompts
from kvforge.protocol.errors import InvalidRequest

VOCAB = 1000


def _letters(text: str) -> list[int]:
    """Return a tokenizer with a token for every byte, including blanks."""
    return list(text.encode())


@pytest.mark.parametrize("name", sorted(PASSAGES))
@pytest.mark.parametrize("length", [1, 40, 300])
def test_without_a_tokenizer_each_word_of_the_text_is_a_token(name: str, length: int) -> None:
    load = build(LoadOptions(closed=1, prompts=name, input=str(length), prefix=8, vocab=VOCAB))
    turns = [load.session(index).turns[0] for index in range(50)]
    for turn in turns:
        words = turn.text.split()
        assert [zlib.crc32(word.encode()) % VOCAB for word in words] == turn.tokens.tolist()
        assert len(words) == length
    assert len({turn.text for turn in turns}) > 40 or length == 1
    assert len({tuple(turn.tokens[:8]) for turn in turns}) == 1


def test_a_tokenizer_gives_the_tokens_of_just_that_text() -> None:
    load = build(LoadOptions(closed=1, prompts="sonnet", input="200", vocab=256), _letters)
    for index in range(20):
        turn = load.session(index).turns[0]
        assert len(turn.tokens) == 200
        text = turn.text.encode()
        # The last line is cut between words, the tokens anywhere.
        assert 190 - 10 <= len(text) <= 215
        assert bytes(turn.tokens.astype(np.uint8))[:180] == text[:180]
    with pytest.raises(InvalidRequest, match="vocab"):
        build(LoadOptions(closed=1, prompts="sonnet", vocab=100), _letters)


def test_a_passage_goes_on_from_the_beginning_as_often_as_it_must() -> None:
    text = Text("\n\none two\nthree\n\n four five six", encoder(None, 1 << 30))
    assert (len(text), text.lines) == (6, 3)
    for line, first in enumerate(["one", "three", "four"]):
        for length in range(1, 20):
            tokens, words = text.passage(line, length)
            assert len(tokens) == len(words.replace("six", "six ").split()) == length
            assert words.split()[0] == first
    assert text.passage(0, 6)[1] == "\n\none two\nthree\n\n four five six"


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_questions_are_asked_whole_and_each_in_its_turn(name: str) -> None:
    file, field = QUESTIONS[name]
    asked = [json.loads(line)[field] for _, line in sample_lines(file)]
    load = build(LoadOptions(closed=1, prompts=name, requests=len(asked), output="20"))
    sessions = [load.session(index) for index in range(len(asked))]
    texts = {tuple(turn.text for turn in session.turns) for session in sessions}
    assert texts == {(one.rstrip(),) if isinstance(one, str) else tuple(one) for one in asked} or name == "humaneval"
    assert load.requests == sum(len(session.turns) for session in sessions)


def test_a_second_turn_holds_the_first_one_and_its_real_answer() -> None:
    load = build(LoadOptions(closed=1, prompts="mt-bench", output="20", requests=30))
    session = load.session(3)
    assert [turn.kept for turn in session.turns] == [0, ALL]
    answer = np.arange(7, dtype=np.int32)
    first, second = prompts(session, [answer, answer])
    assert np.array_equal(second, np.concatenate((first, answer, session.turns[1].tokens)))


def test_questions_are_cut_or_repeated_to_a_length_and_cut_to_fit() -> None:
    load = build(LoadOptions(closed=1, prompts="gsm8k", input="100", requests=20))
    assert {len(load.session(index).turns[0].tokens) for index in range(20)} == {100}
    small = build(LoadOptions(closed=1, prompts="mt-bench", input="30", output="30", requests=20, context_max=100))
    assert small.shortened == small.requests // 2 == 20
    for index in range(20):
        turns = small.session(index).turns
        first, second = prompts(small.session(index), [np.zeros(turn.output_tokens, np.int32) for turn in turns])
        assert len(first) == 30 and len(second) + turns[1].output_tokens == 100
