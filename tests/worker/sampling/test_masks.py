"""Masks in the sampler: a token that a mask lacks is never chosen, and nothing else about a row changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.sampling.sampler import HostRows, SamplingState, unpacked

ROWS = 6
TEMPERATURES = (0.0, 1.0, 0.3, 0.0, 5.0, 1e-3)
VOCABS = [5, 97, 4097]


@pytest.fixture(params=["host", "triton", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_device("auto" if request.param == "gpu" else "cpu")
    if request.param == "gpu" and not device.runs_kernels:
        pytest.skip("no GPU here")
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels are not interpreted beside a GPU")
    if request.param == "host" and device.cpu_kernels_problem:
        pytest.skip(device.cpu_kernels_problem)
    yield device


@pytest.fixture
def by_triton(request: pytest.FixtureRequest) -> bool:
    return "triton" in request.node.name


def state_of(device: Device, vocab: int, **more: Any) -> SamplingState:
    state = SamplingState(ROWS, vocab, device)
    for slot, temperature in enumerate(TEMPERATURES):
        sampling = SamplingParams(temperature=temperature, **more)
        state.begin(RowStart(slot=slot, request_id=1, sampling=sampling, seed=slot + 2**63, generated=slot))
    state.upload_starts()
    return state


def masks_of(vocab: int, seed: int, share: float) -> npt.NDArray[np.int32]:
    """Random masks, each with at least one token, and with unused bits behind the vocabulary."""
    rng = np.random.default_rng(seed)
    bits = rng.random((ROWS, -(-vocab // 32) * 32)) < share
    bits[np.arange(ROWS), rng.integers(0, vocab, ROWS)] = True
    packed: npt.NDArray[np.int32] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return packed


def chosen(state: SamplingState, logits: torch.Tensor, masks: torch.Tensor | None, triton: bool = False) -> HostRows:
    where = logits.device
    slots, wanted = torch.arange(ROWS, device=where), torch.ones(ROWS, dtype=torch.int64, device=where)
    packed = torch.full((3 * ROWS,), -1, dtype=torch.int32, device=where)
    if triton:
        from kvforge.worker.sampling.kernels import choose_tokens

        kept = (state.values, state.seed, state.generated, state.last_token)
        choose_tokens(logits, slots, wanted, *kept, packed, masks=masks)
    else:
        state.sample_simple(logits, slots, wanted, packed, masks)
    return HostRows.unpacked(packed.cpu().numpy(), np.zeros(ROWS, np.int32))


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_kernels_choose_what_torch_chooses(vocab: int, share: float, device: Device, by_triton: bool) -> None:
    ours, plain = state_of(device, vocab), state_of(replace(device, kernels=False), vocab)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        logits = (torch.randn(ROWS, vocab, generator=generator) * 4).to(device.torch_device)
        masks = torch.from_numpy(masks_of(vocab, step, share)).to(device.torch_device)
        got = chosen(ours, logits, masks, by_triton)
        want = plain.sample(logits, np.arange(ROWS), masks).to_host()
        assert got.tokens.tolist() == want.tokens.tolist()
        assert unpacked(masks, vocab)[range(ROWS), got.tokens].all()
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
        assert got.finite.all() and want.finite.all()
        everything = torch.log_softmax(logits.double(), dim=-1)[range(ROWS), got.tokens]
        assert got.logprobs == pytest.approx(everything.cpu().numpy(), abs=1e-5), "of the model's own distribution"
    assert ours.last_token.tolist() == plain.last_token.tolist()
    assert ours.generated.tolist() == plain.generated.tolist()


@pytest.mark.parametrize("vocab", [97, 9001])
def test_a_mask_of_everything_changes_nothing(vocab: int, device: Device, by_triton: bool) -> None:
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    masks = torch.full((ROWS, -(-vocab // 32)), -1, dtype=torch.int32, device=device.torch_device)
    free = chosen(state_of(device, vocab), logits, None, by_triton)
    masked = chosen(state_of(device, vocab), logits, masks, by_triton)
    assert masked.tokens.tolist() == free.tokens.tolist()
    assert masked.logprobs.tolist() == free.logprobs.tolist()


def test_rows_of_wider_masks_and_ties(device: Device, by_triton: bool) -> None:
    """The lowest allowed id wins a tie; rows of masks need not be contiguous."""
    vocab = 5000
    logits = torch.zeros((ROWS, vocab), device=device.torch_device)
    wide = torch.zeros((ROWS, 200), dtype=torch.int32, device=device.torch_device)
    masks = wide[:, : -(-vocab // 32)]
    for row in range(ROWS):
        masks[row, 100] = 1 << (row + 3)
        masks[row, 140] = -1
    state = state_of(device, vocab)
    got = chosen(state, logits, masks, by_triton)
    assert [got.tokens[row] for row in (0, 3)] == [3203, 3206]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_where_its_mask_hides_it_too(
    poison: float, device: Device, by_triton: bool
) -> None:
    state, logits = state_of(device, 97), torch.zeros((ROWS, 97), device=device.torch_device)
    logits[2, 50] = poison
    masks = torch.ones((ROWS, 4), dtype=torch.int32, device=device.torch_device)
    got = chosen(state, logits, masks, by_triton)
    assert got.finite.tolist() == [True, True, False, True, True, True]
    assert got.tokens[[0, 1, 3, 4, 5]].tolist()[0] == 0 and int(state.last_token[2]) == -1


@pytest.mark.parametrize(
    "more",
    [
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"logit_bias": ((3, 5.0), (4, -100.0))},
        {"logprobs": 3},
        {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "frequency_penalty": 0.5, "logit_bias": ((1, 9.0),), "logprobs": 2},
    ],
    ids=lambda more: " ".join(more),
)
def test_filters_and_penalties_choose_among_what_is_allowed(more: dict[str, Any], cpu: Device) -> None:
    for device in (cpu, replace(cpu, kernels=False)):
        state, free = state_of(device, 97, **more), state_of(device, 97, **more)
        for step in range(20):
            logits = torch.randn(ROWS, 97, generator=torch.Generator().manual_seed(step)) * 3
            masks = torch.from_numpy(masks_of(97, step, 0.05))
            got = state.sample(logits, np.arange(ROWS), masks).to_host()
            assert unpacked(masks, 97)[range(ROWS), got.tokens].all()
            assert got.finite.all() and not got.banned.any()
            told = free.sample(logits, np.arange(ROWS)).to_host()
            assert got.top_tokens.tolist() == told.top_tokens.tolist(), "of the model's own distribution"


def test_a_filter_counts_what_is_allowed_alone(cpu: Device) -> None:
    """top_k = 1 is the greedy choice among the allowed tokens, however unlikely these are."""
    logits = torch.arange(97.0).repeat(ROWS, 1)
    masks = torch.zeros((ROWS, 4), dtype=torch.int32)
    masks[:, 0] = 0b1110
    assert state_of(cpu, 97, top_k=1).sample(logits, np.arange(ROWS), masks).to_host().tokens.tolist() == [3] * ROWS


def test_a_bias_that_bans_all_that_is_allowed_is_told(cpu: Device) -> None:
    state = state_of(cpu, 97, logit_bias=((1, -float("inf")), (2, -float("inf"))))
    masks = torch.full((ROWS, 4), 0, dtype=torch.int32)
    masks[:, 0] = 0b110
    masks[1, 1] = 1
    banned = state.sample(torch.randn(ROWS, 97), np.arange(ROWS), masks).to_host().banned
    assert banned.tolist() == [True, False, True, True, True, True]
