"""Rows with grammars in a runner: their masks wait for the previous token, and other rows do not wait."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Grammar, RowStart, SamplingParams
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.runner import PendingStep, StepOutcome
from tests.worker.characters import EOS, encoded, text_of, write_characters
from tests.worker.step.test_preemption import start
from tests.worker.step.test_runner import BLOCK_SIZE, PROMPTS, Bench, i4

pytestmark = pytest.mark.usefixtures("grammars_known")
COUNT = 12
WORD = Grammar(kind="regex", text="[a-f]{4}-[0-9]{2,4}")
LONG = Grammar(kind="regex", text="([a-f][0-9]){20}")
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TIGHT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMA = Grammar(
    kind="json_schema",
    text=json.dumps(
        {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": False} | TIGHT
    ),
)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, grammar=LONG),
    "random": SamplingParams(temperature=1.2, grammar=LONG),
    "filtered": SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, grammar=LONG),
    "everything": SamplingParams(
        temperature=1.3, top_k=40, repetition_penalty=1.2, logit_bias=((70, 3.0),), logprobs=5, grammar=LONG
    ),
}


@pytest.fixture
def model(tiny: Callable[..., LoadedModel], write_config: Callable[..., Any]) -> LoadedModel:
    write_characters(write_config("llama"))
    return tiny("llama", block_size=BLOCK_SIZE)


@pytest.fixture
def bench(model: LoadedModel) -> Bench:
    return Bench(model)


def shaped(slot: int, grammar: Grammar | None = WORD, **more: Any) -> RowStart:
    sampling = SamplingParams(grammar=grammar, **({"temperature": 1.0} | more))
    return RowStart(slot=slot, request_id=slot + 1, sampling=sampling, seed=slot + 7)


def launch(bench: Bench, rows: list[tuple[int, int, list[int], int]], **fields: Any) -> PendingStep:
    tables = np.array([bench.tables[row[0]] for row in rows], np.int32)
    return bench.runner.launch(bench.step(rows, **fields), tables)


def answers(outcomes: list[StepOutcome]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for outcome in outcomes:
        assert outcome.errors == ()
        for slot, token in zip(outcome.slots.tolist(), outcome.tokens.tolist(), strict=True):
            found.setdefault(slot, []).append(token)
    return found


def alternate(bench: Bench, starts: list[RowStart], steps: int, behind: bool) -> dict[int, list[int]]:
    """Run all rows step by step. behind: launch each step before the previous one has finished."""
    rows = [(each.slot, 0, PROMPTS[each.slot % 4], 1) for each in starts]
    under_way, outcomes = [launch(bench, rows, begins=tuple(starts))], list[StepOutcome]()
    for index in range(steps - 1):
        if not behind:
            outcomes.append(bench.runner.finish(under_way.pop(0)))
        rows = [(each.slot, len(PROMPTS[each.slot % 4]) + index, [-1], 1) for each in starts]
        under_way.append(launch(bench, rows))
        if behind:
            outcomes.append(bench.runner.finish(under_way.pop(0)))
    outcomes += [bench.runner.finish(each) for each in under_way]
    return answers(outcomes)


@pytest.mark.parametrize("grammar", [WORD, SCHEMA], ids=["regex", "schema"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_what_its_grammar_allows_and_then_ends(bench: Bench, grammar: Grammar, temperature: float) -> None:
    tokens = bench.generate(0, PROMPTS[1], 31, shaped(0, grammar, temperature=temperature))
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    text = text_of(tokens[:end])
    if grammar is WORD:
        assert re.fullmatch(WORD.text, text)
        assert set(tokens[end:]) == {EOS}, "nothing but the end may follow the end"
    else:
        assert 0 <= json.loads(text)["a"] <= 99


@pytest.mark.parametrize("name", SAMPLINGS)
def test_preempted_at_every_position(name: str, bench: Bench) -> None:
    sampling, prompt = SAMPLINGS[name], PROMPTS[3]
    begin, history = start(0, sampling, prompt, [])
    whole = bench.run([(0, 0, prompt, 1)], begins=(begin,), history=i4(*history)).tokens.tolist()
    for index in range(COUNT - 1):
        whole += bench.run([(0, len(prompt) + index, [-1], 1)]).tokens.tolist()
    assert re.fullmatch("([a-f][0-9])*", text_of(whole))
    for done in range(
        COUNT
    ):  # comes back to another slot, in another batch, with and without the prompt in its history
        slot = 1 + done % 6
        begin, history = start(slot, sampling, prompt, whole[:done])
        if not sampling.penalises:
            history = whole[:done]
            begin = RowStart(**{n: getattr(begin, n) for n in begin.__struct_fields__} | {"prompt_history": 0})
        rows = [(7, 0, PROMPTS[0], 1), (slot, 0, prompt + whole[:done], 1)]
        outcome = bench.run(rows, begins=(shaped(7, None), begin), history=i4(*history))
        assert outcome.errors == ()
        got = [int(outcome.tokens[1])]
        for index in range(COUNT - 1 - done):
            rows = [(slot, len(prompt) + done + index, [-1], 1), (7, len(PROMPTS[0]) + index, [-1], 1)]
            got.append(int(bench.run(rows).tokens[0]))
        assert got == whole[done:], f"after {done} tokens"


def test_steps_launched_ahead_choose_the_same(model: LoadedModel) -> None:
    starts = [shaped(0, WORD), shaped(1, None), shaped(2, LONG, top_k=20), shaped(3, SCHEMA, temperature=0.0)]
    ahead = alternate(Bench(model), starts, 10, behind=True)
    assert ahead == alternate(Bench(model), starts, 10, behind=False)
    assert re.fullmatch("([a-f][0-9])*", text_of(ahead[2]))
    alone = alternate(Bench(model), [starts[1]], 10, behind=True)
    assert ahead[1] == alone[1], "a row without a grammar changed beside others"


def test_rows_without_a_grammar_choose_before_those_with_one_know_theirs(bench: Bench) -> None:
    starts = (shaped(0, WORD), shaped(1, None))
    first = launch(bench, [(0, 0, PROMPTS[0], 1), (1, 0, PROMPTS[1], 1)], begins=starts)
    assert first.done() and [each.slots.tolist() for each in first.sampled] == [[1], [0]]
    second = launch(bench, [(0, len(PROMPTS[0]), [-1], 1), (1, len(PROMPTS[1]), [-1], 1)])
    assert not second.done() and [each.slots.tolist() for each in second.sampled] == [[1]]
    bench.runner.finish(first)
    assert second.done() and [each.slots.tolist() for each in second.sampled] == [[1], [0]]
    assert bench.runner.finish(second).slots.tolist() == [0, 1]


def test_what_cannot_be_enforced_fails_its_row_alone_at_its_first_step(bench: Bench) -> None:
    bad = Grammar(kind="json_schema", text='{"type": "array", "uniqueItems": true}')
    starts = (shaped(0, bad), shaped(1, WORD), shaped(2, None))
    rows = [(0, 0, PROMPTS[0][:2], 0), (1, 0, PROMPTS[1], 1), (2, 0, PROMPTS[2], 1)]
    outcome = bench.run(rows, begins=starts)
    assert [error.slot for error in outcome.errors] == [0]
    assert outcome.errors[0].error.code == InvalidRequest.code and "uniqueItems" in outcome.errors[0].error.message
    assert outcome.slots.tolist() == [1, 2]
    again = bench.run([(0, 2, PROMPTS[0][2:], 1), (1, 1, [-1], 1)])
    assert [error.slot for error in again.errors] == [0] and again.slots.tolist() == [1]
    assert bench.run([(0, 0, PROMPTS[0], 1)], begins=(shaped(0, WORD),)).errors == ()


def test_a_row_whose_logits_are_not_finite_fails_and_so_does_its_next_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = (shaped(0, WORD), shaped(1, WORD))
    assert bench.run([(0, 0, PROMPTS[0], 1), (1, 0, PROMPTS[1], 1)], begins=starts).errors == ()
    forward = type(bench.runner.model).forward

    def spoiled(*arguments: Any) -> torch.Tensor:
        logits = forward(*arguments)
        logits[0, 5] = float("nan")
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(type(bench.runner.model), "forward", spoiled)
        first = launch(bench, [(0, len(PROMPTS[0]), [-1], 1), (1, 1, [-1], 1)])
    second = launch(bench, [(0, len(PROMPTS[0]) + 1, [-1], 1), (1, 2, [-1], 1)])
    for pending in (first, second):
        outcome = bench.runner.finish(pending)
        assert [error.slot for error in outcome.errors] == [0] and "not finite" in outcome.errors[0].error.message
        assert outcome.slots.tolist() == [1]


def test_a_slot_that_changes_hands_while_its_token_is_under_way(bench: Bench) -> None:
    first = launch(bench, [(0, 0, PROMPTS[0], 1)], begins=(shaped(0, LONG),))
    second = launch(bench, [(0, 0, PROMPTS[1], 1)], begins=(shaped(0, SCHEMA),))
    assert second.done(), "the row before it is none of its own"
    assert bench.runner.finish(first).errors == ()
    assert text_of(bench.runner.finish(second).tokens.tolist()) == "{"


def test_an_answer_that_does_not_fit_its_grammar_is_refused(bench: Bench) -> None:
    begin, _ = start(0, SamplingParams(grammar=WORD), PROMPTS[1], encoded("xy"))
    begin = RowStart(**{n: getattr(begin, n) for n in begin.__struct_fields__} | {"prompt_history": 0})
    outcome = bench.run([(0, 0, PROMPTS[1] + encoded("xy"), 1)], begins=(begin,), history=i4(*encoded("xy")))
    assert "violates the grammar" in outcome.errors[0].error.message


def test_a_model_without_a_tokenizer_serves_no_grammar(tiny: Callable[..., LoadedModel]) -> None:
    bench = Bench(tiny("llama", block_size=BLOCK_SIZE))
    outcome = bench.run([(0, 0, PROMPTS[0], 1), (1, 0, PROMPTS[1], 1)], begins=(shaped(0, WORD), shaped(1, None)))
    assert "tokenizer" in outcome.errors[0].error.message and outcome.slots.tolist() == [1]


def test_another_coordinator_finds_no_grammars(bench: Bench) -> None:
    bench.run([(0, 0, PROMPTS[0], 1)], begins=(shaped(0, WORD),))
    bench.runner.reset()
    assert not bench.runner.shaping.grammars
    assert bench.run([(0, 0, PROMPTS[0], 1)], begins=(shaped(0, None, temperature=0.0),)).errors == ()


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def graphed(request: pytest.FixtureRequest, write_config: Callable[..., Any]) -> Iterator[LoadedModel]:
    device = open_device("auto" if request.param == "gpu" else "cpu")
    if request.param == "gpu" and not device.runs_kernels:
        pytest.skip("no GPU here")
    folder = write_config("llama", head_dim=64, hidden_size=256)
    write_characters(folder)
    yield load_model(folder, device=device, block_size=16, load_format="dummy", dtype="float32", seed=0)


def test_from_graphs_and_without_rows_choose_the_same(graphed: LoadedModel) -> None:
    """After a graph replay as after an eager pass, with steps launched ahead, whatever is beside a row."""
    starts = [shaped(0, WORD), shaped(1, None), shaped(2, LONG, top_k=20), shaped(3, SCHEMA, temperature=0.0)]
    found = []
    for rows_max in (0, 8):
        bench = Bench(graphed, graph_rows_max=rows_max)
        assert (bench.runner.graphs is not None) == bool(rows_max)
        found += [alternate(bench, starts, 8, behind) for behind in (False, True)]
        bench.runner.close()
    assert found[0] == found[1] == found[2] == found[3]
    assert re.match("[a-f]{4}-[0-9]", text_of(found[0][0]))
