"""Filters, penalties and log-probabilities against a plain float64 reference; rows alone and beside others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.device.device import Device
from kvforge.worker.sampling.draws import uniforms
from kvforge.worker.sampling.filters import log_normaliser, min_p_mask, most_likely_mask, top_logprobs
from kvforge.worker.sampling.sampler import SampledRows, SamplingState
from tests.amount import examples

VOCAB = 61


def i4(values: Any) -> Any:
    return np.array(values, np.int32)


def kept(scores: Any, sampling: SamplingParams) -> Any:
    """Return the tokens that the filters keep, one row at a time, by sorting. scores: [vocab] tempered."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(np.array([scores[token] for token in order]) - max(scores))
    if sampling.top_p < 1:
        before = (np.cumsum(weights) - weights) / weights.sum()
        order = order[: max(1, int((before < sampling.top_p).sum()))]
    mask = np.zeros(len(scores), np.bool_)
    mask[order] = True
    if sampling.min_p:
        mask &= np.exp(np.array(scores) - max(scores)) >= sampling.min_p
    return mask


def adjusted(logits: Any, sampling: SamplingParams, prompt: list[int], answer: list[int]) -> Any:
    """The reference: logits after bias and penalties, float64."""
    scores = [float(value) for value in logits]
    for token, value in sampling.logit_bias:
        scores[token] += value
    for token in set(prompt) | set(answer):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(answer):
        scores[token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
    return np.array(scores)


def expected_token(
    logits: Any, sampling: SamplingParams, seed: int, generated: int, prompt: list[int], answer: list[int]
) -> int:
    scores = adjusted(logits, sampling, prompt, answer)
    temperature = float(np.float32(sampling.temperature))
    if temperature == 0:
        return int(np.argmax(scores))
    tempered = scores / temperature
    drawn = uniforms(torch.tensor([seed]), torch.tensor([generated]), len(scores))[0].numpy()
    return int(np.argmax(np.where(kept(tempered, sampling), tempered - np.log(-np.log(drawn)), -np.inf)))


def random_sampling(rng: np.random.Generator) -> SamplingParams:
    """Return sampling parameters with each field set or not at random."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    ids = rng.choice(VOCAB, 5, replace=False).tolist()
    values = [*rng.uniform(-8, 8, 4).tolist(), -math.inf]
    return SamplingParams(
        temperature=maybe(float(rng.uniform(0.2, 3.0)), maybe(1.0, 0.0)),
        top_k=maybe(int(rng.integers(1, 2 * VOCAB)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.001, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe(tuple(zip(ids, values, strict=True)), ()),
        logprobs=maybe(int(rng.integers(1, 21)), 0),
    )


def row_start(slot: int, sampling: SamplingParams, seed: int = 0, generated: int = 0) -> RowStart:
    return RowStart(slot=slot, request_id=slot + 1, sampling=sampling, seed=seed, generated=generated)


def fresh(cpu: Device, sampling: SamplingParams, vocab: int = VOCAB, slots: int = 1) -> SamplingState:
    state = SamplingState(slots, vocab, cpu)
    for slot in range(slots):
        state.begin(row_start(slot, sampling, seed=slot))
    state.upload_starts()
    return state


def test_random_combinations_choose_what_the_reference_chooses(cpu: Device) -> None:
    rng = np.random.default_rng(5)
    rows, steps = 24, 6
    for _ in range(examples(12)):
        samplings = [random_sampling(rng) for _ in range(rows)]
        prompts = [rng.integers(0, VOCAB, 9).tolist() for _ in range(rows)]
        answers = [rng.integers(0, VOCAB, int(rng.integers(0, 9))).tolist() for _ in range(rows)]
        state = SamplingState(rows, VOCAB, cpu)
        for slot, sampling in enumerate(samplings):
            state.begin(row_start(slot, sampling, 100 + slot, len(answers[slot])), i4(prompts[slot]), i4(answers[slot]))
        state.upload_starts()
        for _step in range(steps):
            logits = rng.normal(0, 3, (rows, VOCAB)).astype(np.float32)
            order = rng.permutation(rows)
            chosen = state.sample(torch.from_numpy(logits[order]), order).to_host()
            assert chosen.finite.all()
            for row, slot in enumerate(order.tolist()):
                inputs = (samplings[slot], 100 + slot, len(answers[slot]), prompts[slot], answers[slot])
                token = int(chosen.tokens[row])
                assert token == expected_token(logits[slot], *inputs), inputs
                answers[slot].append(token)


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_a_nucleus_found_among_the_likeliest_is_that_of_the_whole_vocabulary(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = (torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)) * spread).round(decimals=1).double()
    top_k, top_p = torch.zeros(40, dtype=torch.int64), torch.linspace(0.01, 0.999, 40).double()
    kept = most_likely_mask(scores, top_k, top_p, 5000)
    alone = [most_likely_mask(scores[row : row + 1], top_k[:1], top_p[row : row + 1], 5000) for row in range(40)]
    monkeypatch.setattr("kvforge.worker.sampling.filters.NARROW", 5000)  # sort all tokens
    assert torch.equal(kept, most_likely_mask(scores, top_k, top_p, 5000))
    assert torch.equal(torch.cat(alone), kept)
    assert (kept[:1].sum() < 1024) and (spread > 1.0 or kept[-1:].sum() > 1024)


def test_a_row_is_the_same_bit_for_bit_alone_and_in_any_batch(cpu: Device) -> None:
    rng = np.random.default_rng(6)
    vocab, rows = 4099, 12
    samplings = [random_sampling(rng) for _ in range(rows)]
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32)).round(decimals=1)  # with many ties
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # floating-point sums of one long row are split, those of many rows are not
    try:
        together, alone = SamplingState(rows, vocab, cpu), SamplingState(rows, vocab, cpu)
        for state in (together, alone):
            for slot, sampling in enumerate(samplings):
                state.begin(row_start(slot, sampling, seed=slot), i4([1, 2, 3]), i4([4, 4]))
            state.upload_starts()
        for _ in range(4):
            batch = together.sample(logits, np.arange(rows)).to_host()
            for slot in range(rows):
                single = alone.sample(logits[slot : slot + 1], np.array([slot])).to_host()
                assert single.tokens[0] == batch.tokens[slot]
                assert single.logprobs[0] == batch.logprobs[slot]
                tops = [part.tobytes() for part in batch.top_logprobs_of(np.array([slot]))]
                assert [part.tobytes() for part in single.top_logprobs_of(np.array([0]))] == tops
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.7, top_k=6, top_p=0.8, min_p=0.05),
        SamplingParams(logit_bias=((2, 2.0), (0, -math.inf))),
    ],
)
def test_the_filtered_distribution(sampling: SamplingParams, cpu: Device) -> None:
    """Chi-square over 20,000 draws; the 99.9th percentile for 7 degrees of freedom (for fewer it is less) is 24.3."""
    draws, slots = 20_000, 1000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -2.0, 1.5])
    state = fresh(cpu, sampling, 8, slots)
    counts = np.zeros(8)
    for _ in range(draws // slots):
        counts += np.bincount(state.sample(logits.expand(slots, 8), np.arange(slots)).tokens.numpy(), minlength=8)
    tempered = adjusted(logits, sampling, [], []) / float(np.float32(sampling.temperature))
    expected = np.where(kept(tempered, sampling), np.exp(tempered), 0)
    expected *= draws / expected.sum()
    assert not counts[expected == 0].any()
    inside = expected > 0
    assert ((counts - expected)[inside] ** 2 / expected[inside]).sum() < 24.3


def masked(scores: list[float], top_k: int = 0, top_p: float = 1.0) -> list[int]:
    row = torch.tensor([scores], dtype=torch.float64)
    mask = most_likely_mask(
        row, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64), top_k or len(scores)
    )
    return mask[0].nonzero().flatten().tolist()


def test_each_row_keeps_its_own_number_of_tokens_beside_any_other() -> None:
    """Above all top_k = 1, which is greedy whatever else is in the batch."""
    top_k = torch.arange(VOCAB + 1)
    scores = torch.randn((VOCAB + 1, VOCAB), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = most_likely_mask(scores, top_k, torch.ones(VOCAB + 1, dtype=torch.float64), VOCAB)
    for count, row, kept_here in zip([VOCAB, *range(1, VOCAB + 1)], scores, mask, strict=True):
        assert set(kept_here.nonzero().flatten().tolist()) == set(row.topk(count).indices.tolist())


def test_edges_of_the_filters() -> None:
    assert masked([1.0, 5.0, 5.0, 5.0, 0.0], top_k=2) == [1, 2]  # the lowest ids among equals
    assert masked([1.0, 5.0, 2.0], top_p=1e-9) == [1]
    assert masked([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]
    assert masked([1.0, 1.0, 1.0, 1.0], top_p=0.51) == [0, 1, 2]
    assert masked([0.0, -math.inf, 1.0], top_k=3) == [0, 1, 2]
    assert masked([-math.inf, 3.0, -math.inf], top_k=2, top_p=0.5) == [1]
    equal = torch.tensor([[2.0, 2.0, 1.0]], dtype=torch.float64)
    assert min_p_mask(equal, torch.tensor([1.0], dtype=torch.float64)).tolist() == [[True, True, False]]


def test_top_k_beyond_the_vocabulary_is_off(cpu: Device) -> None:
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(3))
    wide, off = fresh(cpu, SamplingParams(top_k=10 * VOCAB)), fresh(cpu, SamplingParams())
    for _ in range(20):
        assert wide.sample(logits, np.array([0])).tokens.tolist() == off.sample(logits, np.array([0])).tokens.tolist()


def sample_once(state: SamplingState, logits: torch.Tensor) -> SampledRows:
    return state.sample(logits, np.arange(len(logits)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_that_is_all_banned_is_told(temperature: float, cpu: Device) -> None:
    bans = tuple((token, -math.inf) for token in range(4))
    everything = SamplingParams(temperature=temperature, logit_bias=bans, top_k=2, top_p=0.5, min_p=0.1)
    state = SamplingState(2, 4, cpu)
    state.begin(row_start(0, everything))
    state.begin(row_start(1, SamplingParams(temperature=temperature, logit_bias=bans[:3])))
    state.upload_starts()
    chosen = sample_once(state, torch.zeros((2, 4)))
    assert chosen.banned is not None
    assert (chosen.banned.tolist(), int(chosen.tokens[1])) == ([True, False], 3)
    assert state.generated[:2].tolist() == [0, 1]


def test_logprobs_and_tops_are_of_the_raw_distribution(cpu: Device) -> None:
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(4)) * 4
    wild = SamplingParams(temperature=0.3, top_k=2, logit_bias=((5, 50.0),), logprobs=3)
    state = SamplingState(3, VOCAB, cpu)
    for slot, sampling in enumerate((wild, SamplingParams(), SamplingParams(logprobs=20))):
        state.begin(row_start(slot, sampling))
    state.upload_starts()
    chosen = sample_once(state, logits).to_host()
    reference = logits.double().log_softmax(-1)
    for row in range(3):
        assert chosen.logprobs[row] == pytest.approx(float(reference[row, int(chosen.tokens[row])]), abs=1e-6)
    counts, tokens, logprobs = chosen.top_logprobs_of(np.array([2, 0, 1]))
    assert counts.tolist() == [20, 3, 0]
    best = [reference[row].topk(count) for row, count in ((2, 20), (0, 3))]
    assert tokens.tolist() == [token for top in best for token in top.indices.tolist()]
    assert logprobs.tolist() == pytest.approx([value for top in best for value in top.values.tolist()], abs=1e-6)


def test_tops_of_equal_logits_are_the_lowest_ids() -> None:
    logits = torch.tensor([[0.0, -0.0, -3.5, 0.0, 2.0, -3.5]])
    tokens, logprobs = top_logprobs(logits, log_normaliser(logits), 6)
    assert tokens.tolist() == [[4, 0, 1, 3, 2, 5]]
    assert logprobs[0].tolist() == pytest.approx(logits.log_softmax(-1)[0, tokens[0]].tolist(), abs=1e-6)


def test_counting_rows_are_few_and_used_again(cpu: Device) -> None:
    state = SamplingState(64, VOCAB, cpu)
    assert state.counts.rows == 0
    for round_ in range(20):
        for slot in range(3):
            state.begin(row_start(slot, SamplingParams(presence_penalty=1.0 if (round_ + slot) % 2 else 0.0)))
    state.upload_starts()
    assert state.counts.rows == 4
    for slot in range(64):
        state.begin(row_start(slot, SamplingParams(frequency_penalty=1.0)), generated=i4([slot % VOCAB]))
    assert state.counts.rows == 64


def test_a_slot_that_changes_hands_forgets_its_counts_and_biases(cpu: Device) -> None:
    state = fresh(cpu, SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias=((3, 50.0),)))
    logits = torch.zeros((1, VOCAB))
    logits[0, 7] = 1.0
    slot = np.array([0])
    assert [int(state.sample(logits, slot).tokens[0]) for _ in range(2)] == [3, 3]
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, presence_penalty=0.5)):
        state.begin(row_start(0, sampling))
        state.upload_starts()
        assert [int(state.sample(logits, slot).tokens[0]) for _ in range(3)] == [7, 7, 7]
