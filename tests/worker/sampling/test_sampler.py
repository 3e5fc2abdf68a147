"""The generator against published vectors; greedy and tempered choice."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.device.device import Device
from kvforge.worker.sampling.draws import philox, splitmix64, uniforms
from kvforge.worker.sampling.sampler import NO_TOKEN, SamplingState

VOCAB = 1000


def start(slot: int, temperature: float = 1.0, seed: int = 0, generated: int = 0) -> RowStart:
    return RowStart(
        slot=slot, request_id=slot, sampling=SamplingParams(temperature=temperature), seed=seed, generated=generated
    )


def begin(state: SamplingState, *starts: RowStart) -> None:
    for row in starts:
        state.begin(row)
    state.upload_starts()


# Random123 1.14, tests/kat_vectors: philox 4x32 10
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox(torch.tensor([counter, counter]), torch.tensor([key, key])).tolist() == [expected, expected]


def test_splitmix64_known_answers() -> None:
    # The first outputs of the authors' C code seeded with 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    bits = splitmix64(torch.tensor([1234567]), torch.arange(5))
    assert [value % 2**64 for value in bits.tolist()] == expected


def test_uniforms_are_inside_the_unit_interval_and_keyed_by_seed_and_position() -> None:
    seeds = torch.tensor([0, 1, -1, 0, 0])
    positions = torch.tensor([0, 0, 0, 1, 2**32])
    drawn = uniforms(seeds, positions, 1000)
    assert drawn.dtype == torch.float64
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 1
    assert len(torch.unique(drawn)) == drawn.numel()
    assert abs(float(drawn.mean()) - 0.5) < 0.02
    assert torch.equal(uniforms(seeds[3:4], positions[3:4], 1000)[0], drawn[3])


def test_greedy_takes_the_lowest_id_of_a_tie(cpu: Device) -> None:
    state = SamplingState(4, VOCAB, cpu)
    begin(state, start(2, temperature=0.0), start(1, temperature=0.0))
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    chosen = state.sample(logits, np.array([2, 1]))
    assert chosen.tokens.tolist() == [1, 0]
    assert chosen.logprobs.tolist() == pytest.approx([3 - math.log(1 + 3 * math.exp(3.0)), -math.log(4)], 1e-5)
    assert chosen.finite.all()


def test_logprobs_are_of_the_untempered_logits(cpu: Device) -> None:
    state = SamplingState(1, VOCAB, cpu)
    begin(state, start(0, temperature=0.25, seed=5))
    logits = torch.randn((1, 50), generator=torch.Generator().manual_seed(0))
    chosen = state.sample(logits, np.array([0]))
    assert float(chosen.logprobs[0]) == pytest.approx(float(logits.log_softmax(-1)[0, chosen.tokens[0]]), abs=1e-6)


def test_a_draw_does_not_depend_on_the_batch(cpu: Device) -> None:
    logits = torch.randn((6, 300), generator=torch.Generator().manual_seed(1))
    seeds = [7, 2**64 - 1, 7, 0, 2**63, 12]
    together = SamplingState(16, VOCAB, cpu)
    begin(together, *(start(i, 0.0 if i == 3 else 1.5, seed) for i, seed in enumerate(seeds)))
    drawn = [together.sample(logits, np.arange(6)).tokens for _ in range(5)]
    for row, seed in enumerate(seeds):
        alone = SamplingState(16, VOCAB, cpu)
        begin(alone, start(11, 0.0 if row == 3 else 1.5, seed))
        tokens = [int(alone.sample(logits[row : row + 1], np.array([11])).tokens[0]) for _ in range(5)]
        assert tokens == [int(step[row]) for step in drawn]


def test_a_resumed_request_draws_what_it_would_have_drawn(cpu: Device) -> None:
    logits = torch.zeros((1, 1000))
    slot = np.array([0])
    state = SamplingState(1, VOCAB, cpu)
    begin(state, start(0, seed=99))
    whole = [int(state.sample(logits, slot).tokens[0]) for _ in range(10)]
    begin(state, start(0, seed=99, generated=6))
    assert [int(state.sample(logits, slot).tokens[0]) for _ in range(4)] == whole[6:]
    assert len(set(whole)) > 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float, cpu: Device) -> None:
    """Chi-square over 20,000 draws of 8 tokens; the 99.9th percentile for 7 degrees of freedom is 24.3."""
    draws, slots = 20_000, 1000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -2.0, 1.5])
    state = SamplingState(slots, VOCAB, cpu)
    begin(state, *(start(slot, temperature, seed=slot) for slot in range(slots)))
    counts = torch.zeros(8)
    for _ in range(draws // slots):
        tokens = state.sample(logits.expand(slots, 8), np.arange(slots)).tokens
        counts += torch.bincount(tokens, minlength=8)
    expected = (logits / temperature).softmax(-1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 7e-46])
def test_a_temperature_below_the_smallest_float32_is_greedy(temperature: float, cpu: Device) -> None:
    """Division by the two smaller temperatures would make the first three logits infinite."""
    slots = np.arange(2)
    state = SamplingState(2, 4, cpu)
    begin(state, *(start(slot, temperature, seed=slot) for slot in range(2)))
    assert state.simple(slots).all() and state.values[:2, 0].tolist() == [0, 0]
    assert state.sample(torch.tensor([[2.0, 3.0, 3.0, -1.0]]).expand(2, 4), slots).tokens.tolist() == [1, 1]
    begin(state, *(start(slot, 1.5e-45, seed=slot) for slot in range(2)))
    assert (state.values[:2, 0] > 0).all()


def test_a_temperature_is_what_float32_makes_of_it(cpu: Device) -> None:
    """Draws of two tokens that float64's 0.7 would decide differently show it: a window of 2e-8 of the logit."""
    exact, rounded = 0.7, float(np.float32(0.7))
    seeds, logits, expected = [], [], []
    for seed in range(400):
        first, second = (-np.log(-np.log(uniforms(torch.tensor([seed]), torch.tensor([0]), 2)[0].numpy()))).tolist()
        logit = float(np.float32((first - second) * (exact + rounded) / 2))
        choices = [int(logit / temperature + second > first) for temperature in (exact, rounded)]
        if choices[0] != choices[1]:
            seeds.append(seed)
            logits.append([0.0, logit])
            expected.append(choices[1])
    assert len(seeds) >= 20
    state = SamplingState(len(seeds), 2, cpu)
    begin(state, *(start(slot, exact, seed) for slot, seed in enumerate(seeds)))
    assert state.sample(torch.tensor(logits), np.arange(len(seeds))).tokens.tolist() == expected


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_changes_nothing(poison: float, cpu: Device) -> None:
    state = SamplingState(2, VOCAB, cpu)
    begin(state, start(0), start(1))
    logits = torch.zeros((2, 10))
    logits[0, 3] = poison
    chosen = state.sample(logits, np.arange(2))
    assert chosen.finite.tolist() == [False, True]
    assert state.generated[:2].tolist() == [0, 1]
    assert state.last_token[:2].tolist() == [NO_TOKEN, int(chosen.tokens[1])]


def test_begin_replaces_what_the_slot_held(cpu: Device) -> None:
    state = SamplingState(2, VOCAB, cpu)
    begin(state, start(0, 0.0, seed=1), start(0, 0.7, seed=2**64 - 1, generated=4))
    state.sample(torch.zeros((1, 4)), np.array([0]))
    assert state.values[:2, 0].tolist() == pytest.approx([0.7, 0.0])
    assert state.seed[:2].tolist() == [-1, 0]
    assert state.generated[:2].tolist() == [5, 0]
    begin(state, start(0, 0.0))
    assert (int(state.generated[0]), int(state.last_token[0])) == (0, NO_TOKEN)
