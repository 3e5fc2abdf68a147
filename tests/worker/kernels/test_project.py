"""Projection, rotation and KV write in one kernel give the results of the three operations in sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvforge.worker.attention import KvLayer, ReferenceAttention
from kvforge.worker.attention.reference import rotate
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.targets import current_target
from kvforge.worker.kernels import PlainOperations
from kvforge.worker.loading.model import LoadedModel

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from kvforge.worker.kernels.fused import FusedOperations  # noqa: E402 - it imports triton
from kvforge.worker.kernels.launching import LaunchSettings  # noqa: E402
from kvforge.worker.kernels.linear import LinearTiles  # noqa: E402
from kvforge.worker.kernels.project import can_project, project  # noqa: E402

interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="only under Triton's interpreter")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CASES = [  # tokens, heads, KV heads, head size, k, tiles
    (1, 4, 1, 64, 128, LinearTiles(64, 64, 16, 1, 4, 2)),
    (3, 3, 3, 128, 256, LinearTiles(64, 128, 16, 1, 4, 4, prefetch=2)),
    (17, 2, 1, 256, 192, LinearTiles(64, 64, 16, 1, 4, 2)),
    (50, 4, 2, 128, 512, LinearTiles(64, 128, 64, 1, 4, 4, prefetch=2)),
]
Case = tuple[int, int, int, int, int, LinearTiles]


def random(device: Device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device.torch_device).to(dtype)


def cache_of(device: Device, dtype: torch.dtype, slots: int, kv_heads: int, head_size: int) -> KvLayer:
    """Blocks of four, all NaN."""
    shape = (-(-slots // 4), 4, kv_heads, head_size)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype, device=device.torch_device) for _ in range(2))
    return KvLayer(keys, values)


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return float((got.double() - want.double()).norm() / want.double().norm()) <= tolerance


def check(device: Device, dtype: torch.dtype, tolerance: float, case: Case, biased: bool, overlap: bool) -> None:
    tokens, heads, kv_heads, head_size, k, tiles = case
    torch.manual_seed(0)
    n = (heads + 2 * kv_heads) * head_size
    x = torch.full((tokens + 2, k + 8), float("nan"), dtype=dtype, device=device.torch_device)[:tokens, :k]
    x.normal_().mul_(k**-0.5)  # tokens are not contiguous, with NaN between and behind them
    weight, bias = random(device, dtype, n, k), random(device, dtype, n) if biased else None
    positions = torch.randint(2000, (tokens,), device=device.torch_device)
    frequencies = 1 / 10000 ** (torch.arange(0, head_size, 2, device=device.torch_device) / head_size)
    cos, sin = PlainOperations().rotary(positions, frequencies, 1.1, dtype)
    order = torch.randperm(3 * tokens, device=device.torch_device)[:tokens].int()
    order[tokens // 2] = -1
    cache = cache_of(device, dtype, 3 * tokens, kv_heads, head_size)
    assert can_project(weight, cos, cache, tiles)
    launch = LaunchSettings(current_target(device), overlap)
    query = project(launch, x, weight, bias, cos, sin, cache, order, tiles)

    by_head = PlainOperations().linear(x, weight, bias).view(tokens, -1, head_size)
    q, key, value = by_head.split((heads, kv_heads, kv_heads), dim=1)
    assert near(query, rotate(q, cos, sin), tolerance)
    stored = order >= 0
    for got, want in ((cache.keys, rotate(key, cos, sin)), (cache.values, value)):
        flat = got.flatten(0, 1)
        places = order[stored].long()
        if len(places):
            assert near(flat[places], want[stored], tolerance)
        assert int(flat.isfinite().sum()) == len(places) * kv_heads * head_size, "nothing else is written"


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_project(case: Case, biased: bool, cpu: Device) -> None:
    check(cpu, torch.float16, DTYPES[torch.float16], case, biased, overlap=False)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
def test_project_on_a_gpu(dtype: torch.dtype, tolerance: float, case: Case) -> None:
    device = open_device()
    for overlap in {False, FusedOperations(device).overlap}:
        for biased in (False, True):
            check(device, dtype, tolerance, case, biased, overlap)


@interpreted
@pytest.mark.parametrize("quantity", ["dtype", "scales", "head size", "rotated", "depth", "tall tiles"])
def test_what_it_is_not_made_for(quantity: str, cpu: Device) -> None:
    """The three operations run instead, as `test_a_model_uses_it` shows."""
    layer, tiles = cache_of(cpu, torch.float16, 4, 1, 64), CASES[0][-1]
    weight, cos = torch.zeros((192, 128), dtype=torch.float16), torch.zeros((1, 64))
    assert can_project(weight, cos, layer, tiles)
    if quantity == "dtype":
        layer = cache_of(cpu, torch.float32, 4, 1, 64)
    elif quantity == "scales":
        layer = replace(layer, key_scales=torch.ones(1), value_scales=torch.ones(1))
    elif quantity == "head size":
        layer = cache_of(cpu, torch.float16, 4, 1, 96)
    elif quantity == "rotated":
        cos = cos[:, :32]
    elif quantity == "depth":
        weight = weight[:, :100]
    else:
        tiles = replace(tiles, rows=128)
    assert not can_project(weight, cos, layer, tiles)


@interpreted
@torch.inference_mode()
def test_a_model_uses_it(
    tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens go through the kernel, many do not, and the logits are those of the plain operations."""
    model = tiny("llama", head_dim=64, dtype="float16")
    assert model.fused is not None
    asked: list[bool] = []

    class Noted(FusedOperations):
        def project(self, *arguments: Any) -> torch.Tensor | None:
            query = super().project(*arguments)
            asked.append(query is not None)
            return query

    fused = replace(model.fused, operations=Noted(model.device), attention=ReferenceAttention())
    sequences = [torch.arange(3, 44).numpy(), torch.arange(7, 12).numpy()]
    schedule = [[30, 3], [10, 1], [1, 1]]
    got = paged_logits(replace(model, fused=fused), sequences, schedule)
    want = paged_logits(replace(model, fused=replace(fused, operations=PlainOperations())), sequences, schedule)
    assert all(near(left, right, 1e-2) for left, right in zip(got, want, strict=True))
    layers = len(fused.layers)
    assert asked == [False] * layers + [True] * 2 * layers
