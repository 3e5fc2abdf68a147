"""A worker without a model gives a request the same answer, whatever steps compute it."""

from __future__ import annotations

import numpy as np

from kvforge.loadtest.fleet.tokens import Tokens
from kvforge.protocol.messages import Grammar, RowStart, SamplingParams, Step

VOCABULARY = 1000


def _step(number: int, slot: int, start: int, tokens: list[int], begin: RowStart | None = None) -> Step:
    rows = [np.array([value], np.int32) for value in (slot, start, len(tokens), 1)]
    begins = () if begin is None else (begin,)
    return Step(number, begins, *rows, tokens=np.array(tokens, np.int32))  # type: ignore[arg-type]


def _answer(temperature: float, seed: int, slot: int = 0, after: tuple[int, ...] = ()) -> list[int]:
    """Return six tokens behind a prompt; the tokens `after` were generated earlier and are recomputed."""
    tokens, prompt = Tokens(4, VOCABULARY), [5, 6, 7, *after]
    begin = RowStart(slot=slot, request_id=1, sampling=SamplingParams(temperature=temperature), seed=seed)
    answer = list(after)
    for number in range(6 - len(after)):
        step = _step(number, slot, len(prompt) + number - 1, [-1]) if number else _step(0, slot, 0, prompt, begin)
        slots, found = tokens.of(step)
        assert slots.tolist() == [slot]
        answer += found.tolist()
    return answer


def test_the_answer_is_the_same_where_it_is_computed_again() -> None:
    for temperature, seed in ((0.0, 3), (1.0, 3)):
        whole = _answer(temperature, seed)
        assert _answer(temperature, seed, slot=2, after=tuple(whole[:3])) == whole
        assert all(0 <= token < VOCABULARY for token in whole) and len(set(whole)) > 3
    assert _answer(1.0, 3) != _answer(1.0, 4)
    assert _answer(0.0, 3) == _answer(0.0, 4)


def test_only_rows_that_sample_answer() -> None:
    tokens = Tokens(4, VOCABULARY)
    columns = ([0, 1, 2], [0, 0, 9], [2, 1, 1], [0, 1, 1])
    step = Step(1, (), *(np.array(column, np.int32) for column in columns), tokens=np.array([1, 2, 3, -1], np.int32))
    slots, found = tokens.of(step)
    assert slots.tolist() == [1, 2] and found.size == 2
    alone = Tokens(4, VOCABULARY).of(_step(1, 1, 0, [3]))
    assert alone[1][0] == found[0]


def test_a_request_with_a_grammar_is_refused_and_nobody_else() -> None:
    tokens = Tokens(4, VOCABULARY)
    shaped = RowStart(slot=2, request_id=1, sampling=SamplingParams(grammar=Grammar(kind="json_object")), seed=3)
    step = _step(1, 2, 0, [5, 6], shaped)
    assert tokens.of(step)[0].tolist() == []
    assert [(error.slot, error.error.fields["field"]) for error in tokens.refused(step)] == [(2, "sampling.grammar")]
    for step in (
        _step(2, 1, 0, [5]),
        _step(3, 2, 0, [5], RowStart(slot=2, request_id=2, sampling=SamplingParams(), seed=3)),
    ):
        assert tokens.of(step)[0].tolist() == step.slots.tolist() and tokens.refused(step) == ()
