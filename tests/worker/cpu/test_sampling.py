"""The CPU's sampling kernel chooses the tokens of plain torch, row by row, greedy and sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.cpu.kernel import cpu_kernels_problem
from kvforge.worker.device.device import Device
from kvforge.worker.sampling.sampler import HostRows, SamplingState

pytestmark = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())
TEMPERATURES = (0.0, 0.3, 1.0, 5.0, 1e-3, 30.0)


def state_of(device: Device, rows: int, vocab: int) -> SamplingState:
    state = SamplingState(rows, vocab, device)
    for slot in range(rows):
        sampling = SamplingParams(temperature=TEMPERATURES[slot % len(TEMPERATURES)])
        seed = (slot * 0x9E3779B97F4A7C15 + 2**63 + 11) % 2**64
        state.begin(RowStart(slot=slot, request_id=1, sampling=sampling, seed=seed, generated=slot * 2**33))
    state.upload_starts()
    return state


def chosen(state: SamplingState, logits: torch.Tensor, wanted: torch.Tensor | None = None) -> HostRows:
    rows = len(logits)
    slots, packed = torch.arange(rows), torch.full((3 * rows,), -1, dtype=torch.int32)
    state.sample_simple(logits, slots, torch.ones(rows).long() if wanted is None else wanted, packed)
    return HostRows.unpacked(packed.numpy(), np.zeros(rows, np.int32))


@pytest.mark.parametrize("vocab", [1, 7, 97, 1024, 1030, 50_001])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 40.0])
def test_tokens_and_log_probabilities_are_those_of_plain_torch(vocab: int, spread: float, cpu: Device) -> None:
    rows, generator = 24, torch.Generator().manual_seed(vocab)
    ours, plain = state_of(cpu, rows, vocab), state_of(replace(cpu, kernels=False), rows, vocab)
    assert ours.splits and not plain.splits
    for _ in range(3):
        logits = torch.randn(rows, vocab, generator=generator) * spread
        got, want = chosen(ours, logits), plain.sample(logits, np.arange(rows)).to_host()
        assert got.tokens.tolist() == want.tokens.tolist()
        assert np.abs(got.logprobs - want.logprobs).max() < 2e-6 * max(1.0, float(np.abs(want.logprobs).max()))
        assert got.finite.all() and not got.banned.any()
    assert torch.equal(ours.generated, plain.generated) and torch.equal(ours.last_token, plain.last_token)


def test_tokens_of_many_draws_are_those_of_plain_torch(cpu: Device) -> None:
    rows, logits = len(TEMPERATURES), torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)) * 3
    ours, plain = state_of(cpu, rows, 3000), state_of(replace(cpu, kernels=False), rows, 3000)
    same = logits.expand(rows, -1).contiguous()
    got = [chosen(ours, same).tokens.tolist() for _ in range(300)]
    assert got == [plain.sample(same, np.arange(rows)).to_host().tokens.tolist() for _ in range(300)]
    assert len({tokens[2] for tokens in got}) > 100, "it draws"


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"logit_bias": ((3, 2.0),)}, {"logprobs": 1}]
)
def test_filtered_draws_are_those_of_plain_torch(filters: dict[str, Any], cpu: Device) -> None:
    rows, vocab, drawn = 5, 3000, []
    for device in (cpu, replace(cpu, kernels=False)):
        state, generator = SamplingState(rows, vocab, device), torch.Generator().manual_seed(2)
        for slot in range(rows):
            sampling = SamplingParams(temperature=0.5 + slot, **filters)
            state.begin(RowStart(slot=slot, request_id=1, sampling=sampling, seed=slot))
        state.upload_starts()
        assert not state.simple(np.arange(rows)).any()
        steps = [torch.randn(rows, vocab, generator=generator) * 4 for _ in range(40)]
        drawn.append([state.sample(logits, np.arange(rows)).to_host().tokens.tolist() for logits in steps])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_moves_nothing_and_is_told(poison: float, cpu: Device) -> None:
    state = state_of(cpu, 6, 1029)
    before = state.generated.clone()
    logits = torch.randn(6, 1029)
    logits[1, 0] = logits[2, 500] = logits[3, 1028] = poison
    got = chosen(state, logits)
    assert got.finite.tolist() == [True, False, False, False, True, True]
    assert (state.generated - before)[:6].tolist() == [1, 0, 0, 0, 1, 1]
    assert state.last_token[1:4].tolist() == [-1, -1, -1]


def test_a_row_that_is_not_wanted_does_not_move(cpu: Device) -> None:
    state = state_of(cpu, 3, 50)
    chosen(state, torch.randn(3, 50), torch.tensor([1, 0, 1]))
    assert (state.last_token[:3] >= 0).tolist() == [True, False, True]


def test_of_equal_logits_the_first_is_the_likeliest(cpu: Device) -> None:
    state, logits = state_of(cpu, 1, 5000), torch.zeros(1, 5000)
    logits[0, [2100, 2050, 4500]] = 1.0
    logits[0, 17] = -0.0
    assert chosen(state, logits).tokens.tolist() == [2050]
    assert chosen(state, torch.zeros(1, 5000) * -1.0).tokens.tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_has_the_same_bits_beside_others_that_are_filtered(temperature: float, cpu: Device) -> None:
    """By the runner's rule that `sample` never handles rows that `sample_simple` can."""
    state = state_of(cpu, 3, 400)
    for slot, more in enumerate(({}, {"top_p": 0.5}, {"logprobs": 2})):
        sampling = SamplingParams(temperature=temperature, **more)
        state.begin(RowStart(slot=slot, request_id=1, sampling=sampling, seed=slot))
    state.upload_starts()
    assert state.simple(np.arange(3)).tolist() == [True, False, False] and state.splits
