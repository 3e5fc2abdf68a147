"""Log-probabilities of prompt tokens: transformers' own, the same in any chunks and company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling import scoring
from kvforge.worker.sampling.scoring import PromptScores
from kvforge.worker.step.runner import StepOutcome
from tests.worker.step.test_runner import BLOCK_SIZE, PROMPTS, Bench, break_forward, i4

LONG = [5, 9, 31, 7, 7, 2, 88, 14, 3, 60, 61, 62, 63, 12, 90, 4, 4, 4, 17]


@pytest.fixture
def model(tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny("llama", block_size=BLOCK_SIZE)


@pytest.fixture
def bench(model: LoadedModel) -> Iterator[Bench]:
    bench = Bench(model)
    yield bench
    bench.pool.close()


def begin(slot: int, width: int = 3) -> RowStart:
    return RowStart(
        slot=slot, request_id=slot, sampling=SamplingParams(temperature=0.0, prompt_logprobs=width), seed=slot
    )


def run(bench: Bench, rows: list[tuple[int, int, list[int]]], prompts: dict[int, list[int]], **fields: Any) -> Any:
    """Run rows (slot, start, tokens) and score all their prompt tokens."""
    scored: list[int] = []
    following: list[int] = []
    fed = 0
    for slot, start, tokens in rows:
        whole = prompts[slot]
        for at in range(len(tokens)):
            if start + at + 1 < len(whole):
                scored.append(fed + at)
                following.append(whole[start + at + 1])
        fed += len(tokens)
    sampling = [(slot, start, tokens, int(start + len(tokens) == len(prompts[slot]))) for slot, start, tokens in rows]
    return bench.run(sampling, scored=i4(*scored), following=i4(*following), **fields)


def score(bench: Bench, prompt: list[int], chunk: int, slot: int = 0, width: int = 3) -> PromptScores:
    """Score a prompt in chunks."""
    found: list[PromptScores] = []
    for start in range(0, len(prompt), chunk):
        begins = (begin(slot, width),) if start == 0 else ()
        outcome = run(bench, [(slot, start, prompt[start : start + chunk])], {slot: prompt}, begins=begins)
        assert outcome.errors == ()
        found.append(outcome.prompts)
    names = ("logprobs", "ranks", "top_counts", "top_tokens", "top_logprobs")
    return PromptScores(*(np.concatenate([getattr(part, name) for part in found]) for name in names))


def same(one: PromptScores, other: PromptScores) -> bool:
    names = ("logprobs", "ranks", "top_counts", "top_tokens", "top_logprobs")
    return all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in names)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("kernels", [True, False])
def test_they_are_transformers_own(
    family: str, kernels: bool, tiny: Callable[..., LoadedModel], eager_logits: Callable[..., torch.Tensor]
) -> None:
    model = tiny(family, block_size=BLOCK_SIZE, kernels=kernels)
    bench, width = Bench(model), 4
    found = score(bench, LONG, 5, width=width)
    expected = eager_logits(model, LONG)[:-1].log_softmax(-1)
    following = torch.tensor(LONG[1:])
    own = expected.gather(1, following[:, None]).squeeze(1)
    assert found.logprobs.tolist() == pytest.approx(own.tolist(), abs=1e-4)
    assert found.ranks.tolist() == (1 + (expected > own[:, None]).sum(-1)).tolist()
    top = expected.topk(width)
    assert found.top_counts.tolist() == [width] * len(own)
    assert found.top_tokens.tolist() == top.indices.flatten().tolist()
    assert found.top_logprobs.tolist() == pytest.approx(top.values.flatten().tolist(), abs=1e-4)
    tops = found.top_tokens.reshape(-1, width)
    for at, (token, rank) in enumerate(zip(LONG[1:], found.ranks.tolist(), strict=True)):
        assert (tops[at].tolist().index(token) + 1 == rank) if rank <= width else token not in tops[at]
    bench.pool.close()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_no_bit_depends_on_chunks(chunk: int, model: LoadedModel) -> None:
    whole, cut = Bench(model), Bench(model)
    assert same(score(whole, LONG, len(LONG)), score(cut, LONG, chunk))


def test_no_bit_depends_on_company(model: LoadedModel) -> None:
    """Rows of other widths, rows that score nothing and decodes share the step."""
    alone, bench = Bench(model), Bench(model)
    widths = [3, 0, 20, 1]
    expected = [score(alone, prompt, 64, slot, widths[slot]) for slot, prompt in enumerate(PROMPTS)]
    bench.run([(5, 0, [3, 4, 5], 1), (6, 0, [9], 1)], begins=(begin(5), begin(6)))
    rows = [(5, 3, [-1]), *((slot, 0, prompt) for slot, prompt in enumerate(PROMPTS)), (6, 1, [-1])]
    prompts = {5: [3, 4, 5], 6: [9], **dict(enumerate(PROMPTS))}
    outcome = run(bench, rows, prompts, begins=tuple(begin(slot, widths[slot]) for slot in range(4)))
    assert outcome.errors == ()
    first = pairs = 0
    for slot, prompt in enumerate(PROMPTS):
        count, width = len(prompt) - 1, widths[slot]
        part, mine = slice(first, first + count), slice(pairs, pairs + count * width)
        found = PromptScores(
            outcome.prompts.logprobs[part],
            outcome.prompts.ranks[part],
            outcome.prompts.top_counts[part],
            outcome.prompts.top_tokens[mine],
            outcome.prompts.top_logprobs[mine],
        )
        assert same(found, expected[slot])
        first, pairs = first + count, pairs + count * width
    assert first == len(outcome.prompts.logprobs)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("most", [1, 4])
def test_logits_are_computed_for_few_tokens_at_a_time(
    most: int, kernels: bool, tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama" if kernels else "gpt2", block_size=BLOCK_SIZE, kernels=kernels)
    whole, parts = Bench(model), Bench(model)
    expected = score(whole, LONG, 64)
    seen: list[int] = []
    inner = scoring.log_normaliser
    monkeypatch.setattr(scoring, "LOGITS_MAX", most * model.vocab_size)
    monkeypatch.setattr(scoring, "log_normaliser", lambda logits: (seen.append(len(logits)), inner(logits))[1])
    found = score(parts, LONG, 64)
    assert same(found, expected) if kernels else np.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert max(seen) == most and sum(seen) == len(LONG) - 1


def test_a_graph_does_not_run_rows_that_are_scored(model: LoadedModel) -> None:
    """A chunk of one prompt token looks like a decode on a device that does not tell kinds apart."""
    graphs, plain = Bench(model, graph_rows_max=4), Bench(model)
    assert same(score(graphs, LONG, 1), score(plain, LONG, 64))


def test_a_failing_pass_spares_the_other_rows(
    bench: Bench, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(slot, 0, prompt) for slot, prompt in enumerate(PROMPTS)]
    begins, prompts = tuple(begin(slot) for slot in range(4)), dict(enumerate(PROMPTS))
    whole: StepOutcome = run(Bench(model), rows, prompts, begins=begins)
    break_forward(bench, monkeypatch, token=61)
    inner = model.forward_by_parts

    def by_parts(token_ids: torch.Tensor, *arguments: Any) -> Any:
        if (token_ids == 61).any():
            raise RuntimeError("device-side assert triggered")
        return inner(token_ids, *arguments)

    monkeypatch.setitem(bench.runner._launcher.passes.model.__dict__, "forward_by_parts", by_parts)
    outcome = run(bench, rows, prompts, begins=begins)
    assert [error.slot for error in outcome.errors] == [2]
    kept = np.r_[0:8, 11:16]  # prompts 0 and 3; prompt 1 has one token
    assert outcome.prompts.logprobs.tolist() == whole.prompts.logprobs[kept].tolist()
    assert outcome.prompts.top_tokens.tolist() == whole.prompts.top_tokens.reshape(-1, 3)[kept].flatten().tolist()


def test_logits_that_are_not_finite_fail_their_row_only(bench: Bench, model: LoadedModel) -> None:
    with torch.no_grad():
        model.module.get_input_embeddings().weight[61] = float("nan")
    rows = [(slot, 0, prompt[:-1]) for slot, prompt in enumerate(PROMPTS) if slot != 1]
    outcome = run(bench, rows, dict(enumerate(PROMPTS)), begins=tuple(begin(slot) for slot, *_ in rows))
    assert [(error.slot, error.error.code) for error in outcome.errors] == [(2, "worker_error")]
    assert "not finite" in outcome.errors[0].error.message
    assert len(outcome.prompts.logprobs) == len(PROMPTS[0]) + len(PROMPTS[3]) - 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scored": i4(0, 1), "following": i4(1)}, "following"),
        ({"scored": i4(1, 1), "following": i4(1, 1)}, "scored"),
        ({"scored": i4(1, 0), "following": i4(1, 1)}, "scored"),
        ({"scored": i4(3), "following": i4(1)}, "scored"),
        ({"scored": i4(-1), "following": i4(1)}, "scored"),
        ({"scored": i4(0), "following": i4(97)}, "following"),
        ({"scored": i4(0), "following": i4(-1)}, "following"),
        ({"scored": np.zeros(1, np.int64), "following": i4(1)}, "scored"),
    ],
)
def test_a_malformed_step_fails_every_row(fields: dict[str, Any], named: str, bench: Bench) -> None:
    outcome = bench.run([(0, 0, [1, 2, 3], 1)], begins=(begin(0),), **fields)
    assert [error.error.fields["field"] for error in outcome.errors] == [named]
    assert not len(outcome.prompts.logprobs)


@pytest.mark.parametrize("width", [-1, 21])
def test_a_start_that_wants_too_many_is_refused(width: int, bench: Bench) -> None:
    outcome = bench.run([(0, 0, [1, 2, 3], 1)], begins=(begin(0, width),))
    assert [error.error.fields["field"] for error in outcome.errors] == ["sampling.prompt_logprobs"]


def test_more_tops_than_tokens_of_the_vocabulary(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("llama", block_size=BLOCK_SIZE, vocab_size=7, pad_token_id=None)
    bench = Bench(replace(model))
    found = score(bench, [3, 1, 4, 1, 5], 64, width=20)
    assert found.top_counts.tolist() == [7] * 4
    assert sorted(found.top_tokens[:7].tolist()) == list(range(7))
    assert np.exp(found.top_logprobs[:7]).sum() == pytest.approx(1, abs=1e-5)
    bench.pool.close()
