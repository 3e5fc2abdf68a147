"""Rows with drafts: the answer has the bits that it has without them, whatever the drafts are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvforge.protocol.messages import GENERATED, Grammar, RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import open_device
from kvforge.worker.device.queue import DeviceEvent
from kvforge.worker.drafts.lookup import LookupDrafter
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.draft_checks import drafts_possible
from kvforge.worker.step.runner import ModelRunner, PendingStep, StepOutcome
from kvforge.worker.wanted import ADVANCES, AHEAD
from tests.pairs import every_pair
from tests.worker.characters import write_characters
from tests.worker.step.test_runner import BLOCK_SIZE, i4

pytestmark = pytest.mark.usefixtures("grammars_known")
SLOTS, BLOCKS, TOKENS, DRAFTS_MAX = 7, 16, 28, 5
PROMPTS = [
    [5, 9, 31, 7, 7, 2, 88, 14, 3],
    [1],
    [60, 61, 62, 63],
    [12, 90, 4, 4, 4, 17],
    [8, 8, 9],
    [3, 5] * 6,
    [44, 2, 44],
]
GRAMMAR = Grammar(kind="regex", text="([a-f][0-9]){20}")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy with log-probabilities": SamplingParams(temperature=0.0, logprobs=3),
    "sampled": SamplingParams(temperature=1.3),
    "penalties": SamplingParams(
        temperature=1.1, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, logprobs=2
    ),
    "greedy with penalties": SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
    "filters": SamplingParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.02),
    "biases": SamplingParams(temperature=1.0, logit_bias=((7, 3.0), (11, -5.0)), logprobs=1),
}
GRAMMARS = {
    "grammar": SamplingParams(temperature=1.2, grammar=GRAMMAR),
    "greedy grammar": SamplingParams(temperature=0.0, grammar=GRAMMAR),
    "grammar and all": SamplingParams(
        temperature=1.3, top_k=40, repetition_penalty=1.2, logit_bias=((70, 3.0),), logprobs=5, grammar=GRAMMAR
    ),
}
Drafts = Callable[["Answer"], list[int]]
Row = tuple[int, int, list[int], int]  # slot, start, tokens as sent, drafts


@dataclass(eq=False)
class Answer:
    """A request and its answer: (token, bits of the log-probability, top tokens with theirs) each."""

    slot: int
    sampling: SamplingParams
    chosen: list[tuple[int, int, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    most: int = 0

    @property
    def prompt(self) -> list[int]:
        return PROMPTS[self.slot]

    @property
    def tokens(self) -> list[int]:
        return [token for token, *_ in self.chosen]

    def start(self) -> RowStart:
        more = {"prompt_history": len(self.prompt), "drafts": self.most}
        return RowStart(slot=self.slot, request_id=1, sampling=self.sampling, seed=40 + self.slot, **more)


class Drafting:
    """A runner over a pool full of NaN; each slot owns BLOCKS blocks, and the pages of a recurrent state."""

    def __init__(
        self, model: LoadedModel, graphs: bool = False, drafts_max: int = DRAFTS_MAX, draft_rows_max: int = 1000
    ) -> None:
        self.model = model
        pages, first = model.geometry.state_blocks, BLOCKS * SLOTS
        self.pool = KvPool(model.geometry, first + SLOTS * pages, model.device)
        self.states = np.arange(first, first + SLOTS * pages, dtype=np.int32).reshape(SLOTS, pages)
        for cache in self.pool.tensors():
            cache.fill_(float("nan") if cache.is_floating_point() else 127)
        self.runner = ModelRunner(
            model,
            self.pool,
            slots_max=SLOTS * (DRAFTS_MAX + 1),
            step_tokens_max=256,
            step_rows_max=SLOTS * (DRAFTS_MAX + 1),
            graph_rows_max=SLOTS * (DRAFTS_MAX + 1) if graphs else 0,
            drafts_max=drafts_max,
            draft_rows_max=draft_rows_max,
        )

    def launch(self, rows: Sequence[Row], **fields: Any) -> PendingStep:
        slots, starts, tokens, drafts = zip(*rows, strict=True)
        arrays = {"samples": i4(*[1] * len(rows)), "drafts": i4(*drafts) if any(drafts) else i4()} | fields
        arrays.setdefault("propose", DRAFTS_MAX)
        flat = i4(*[token for part in tokens for token in part])
        step = Step(0, slots=i4(*slots), starts=i4(*starts), counts=i4(*map(len, tokens)), tokens=flat, **arrays)
        tables = np.array([self.table(slot) for slot in slots], np.int32)
        return self.runner.launch(step, tables, self.states[list(slots)] if self.states.size else None)

    def table(self, slot: int) -> Sequence[int]:
        return range(BLOCKS * slot, BLOCKS * (slot + 1))

    def run(self, rows: Sequence[Row], **fields: Any) -> StepOutcome:
        return self.runner.finish(self.launch(rows, **fields))

    def marked(self, tokens: list[int]) -> list[int]:
        return [token + GENERATED * self.model.wants_kinds for token in tokens]

    def begin(self, answers: Sequence[Answer]) -> StepOutcome:
        history = i4(*[token for each in answers for token in each.prompt])
        starts = tuple(each.start() for each in answers)
        outcome = self.run([(each.slot, 0, each.prompt, 0) for each in answers], begins=starts, history=history)
        self.take(answers, outcome)
        return outcome

    def row(self, answer: Answer, drafted: list[int]) -> Row:
        """Return the next row of an answer; without drafts, the worker feeds the last token itself."""
        at = len(answer.prompt) + len(answer.tokens) - 1
        return answer.slot, at, self.marked([answer.tokens[-1], *drafted]) if drafted else [-1], len(drafted)

    def advance(self, answers: Sequence[Answer], drafts: Drafts) -> StepOutcome:
        """Run one step of the answers with the drafts that `drafts` makes for each."""
        rows = list[Row]()
        for each in answers:
            drafted = drafts(each)
            each.drafted += len(drafted)
            rows.append(self.row(each, drafted))
        outcome = self.run(rows)
        self.take(answers, outcome)
        return outcome

    def take(self, answers: Sequence[Answer], outcome: StepOutcome) -> None:
        assert outcome.errors == ()
        assert list(dict.fromkeys(outcome.slots.tolist())) == [each.slot for each in answers]
        counts = outcome.top_counts if len(outcome.top_counts) else np.zeros(len(outcome.slots), np.int32)
        tops = iter(zip(outcome.top_tokens.tolist(), outcome.top_logprobs.view(np.int32).tolist(), strict=True))
        bits, by_slot = outcome.logprobs.view(np.int32), {each.slot: each for each in answers}
        for place, slot in enumerate(outcome.slots.tolist()):
            own = tuple(next(tops) for _ in range(int(counts[place])))
            by_slot[slot].chosen.append((int(outcome.tokens[place]), int(bits[place]), own))
        for each in answers:
            each.accepted += outcome.slots.tolist().count(each.slot) - 1

    def answer(self, answers: list[Answer], drafts: Drafts, tokens: int = TOKENS) -> list[Answer]:
        """Run the answers to their ends together; the ones that are done leave."""
        self.begin(answers)
        while running := [each for each in answers if len(each.chosen) < tokens]:
            self.advance(running, drafts)
        for each in answers:
            del each.chosen[tokens:]
        self.close()
        return answers

    def close(self) -> None:
        self.runner.close()
        self.pool.close()


def answers_of(samplings: Sequence[SamplingParams]) -> list[Answer]:
    return [Answer(slot, sampling) for slot, sampling in enumerate(samplings)]


def none(answer: Answer) -> list[int]:
    return []


def undrafted(model: LoadedModel, samplings: Sequence[SamplingParams], tokens: int = TOKENS) -> list[Answer]:
    """Return answers without drafts, in one batch. The tests of drafts below compare with each alone."""
    return Drafting(model).answer(answers_of(samplings), none, tokens)


def drafts_by(want: list[Answer], policy: str) -> Drafts:
    """Return drafts for answers that are known: right, wrong, or right up to a random place."""
    random = Random(policy)

    def drafts(answer: Answer) -> list[int]:
        known = next(each for each in want if each.slot == answer.slot).tokens[len(answer.tokens) :]
        right = known[: random.randint(0, DRAFTS_MAX) if policy == "partly right" else 3]
        if policy == "right":
            return right
        cut = 0 if policy == "wrong" else random.randint(0, len(right))
        return right[:cut] + [(token + 1) % 97 for token in right[cut:]]

    return drafts


def by_path(load: Callable[..., LoadedModel], path: str, folder: Path) -> tuple[LoadedModel, bool]:
    """Return the model, and whether it runs from graphs."""
    if path.startswith("gpu"):
        device = open_device("auto")
        if not device.runs_kernels:
            pytest.skip("no GPU here")
        model = load_model(folder, load_format="dummy", dtype="bfloat16", device=device, block_size=16)
        return model, path == "gpu graphs"
    return load("llama", block_size=BLOCK_SIZE, kernels=path != "torch"), path == "graphs"


@pytest.fixture
def load(tiny: Callable[..., LoadedModel], write_config: Callable[..., Any]) -> Callable[..., LoadedModel]:
    write_characters(write_config("llama"))
    return tiny


ON_CPU = [(policy, "kernels") for policy in ("right", "wrong", "partly right")]
ON_CPU += [("partly right", "torch"), ("partly right", "graphs"), ("right", "graphs")]


@pytest.mark.parametrize(
    ("policy", "path", "kinds"),
    [
        *every_pair(ON_CPU, [SAMPLINGS, GRAMMARS]),
        *(
            pytest.param(policy, path, kinds, marks=pytest.mark.gpu)
            for policy in ("right", "wrong", "partly right")
            for path in ("gpu", "gpu graphs")
            for kinds in (SAMPLINGS, GRAMMARS)
        ),
    ],
    ids=lambda each: None if isinstance(each, str) else "grammars" if each is GRAMMARS else "plain",
)
def test_answers_with_drafts_have_the_bits_of_answers_without(
    kinds: dict[str, SamplingParams],
    policy: str,
    path: str,
    load: Callable[..., LoadedModel],
    write_config: Callable[..., Path],
) -> None:
    model, graphs = by_path(load, path, write_config("llama"))
    samplings = list(kinds.values())
    want = [Drafting(model, graphs).answer([each], none)[0] for each in answers_of(samplings)]
    got = Drafting(model, graphs).answer(answers_of(samplings), drafts_by(want, policy))
    for name, mine, other in zip(kinds, got, want, strict=False):
        assert mine.tokens == other.tokens, name
        if path == "torch" or model.unsteady:  # some products round differently with the number of rows
            logprobs = [
                [float(np.int32(bits).view(np.float32)) for _, bits, _ in each.chosen] for each in (mine, other)
            ]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
        else:
            assert mine.chosen == other.chosen, name
        assert mine.drafted > 0
        if policy == "right":
            assert mine.accepted >= mine.drafted - 3, name
        else:
            assert (mine.accepted == 0) == (policy == "wrong"), name


GREEDY, SAMPLED = SAMPLINGS["greedy"], SAMPLINGS["penalties"]


@pytest.fixture
def model(load: Callable[..., LoadedModel]) -> LoadedModel:
    return load("llama", block_size=BLOCK_SIZE)


@pytest.fixture
def bench(model: LoadedModel) -> Iterator[Drafting]:
    bench = Drafting(model)
    yield bench
    bench.close()


def wanted(model: LoadedModel, *samplings: SamplingParams, tokens: int = TOKENS) -> list[Answer]:
    return Drafting(model).answer(answers_of(samplings), none, tokens)


def proposed_to(proposed: dict[int, list[int]], answer: Answer) -> list[int]:
    return proposed.get(answer.slot, [])


def test_a_proposal_becomes_drafts_of_the_next_step(model: LoadedModel, bench: Drafting) -> None:
    few = tuple((token, 40.0) for token in (7, 11, 13))  # answers of three tokens repeat themselves
    samplings = [SamplingParams(temperature=heat, logit_bias=few) for heat in (0.0, 0.0, 0.0, 1.0)]
    want, answers = wanted(model, *samplings, tokens=40), answers_of(samplings)
    for each, most in zip(answers, (DRAFTS_MAX, 2, 0, DRAFTS_MAX), strict=True):
        each.most = most
    outcome = bench.begin(answers)
    while running := [each for each in answers if len(each.chosen) < 40]:
        slots, counts, tokens = outcome.proposals.slots, outcome.proposals.counts, outcome.proposals.tokens
        parts = np.split(tokens, np.cumsum(counts)[:-1]) if len(slots) else []
        proposed = {slot: part.tolist() for slot, part in zip(slots.tolist(), parts, strict=True)}
        assert all(0 < len(part) <= answers[slot].most for slot, part in proposed.items())
        outcome = bench.advance(running, partial(proposed_to, proposed))
    assert [each.chosen[:40] for each in answers] == [each.chosen for each in want]
    assert min(answers[slot].accepted for slot in (0, 1, 3)) > 10
    assert answers[2].drafted == 0


def faulty(model: LoadedModel, bench: Drafting, row: Row, **fields: Any) -> dict[str, Any]:
    """Return the error of a row of slot 0 beside a good one of slot 1, which goes on; then slot 0 goes on too."""
    want = wanted(model, SAMPLED, GREEDY, tokens=8)
    answers = answers_of([SAMPLED, GREEDY])
    bench.begin(answers)
    good = bench.row(answers[1], [3])
    outcome = bench.run([row, good], **fields)
    (error,) = outcome.errors
    assert error.slot == 0
    assert outcome.slots.tolist() == [1] * len(outcome.slots)
    bench.take(answers[1:], replace(outcome, errors=()))
    for _ in range(3):
        bench.advance(answers, lambda each: [5])
    for mine, other in zip(answers, want, strict=True):
        assert mine.chosen[:4] == other.chosen[:4]
    return {"field": error.error.fields["field"], "message": error.error.message}


AT = len(PROMPTS[0])


@pytest.mark.parametrize(
    ("row", "field", "words"),
    [
        ((0, AT, [4] * (DRAFTS_MAX + 2), DRAFTS_MAX + 1), "drafts", "6 drafted tokens are more than drafts_max = 5"),
        ((0, AT, [4, 5, 6], 1), "drafts", "a row with 1 drafted tokens has 2 tokens, not 3"),
        ((0, AT, [4, -1, 6], 2), "tokens", "-1 stands in a row with drafts"),
        ((0, AT, [4, -2, 6], 2), "tokens", "token id -2 is outside the vocabulary of 97"),
        ((0, AT, [4, 97, 6], 2), "tokens", "token id 97 is outside the vocabulary of 97"),
        ((0, 4 * BLOCKS - 2, [4, 5, 6], 2), "tables", "16 blocks of 4 tokens cannot hold the row's 65 tokens"),
    ],
)
def test_a_row_with_bad_drafts_fails_alone(
    row: Row, field: str, words: str, model: LoadedModel, bench: Drafting
) -> None:
    slot, start, tokens, drafts = row
    marked = [token + GENERATED * (model.wants_kinds and token >= 0) for token in tokens]
    error = faulty(model, bench, (slot, start, marked, drafts))
    assert error["field"] == field
    assert words in error["message"]


def test_prompt_tokens_are_no_drafts(model: LoadedModel, bench: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadedModel, "wants_kinds", True)
    error = faulty(model, bench, (0, AT, [4 + GENERATED, 5], 1))
    assert (error["field"], "has prompt tokens" in error["message"]) == ("drafts", True)


def test_a_row_with_drafts_samples(model: LoadedModel, bench: Drafting) -> None:
    error = faulty(model, bench, (0, AT, bench.marked([4, 5]), 1), samples=i4(0, 1))
    assert (error["field"], "is 0; a row with drafts samples: 1" in error["message"]) == ("samples", True)


@pytest.mark.parametrize(
    ("drafts", "words"),
    [
        (i4(1), "has 1 rows, slots 2"),
        (i4(1, -3), "-3 drafted tokens; a row has 0 or more"),
        (i4(1, 60), "2 rows with 61 drafted tokens are more than 42 rows"),
        (i4(1, 1)[None], "must be int32 of 1 dimension"),
    ],
)
def test_malformed_drafts_fail_the_whole_step(drafts: Any, words: str, bench: Drafting) -> None:
    answers = answers_of([GREEDY, GREEDY])
    bench.begin(answers)
    outcome = bench.run([bench.row(each, [3]) for each in answers], drafts=drafts)
    assert [error.slot for error in outcome.errors] == [0, 1]
    for error in outcome.errors:
        assert error.error.fields["field"] == "drafts"
        assert words in error.error.message


def test_a_worker_without_drafts_refuses_them_and_proposes_none(model: LoadedModel) -> None:
    bench, answer = Drafting(model, drafts_max=0), Answer(0, GREEDY, most=4)
    assert bench.begin([answer]).proposals.slots.size == 0
    (error,) = bench.run([bench.row(answer, [3])]).errors
    assert "1 drafted tokens are more than drafts_max = 0" in error.error.message
    bench.close()


def test_a_step_of_as_many_rows_as_drafts_may_be_in_looks_nothing_up(model: LoadedModel) -> None:
    always = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))
    bench, answers = Drafting(model, draft_rows_max=2), [Answer(slot, always, most=3) for slot in (0, 1)]
    assert bench.begin(answers).proposals.slots.size == 0
    for _ in range(4):
        outcome = bench.run([bench.row(each, []) for each in answers], propose=0)
        bench.take(answers, outcome)
        assert outcome.proposals.slots.size == 0
    outcome = bench.run([bench.row(answers[0], [])], propose=0)
    bench.take(answers[:1], outcome)
    assert answers[0].tokens == [7] * 6
    assert (outcome.proposals.slots.tolist(), outcome.proposals.tokens.tolist()) == ([0], [7] * 3)
    bench.close()


@pytest.mark.parametrize(("rows_max", "left"), [(1000, 0), (1, len(PROMPTS[0]))])
def test_tokens_are_indexed_while_the_device_computes(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, rows_max: int, left: int
) -> None:
    bench, answer = Drafting(model, draft_rows_max=rows_max), Answer(0, SamplingParams(temperature=0.0), most=3)
    drafter, seen = cast("LookupDrafter", bench.runner.drafter), list[int]()
    pending = bench.launch([(0, 0, answer.prompt, 0)], begins=(answer.start(),), history=i4(*answer.prompt))
    monkeypatch.setattr(DeviceEvent, "passed", lambda _: False)
    monkeypatch.setattr(DeviceEvent, "wait", lambda _: seen.append(drafter._of[0][1].waiting))
    bench.runner.finish(pending)
    assert seen[0] == left
    bench.close()


def test_a_slot_with_drafts_in_flight_takes_no_other_row_and_the_others_go_on(
    model: LoadedModel, bench: Drafting
) -> None:
    want, answers = wanted(model, SAMPLED, SAMPLED, tokens=6), answers_of([SAMPLED, SAMPLED])
    bench.begin(answers)
    first = bench.launch([bench.row(answers[0], want[0].tokens[1:3]), bench.row(answers[1], [])])
    length = len(PROMPTS[1]) + 1
    second = bench.launch([(0, AT + 1, bench.marked([7]), 0), (1, length, [-1], 0)])
    bench.take(answers, bench.runner.finish(first))
    outcome = bench.runner.finish(second)
    (error,) = outcome.errors
    assert (error.slot, error.error.fields["field"]) == (0, "slots")
    assert "slot 0 has drafts in flight" in error.error.message
    bench.take(answers[1:], replace(outcome, errors=()))
    assert answers[0].chosen == want[0].chosen[:4]
    assert answers[1].chosen == want[1].chosen[:3]
    bench.advance(answers, none)
    assert answers[0].chosen == want[0].chosen[:5]


def test_a_request_that_takes_the_slot_of_drafts_in_flight_begins_afresh(model: LoadedModel, bench: Drafting) -> None:
    (want,) = wanted(model, SAMPLED, tokens=6)
    old, new = Answer(0, SAMPLED, most=3), Answer(0, SAMPLED, most=3)
    bench.begin([old])
    drafter = cast("LookupDrafter", bench.runner.drafter)
    first = bench.launch([bench.row(old, want.tokens[1:4])])
    second = bench.launch([(0, 0, new.prompt, 0)], begins=(new.start(),), history=i4(*new.prompt))
    assert len(bench.runner.finish(first).slots) == 4
    assert drafter.remembered(0) == new.prompt
    bench.take([new], bench.runner.finish(second))
    for _ in range(2):
        bench.advance([new], lambda each: want.tokens[len(each.tokens) :][:1])
    assert new.chosen == want.chosen[:5]


def test_logits_that_are_not_finite_behind_a_draft_end_the_accepted_tokens(
    model: LoadedModel, bench: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails when the broken row is its first, as without drafts."""
    (want,), (answer,) = wanted(model, SAMPLED, tokens=8), answers_of([SAMPLED])
    bench.begin([answer])
    forward = bench.runner._launcher.passes.forward

    def broken(rows: Any) -> Any:
        logits, scored = forward(rows)
        logits[2] = float("nan")
        return logits, scored

    with monkeypatch.context() as patch:
        patch.setattr(bench.runner._launcher.passes, "forward", broken)
        bench.advance([answer], lambda each: want.tokens[1:5])
    assert answer.chosen == want.chosen[:3]
    bench.advance([answer], lambda each: want.tokens[3:5])
    assert answer.chosen == want.chosen[:6]

    def broken_first(rows: Any) -> Any:
        logits, scored = forward(rows)
        logits[0] = float("nan")
        return logits, scored

    monkeypatch.setattr(bench.runner._launcher.passes, "forward", broken_first)
    outcome = bench.run([bench.row(answer, want.tokens[6:8])])
    assert [error.slot for error in outcome.errors] == [0]
    assert "not finite" in outcome.errors[0].error.message
    assert outcome.slots.size == outcome.proposals.slots.size == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_slots_advance_behind_the_outcome_and_before_the_next_step(
    at_once: bool, model: LoadedModel, bench: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop asks for it once it has sent the outcome; otherwise the next launch does it."""
    (want,), (answer,) = wanted(model, SAMPLED, tokens=8), answers_of([SAMPLED])
    bench.begin([answer])
    advance, advanced = bench.runner._state.advance, list[list[int]]()

    def watched(slots: Any, tokens: Any) -> None:
        advanced.append(tokens.tolist())
        advance(slots, tokens)

    monkeypatch.setattr(bench.runner._state, "advance", watched)
    bench.advance([answer], lambda each: want.tokens[1:4])
    assert not advanced
    if at_once:
        bench.runner.accept_drafts()
        assert advanced == [want.tokens[1:5]]
    outcome = bench.run([bench.row(answer, [])])
    assert advanced == [want.tokens[1:5]]
    assert outcome.tokens.tolist() == want.tokens[5:6]


def test_a_slot_that_cannot_be_advanced_fails_in_its_next_step(
    model: LoadedModel, bench: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, answers = wanted(model, SAMPLED, GREEDY, tokens=6), answers_of([SAMPLED, GREEDY])
    bench.begin(answers)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(bench.runner._state, "advance", broken)
        bench.advance(answers[:1], lambda each: want[0].tokens[1:4])
        bench.runner.accept_drafts()
    assert answers[0].chosen == want[0].chosen[:5]
    outcome = bench.run([bench.row(each, []) for each in answers])
    assert [(error.slot, "accepting drafts" in error.error.message) for error in outcome.errors] == [(0, True)]
    assert outcome.slots.tolist() == [1]
    (again,) = answers_of([SAMPLED])
    bench.begin([again])
    assert not bench.run([bench.row(again, [])]).errors, "a new request of the slot"


def test_drafts_that_cannot_be_sampled_together_are_sampled_by_request(
    model: LoadedModel, bench: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, answers = wanted(model, SAMPLED, SAMPLED, tokens=5), answers_of([SAMPLED, SAMPLED])
    bench.begin(answers)
    sample, sampled = bench.runner._state.sample, list[list[int]]()

    def narrow(logits: Any, slots: Any, masks: Any = None, ahead: Any = None) -> Any:
        sampled.append(slots.tolist())
        if len(set(slots.tolist())) > 1:
            raise RuntimeError("out of memory")
        return sample(logits, slots, masks, ahead)

    monkeypatch.setattr(bench.runner._state, "sample", narrow)
    bench.advance(answers, lambda each: want[each.slot].tokens[1:4])
    assert sampled == [[0] * 4 + [1] * 4, [0] * 4, [1] * 4]
    assert [each.chosen for each in answers] == [each.chosen for each in want]


def test_a_failed_pass_is_made_again_request_by_request(
    model: LoadedModel, bench: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, answers = wanted(model, SAMPLED, GREEDY, tokens=5), answers_of([SAMPLED, GREEDY])
    bench.begin(answers)
    forward, passes = bench.runner._launcher.passes.forward, list[list[int]]()

    def narrow(rows: Any) -> Any:
        passes.append(rows.slots.tolist())
        if len(rows) > 1:
            raise RuntimeError("out of memory")
        return forward(rows)

    monkeypatch.setattr(bench.runner._launcher.passes, "forward", narrow)
    bench.advance(answers, lambda each: want[each.slot].tokens[1:4])
    assert passes == [[0, 1], [0], [1]]
    assert [each.chosen for each in answers] == [each.chosen for each in want]


def test_a_cache_that_takes_nothing_back_has_no_drafts(tiny: Callable[..., LoadedModel]) -> None:
    for states, possible in ((0, 0), (4, 7)):
        geometry = SimpleNamespace(states=("a state",), draft_states=states)
        assert drafts_possible(cast("LoadedModel", SimpleNamespace(geometry=geometry)), 8) == possible
    assert drafts_possible(tiny("llama"), 8) == 7


def test_a_graph_samples_behind_drafts(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of one request, which advance no slot, beside one of another; nothing is left to sample."""
    bench, answers = Drafting(model, graphs=True), answers_of([GREEDY, SAMPLINGS["sampled"]])
    bench.begin(answers)
    graphs = bench.runner.graphs
    assert graphs is not None
    fill, seen, left = graphs._fill, list[tuple[list[int], list[int]]](), list[object]()

    def observed(bucket: Any, rows: Any, wanted: Any) -> None:
        if len(rows):  # a capture fills in none
            seen.append((rows.slots.tolist(), wanted.tolist()))
        fill(bucket, rows, wanted)

    monkeypatch.setattr(graphs, "_fill", observed)
    monkeypatch.setattr(bench.runner._sampler, "sample_others", lambda *arguments: left.append(arguments))
    bench.run([bench.row(answers[0], [3, 4]), bench.row(answers[1], [])])
    assert seen == [([0, 0, 0, 1], [AHEAD, AHEAD + 1, AHEAD + 2, ADVANCES])]
    assert not left
    bench.close()
