"""The kernels around attention over latents, and of routers: plain torch's numbers, and bits of a row alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.device.device import open_device
from kvforge.worker.device.targets import current_target
from kvforge.worker.kernels.by_head import FEW_TOKENS, by_head
from kvforge.worker.kernels.latent_inputs import latent_inputs
from kvforge.worker.kernels.launching import LaunchSettings
from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.selftest import TOLERANCE
from kvforge.worker.kernels.steady import same_bits
from kvforge.worker.kernels.wide_linear import NUMBERS, can_widen, wide_linear

DEVICE = open_device("auto")
pytestmark = [
    pytest.mark.skipif(not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*"),
]
LAUNCH = LaunchSettings(current_target(DEVICE))
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MULTIPLIED = (F32, F16, BF16) if DEVICE.runs_kernels else (F32, F16)  # the interpreter has no products of bfloat16
# Heads, numbers of a query without rotation, with it, of a latent, of a value: even tiles, and none.
SIZES = [(2, 64, 16, 128, 32), (3, 24, 8, 64, 40), (1, 100, 2, 33, 7)]


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE.torch_device, dtype)


def within(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    return float((got.double() - want.double()).abs().max()) <= TOLERANCE[dtype] * float(want.double().abs().max())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
def test_each_head_has_its_own_matrix(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    heads, plain, rotated, latent, value = sizes
    matrices = random(heads, plain + value, latent, dtype=dtype, seed=1)
    keys, values = matrices.split((plain, value), dim=1)
    for tokens in (1, FEW_TOKENS, FEW_TOKENS + 3, 70):
        queries = random(tokens + 1, heads, plain + rotated, dtype=dtype)
        queries[..., plain:] = torch.nan  # rotated numbers, and a row that belongs to no token
        queries[tokens] = torch.nan
        output = torch.full((tokens + 1, heads, latent + rotated), 7.0, device=DEVICE.torch_device, dtype=dtype)
        by_head(LAUNCH, queries[:tokens, :, :plain], keys, output[:tokens, :, :latent])
        want = torch.einsum("thk,hkn->thn", queries[:tokens, :, :plain].double(), keys.double())
        assert within(output[:tokens, :, :latent], want, dtype)
        assert bool((output[..., latent:] == 7).all()) and bool((output[tokens] == 7).all())
        sums = random(tokens, heads, latent, dtype=dtype, seed=2)
        want = torch.einsum("thk,hnk->thn", sums.double(), values.double())
        for got in (by_head(LAUNCH, sums, values.transpose(1, 2)), PlainOperations().by_head(sums, values.mT)):
            assert got.is_contiguous() and within(got, want, dtype)


@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
def test_a_product_of_a_head_depends_on_its_row_alone(dtype: torch.dtype) -> None:
    x, weight = random(150, 3, 64, dtype=dtype), random(3, 64, 96, dtype=dtype, seed=1)
    for multiply in (lambda x: by_head(LAUNCH, x, weight), lambda x: PlainOperations().by_head(x, weight)):
        whole = multiply(x)
        for first, count in ((0, 1), (37, 1), (149, 1), (5, 16), (37, 17), (20, 65)):
            assert same_bits(multiply(x[first : first + count]), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(8, 64), (5, 1000), (3, 4100)])
def test_a_router_multiplies_in_float32(n: int, k: int, dtype: torch.dtype) -> None:
    weight, x = random(n, k, seed=1), torch.full((73, k + 8), torch.nan, device=DEVICE.torch_device, dtype=dtype)
    x[:72, :k] = random(72, k, dtype=dtype)
    assert can_widen(weight) and not can_widen(weight.half()) and not can_widen(random(2, NUMBERS + 1))
    for bias in (None, random(n, seed=2)):
        whole = wide_linear(LAUNCH, x[:72, :k], weight, bias)
        want = x[:72, :k].double() @ weight.double().t() + (0 if bias is None else bias.double())
        assert whole.dtype == F32 and float((whole.double() - want).abs().max()) <= 1e-5 * float(want.abs().max())
        for first, count in ((0, 1), (71, 1), (3, 20)):
            part = wide_linear(LAUNCH, x[first : first + count, :k], weight, bias)
            assert same_bits(part, whole[first : first + count])
    assert wide_linear(LAUNCH, x[:0, :k], weight, None).shape == (0, n)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_latents_are_normed_and_keys_rotated(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    heads, plain, rotated, latent, _ = sizes
    for tokens, norm in (
        (1, Norm(random(latent, dtype=dtype), 1e-6)),
        (5, Norm(random(latent, dtype=dtype), 1e-2, offset=1.0, rounds_first=False)),
        (5, Norm(random(latent, dtype=dtype), 1e-6, bias=random(latent, dtype=dtype, seed=5), centred=True)),
        (3, None),
    ):
        projected = random(tokens, 9 + latent + rotated, dtype=dtype, seed=3)
        projected[:, :9] = torch.nan
        own, queries = projected[:, 9:], random(tokens, heads, plain + rotated, dtype=dtype)
        queries[..., :plain] = torch.nan
        angles = random(tokens, rotated, seed=4) * 3
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        found = []
        for make in (lambda *given: latent_inputs(LAUNCH, *given), PlainOperations().latent_inputs):
            absorbed = torch.full((tokens, heads, latent + rotated), 7.0, device=DEVICE.torch_device, dtype=dtype)
            stored = make(own, queries[..., plain:], norm, cos, sin, absorbed[..., latent:])
            assert bool((absorbed[..., :latent] == 7).all()) and stored.is_contiguous()
            found.append((stored, absorbed[..., latent:]))
        for got, want in zip(*found, strict=True):
            assert within(got, want, dtype)
