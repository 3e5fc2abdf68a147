"""A trial process compiles a grammar: its row is deferred, and the steps of other rows continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvforge.protocol.messages import Grammar
from kvforge.text.grammar_trials import GrammarTrials
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.grammar_tokens import GrammarTokens, grammar_tokens
from kvforge.worker.step import shaping
from tests.kvforge.text.test_grammar_trials import DEADLINE_S, GatedHelper, trials_of
from tests.worker.characters import encoded, write_characters
from tests.worker.step.test_runner import BLOCK_SIZE, PROMPTS, Bench, begin
from tests.worker.step.test_shaping import WORD, launch, shaped

# Each mask recomputes the forced tokens: a valid grammar that takes seconds of a core.
COSTLY = Grammar(kind="lark", text="start: a{1000}\na: /x{1000}/")
STEPS_MAX = 20_000


@pytest.fixture
def model(tiny: Callable[..., LoadedModel], write_config: Callable[..., Any]) -> LoadedModel:
    write_characters(write_config("llama"))
    return tiny("llama", block_size=BLOCK_SIZE)


@pytest.fixture
def helper() -> Iterator[GatedHelper]:
    made = GatedHelper()
    yield made
    made.gate = True


@pytest.fixture
def trials(model: LoadedModel, helper: GatedHelper, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarTrials]:
    """Collect the trials of each runner created after this fixture."""
    made = trials_of(helper)
    tokens = grammar_tokens(model.info.source, model.vocab_size, model.info.eos_tokens).tokens
    monkeypatch.setattr(shaping, "grammar_tokens", lambda *_: GrammarTokens(tokens, trials=made))
    yield made
    helper.gate = True
    made.close()


def test_the_row_whose_grammar_is_tried_is_put_off_and_the_others_have_their_own_bits(
    model: LoadedModel, helper: GatedHelper, trials: GrammarTrials
) -> None:
    alone = Bench(model).generate(0, PROMPTS[0], 6)
    helper.tries.clear()
    bench, prompt = Bench(model), PROMPTS[1]
    outcome = bench.run([(0, 0, PROMPTS[0], 1), (1, 0, prompt, 1)], begins=(begin(0), shaped(1)))
    tokens = outcome.tokens.tolist()
    assert [(each.slot, each.again_ms > 0) for each in outcome.errors] == [(1, True)]
    for index in range(5):
        rows = [(0, len(PROMPTS[0]) + index, [-1], 1), (1, 0, prompt, 1)]
        outcome = bench.run(rows, begins=(shaped(1),))
        assert outcome.slots.tolist() == [0] and [each.slot for each in outcome.errors] == [1]
        tokens += outcome.tokens.tolist()
    assert tokens == alone
    assert len(helper.tries) <= 1, "one trial for all the rows of a grammar"
    helper.gate = True
    trials.wait(DEADLINE_S)
    chosen = bench.run([(1, 0, prompt, 1)], begins=(shaped(1),))
    assert chosen.errors == () and chosen.tokens[0] in encoded("abcdef")


def test_a_step_behind_that_was_fed_with_the_missing_token_fails_alone(
    model: LoadedModel, trials: GrammarTrials
) -> None:
    bench = Bench(model)
    first = launch(bench, [(0, 0, PROMPTS[0], 1), (1, 0, PROMPTS[1], 1)], begins=(begin(0), shaped(1)))
    second = launch(bench, [(0, len(PROMPTS[0]), [-1], 1), (1, len(PROMPTS[1]), [-1], 1)])
    for pending in (first, second):
        outcome = bench.runner.finish(pending)
        assert outcome.slots.tolist() == [0] and [each.slot for each in outcome.errors] == [1]


def test_a_prompt_is_computed_while_its_grammar_is_tried(
    model: LoadedModel, helper: GatedHelper, trials: GrammarTrials
) -> None:
    bench, prompt = Bench(model), PROMPTS[0]
    outcome = bench.run([(1, 0, prompt[:4], 0)], begins=(shaped(1),))
    assert outcome.errors == ()
    helper.gate = True
    trials.wait(DEADLINE_S)
    chosen = bench.run([(1, 4, prompt[4:], 1)])
    assert chosen.errors == () and chosen.tokens[0] in encoded("abcdef")


def test_steps_go_on_while_a_costly_grammar_is_tried_and_it_is_refused(model: LoadedModel) -> None:
    bench, prompt = Bench(model), PROMPTS[0]
    together = 0
    for _ in range(STEPS_MAX):
        outcome = bench.run([(0, 0, prompt, 1), (1, 0, PROMPTS[1], 1)], begins=(begin(0), shaped(1, COSTLY)))
        assert outcome.slots.tolist() == [0]
        (error,) = outcome.errors
        if not error.again_ms:
            break
        together += 1
    assert error.error.code == "invalid_request" and "takes longer than 1 s of a core" in error.error.message
    assert together > 1
    assert bench.run([(1, 0, PROMPTS[1], 1)], begins=(shaped(1, COSTLY),)).errors[0].again_ms == 0, "known by now"


def test_ranks_do_as_the_first_of_them(model: LoadedModel, helper: GatedHelper, trials: GrammarTrials) -> None:
    """Their trials end at different times."""
    bench = Bench(model)
    grammars = bench.runner.shaping.grammars
    for verdict, again in ((0, True), (2, False)):
        grammars._agree = lambda mine, verdict=verdict: [verdict] * len(mine)  # type: ignore[misc]
        (error,) = bench.run([(1, 0, PROMPTS[1], 1)], begins=(shaped(1, WORD),)).errors
        assert (error.again_ms > 0) == again
    grammars._agree = lambda mine: [1] * len(mine)
    assert bench.run([(1, 0, PROMPTS[1], 1)], begins=(shaped(1, WORD),)).errors == ()
