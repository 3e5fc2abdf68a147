"""A draft model: answers have the bits that they have without, and its K and V are those of the tokens before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import SamplingParams, Step
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.drafts.model import DraftRow, ModelDrafter
from kvforge.worker.loading import draft_model
from kvforge.worker.loading.draft_model import join_draft_model
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.draft_graphs import DraftGraphs
from kvforge.worker.step.draft_passes import DraftPasses
from kvforge.worker.step.runner import StepOutcome
from tests.pairs import every_pair
from tests.worker.characters import write_characters
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE
from tests.worker.step.test_drafts import (
    DRAFTS_MAX,
    GRAMMARS,
    PROMPTS,
    SAMPLINGS,
    SLOTS,
    TOKENS,
    Answer,
    Drafting,
    answers_of,
    none,
    undrafted,
)
from tests.worker.step.test_runner import BLOCK_SIZE, i4

pytestmark = pytest.mark.usefixtures("grammars_known")
GREEDY = SAMPLINGS["greedy"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def joined_models() -> dict[Any, LoadedModel]:
    """Models that `load` returned: no test changes one."""
    return {}


@pytest.fixture
def load(tiny: Load, write_config: Callable[..., Any], joined_models: dict[Any, LoadedModel]) -> Load:
    """load(kind, **options) -> a model with a draft model: itself ("same"), or a small one with other weights."""
    write_characters(write_config("llama"))

    def load_once(kind: str, kernels: bool = True, **options: Any) -> LoadedModel:
        key = kind, kernels, *sorted(options.items())
        if key not in joined_models:
            joined_models[key] = joined(kind, kernels, **options)
        return joined_models[key]

    def joined(kind: str, kernels: bool, **options: Any) -> LoadedModel:
        settings = {"block_size": BLOCK_SIZE, "kernels": kernels}
        model = tiny("llama", **settings, **options)
        fields = SMALL if kind == "small" else {}
        draft = tiny("llama", **settings, **(fields | {"seed": 0 if kind == "same" else 5}))
        return join_draft_model(model, draft)

    return load_once


def nan_pool(bench: Drafting) -> Drafting:
    """Fill the scratch blocks with NaN too, and capture the passes of a runner with graphs."""
    assert bench.pool.beside is not None
    if bench.runner.draft_graphs is not None:
        bench.runner.draft_graphs.capture()
    for cache in bench.pool.beside.tensors():
        cache.fill_(float("nan") if cache.is_floating_point() else 127)
    return bench


def proposed(outcome: StepOutcome) -> dict[int, list[int]]:
    slots, counts, tokens = outcome.proposals.slots, outcome.proposals.counts, outcome.proposals.tokens
    parts = np.split(tokens, np.cumsum(counts)[:-1]) if len(slots) else []
    return {slot: part.tolist() for slot, part in zip(slots.tolist(), parts, strict=True)}


def drafter_of(bench: Drafting) -> ModelDrafter:
    return cast("ModelDrafter", bench.runner.drafter)


def without_lookup(bench: Drafting, monkeypatch: pytest.MonkeyPatch) -> Drafting:
    """Leave every proposal to the draft model."""
    monkeypatch.setattr(drafter_of(bench).lookup, "found", lambda *_: {})
    return bench


def watched_inputs(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Return lists that get the tokens and the positions that the draft model is fed."""
    fed, positions, write, decode = list[int](), list[int](), LoadedModel.write, LoadedModel.decode

    def note(self: LoadedModel, tokens: Any, places: Any) -> None:
        if self is model.draft:
            fed.extend(tokens.tolist())
            positions.extend(places.tolist())

    def written(self: LoadedModel, tokens: Any, places: Any, *rest: Any) -> None:
        note(self, tokens, places)
        write(self, tokens, places, *rest)

    def decoded(self: LoadedModel, tokens: Any, places: Any, *rest: Any) -> Any:
        note(self, tokens, places)
        return decode(self, tokens, places, *rest)

    monkeypatch.setattr(LoadedModel, "write", written)
    monkeypatch.setattr(LoadedModel, "decode", decoded)
    return fed, positions


def drafted_answers(bench: Drafting, answers: Sequence[Answer], tokens: int = TOKENS) -> list[Answer]:
    """Run the answers to their ends, each step with the proposals of the one before."""
    for each in answers:
        each.most = DRAFTS_MAX
    outcome = bench.begin(answers)
    while running := [each for each in answers if len(each.chosen) < tokens]:
        found = proposed(outcome)
        outcome = bench.advance(running, lambda each, found=found: found.get(each.slot, []))  # type: ignore[misc]
    for each in answers:
        del each.chosen[tokens:]
    return list(answers)


@pytest.mark.parametrize(
    ("kind", "path", "kinds"),
    every_pair([("same", "kernels"), ("small", "kernels"), ("same", "graphs")], [SAMPLINGS, GRAMMARS]),
    ids=lambda each: None if isinstance(each, str) else "grammars" if each is GRAMMARS else "plain",
)
def test_answers_have_the_bits_that_they_have_without_a_draft_model(
    kind: str, path: str, kinds: dict[str, SamplingParams], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(kind)
    samplings = list(kinds.values())
    plain = replace(model, draft=None, geometry=replace(model.geometry, beside=None))
    want = undrafted(plain, samplings)
    bench = without_lookup(nan_pool(Drafting(model, path == "graphs")), monkeypatch)
    got = drafted_answers(bench, answers_of(samplings))
    for name, mine, other in zip(kinds, got, want, strict=False):
        assert mine.chosen == other.chosen, name
        assert mine.drafted > 0, name
    bench.close()


@NEEDS_CACHE
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize(("family", "graphs"), [("lfm2", False), ("qwen3_next", True)])
def test_a_draft_model_serves_a_model_with_recurrent_states(
    family: str, graphs: bool, tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, fields = HYBRIDS[family]
    plain = tiny(model_type, block_size=BLOCK_SIZE, **fields)
    plain = replace(plain, geometry=replace(plain.geometry, draft_states=SLOTS * DRAFTS_MAX))
    model = join_draft_model(plain, tiny("llama", block_size=BLOCK_SIZE, **SMALL))
    assert model.geometry.state_blocks == plain.geometry.state_blocks, "pages are of the model's own bytes"
    samplings = list(SAMPLINGS.values())
    want = undrafted(plain, samplings, 12)
    bench = without_lookup(nan_pool(Drafting(model, graphs)), monkeypatch)
    for mine, other in zip(drafted_answers(bench, answers_of(samplings), 12), want, strict=True):
        assert mine.chosen == other.chosen
        assert mine.drafted > 0
    bench.close()


@pytest.mark.parametrize("path", ["kernels", "torch", "graphs"])
def test_a_draft_model_equal_to_the_model_is_always_right(
    path: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every greedy draft is accepted: its K and V are those of all tokens before, in blocks and in scratch blocks."""
    bench = without_lookup(nan_pool(Drafting(load("same", path != "torch"), path == "graphs")), monkeypatch)
    for each in drafted_answers(bench, answers_of([GREEDY] * len(PROMPTS))):
        assert each.drafted > 0
        assert each.accepted == each.drafted, f"slot {each.slot}"
    bench.close()


def continuation(model: LoadedModel, slot: int, chosen: Sequence[int], count: int = DRAFTS_MAX) -> list[int]:
    """Return the greedy tokens of a model behind an answer of a slot, computed alone and without a draft model."""
    plain = replace(model, draft=None, geometry=replace(model.geometry, beside=None))
    bench, answer = Drafting(plain), Answer(slot, GREEDY)
    bench.begin([answer])
    while len(answer.chosen) < len(chosen) + count:
        bench.advance([answer], none)
    bench.close()
    assert answer.tokens[: len(chosen)] == list(chosen)
    return answer.tokens[len(chosen) :]


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_are_the_greedy_tokens_of_the_draft_model(
    graphs: bool, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each proposal is what the draft model itself would answer, of rows of all lengths and counts together."""
    model = load("small")
    assert model.draft is not None
    bench = without_lookup(nan_pool(Drafting(model, graphs)), monkeypatch)
    assert (bench.runner.draft_graphs is not None) == graphs
    answers = answers_of([GREEDY] * len(PROMPTS))
    for number, each in enumerate(answers):
        each.most = 1 + number % DRAFTS_MAX
    found = proposed(bench.begin(answers))
    alone = Drafting(model.draft)
    for each in answers:
        mine, tokens = found[each.slot], [*each.prompt, each.tokens[0]]
        own = [(each.slot, 0, tokens, 0)]
        want = alone.run(own, begins=(each.start(),), history=i4(*each.prompt)).tokens.tolist()
        assert len(mine) == each.most
        while len(want) < len(mine):
            at = len(tokens) + len(want) - 1
            want += alone.run([(each.slot, at, [-1], 0)]).tokens.tolist()
        assert mine == want, f"slot {each.slot}"
    alone.close()
    bench.close()


def test_a_row_gets_no_more_drafts_than_it_may(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, answers = without_lookup(Drafting(load("same")), monkeypatch), answers_of([GREEDY] * 3)
    for each, most in zip(answers, (1, 0, 3), strict=True):
        each.most = most
    found = proposed(bench.begin(answers))
    assert {slot: len(tokens) for slot, tokens in found.items()} == {0: 1, 2: 3}
    bench.close()


def test_lookup_proposes_first_and_takes_no_pass(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of three tokens are looked up; the model proposes for the other rows alone."""
    bench, answers = Drafting(load("same")), answers_of([GREEDY, GREEDY])
    for each in answers:
        each.most = 3
    drafter, asked = drafter_of(bench), list[list[int]]()
    passes = cast("DraftPasses", drafter._model)
    continue_rows = passes.continue_rows

    def watched(rows: Any) -> Any:
        asked.append([row.position for row in rows])
        return continue_rows(rows)

    monkeypatch.setattr(passes, "continue_rows", watched)
    monkeypatch.setattr(drafter.lookup, "found", lambda slots, least=0: {0: [1, 2, 3]} if least and 0 in slots else {})
    found = proposed(bench.begin(answers))
    assert found[0] == [1, 2, 3]
    assert len(found[1]) == 3
    assert asked == [[len(PROMPTS[1])]]
    monkeypatch.setattr(drafter.lookup, "found", lambda slots, _=0: {slot: [7] for slot in slots})
    monkeypatch.setattr(drafter, "_right", {0: 1.0, 1: 1.0})  # as if its tokens had been right so far
    assert set(proposed(bench.run([bench.row(each, []) for each in answers]))) == {0, 1}
    assert len(asked) == 1
    bench.close()


@pytest.mark.parametrize("copied", [BLOCK_SIZE, 2])
def test_copied_blocks_bring_the_draft_models_keys_and_values(
    copied: int, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork goes on in copies of blocks, and one that was zeroed between."""
    bench = without_lookup(nan_pool(Drafting(load("same"))), monkeypatch)
    parent, child = Answer(0, GREEDY, most=DRAFTS_MAX), Answer(1, GREEDY, most=DRAFTS_MAX)
    bench.begin([parent])
    length = len(PROMPTS[0])  # two whole blocks and a token
    shared = length // BLOCK_SIZE * BLOCK_SIZE if copied == BLOCK_SIZE else BLOCK_SIZE + copied
    copies = [[16 * 0 + block, 16 + block, min(BLOCK_SIZE, shared - BLOCK_SIZE * block)] for block in range(2)]
    rest = PROMPTS[0][shared:]
    start = msgspec.structs.replace(child.start(), prompt_history=length)
    outcome = bench.run(
        [(1, shared, rest, 0)],
        begins=(start,),
        history=i4(*PROMPTS[0]),
        copies=i4(*[number for copy in copies for number in copy]),
        zeros=i4(*range(16, 32)),
    )
    bench.take([child], outcome)
    assert child.tokens == parent.tokens
    want = continuation(bench.model, 0, parent.tokens)
    assert proposed(outcome)[1] == want[: len(proposed(outcome)[1])]
    bench.close()


def test_zeroed_blocks_keep_nothing_of_the_draft_model(load: Load) -> None:
    bench = Drafting(load("small"))
    bench.begin(answers_of([GREEDY]))
    bench.pool.zero_blocks(i4(*range(bench.pool.blocks)))
    assert bench.pool.beside is not None
    own = [*bench.pool.tensors()]
    assert len(own) == 2 * (len(bench.pool.geometry.layers) + 1) + 1
    assert not any(tensor.any() for tensor in own)
    bench.close()


def test_a_step_in_flight_gives_the_place_of_the_drafts(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator sends no step behind one that asks. The model's tokens would be of no use, and delay it."""
    bench = without_lookup(nan_pool(Drafting(load("same"))), monkeypatch)
    (answer,) = answers_of([GREEDY])
    answer.most = DRAFTS_MAX
    row = (answer.slot, 0, answer.prompt, 0)
    first = bench.launch([row], begins=(answer.start(),), history=i4(*answer.prompt))
    second = bench.launch([(0, len(PROMPTS[0]), [-1], 0)])
    outcome = bench.runner.finish(first)
    bench.take([answer], outcome)
    assert proposed(outcome) == {}
    outcome = bench.runner.finish(second)
    bench.take([answer], outcome)
    assert proposed(outcome)[0] == continuation(bench.model, 0, answer.tokens)[:DRAFTS_MAX]
    assert (outcome.proposals.model_rows, outcome.proposals.took_us > 0) == (1, True)
    bench.close()


def test_a_step_that_does_not_ask_gets_none_of_the_models_tokens(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = without_lookup(nan_pool(Drafting(load("same"))), monkeypatch)
    (answer,) = answers_of([GREEDY])
    answer.most = DRAFTS_MAX
    outcome = bench.begin([answer])
    assert len(proposed(outcome)[0]) == DRAFTS_MAX
    for asked in (0, 2, 0):
        row = bench.row(answer, [])
        outcome = bench.run([row], propose=asked)
        bench.take([answer], outcome)
        assert len(proposed(outcome).get(0, [])) == asked == 2 * outcome.proposals.model_rows
    bench.close()


def test_a_draft_model_that_fails_proposes_nothing_and_answers_go_on(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, answers = without_lookup(Drafting(load("same")), monkeypatch), answers_of([GREEDY])
    answers[0].most = 3

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(DraftPasses, "_continue", broken)
    monkeypatch.setattr(Device, "release_cached", broken)
    outcome = bench.begin(answers)
    for _ in range(3):
        assert proposed(outcome) == {}
        outcome = bench.advance(answers, none)
    assert len(answers[0].chosen) == 4
    assert [record.message for record in caplog.records] == [
        "drafts: the draft model failed: RuntimeError: out of memory"
    ], "said once"
    monkeypatch.undo()
    bench.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(
    graphs: bool, load: Load, tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its positions end before those of the model, which goes on without drafts."""
    model = load("same", max_position_embeddings=64)
    draft = tiny("llama", block_size=BLOCK_SIZE, max_position_embeddings=16)
    model = join_draft_model(replace(model, draft=None, geometry=replace(model.geometry, beside=None)), draft)
    bench = without_lookup(nan_pool(Drafting(model, graphs)), monkeypatch)
    answer, other = answers_of([GREEDY, GREEDY])
    answer.most = other.most = 3
    _, positions = watched_inputs(model, monkeypatch)
    outcome, lengths = bench.begin([answer, other]), list[int]()
    for _ in range(10):
        lengths.append(len(proposed(outcome).get(0, [])))
        outcome = bench.advance([answer, other], none)
    assert max(positions) == 15
    position = len(PROMPTS[0])
    assert lengths == [min(3, max(0, 16 - position - step)) for step in range(10)]
    bench.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_that_keeps_windows_has_a_draft_model(
    graphs: bool, tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is page-major, and the draft model's is not: each has batches of its own."""
    from tests.worker.step.test_windows import BLOCK_SIZE as SIZE
    from tests.worker.step.test_windows import COMMON, LIMITS, MODELS, Bench, prompt

    model_type, fields = MODELS["gemma3"]
    settings = {"block_size": SIZE, **COMMON, **fields}
    kept, draft = tiny(model_type, windows=LIMITS, **settings), tiny(model_type, **settings)
    model = join_draft_model(kept, draft)
    own = draft.geometry.bytes_per_block + 4 * SIZE  # and the id of each token
    assert model.geometry.bytes_per_block == kept.geometry.bytes_per_block + own
    plain, bench = Bench(kept), Bench(model, 4 if graphs else 0)
    monkeypatch.setattr(drafter_of(cast("Drafting", bench)).lookup, "found", lambda *_: {})
    text = prompt(70)
    want, got = plain.run([(0, 0, text)]).tokens.tolist(), [0]
    outcome = bench.run([(0, 0, text)], most=3, propose=3)
    got = outcome.tokens.tolist()
    drafted = 0
    while len(got) < 40:
        drafts = proposed(outcome).get(0, [])[:3]
        drafted += len(drafts)
        outcome = bench.run([(0, 70 + len(got) - 1, [got[-1], *drafts])], (len(drafts),), keep=len(drafts), propose=3)
        assert len(outcome.tokens) == 1 + len(drafts), "a draft of the same model was wrong"
        got += outcome.tokens.tolist()
    while len(want) < len(got):
        want += plain.run([(0, 70 + len(want) - 1, [want[-1]])]).tokens.tolist()
    assert got == want
    assert drafted > 20


@pytest.mark.parametrize(
    ("model", "draft", "words"),
    [
        (
            {},
            {"vocab_size": 96},
            r"has not the same number of tokens, 96 and not 97, as llama: choose a model with the same vocabulary",
        ),
        ({}, "states", "has recurrent states, which take back no wrong draft: choose a model without"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
def test_models_that_do_not_fit_are_refused(model: Any, draft: Any, words: str, tiny: Load) -> None:
    def loaded(fields: Any) -> LoadedModel:
        if fields != "states":
            return tiny("llama", block_size=16, **fields)
        layers = ["conv", "full_attention", "conv"]
        return tiny("lfm2", block_size=16, num_hidden_layers=3, layer_types=layers)

    with pytest.raises(InvalidConfiguration, match=words) as caught:
        join_draft_model(loaded(model), loaded(draft))
    assert caught.value.field == "draft_model"


@pytest.mark.parametrize(("size", "graphs"), every_pair([90, 101], [False, True]))
def test_vocabularies_may_be_padded_differently(
    size: int, graphs: bool, load: Load, tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokenizers agree: tokens that one lacks are never drafted, and harmless where a text has them."""
    model = load("same")
    plain = replace(model, draft=None, geometry=replace(model.geometry, beside=None))
    monkeypatch.setattr(draft_model, "_token_ids", lambda _: {str(token): token for token in range(90)})
    joined = join_draft_model(plain, tiny("llama", block_size=BLOCK_SIZE, **SMALL, vocab_size=size))
    want = undrafted(plain, [GREEDY] * len(PROMPTS))
    assert max(token for each in want for token in (*each.tokens, *each.prompt)) > 90
    bench = without_lookup(nan_pool(Drafting(joined, graphs)), monkeypatch)
    fed, _ = watched_inputs(joined, monkeypatch)
    answers = answers_of([GREEDY] * len(PROMPTS))
    for each in answers:
        each.most = DRAFTS_MAX
    outcome, drafted = bench.begin(answers), list[int]()
    while len(answers[0].chosen) < TOKENS:
        drafted += [token for tokens in proposed(outcome).values() for token in tokens]
        outcome = bench.advance(answers, none)
    assert [each.chosen for each in answers] == [each.chosen for each in want]
    assert len(drafted) > TOKENS
    assert max(drafted) < min(size, 97)
    assert 80 < max(fed) < size, "kernels read the table of embeddings unchecked"
    assert min(fed) >= 0
    bench.close()


@pytest.mark.parametrize(
    ("own", "other", "sizes", "words"),
    [
        (None, None, (9, 9), ""),
        (None, {"a": 0}, (9, 8), "has not the same number of tokens, 8 and not 9,"),
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}, (9, 64), ""),
        ({"a": 0, "b": 1}, {"a": 1, "b": 0}, (9, 9), "gives only 0 of 2 tokens the same ids"),
        ({str(at): at for at in range(200)}, {str(at): at for at in range(202)}, (9, 9), ""),
        (
            {str(at): at for at in range(200)},
            {str(at): at for at in range(203)},
            (9, 9),
            "gives only 200 of 200 tokens the same ids",
        ),
    ],
)
def test_vocabularies_are_compared_by_their_tokens(own: Any, other: Any, sizes: tuple[int, int], words: str) -> None:
    assert draft_model.vocabulary_problem(own, other, *sizes) == words


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_draft_model_on_a_gpu(
    graphs: bool, kv_dtype: str, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    settings = {"load_format": "dummy", "dtype": "bfloat16", "device": device, "block_size": 16, "kv_dtype": kv_dtype}
    folder = write_config("llama")
    model = load_model(folder, **settings)
    want = [Drafting(model, graphs).answer([each], none)[0] for each in answers_of(list(SAMPLINGS.values()))]
    same = join_draft_model(model, load_model(folder, **settings))
    bench = without_lookup(
        nan_pool(Drafting(same, graphs)) if kv_dtype == "auto" else Drafting(same, graphs), monkeypatch
    )
    got = drafted_answers(bench, answers_of(list(SAMPLINGS.values())))
    assert [each.chosen for each in got] == [each.chosen for each in want]
    greedy = got[0]
    assert greedy.drafted > 0
    assert greedy.accepted >= 0.9 * greedy.drafted, "prompts and generated tokens round alike in the draft model"
    bench.close()


def check_graphs_and_eager_passes(bench: Drafting, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the longest proposals of rows by captured passes with those by eager ones; counts differ by row."""
    passes, asked = cast("DraftPasses", drafter_of(bench)._model), list[DraftRow]()
    assert bench.runner.draft_graphs is not None
    bench.runner.draft_graphs.capture()
    assert bench.runner.draft_graphs.sizes, "captured"
    continue_rows = passes.continue_rows
    monkeypatch.setattr(passes, "continue_rows", lambda given: (asked.extend(given), continue_rows(given))[1])
    answers = answers_of([GREEDY] * rows)
    for each in answers:
        each.most = DRAFTS_MAX
    bench.begin(answers)
    assert len(asked) == rows
    asked = [replace(row, count=max(1, passes.tokens_max - 3 * number)) for number, row in enumerate(asked)]
    ran = list[int]()
    run = bench.runner.draft_graphs.run
    monkeypatch.setattr(bench.runner.draft_graphs, "run", lambda *given: (ran.append(given[-1]), run(*given))[1])
    captured = [continue_rows(asked) for _ in range(2)]  # the second one finds the results of the first
    assert ran == [passes.tokens_max] * 2
    monkeypatch.setattr(passes, "graphs", None)
    eager = continue_rows(asked)
    assert [len(each) for each in eager] == [row.count for row in asked]
    assert captured == [eager, eager]


@pytest.mark.parametrize("kind", ["same", "small"])
def test_captured_passes_propose_what_eager_ones_do(kind: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = without_lookup(nan_pool(Drafting(load(kind), graphs=True)), monkeypatch)
    check_graphs_and_eager_passes(bench, 3, monkeypatch)
    bench.close()


@pytest.mark.gpu
def test_captured_passes_propose_what_eager_ones_do_on_a_gpu(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    settings = {"load_format": "dummy", "dtype": "bfloat16", "device": device, "block_size": 16}
    folder = write_config("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model = load_model(folder, **settings)
    joined = join_draft_model(model, load_model(folder, **settings, seed=5))
    bench = without_lookup(nan_pool(Drafting(joined, graphs=True)), monkeypatch)
    check_graphs_and_eager_passes(bench, 3, monkeypatch)
    bench.close()


def test_steps_without_rows_propose_nothing(load: Load) -> None:
    bench = Drafting(load("same"))
    outcome = bench.runner.run(Step(0), np.zeros((0, 1), np.int32))
    assert outcome.proposals.slots.size == 0
    bench.close()


@pytest.mark.parametrize("right", [0, 1, 3])
def test_proposals_go_on_behind_the_accepted_drafts(right: int, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts leave K and V behind the answer, in blocks of its own, which the next passes overwrite."""
    model = load("same")
    want = continuation(model, 0, [], TOKENS + DRAFTS_MAX)
    bench = without_lookup(nan_pool(Drafting(model)), monkeypatch)
    (answer,) = answers_of([GREEDY])
    answer.most = DRAFTS_MAX
    bench.begin([answer])

    def drafts(each: Answer) -> list[int]:
        known = want[len(each.tokens) :]
        return known[:right] + [(token + 1) % 97 for token in known[right:DRAFTS_MAX]]

    while len(answer.tokens) + DRAFTS_MAX < TOKENS:
        found = proposed(bench.advance([answer], drafts))[0]
        assert answer.tokens == want[: len(answer.tokens)]
        assert found == want[len(answer.tokens) :][: len(found)]
    bench.close()


def test_graphs_of_prompts_write_the_draft_models_keys_and_values(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("same")
    bench = without_lookup(nan_pool(Drafting(model, graphs=True)), monkeypatch)
    graphs, launched = bench.runner.prompt_graphs, list[int]()
    assert graphs is not None
    assert graphs.capture_one(graphs.sizes[0])
    launch = graphs.launch

    def watched(rows: Any) -> Any:
        launched.append(len(rows))
        return launch(rows)

    monkeypatch.setattr(graphs, "launch", watched)
    (answer,) = answers_of([GREEDY])
    answer.most = DRAFTS_MAX
    found = proposed(bench.begin([answer]))[0]
    assert launched == [1]
    assert found == continuation(model, 0, answer.tokens)[: len(found)]
    bench.close()


def test_passes_that_cannot_be_captured_run_eagerly(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a synchronisation")

    monkeypatch.setattr(DraftGraphs, "_capture", broken)
    bench = without_lookup(nan_pool(Drafting(load("same"), graphs=True)), monkeypatch)
    graphs = bench.runner.draft_graphs
    assert graphs is not None
    assert (graphs.sizes, graphs.can_run(1, 1)) == ((), False)
    assert [record.message for record in caplog.records] == [
        "drafts run without graphs: capturing failed: RuntimeError: a synchronisation"
    ]
    (answer,) = drafted_answers(bench, answers_of([GREEDY]))
    assert answer.accepted == answer.drafted > 0
    bench.close()


def test_a_proposal_runs_in_the_smallest_graph_that_holds_it(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = without_lookup(nan_pool(Drafting(load("same"), graphs=True)), monkeypatch)
    graphs, ran = bench.runner.draft_graphs, list[int]()
    assert graphs is not None
    assert graphs.sizes[:3] == (1, 2, 4)
    holding = graphs._holding

    def watched(rows: int) -> Any:
        graph = holding(rows)
        ran.append(len(graph.batch.counts))
        return graph

    monkeypatch.setattr(graphs, "_holding", watched)
    answers = answers_of([GREEDY] * 3)
    for each in answers:
        each.most = 2
    bench.begin(answers)
    assert ran == [4, 4]
    bench.advance(answers[:1], none)
    assert ran == [4, 4, 2, 1], "the first pass has the token that was sampled first too"
    bench.close()


def test_layers_of_transformers_draft_too(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a description: the pass that writes K and V computes the logits of one token."""
    model = load("same")
    assert model.draft is not None
    model = replace(model, draft=replace(model.draft, fused=None))
    bench = without_lookup(nan_pool(Drafting(model)), monkeypatch)
    for each in drafted_answers(bench, answers_of([GREEDY] * 3)):
        assert each.accepted == each.drafted > 0
    bench.close()
