"""Projections of one input in one product."""

from __future__ import annotations

import torch

from kvforge.worker.device.device import Device
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.loading.projections import Place, Projections
from kvforge.worker.loading.row_independence import SteadyLinear


class Mixer(torch.nn.Module):
    def __init__(self, has_bias: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, rows in (("a", 8), ("b", 3)):
            weight = torch.nn.Parameter(torch.randn((rows, 16), generator=generator).bfloat16(), requires_grad=False)
            bias = torch.nn.Parameter(torch.zeros(rows).bfloat16(), requires_grad=False) if has_bias else None
            self.add_module(name, SteadyLinear(PlainOperations(), weight, bias))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(hidden), self.b(hidden)


def joined(mixer: Mixer) -> Projections:
    found = Projections((Place(mixer, "a"), Place(mixer, "b")))
    found.join(lambda matrix: SteadyLinear(PlainOperations(), matrix, None))
    return found


def test_the_weights_lie_in_one_matrix_and_the_mixer_finds_the_results(cpu: Device) -> None:
    mixer, hidden = Mixer(), torch.randn((1, 5, 16), generator=torch.Generator().manual_seed(4)).bfloat16()
    want = mixer(hidden)
    projections = joined(mixer)
    assert projections.joined is not None
    matrix = projections.joined.module.weight
    assert matrix.shape == (11, 16)
    assert mixer.b.weight.data_ptr() == matrix[8:].data_ptr()  # no weight is there twice
    calls = []
    projections.joined.module.register_forward_hook(lambda *given: calls.append(given))
    with projections.over(hidden) as tokens:
        for got, expected in zip(mixer(tokens.part(1, 4)), want, strict=True):
            torch.testing.assert_close(got, expected[:, 1:4])
    assert len(calls) == 1
    for got, expected in zip(mixer(hidden), want, strict=True):
        assert torch.equal(got, expected)


def test_other_weights_are_not_those_that_were_joined(cpu: Device) -> None:
    """A check in float32 puts wider weights in their place for a while."""
    mixer, hidden = Mixer(), torch.randn((1, 5, 16), generator=torch.Generator().manual_seed(4))
    projections = joined(mixer)
    wide = torch.nn.Parameter(2 * mixer.a.weight.float(), requires_grad=False)
    mixer.a.weight, narrow = wide, mixer.b.weight
    with projections.over(hidden) as tokens:
        torch.testing.assert_close(tokens.projected["a"], hidden @ wide.T)
        torch.testing.assert_close(tokens.projected["b"], hidden @ narrow.float().T)


def test_projections_with_a_bias_stay_apart(cpu: Device) -> None:
    assert joined(Mixer(has_bias=True)).joined is None
