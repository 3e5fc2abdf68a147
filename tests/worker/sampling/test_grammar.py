"""A slot's matcher and its masks: allowed tokens, possible ends, and the same state after any of its tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llguidance import LLParserLimits, LLTokenizer

from kvforge.protocol.errors import InvalidRequest, KvforgeError, WorkerError
from kvforge.protocol.messages import NO_INT32, Grammar
from kvforge.worker.sampling.grammar import COMPILED_MAX, Grammars
from kvforge.worker.sampling.grammar_tokens import GrammarTokens, grammar_tokens
from tests.worker.characters import CHARACTERS, EOS, ID_OF, characters_json, encoded, text_of

VOCAB = 131  # more than the tokenizer's 97, and no multiple of 32
NUMBER = Grammar(kind="regex", text="-?[0-9]{1,3}")
SCHEMA = Grammar(
    kind="json_schema",
    text='{"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": '
    '"boolean"}, "maxItems": 3}}, "required": ["a", "b"], "additionalProperties": false}',
)


@pytest.fixture
def grammars() -> Grammars:
    tokens = LLTokenizer(characters_json(), n_vocab=VOCAB, eos_token=[EOS])
    return Grammars(8, VOCAB, lambda: GrammarTokens(tokens))


def begun(grammars: Grammars, slot: int, grammar: Grammar, answer: list[int] | None = None) -> None:
    grammars.begin(slot, grammar, np.array(answer or [], np.int32))
    assert grammars.compile() == {}


def allowed(grammars: Grammars, *slots: int) -> list[list[int]]:
    masks = np.full((len(slots), grammars.words), -1, np.int32)
    assert grammars.fill([grammars.row(slot) for slot in slots], masks) == {}
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def test_only_what_continues_is_allowed_and_the_end_where_it_may_be(grammars: Grammars) -> None:
    begun(grammars, 3, NUMBER)
    digits = encoded("0123456789")
    assert allowed(grammars, 3) == [sorted([*digits, ID_OF["-"]])]
    row = grammars.row(3)
    row.accept(ID_OF["-"])
    assert allowed(grammars, 3) == [digits]
    for digit in "123":
        assert EOS not in allowed(grammars, 3)[0] or digit != "1"
        row.accept(ID_OF[digit])
    assert allowed(grammars, 3) == [[EOS]]
    row.accept(EOS)
    row.accept(EOS)  # from a step in flight
    assert allowed(grammars, 3) == [[EOS]]


def test_no_token_behind_the_tokenizers_own_is_ever_allowed(grammars: Grammars) -> None:
    begun(grammars, 0, Grammar(kind="regex", text="(.|\n)*"))
    assert allowed(grammars, 0) == [[EOS, *range(3, 3 + len(CHARACTERS))]]


@pytest.mark.parametrize("grammar", [SCHEMA, Grammar(kind="json_object")], ids=["schema", "object"])
def test_the_state_after_any_tokens_is_made_of_them(grammars: Grammars, grammar: Grammar) -> None:
    rng, answer = random.Random(1), list[int]()
    begun(grammars, 0, grammar)
    while EOS not in answer and len(answer) < 60:
        begun(grammars, 1, grammar, answer)
        following, again = allowed(grammars, 0, 1)
        assert following == again and following
        answer.append(EOS if EOS in following else rng.choice(following))
        grammars.row(0).accept(answer[-1])
    assert text_of(answer).startswith("{")


def test_rows_of_one_grammar_do_not_touch_each_other(grammars: Grammars) -> None:
    for slot in (0, 1):
        begun(grammars, slot, NUMBER)
    grammars.row(0).accept(ID_OF["-"])
    first, second = allowed(grammars, 0, 1)
    assert ID_OF["-"] not in first and ID_OF["-"] in second


def test_a_model_that_writes_blanks_comes_to_an_end_of_them(grammars: Grammars) -> None:
    begun(grammars, 0, SCHEMA)
    grammars.row(0).accept(ID_OF["{"])
    blanks = 0
    while ID_OF[" "] in allowed(grammars, 0)[0] and blanks < 100:
        grammars.row(0).accept(ID_OF[" "])
        blanks += 1
    assert blanks == 32 and allowed(grammars, 0) == [[ID_OF['"']]]


def test_a_slot_that_changes_hands_forgets(grammars: Grammars) -> None:
    begun(grammars, 2, NUMBER)
    assert grammars.holds(np.array([1, 2])).tolist() == [False, True] and grammars
    grammars.begin(2, None, NO_INT32)
    assert not grammars.holds(np.array([2])).any() and not grammars
    begun(grammars, 5, NUMBER)
    grammars.forget()
    assert not grammars and not grammars.holds(np.arange(8)).any()


def test_what_is_wrong_with_a_grammar_is_its_rows_own(grammars: Grammars) -> None:
    bad = Grammar(kind="json_schema", text='{"type": "array", "uniqueItems": true}')
    lenient = Grammar(kind="lark", text='start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}')
    for slot, grammar in enumerate((bad, lenient, NUMBER, Grammar(kind="regex", text="a("))):
        grammars.begin(slot, grammar, NO_INT32)
    problems = grammars.compile()
    fields = {slot: error.field for slot, error in problems.items() if isinstance(error, InvalidRequest)}
    assert fields == {0: "sampling.json_schema", 1: "sampling.grammar", 3: "sampling.regex"}
    assert all("uniqueItems: " in problems[slot].message for slot in (0, 1))
    masks = np.zeros((3, grammars.words), np.int32)
    assert grammars.fill([grammars.row(slot) for slot in (0, 2, 3)], masks).keys() == {0, 2}
    assert masks[1].any()


def test_an_answer_that_the_grammar_does_not_allow_fails(grammars: Grammars) -> None:
    grammars.begin(0, NUMBER, np.array(encoded("1x"), np.int32))
    assert isinstance(grammars.compile()[0], WorkerError)
    begun(grammars, 1, NUMBER)
    grammars.row(1).accept(ID_OF["x"])
    masks = np.zeros((1, grammars.words), np.int32)
    assert isinstance(grammars.fill([grammars.row(1)], masks)[0], WorkerError)


def test_a_token_that_brings_a_grammar_to_a_limit_is_not_said_to_be_a_wrong_one(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.worker.sampling.grammar.limits", lambda: LLParserLimits(max_items_in_row=20))
    rules = "".join(f"a{i}: a{i + 1} a{i + 1} |\n" for i in range(20))
    wide = Grammar(kind="lark", text=f'start: a0\n{rules}a20: "x" |')
    begun(grammars, 0, wide)
    grammars.begin(1, wide, np.array(encoded("xx"), np.int32))
    told = grammars.compile()[1]
    row = grammars.row(0)
    row.accept(ID_OF["x"])
    row.accept(ID_OF["x"])
    for problem in (told, row.problem):
        assert isinstance(problem, InvalidRequest)
        assert problem.message.startswith("sampling.grammar: cannot continue: ") and "max is 20" in problem.message


def test_a_grammar_that_becomes_too_much_fails_alone_and_says_so(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(grammars, 0, NUMBER)
    monkeypatch.setattr("kvforge.worker.sampling.grammar.limits", lambda: LLParserLimits(step_max_items=20))
    begun(grammars, 1, Grammar(kind="lark", text="start: a*\na: b | c | d\nb: /x/\nc: /xy/\nd: /x[a-z]/"))
    masks, problems = np.zeros((2, grammars.words), np.int32), dict[int, KvforgeError]()
    for _ in range(50):
        problems = grammars.fill([grammars.row(0), grammars.row(1)], masks)
        if problems:
            break
        grammars.row(1).accept(ID_OF["x"])
    assert problems.keys() == {1} and isinstance(problems[1], InvalidRequest)
    assert problems[1].message.startswith("sampling.grammar: cannot continue: ")
    assert masks[0].any()


def test_compiled_grammars_are_kept_and_not_without_end(grammars: Grammars) -> None:
    for number in range(COMPILED_MAX + 5):
        begun(grammars, 0, Grammar(kind="regex", text=f"a{number}"))
    assert len(grammars._compiled) == COMPILED_MAX
    assert allowed(grammars, 0) == [[ID_OF["a"]]]


def test_without_a_tokenizer_or_an_end_no_grammar_is_served() -> None:
    for tokens in (grammar_tokens("no such model", 97, (2,)), grammar_tokens("anything", 97, ())):
        assert tokens.tokens is None
        grammars = Grammars(4, 97, lambda tokens=tokens: tokens)  # type: ignore[misc]
        assert grammars.prepare() == tokens.problem
        grammars.begin(1, NUMBER, NO_INT32)
        problem = grammars.compile()[1]
        assert isinstance(problem, InvalidRequest) and tokens.problem in problem.message
