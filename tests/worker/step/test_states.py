"""Steps of models with recurrent states: chunks, checkpoints, forks, rewinds, and steps that fail.

The test plays the coordinator: it cuts prompts at multiples of a chunk, copies whole pages, and compares bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvforge.protocol.messages import GENERATED, RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.loading import mixers
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.runner import ModelRunner, StepOutcome
from kvforge.worker.step.step_failures import StateLostError
from tests.worker.loading.covering import HYBRID, MIXER, by_parts
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE, RECURRENT

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*"),
    NEEDS_CACHE,
]
BLOCK_SIZE, WIDTH, SLOTS = 16, 8, 6
Row = tuple[int, int, list[int], int]  # slot, start, tokens, sample


def i4(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


class Bench:
    """A runner. Each slot owns WIDTH blocks of K and V and the pages of a state, in random places of the pool."""

    def __init__(self, model: LoadedModel, graph_rows_max: int = 0) -> None:
        self.pages = model.geometry.state_blocks
        each = WIDTH + self.pages
        self.pool = KvPool(model.geometry, (SLOTS + 2) * each, model.device)
        for memory in self.pool.tensors():
            memory.fill_(float("nan"))  # a row at the begin reads no page
        order = np.random.default_rng(7).permutation(self.pool.blocks).astype(np.int32).reshape(-1, each)
        self.tables, self.states = order[:, :WIDTH], order[:, WIDTH:]  # the last two are checkpoints
        limits = {"slots_max": SLOTS, "step_tokens_max": 256, "step_rows_max": 8}
        self.runner = ModelRunner(model, self.pool, **limits, graph_rows_max=graph_rows_max)

    def step(self, rows: list[Row], copies: npt.NDArray[np.int32] | None = None, **fields: Any) -> Step:
        slots, starts, tokens, samples = zip(*rows, strict=True)
        begins = tuple(
            RowStart(slot=slot, request_id=slot, sampling=SamplingParams(temperature=0.0), seed=0)
            for slot, start, _, _ in rows
            if start == 0
        )
        return Step(
            0,
            slots=i4(*slots),
            starts=i4(*starts),
            counts=i4(*map(len, tokens)),
            samples=i4(*samples),
            tokens=i4(*[token for part in tokens for token in part]),
            copies=i4() if copies is None else copies.reshape(-1).astype(np.int32),
            **{"begins": begins} | fields,
        )

    def run(self, rows: list[Row], copies: npt.NDArray[np.int32] | None = None, **fields: Any) -> StepOutcome:
        slots = [row[0] for row in rows]
        outcome = self.runner.run(self.step(rows, copies, **fields), self.tables[slots], self.states[slots])
        assert outcome.errors == ()
        return outcome

    def copy(self, source: int, target: int, blocks: int) -> npt.NDArray[np.int32]:
        """Return the copies of a state, and of the first blocks of K and V."""
        froms = [*self.states[source], *self.tables[source, :blocks]]
        return np.array([froms, [*self.states[target], *self.tables[target, :blocks]], [BLOCK_SIZE] * len(froms)]).T

    def decode(self, slot: int, start: int, token: int, beside: list[Row] | None = None) -> tuple[int, float]:
        outcome = self.run([*(beside or []), (slot, start, [token + GENERATED], 1)])
        (at,) = np.flatnonzero(outcome.slots == slot)
        return int(outcome.tokens[at]), float(outcome.logprobs[at])

    def continued(self, slot: int, start: int, first: int, count: int) -> list[tuple[int, float]]:
        found, token = [], first
        for place in range(start, start + count):
            found.append(self.decode(slot, place, token))
            token = found[-1][0]
        return found


PLAYED = ["lfm2", "qwen3_next", "granite", "jamba", "kimi_linear"]
_played: dict[str, tuple[LoadedModel, list[tuple[int, float]]]] = {}


def played(name: str, tiny: Callable[..., LoadedModel]) -> tuple[LoadedModel, list[tuple[int, float]]]:
    """Return a model of a family and what `play` returns for it, computed once for both tests."""
    if name not in _played:
        model_type, fields = HYBRIDS[name]
        model = tiny(model_type, block_size=BLOCK_SIZE, **fields)
        _played[name] = model, play(model)
    return _played[name]


@pytest.fixture
def lfm2(tiny: Callable[..., LoadedModel]) -> LoadedModel:
    model_type, fields = HYBRIDS["lfm2"]
    return tiny(model_type, block_size=BLOCK_SIZE, **fields)


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


def first(outcome: StepOutcome, slot: int) -> tuple[int, float]:
    (at,) = np.flatnonzero(outcome.slots == slot)
    return int(outcome.tokens[at]), float(outcome.logprobs[at])


@pytest.mark.parametrize("name", PLAYED)
def test_a_request_has_the_same_bits_whatever_was_done_with_its_state(
    name: str, tiny: Callable[..., LoadedModel]
) -> None:
    assert len(played(name, tiny)[1]) == 11


@pytest.mark.parametrize("name", PLAYED)
def test_generated_tokens_from_graphs_have_the_same_bits(name: str, tiny: Callable[..., LoadedModel]) -> None:
    model, whole = played(name, tiny)
    assert play(model, graph_rows_max=4) == whole
    bench = Bench(model, graph_rows_max=4)
    graphs = bench.runner.graphs
    assert graphs is not None
    bench.run([(slot, 0, prompt(slot, 20 + slot), 1) for slot in range(3)])
    for place in range(3):
        bench.run([(slot, 20 + slot + place, [7 + GENERATED], 1) for slot in range(3)])
    assert (bench.runner.meter.graphs, graphs.captured) == (3, 1)  # three rows in a graph of four
    # Two tokens of one sequence in a step: the second one needs the state behind the first.
    bench.run([(0, 23, [7 + GENERATED, 8 + GENERATED], 1)])
    assert bench.runner.meter.graphs == 3


def test_a_mixer_that_runs_row_by_row_has_no_graphs(tiny: Callable[..., LoadedModel]) -> None:
    model_type, fields = HYBRIDS["olmo_hybrid"]
    bench = Bench(tiny(model_type, block_size=BLOCK_SIZE, **fields), graph_rows_max=4)
    assert bench.runner.graphs is None


def play(model: LoadedModel, graph_rows_max: int = 0) -> list[tuple[int, float]]:
    """Return an answer, which has the same bits whatever was done with its state.

    It runs in chunks and company, behind a checkpoint, as a fork, after a rewind, and recomputed from its tokens.
    """
    text, other = prompt(1, 75), prompt(2, 40)
    alone = Bench(model, graph_rows_max)
    begun = first(alone.run([(0, 0, text, 1)]), 0)
    whole = [begun, *alone.continued(0, 75, begun[0], 10)]
    answer = [token for token, _ in whole]

    bench = Bench(model, graph_rows_max)
    bench.run([(3, 0, other, 0), (1, 0, text[:64], 0)])
    # A checkpoint behind 64 tokens is copied before the step that advances the state.
    outcome = bench.run([(1, 64, text[64:], 1), (2, 0, other[:1], 1)], bench.copy(1, SLOTS, 4))
    assert first(outcome, 1) == begun
    assert bench.continued(1, 75, begun[0], 6) == whole[1:7]

    # Another request with the same prefix stands on the checkpoint.
    outcome = bench.run([(4, 64, text[64:], 1)], bench.copy(SLOTS, 4, 4), begins=bench.step([(4, 0, [1], 0)]).begins)
    assert first(outcome, 4) == begun
    assert bench.continued(4, 75, begun[0], 3) == whole[1:4]

    # A fork of the first behind 81 tokens; both go on apart, the fork with another token.
    bench.run([(3, 40, [5 + GENERATED], 0)], bench.copy(1, 5, 6))
    fork = bench.decode(5, 81, 9)
    assert bench.decode(1, 81, answer[6]) == whole[7]
    assert bench.decode(1, 82, answer[7], [(5, 82, [fork[0] + GENERATED], 1)]) == whole[8]

    # A rewind to the checkpoint behind 64 tokens, and recomputation of the answer so far.
    bench.run([(1, 64, text[64:], 0)], bench.copy(SLOTS, 1, 0))
    for place, token in enumerate(answer[:8]):
        last = bench.decode(1, 75 + place, token)
    assert last == whole[8]
    assert bench.continued(1, 83, answer[8], 2) == whole[9:]

    # Recomputed from its tokens in other pages: generated tokens one for each step.
    bench.run([(2, 0, text[:64], 0)])
    bench.run([(2, 64, text[64:], 0), (0, 0, other, 1)])
    for place, token in enumerate(answer[:10]):
        last = bench.decode(2, 75 + place, token)
    assert last == whole[10]

    # Prompt and answer in one row, beside another.
    marked = [token + GENERATED for token in answer[:3]]
    outcome = bench.run([(4, 0, other, 0), (0, 0, text + marked, 1)])
    assert first(outcome, 0) == whole[3]
    return whole


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_a_prompt_behind_an_answer_has_the_same_bits_in_any_chunks(name: str, tiny: Callable[..., LoadedModel]) -> None:
    """A run of prompt tokens that begins at 33, is cut at 64, and ends at 70."""
    model_type, fields = HYBRIDS[name]
    model, text, more = tiny(model_type, block_size=BLOCK_SIZE, **fields), prompt(3, 30), prompt(4, 37)
    found = []
    for cuts in ([37], [31, 6]):
        bench = Bench(model)
        bench.run([(0, 0, text, 0)])
        for place, token in enumerate((7, 8, 9)):
            bench.decode(0, 30 + place, token)
        start = 0
        for count in cuts:
            outcome = bench.run([(0, 33 + start, more[start : start + count], 1)])
            start += count
        found.append(first(outcome, 0))
    assert found[0] == found[1]


ATTENDING = [name for name in HYBRIDS if name not in {*RECURRENT, "lfm2_moe", "qwen3_5_moe"}]


@pytest.mark.parametrize("name", by_parts(ATTENDING, HYBRID, MIXER))
def test_a_block_has_the_same_bits_behind_prompts_of_any_length(name: str, tiny: Callable[..., LoadedModel]) -> None:
    """Its chunk may be the last, incomplete one of a prompt, and a whole one of another that finds the block cached."""
    model_type, fields = HYBRIDS[name]
    model, text = tiny(model_type, block_size=BLOCK_SIZE, **fields), prompt(6, 128)
    found = []
    for count in (65 + BLOCK_SIZE, 100, 128):
        bench = Bench(model)
        bench.run([(0, 0, text[:64], 0)])
        bench.run([(1, 0, [5, 6, 7], 0), (0, 64, text[64:count], 0)])
        (memory,) = bench.pool.tensors()
        found.append(memory[bench.tables[0, 4]].clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_prompt_log_probabilities_do_not_advance_the_state_again(
    lfm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.worker.step.forward_passes.tokens_at_a_time", lambda _: 7)
    text = prompt(5, 90)
    plain, scoring = Bench(lfm2), Bench(lfm2)
    for bench in (plain, scoring):
        bench.run([(0, 0, text[:64], 0)])
    begun = first(plain.run([(0, 64, text[64:], 1)]), 0)
    outcome = scoring.run([(0, 64, text[64:], 1)], scored=np.arange(25, dtype=np.int32), following=i4(*text[65:]))
    assert len(outcome.prompts.logprobs) == 25
    assert first(outcome, 0) == begun
    assert scoring.continued(0, 90, begun[0], 5) == plain.continued(0, 90, begun[0], 5)


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ("range", "states", "block 9999 is not one of the pool's"),
        ("negative", "states", "block -1 is not one"),
        ("twice", "states", "named twice"),
        ("copy", "copies", "of this row's state is out of bounds"),
    ],
)
def test_a_row_with_bad_pages_fails_alone(
    change: str, field: str, problem: str, tiny: Callable[..., LoadedModel]
) -> None:
    model_type, fields = HYBRIDS["granite"]  # with a state of several pages
    bench = Bench(tiny(model_type, block_size=BLOCK_SIZE, **fields))
    rows: list[Row] = [(0, 0, prompt(1, 9), 1), (1, 0, prompt(2, 9), 1)]
    states, copies = bench.states[[0, 1]].copy(), None
    if change == "copy":
        copies = i4(9999, int(states[1, 0]), BLOCK_SIZE)
    elif change == "twice":
        states[1, 0] = states[1, 1]
    else:
        states[1, 0] = 9999 if change == "range" else -1
    outcome = bench.runner.run(bench.step(rows[::-1], copies), bench.tables[[1, 0]], states[::-1].copy())
    assert outcome.slots.tolist() == [0]
    bench.continued(0, 9, 5, 2)  # its state is in its own pages
    (error,) = outcome.errors
    assert error.slot == 1 and error.error.fields["field"] == field and problem in error.error.message


@pytest.mark.parametrize("states", [None, np.zeros((1, 9), np.int32), np.zeros((1, 1), np.int64)])
def test_a_step_without_the_pages_of_its_rows_fails(states: Any, lfm2: LoadedModel) -> None:
    bench = Bench(lfm2)
    outcome = bench.runner.run(bench.step([(0, 0, [5], 1)]), bench.tables[[0]], states)
    assert [error.error.fields["field"] for error in outcome.errors] == ["states"]


def test_a_pass_that_failed_half_way_ends_the_worker(lfm2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running its rows again one by one would advance some states twice."""
    bench, calls = Bench(lfm2), list[int]()
    mixed = mixers._mixed

    def failing(binding: Any, *given: Any) -> Any:
        calls.append(binding.index)
        if binding.index == 1:
            raise RuntimeError("no memory")
        return mixed(binding, *given)

    monkeypatch.setattr(mixers, "_mixed", failing)
    with pytest.raises(StateLostError, match="failed half-way: RuntimeError: no memory"):
        bench.run([(0, 0, [5, 6], 1), (1, 0, [7], 1)])
    assert calls == [0, 1]
