"""Steps: order, slots, copies, poison rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.runner import ModelRunner, PendingStep, StepOutcome

BLOCK_SIZE = 4


def i4(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def begin(slot: int, temperature: float = 0.0, seed: int = 0, generated: int = 0) -> RowStart:
    return RowStart(
        slot=slot, request_id=slot, sampling=SamplingParams(temperature=temperature), seed=seed, generated=generated
    )


class Bench:
    """A runner and rows written as (slot, start, tokens, sample). Slot s owns blocks 8 s to 8 s + 7."""

    def __init__(self, model: LoadedModel, slots_max: int = 8, graph_rows_max: int = 0) -> None:
        self.pool = KvPool(model.geometry, 8 * slots_max, model.device)
        for cache in self.pool.tensors():
            cache.fill_(float("nan"))
        limits = {"slots_max": slots_max, "step_tokens_max": 64, "step_rows_max": 8}
        self.runner = ModelRunner(model, self.pool, **limits, graph_rows_max=graph_rows_max)
        self.tables = {slot: list(range(8 * slot, 8 * slot + 8)) for slot in range(slots_max)}

    def step(self, rows: list[tuple[int, int, list[int], int]], **fields: Any) -> Step:
        slots, starts, tokens, samples = zip(*rows, strict=True)
        return Step(
            0,
            slots=i4(*slots),
            starts=i4(*starts),
            counts=i4(*[len(part) for part in tokens]),
            samples=i4(*samples),
            tokens=i4(*[token for part in tokens for token in part]),
            **fields,
        )

    def run(self, rows: list[tuple[int, int, list[int], int]], **fields: Any) -> StepOutcome:
        tables = np.array([self.tables.get(row[0], [0] * 8) for row in rows], np.int32)
        return self.runner.run(self.step(rows, **fields), tables)

    def generate(self, slot: int, prompt: list[int], count: int, start: RowStart | None = None) -> list[int]:
        """Prefill at once, then decode rows fed with -1."""
        outcome = self.run([(slot, 0, prompt, 1)], begins=(start or begin(slot),))
        tokens = outcome.tokens.tolist()
        for index in range(count - 1):
            tokens += self.run([(slot, len(prompt) + index, [-1], 1)]).tokens.tolist()
        return tokens


PROMPTS = [[5, 9, 31, 7, 7, 2, 88, 14, 3], [1], [60, 61, 62, 63], [12, 90, 4, 4, 4, 17]]


@pytest.fixture
def model(tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny("llama", block_size=BLOCK_SIZE)


@pytest.fixture
def bench(model: LoadedModel) -> Iterator[Bench]:
    bench = Bench(model)
    yield bench
    bench.pool.close()


def test_greedy_tokens_and_logprobs_are_transformers_own(
    bench: Bench, model: LoadedModel, eager_logits: Callable[..., torch.Tensor]
) -> None:
    for slot, prompt in enumerate(PROMPTS):
        tokens = bench.generate(slot, prompt, 6)
        for index, token in enumerate(tokens):
            logits = eager_logits(model, prompt + tokens[:index])[-1]
            assert token == int(logits.argmax())
    outcome = bench.run([(0, 0, PROMPTS[0], 1)], begins=(begin(0),))
    expected = eager_logits(model, PROMPTS[0])[-1].log_softmax(-1).max()
    assert float(outcome.logprobs[0]) == pytest.approx(float(expected), abs=1e-5)
    assert (outcome.slots.dtype, outcome.tokens.dtype, outcome.logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert outcome.duration_us > 0


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_batched_equals_alone(temperature: float, model: LoadedModel) -> None:
    alone, batched = Bench(model), Bench(model)
    starts = [begin(slot, temperature, seed=1000 + slot) for slot in range(len(PROMPTS))]
    expected = [alone.generate(slot, prompt, 6, starts[slot]) for slot, prompt in enumerate(PROMPTS)]
    outcome = batched.run([(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)], begins=tuple(starts))
    got = [[token] for token in outcome.tokens.tolist()]
    for index in range(5):
        rows = [(slot, len(prompt) + index, [-1], 1) for slot, prompt in enumerate(PROMPTS)]
        outcome = batched.run(rows[::-1])
        assert outcome.slots.tolist() == [3, 2, 1, 0]
        for slot, token in zip(outcome.slots.tolist(), outcome.tokens.tolist(), strict=True):
            got[slot].append(token)
    assert got == expected


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_chunked_prefill_equals_one_shot(chunk: int, bench: Bench) -> None:
    prompt = PROMPTS[0]
    whole = bench.run([(0, 0, prompt, 1)], begins=(begin(0),))
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        sample = int(start + len(part) == len(prompt))
        decode = (2, start, [7], 0)  # another row beside it
        outcome = bench.run([decode, (1, start, part, sample)], begins=(begin(1), begin(2)) if start == 0 else ())
        assert outcome.errors == ()
        assert len(outcome.slots) == sample
    assert outcome.tokens.tolist() == whole.tokens.tolist()
    assert outcome.logprobs.tolist() == pytest.approx(whole.logprobs.tolist(), abs=1e-5)
    for cache in bench.pool.tensors():
        left, right = (cache[8 * slot : 8 * slot + 8].flatten(0, 1)[: len(prompt)] for slot in (0, 1))
        assert torch.allclose(left, right, atol=1e-5)


def test_a_resumed_request_continues_as_if_never_interrupted(bench: Bench) -> None:
    prompt, start = PROMPTS[3], begin(0, temperature=1.0, seed=77)
    whole = bench.generate(0, prompt, 8, start)
    again = replace_start(start, slot=5, generated=3)
    outcome = bench.run([(5, 0, prompt + whole[:3], 1)], begins=(again,))
    resumed = outcome.tokens.tolist()
    for index in range(4):
        resumed += bench.run([(5, len(prompt) + 3 + index, [-1], 1)]).tokens.tolist()
    assert resumed == whole[3:]


def replace_start(start: RowStart, **changes: Any) -> RowStart:
    fields = {name: getattr(start, name) for name in start.__struct_fields__}
    return RowStart(**(fields | changes))


# behaviour 15
def test_copy_on_write_leaves_the_other_side_untouched(bench: Bench) -> None:
    prompt = PROMPTS[3]  # 6 tokens: block 0 full, block 1 half full
    bench.run([(0, 0, prompt, 0)], begins=(begin(0),))
    shared = bench.tables[0]
    bench.tables[1] = [shared[0], 50, 51, 52, 53, 54, 55, 56]  # the fork shares block 0 and gets its own block 1
    parent = [cache[shared[:2]].clone() for cache in bench.pool.tensors()]
    outcome = bench.run([(1, 6, [42], 1)], begins=(begin(1),), copies=i4(shared[1], 50, 2))
    assert outcome.errors == ()
    for before, cache in zip(parent, bench.pool.tensors(), strict=True):
        assert torch.equal(before.nan_to_num(9.0), cache[shared[:2]].nan_to_num(9.0))
        assert torch.equal(cache[50, :2], cache[shared[1], :2])
        assert torch.isfinite(cache[50, 2]).all()
        assert torch.isnan(cache[50, 3]).all()  # neither copied nor written
        assert torch.isnan(cache[shared[1], 2:]).all()
    fresh = bench.run([(2, 0, [*prompt, 42], 1)], begins=(begin(2),))
    assert outcome.tokens.tolist() == fresh.tokens.tolist()
    parents_own = bench.run([(0, 6, [11], 1)])
    fresh = bench.run([(2, 0, [*prompt, 11], 1)], begins=(begin(2),))
    assert parents_own.logprobs.tolist() == pytest.approx(fresh.logprobs.tolist(), abs=1e-5)


POISON: dict[str, tuple[tuple[int, int, list[int], int], str]] = {
    "token too large": ((1, 0, [5, 97], 1), "tokens"),
    "token negative": ((1, 0, [5, -2], 1), "tokens"),
    "never sampled": ((1, 3, [-1], 1), "tokens"),
    "start negative": ((1, -1, [5], 1), "starts"),
    "beyond the table": ((1, 31, [5, 5], 1), "tables"),
    "sample": ((1, 0, [5], 2), "samples"),
    "slot too large": ((8, 0, [5], 1), "slots"),
    "slot negative": ((-1, 0, [5], 1), "slots"),
}


@pytest.mark.parametrize(("poison", "field"), POISON.values(), ids=POISON)
def test_a_poison_row_is_left_out_by_name(
    poison: tuple[int, int, list[int], int], field: str, model: LoadedModel
) -> None:
    begins = (begin(0), begin(1), begin(2))
    good = [(0, 0, PROMPTS[0], 1), (2, 0, PROMPTS[2], 1)]
    expected = Bench(model).run(good, begins=begins)
    outcome = Bench(model).run([good[0], poison, good[1]], begins=begins)
    assert [(error.slot, error.error.code) for error in outcome.errors] == [(poison[0], "invalid_request")]
    assert outcome.errors[0].error.fields["field"] == field
    assert outcome.slots.tolist() == [0, 2]
    assert outcome.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("block", [-1, 64, 2**31 - 1])
def test_a_block_outside_the_pool_is_refused_unless_it_is_not_read(block: int, bench: Bench) -> None:
    bench.tables[1][2] = block
    rows = [(0, 0, [1, 2, 3], 1), (1, 0, list(range(9)), 1)]
    outcome = bench.run(rows, begins=(begin(0), begin(1)))
    assert outcome.slots.tolist() == [0]
    assert outcome.errors[0].error.fields["field"] == "tables"
    assert bench.run([(1, 0, list(range(8)), 1)], begins=(begin(1),)).errors == ()


def test_context_limit_and_repeated_slots(tiny: Callable[..., LoadedModel]) -> None:
    bench = Bench(tiny("llama", max_position_embeddings=10))
    outcome = bench.run([(0, 0, [1] * 11, 1), (1, 0, [1] * 10, 1), (1, 0, [2], 1)], begins=(begin(0), begin(1)))
    assert outcome.slots.tolist() == []
    assert {error.slot: error.error.fields["field"] for error in outcome.errors} == {0: "starts", 1: "slots"}


@pytest.mark.parametrize("copy", [(0, 64, 1), (-1, 8, 1), (0, 8, 5), (0, 8, -1)])
def test_an_impossible_copy_fails_the_rows_that_hold_its_target(copy: tuple[int, int, int], bench: Bench) -> None:
    bench.tables[1][0] = copy[1]
    rows = [(0, 0, [1, 2, 3], 1), (1, 2, [4], 1)]
    outcome = bench.run(rows, begins=(begin(0), begin(1)), copies=i4(*copy, 16, 24, 4))
    assert outcome.slots.tolist() == [0]
    assert [error.slot for error in outcome.errors] == [1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"starts": i4(0)}, "starts"),
        ({"counts": i4(1, 1)}, "counts"),
        ({"counts": i4(3, 0)}, "counts"),
        ({"samples": i4(1)}, "samples"),
        ({"tokens": np.zeros(3, np.int64)}, "tokens"),
        ({"slots": np.zeros((1, 2), np.int32)}, "slots"),
        ({"copies": i4(1, 2)}, "copies"),
        ({"counts": i4(60, 5), "tokens": np.zeros(65, np.int32)}, "tokens"),
    ],
)
def test_a_malformed_step_fails_every_row(fields: dict[str, Any], named: str, bench: Bench) -> None:
    good = bench.step([(0, 0, [1, 2], 1), (1, 0, [3], 1)])
    values = {name: getattr(good, name) for name in good.__struct_fields__} | fields
    outcome = bench.runner.run(Step(**values), np.zeros((2, 8), np.int32))
    assert outcome.tokens.tolist() == []
    assert outcome.errors
    assert {error.error.fields["field"] for error in outcome.errors} == {named}


def test_malformed_tables_fail_every_row(bench: Bench) -> None:
    step = bench.step([(0, 0, [1, 2], 1), (1, 0, [3], 1)])
    for tables in (np.zeros((1, 8), np.int32), np.zeros((2, 8), np.int64), np.zeros(8, np.int32)):
        outcome = bench.runner.run(step, tables)
        assert [error.slot for error in outcome.errors] == [0, 1]
        assert outcome.errors[0].error.fields["field"] == "tables"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slot": 8}, "slot"),
        ({"slot": -1}, "slot"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"generated": -1}, "generated"),
        ({"sampling": SamplingParams(temperature=-0.5)}, "sampling.temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": SamplingParams(temperature=float("inf"))}, "sampling.temperature"),
    ],
)
def test_a_bad_start_is_refused_by_name(changes: dict[str, Any], named: str, bench: Bench) -> None:
    bad = replace_start(begin(1), **changes)
    outcome = bench.run([(0, 0, [1, 2], 1), (bad.slot, 0, [3], 1)], begins=(begin(0), bad))
    assert outcome.slots.tolist() == [0]
    assert [(error.slot, error.error.fields["field"]) for error in outcome.errors] == [(bad.slot, named)]


def break_forward(bench: Bench, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Make the forward pass fail whenever `token` is in the batch."""
    model = bench.runner.model

    def forward(token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if (token_ids == token).any():
            raise RuntimeError("device-side assert triggered\nand more")
        return model.forward(token_ids, *arguments)

    stand_in = replace(model)
    monkeypatch.setitem(stand_in.__dict__, "forward", forward)
    bench.runner._launcher.passes.model = stand_in


def test_a_failing_pass_is_isolated_to_the_row_that_fails(
    bench: Bench, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)]
    begins = tuple(begin(slot, 1.0, seed=slot) for slot in range(4))
    whole = Bench(model).run(rows, begins=begins)
    break_forward(bench, monkeypatch, token=61)  # only prompt 2 holds it
    outcome = bench.run(rows, begins=begins)
    assert outcome.slots.tolist() == [0, 1, 3]
    assert outcome.tokens.tolist() == whole.tokens[[0, 1, 3]].tolist()
    assert [(error.slot, error.error.code) for error in outcome.errors] == [(2, "worker_error")]
    assert "device-side assert triggered" in outcome.errors[0].error.message
    after = bench.run([(slot, len(PROMPTS[slot]), [-1], 1) for slot in (0, 1, 3)])
    assert after.errors == ()


def test_logits_that_are_not_finite_fail_their_row_only(bench: Bench, model: LoadedModel) -> None:
    with torch.no_grad():
        model.module.get_input_embeddings().weight[61] = float("nan")
    rows = [(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)]
    outcome = bench.run(rows, begins=tuple(begin(slot) for slot in range(4)))
    assert outcome.slots.tolist() == [0, 1, 3]
    assert [(error.slot, error.error.code) for error in outcome.errors] == [(2, "worker_error")]
    assert "not finite" in outcome.errors[0].error.message
    again = bench.run([(2, 4, [-1], 1)])
    assert again.errors[0].error.fields["field"] == "tokens"  # nothing was sampled there


def test_step_without_sampling_and_empty_step(bench: Bench) -> None:
    outcome = bench.run([(0, 0, [1, 2, 3], 0)], begins=(begin(0),))
    assert (outcome.slots.tolist(), outcome.errors) == ([], ())
    outcome = bench.runner.run(Step(1, begins=(begin(3),)), np.zeros((0, 8), np.int32))
    assert (outcome.slots.tolist(), outcome.errors) == ([], ())


@pytest.mark.parametrize("field", ["slots_max", "step_tokens_max", "step_rows_max"])
def test_limits_are_refused_by_name(field: str, bench: Bench) -> None:
    limits = {"slots_max": 1, "step_tokens_max": 1, "step_rows_max": 1}
    with pytest.raises(InvalidConfiguration) as caught:
        ModelRunner(bench.runner.model, bench.pool, **(limits | {field: 0}))
    assert caught.value.field == field
    ModelRunner(bench.runner.model, bench.pool, **limits)


def test_half_precision_pool_under_a_float32_model(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("llama")
    half = replace(model, geometry=replace(model.geometry, kv_dtype="bfloat16"))
    full, small = Bench(model), Bench(half)
    assert small.pool.bytes * 2 == full.pool.bytes
    rows = [(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)]
    begins = tuple(begin(slot) for slot in range(4))
    want, got = full.run(rows, begins=begins), small.run(rows, begins=begins)
    assert got.errors == ()
    assert got.logprobs.tolist() == pytest.approx(want.logprobs.tolist(), abs=0.3)


# ----------------------------------------------------------------------------------------------- two steps under way


def launch(bench: Bench, rows: list[tuple[int, int, list[int], int]], **fields: Any) -> PendingStep:
    tables = np.array([bench.tables[row[0]] for row in rows], np.int32)
    return bench.runner.launch(bench.step(rows, **fields), tables)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_step_launched_before_the_last_one_is_finished_gets_its_tokens(
    temperature: float, bench: Bench, model: LoadedModel
) -> None:
    starts = tuple(begin(slot, temperature, seed=7 + slot) for slot in range(len(PROMPTS)))
    alone = Bench(model)
    expected = [alone.generate(slot, prompt, 6, starts[slot]) for slot, prompt in enumerate(PROMPTS)]
    under_way = [launch(bench, [(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)], begins=starts)]
    got: list[list[int]] = []
    for index in range(5):
        rows = [(slot, len(prompt) + index, [-1], 1) for slot, prompt in enumerate(PROMPTS)]
        under_way.append(launch(bench, rows))
        got.append(bench.runner.finish(under_way.pop(0)).tokens.tolist())
    got.append(bench.runner.finish(under_way.pop(0)).tokens.tolist())
    assert np.transpose(got).tolist() == expected


def test_steps_are_finished_in_order_and_two_at_most_are_under_way(bench: Bench) -> None:
    first = launch(bench, [(0, 0, [1, 2], 1)], begins=(begin(0),))
    second = launch(bench, [(0, 2, [-1], 1)])
    with pytest.raises(AssertionError, match="finish a step"):
        launch(bench, [(0, 3, [-1], 1)])
    with pytest.raises(AssertionError, match="order"):
        bench.runner.finish(second)
    assert first.done() and second.done()
    assert (bench.runner.finish(first).errors, bench.runner.finish(second).errors) == ((), ())
    third = launch(bench, [(0, 3, [-1], 1)])
    assert len(bench.runner.finish(third).tokens) == 1


def test_a_row_without_a_token_fails_in_the_step_behind_too(bench: Bench, model: LoadedModel) -> None:
    with torch.no_grad():
        model.module.get_input_embeddings().weight[61] = float("nan")
    prompts = {0: PROMPTS[0], 2: PROMPTS[2], 3: PROMPTS[3]}
    first = launch(bench, [(s, 0, prompt, 1) for s, prompt in prompts.items()], begins=tuple(map(begin, prompts)))
    second = launch(bench, [(s, len(prompt), [-1], 1) for s, prompt in prompts.items()])
    for outcome in (bench.runner.finish(first), bench.runner.finish(second)):
        assert [(error.slot, error.error.code) for error in outcome.errors] == [(2, "worker_error")]
        assert "not finite" in outcome.errors[0].error.message
        assert outcome.slots.tolist() == [0, 3]
    again = bench.run([(2, 5, [-1], 1), (3, 7, [-1], 1)])
    assert [(error.slot, error.error.fields["field"]) for error in again.errors] == [(2, "tokens")]
    assert again.slots.tolist() == [3]


def test_a_slot_that_changed_hands_is_not_blamed_for_its_last_owner(bench: Bench, model: LoadedModel) -> None:
    expected = Bench(model).generate(2, PROMPTS[3], 2)
    with torch.no_grad():
        model.module.get_input_embeddings().weight[61] = float("nan")
    first = launch(bench, [(2, 0, PROMPTS[2], 1)], begins=(begin(2),))
    second = launch(bench, [(2, 0, PROMPTS[3], 1)], begins=(begin(2),))
    assert len(bench.runner.finish(first).errors) == 1
    third = launch(bench, [(2, len(PROMPTS[3]), [-1], 1)])
    outcomes = [bench.runner.finish(second), bench.runner.finish(third)]
    assert [outcome.errors for outcome in outcomes] == [(), ()]
    assert [int(outcome.tokens[0]) for outcome in outcomes] == expected


def test_what_the_device_fails_at_later_fails_the_rows_of_its_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch(bench, [(0, 0, [1, 2], 1), (1, 0, [3], 0)], begins=(begin(0), begin(1)))
    second = launch(bench, [(0, 2, [-1], 1), (2, 0, [4], 1)], begins=(begin(2),))

    def fault() -> None:
        raise torch.OutOfMemoryError("planted")

    assert first.end is not None
    monkeypatch.setattr(first.end, "wait", fault)
    outcome = bench.runner.finish(first)
    assert {error.slot: error.error.code for error in outcome.errors} == {0: "gpu_error", 1: "gpu_error"}
    assert outcome.slots.tolist() == []
    outcome = bench.runner.finish(second)
    assert [error.slot for error in outcome.errors] == [0]
    assert outcome.slots.tolist() == [2]


def test_a_step_that_finds_no_memory_runs_row_by_row(
    bench: Bench, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)]
    begins = tuple(begin(slot) for slot in range(4))
    whole = Bench(model).run(rows, begins=begins)
    stand_in = replace(model)

    def forward(token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if len(token_ids) > 6:  # all together, and prompt 0 alone
            raise torch.OutOfMemoryError("planted")
        return model.forward(token_ids, *arguments)

    monkeypatch.setitem(stand_in.__dict__, "forward", forward)
    bench.runner._launcher.passes.model = stand_in
    outcome = bench.run(rows, begins=begins)
    assert [(error.slot, error.error.code) for error in outcome.errors] == [(0, "gpu_error")]
    assert outcome.tokens.tolist() == whole.tokens[1:].tolist()


@pytest.mark.parametrize("filtered", [False, True])  # unfiltered rows may use a separate kernel
def test_sampling_that_finds_no_memory_goes_row_by_row(
    filtered: bool, bench: Bench, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(slot, 0, prompt, 1) for slot, prompt in enumerate(PROMPTS)]
    sampling = SamplingParams(temperature=1.0, top_k=50 if filtered else 0)
    begins = tuple(RowStart(slot=slot, request_id=slot, sampling=sampling, seed=slot) for slot in range(4))
    whole = Bench(model).run(rows, begins=begins)
    state = bench.runner._state

    def scarce(sample: Callable[..., Any]) -> Callable[..., Any]:
        def run(logits: torch.Tensor, slots: Any, *others: Any) -> Any:
            if len(slots) > 1 or slots[0] == 1:
                raise torch.OutOfMemoryError("planted")
            return sample(logits, slots, *others)

        return run

    for name in ("sample", "sample_simple"):
        monkeypatch.setattr(state, name, scarce(getattr(state, name)))
    outcome = bench.run(rows, begins=begins)
    assert [(error.slot, error.error.code) for error in outcome.errors] == [(1, "gpu_error")]
    assert outcome.tokens.tolist() == whole.tokens[[0, 2, 3]].tolist()
    assert bench.run([(1, 1, [-1], 1)]).errors[0].error.fields["field"] == "tokens"


def test_a_step_that_finds_no_memory_for_its_own_arrays_fails_all_rows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault() -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(bench.runner._state, "upload_starts", fault)
        outcome = bench.run([(0, 0, [1, 2], 1), (1, 0, [3], 0)], begins=(begin(0), begin(1)))
    assert {error.slot: error.error.code for error in outcome.errors} == {0: "gpu_error", 1: "gpu_error"}
    outcome = bench.run([(0, 0, [1, 2], 1), (2, 0, [5], 1)], begins=(begin(2),))  # its start never ran
    assert [(error.slot, error.error.code) for error in outcome.errors] == [(0, "gpu_error")]
    assert bench.run([(0, 0, [1, 2], 1)], begins=(begin(0),)).errors == ()


def test_another_coordinator_finds_no_slot_in_use(bench: Bench) -> None:
    pending = launch(bench, [(0, 0, [1, 2], 1)], begins=(begin(0),))
    bench.runner.reset()
    assert pending.done()
    assert bench.run([(0, 2, [-1], 1)]).errors[0].error.fields["field"] == "tokens"


def test_the_time_of_a_step_that_waited_for_the_one_before_it_begins_when_that_one_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now_ns = 1_000_000_000

        def monotonic_ns(self) -> int:
            return self.now_ns

    clock = Clock()
    monkeypatch.setattr("kvforge.worker.step.runner.time", clock)
    first = launch(bench, [(0, 0, [1, 2], 1)], begins=(begin(0),))
    clock.now_ns += 1_000_000
    second = launch(bench, [(0, 2, [-1], 1)])
    clock.now_ns += 9_000_000
    assert bench.runner.finish(first).duration_us == 10_000
    clock.now_ns += 2_000_000
    assert bench.runner.finish(second).duration_us == 2_000
    clock.now_ns += 5_000_000  # nothing was in flight: idle time counts for no step
    third = launch(bench, [(0, 3, [-1], 1)])
    clock.now_ns += 3_000_000
    assert bench.runner.finish(third).duration_us == 3_000


def test_the_pause_before_a_step_begins_when_the_step_before_it_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [1_000_000_000]
    monkeypatch.setattr("kvforge.worker.device.queue.time.perf_counter_ns", lambda: now_ns[0])

    def idle_us(row: tuple[int, int, list[int], int], after_us: int, **more: Any) -> int:
        now_ns[0] += 1000 * after_us
        pending = launch(bench, [row], **more)
        bench.runner.finish(pending)
        return pending.idle_us

    assert idle_us((0, 0, [1, 2], 1), 0, begins=(begin(0),)) == -1, "the first step"
    assert idle_us((0, 2, [-1], 1), 300) == 300
    assert idle_us((1, 0, [-1], 1), 5) == -1, "its only row is refused: nothing ran"
    assert idle_us((0, 3, [-1], 1), 40) == 40
    assert idle_us((0, 4, [-1], 1), 7) == 7
    bench.runner.reset()
    assert idle_us((0, 0, [1, 2], 1), 70, begins=(begin(0),)) == -1, "of another coordinator"
