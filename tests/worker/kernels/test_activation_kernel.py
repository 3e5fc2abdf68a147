"""Activations inside kernels round where plain torch rounds, behind few tokens' products and many's."""

from __future__ import annotations

import pytest
import torch

from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.targets import current_target
from kvforge.worker.kernels.activations import KINDS, Activation
from kvforge.worker.kernels.plain import PlainOperations

pytest.importorskip("triton")

from triton import knobs

from kvforge.worker.kernels.activation import apply_activation
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.launching import LaunchSettings
from kvforge.worker.kernels.xielu import apply_xielu

# numpy warns where an exponential overflows.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="only under Triton's interpreter")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GATED = [*map(Activation, KINDS), Activation("clamped_swiglu", 1.702, 7.0)]
PLAIN = list(map(Activation, KINDS))
XIELU = Activation("xielu", alpha=0.9, negative=1.3)
# Largest difference relative to the largest number: an exponential may round differently.
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EACH = [*((each, True) for each in GATED), *((each, False) for each in (*PLAIN, XIELU))]


def check(device: Device, dtype: torch.dtype, activation: Activation, gated: bool) -> None:
    """The numbers are far beyond the limit, and NaN stays NaN."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 2062, generator=generator) * 8).to(dtype=dtype, device=device.torch_device)
    x[2, :3] = x[2, 1031:1034] = float("nan")
    wanted = activation.gate(*x.chunk(2, dim=-1)) if gated else activation.apply(x)
    launch = LaunchSettings(current_target(device))
    if activation == XIELU:
        found = apply_xielu(launch, x, activation)
    else:
        found = apply_activation(launch, x, activation, gated)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    difference = (found.float() - wanted.float()).nan_to_num().abs() / wanted.float().nan_to_num().abs().clamp_min(1.0)
    assert float(difference.max()) <= DTYPES[dtype]


@interpreted
@pytest.mark.parametrize(("activation", "gated"), EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activations(dtype: torch.dtype, activation: Activation, gated: bool, cpu: Device) -> None:
    check(cpu, dtype, activation, gated)


@interpreted
@pytest.mark.parametrize(("activation", "gated"), EACH, ids=str)
@pytest.mark.parametrize("tokens", [3, 40])
def test_behind_a_product(tokens: int, activation: Activation, gated: bool, cpu: Device) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 128, generator=generator).half()
    weight, bias = (torch.randn(*shape, generator=generator).half() for shape in ((128, 128), (128,)))

    def run(operations: FusedOperations | PlainOperations) -> torch.Tensor:
        return (operations.gated if gated else operations.activated)(x, weight, bias, activation)

    got, want = run(FusedOperations(cpu)).float(), run(PlainOperations()).float()
    assert got.shape == (tokens, 64 if gated else 128)
    assert float((got - want).abs().max()) <= 4e-3 * float(want.abs().max())


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(("activation", "gated"), EACH, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_on_a_gpu(dtype: torch.dtype, activation: Activation, gated: bool) -> None:
    check(open_device(), dtype, activation, gated)
