"""The sampling kernels against plain torch, and compiled for every supported GPU."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.sampling.sampler import HostRows, SamplingState
from kvforge.worker.wanted import ADVANCES, AHEAD

pytest.importorskip("triton")

from kvforge.worker.device import copies
from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels.registry import KERNELS
from kvforge.worker.sampling import kernels
from tools.aot.compilation import Configuration
from tools.aot.configurations import configurations_of
from tools.aot.specialise import recorded

ROWS = 7
SMALL = [
    kernel for kernel in KERNELS if kernel.module in ("kvforge.worker.sampling.kernels", "kvforge.worker.device.copies")
]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_device("cpu" if request.param == "cpu" else "auto")
    if request.param == "gpu" and not device.runs_kernels:
        pytest.skip("no GPU here")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are not interpreted beside a GPU")
    yield device


def states(device: Device, vocab: int, temperatures: list[float]) -> tuple[SamplingState, SamplingState]:
    both = SamplingState(ROWS, vocab, device), SamplingState(ROWS, vocab, device)
    for state in both:
        for slot, temperature in enumerate(temperatures):
            seed = 2**64 - 1 - slot * 0x9E3779B97F4A7C15 % 2**64
            start = RowStart(
                slot=slot,
                request_id=1,
                sampling=SamplingParams(temperature=temperature),
                seed=seed % 2**64,
                generated=3,
            )
            state.begin(start)
        state.upload_starts()
    return both


def fused(state: SamplingState, logits: torch.Tensor, slots: list[int], wanted: list[int]) -> HostRows:
    where = logits.device
    packed = torch.full((3 * len(slots),), -1, dtype=torch.int32, device=where)
    kernels.choose_tokens(
        logits,
        torch.tensor(slots, device=where),
        torch.tensor(wanted, device=where),
        state.values,
        state.seed,
        state.generated,
        state.last_token,
        packed,
    )
    return HostRows.unpacked(packed.cpu().numpy(), np.zeros(len(slots), np.int32))


@pytest.mark.parametrize("vocab", [5, 97, 1024, 4096, 4097, 8192, 8193, 20_000])
def test_the_kernels_choose_what_torch_chooses(vocab: int, device: Device) -> None:
    temperatures = [0.0, 1.0, 0.7, 0.0, 2.5, 1e-3, 1.0]
    kernel, torch_state = states(device, vocab, temperatures)
    rng = np.random.default_rng(vocab)
    for _ in range(3):
        logits = torch.from_numpy(rng.normal(0, 3, (ROWS, vocab)).astype(np.float32)).to(device.torch_device)
        order = rng.permutation(ROWS).tolist()
        want = torch_state.sample(logits, np.array(order)).to_host()
        got = fused(kernel, logits, order, [1] * ROWS)
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.finite.all() and not got.banned.any()
        assert got.logprobs == pytest.approx(want.logprobs, abs=2e-6)
    assert kernel.last_token.tolist() == torch_state.last_token.tolist()
    assert kernel.generated.tolist() == torch_state.generated.tolist() == [6] * ROWS + [0]


def test_rows_behind_drafts_sample_at_their_place_and_advance_nothing(device: Device) -> None:
    """Two slots, three rows each: as if the slot had advanced by 0, 1 and 2 tokens."""
    kernel, one_by_one = states(device, 97, [1.0, 0.7, *[0.0] * (ROWS - 2)])
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (6, 97)).astype(np.float32)).to(device.torch_device)
    got = fused(kernel, logits, [1, 1, 1, 0, 0, 0], [AHEAD, AHEAD + 1, AHEAD + 2] * 2)
    want = [fused(one_by_one, logits[row : row + 1], [int(row < 3)], [ADVANCES]) for row in range(6)]
    assert got.tokens.tolist() == [int(each.tokens[0]) for each in want]
    assert got.logprobs.tolist() == [float(each.logprobs[0]) for each in want]
    assert kernel.generated.tolist() == [3] * ROWS + [0] and (kernel.last_token < 0).all()
    assert one_by_one.generated.tolist() == [6, 6, *[3] * (ROWS - 2), 0]


def test_the_lowest_id_wins_a_tie(device: Device) -> None:
    kernel, _ = states(device, 9000, [0.0] * ROWS)
    logits = torch.zeros((ROWS, 9000), device=device.torch_device)
    for row, places in enumerate([(0,), (8999,), (1023, 1024), (8191, 8192), (5, 8500), (2048, 3000), ()]):
        logits[row, list(places)] = 1.0
    got = fused(kernel, logits, list(range(ROWS)), [1] * ROWS)
    assert got.tokens.tolist() == [0, 8999, 1023, 8191, 5, 2048, 0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_or_not_wanted_move_nothing(poison: float, device: Device) -> None:
    kernel, _ = states(device, 9000, [0.0, 1.0] * 3 + [0.0])
    logits = torch.ones((ROWS, 9000), device=device.torch_device)
    logits[0, 8500] = logits[1, 3] = logits[2, :] = poison
    got = fused(kernel, logits, list(range(ROWS)), [1, 1, 1, 1, 0, 0, 1])
    assert got.finite.tolist() == [False] * 3 + [True] * 4
    assert kernel.generated.tolist() == [3, 3, 3, 4, 3, 3, 4, 0]
    assert (kernel.last_token >= 0).tolist() == [False, False, False, True, False, False, True, False]
    assert ((got.tokens >= 0) & (got.tokens < 9000)).all()


def test_padding_shares_the_place_behind_the_slots(device: Device) -> None:
    kernel, _ = states(device, 97, [0.0] * ROWS)
    logits = torch.randn((4, 97), device=device.torch_device)
    fused(kernel, logits, [2, ROWS, ROWS, ROWS], [1, 0, 0, 0])
    assert kernel.generated.tolist() == [3, 3, 4, 3, 3, 3, 3, 0]


@pytest.mark.parametrize("rows", [1, 3, 127, 129])
def test_feeding(rows: int, device: Device) -> None:
    rng = np.random.default_rng(rows)
    last = torch.from_numpy(rng.integers(-1, 50, 300)).to(device.torch_device)
    packed = rng.integers(-1, 300, (4, rows)).astype(np.int32)
    packed[1] = rng.integers(0, 300, rows)
    packed[0, ::2] = -1
    fed = kernels.feed_tokens(torch.from_numpy(packed).to(device.torch_device), last).cpu().numpy()
    expected = packed.astype(np.int64)
    expected[0] = np.where(packed[0] < 0, np.maximum(last.cpu().numpy()[packed[1]], 0), packed[0])
    assert fed.dtype == np.int64
    assert fed.tolist() == expected.tolist()


def test_launches_of_any_size_are_among_those_that_are_compiled() -> None:
    """For every target, as Triton's launcher specialises them."""
    random = Random(3)
    for target in TARGETS.values():
        if target.backend == "cpu":
            continue
        with recorded(target) as made, torch.device("meta"):
            for _ in range(40):
                vocab, rows = random.randint(1, 260_000), random.choice((1, 3, 16, 64, 10_000))
                slots, values = torch.empty(rows + 1, dtype=torch.int64), torch.empty((rows, 7), dtype=torch.float64)
                packed, state = torch.empty(3 * rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int64)
                moved = (values, state, state, state, packed)
                kernels.choose_tokens(torch.empty((rows, vocab)), slots[1:], slots[1:], *moved, target.chained)
                kernels.feed_tokens(torch.empty((4, rows), dtype=torch.int32), state)
                copies.copy_numbers(packed, packed)
        compiled = {each.kind() for kernel in SMALL for each in configurations_of(kernel, target)}
        assert not [str(each) for each in made if Configuration("", each, False).kind() not in compiled]
