"""Weights of 8 and 4 bits: their dequantised numbers, products with these, and which weights are eligible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration, KernelError
from kvforge.worker.config import WorkerConfig
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import quantised
from kvforge.worker.kernels.packed import PackedOperations, quantising_problem, weight_kind
from kvforge.worker.kernels.quantised import GROUP, Groups, QuantisedWeight
from kvforge.worker.loading.gguf_groups import read_groups
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from tests.worker.loading.gguf_files import write_gguf

CPU = Device("cpu", torch.device("cpu"), "CPU")
PROBLEM = quantising_problem(CPU, torch.float32, "int8") or quantising_problem(CPU, torch.float32, "int4")
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
TOLERANCE = {"int8": 1e-5, "int4": 1e-2}
SHAPES = [(1, 1), (5, 7), (72, 33), (96, 64), (128, 192)]  # k, n; only the last can be int4


def quantise(weight: torch.Tensor, kind: str, cpu: Device) -> QuantisedWeight:
    found = PackedOperations(cpu).quantise(weight, kind)
    assert isinstance(found, QuantisedWeight)
    return found


def kinds_of(model: LoadedModel) -> list[str]:
    assert model.fused is not None
    return [weight_kind(weight) for weight in model.fused.product_weights()]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@torch.inference_mode()
def test_products_are_those_of_the_numbers_that_are_kept(
    k: int, n: int, dtype: torch.dtype, kind: str, cpu: Device
) -> None:
    torch.manual_seed(0)
    weight = quantise(torch.randn(n, k), kind, cpu)
    assert weight_kind(weight) == (kind if n % 64 == 0 and k % GROUP == 0 else "int8")
    ops, bias = PackedOperations(cpu), torch.randn(n).to(dtype)
    for rows in (1, 3, 130):
        x = torch.randn(2 * rows, k).to(dtype)[::2]  # non-contiguous rows
        got, want = ops.linear(x, weight, bias), weight.seen(x) @ weight.widened().t() + bias
        assert got.dtype == dtype and got.shape == (rows, n)
        tolerance = max(TOLERANCE[kind], 1e-2 if dtype == torch.bfloat16 else 0.0)
        assert float((got - want).norm() / want.norm()) < tolerance
        wide = torch.full((rows, n), float("nan"))
        assert ops.linear(x, weight, bias, wide) is wide and torch.equal(wide, got.float())


@torch.inference_mode()
def test_what_is_beside_a_row_does_not_change_its_product_in_8_bits(cpu: Device) -> None:
    torch.manual_seed(0)
    weight, x = quantise(torch.randn(72, 96), "int8", cpu), torch.randn(40, 96)
    x[7] *= 1e6
    together = weight.product(x)
    for row in (0, 7, 39):
        alone = weight.product(x[row : row + 1])[0]
        assert float((alone - together[row]).norm()) < 1e-6 * float(alone.norm())
    x[3, 5], x[4] = float("nan"), 0.0
    beside = weight.product(x)
    assert beside[3].isnan().all() and beside[4].eq(0).all()
    assert torch.equal(beside[5:], together[5:])


@torch.inference_mode()
def test_columns_that_are_much_larger_leave_levels_to_the_others(cpu: Device) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(256, 512), torch.randn(20, 512)
    x[:, 100] *= 50
    error = quantise(weight, "int8", cpu).product(x) - x @ weight.t()
    assert float(error.norm() / (x @ weight.t()).norm()) < 0.012
    levels = (x / x.abs().amax(1, keepdim=True) * 127).round()  # as without a rotation
    plain = levels * x.abs().amax(1, keepdim=True) / 127 @ weight.t() - x @ weight.t()
    assert float(plain.norm()) > 3 * float(error.norm())


@torch.inference_mode()
def test_the_numbers_that_are_kept_are_the_nearest(cpu: Device) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    weight[3] = 0.0
    grouped = weight.unflatten(1, (-1, GROUP))
    step = (grouped.amax(2) - grouped.amin(2)) / 15
    apart = (quantise(weight, "int4", cpu).widened() - weight).unflatten(1, (-1, GROUP)).abs().amax(2)
    assert (apart <= 0.55 * step + 1e-2 * grouped.abs().amax(2)).all()
    kept = quantise(weight, "int8", cpu).widened()
    assert float((kept - weight).norm() / weight.norm()) < 0.01 and kept[3].abs().max() < 1e-6


def test_a_quantised_weight_is_in_no_other_computation(cpu: Device) -> None:
    weight = quantise(torch.randn(4, 4), "int8", cpu)
    assert (weight.shape, len(weight), weight.is_mkldnn) == ((4, 4), 4, False)
    with pytest.raises(TypeError, match="does not support a quantised weight"):
        torch.add(weight, 1)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q4_K"])
def test_groups_of_a_file_are_its_numbers(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    octets = rng.integers(0, 256, (6, 512 // block, size), dtype=np.uint8)
    scale_bytes = 2 if type_name == "Q4_0" else 4
    scales = rng.normal(size=(6, 512 // block, scale_bytes // 2)).astype(np.float16)
    octets[..., :scale_bytes] = scales.view(np.uint8)  # any byte is a valid level, but not every scale is finite
    octets = octets.reshape(6, -1)
    assert np.array_equal(read_groups(octets, type_name).widened().numpy(), gguf.dequantize(octets, kind))


@pytest.mark.parametrize(
    ("stored", "weight_dtype", "kinds", "name"),
    [
        ("Q4_0", "auto", ["int4"] * 8 + ["int8"], "int4"),
        ("Q4_1", "int4", ["int4"] * 8 + ["int8"], "int4"),
        ("Q8_0", "auto", ["int8"] * 9, "int8"),
        ("Q8_0", "int4", ["int4"] * 8 + ["int8"], "int4"),
        ("F32", "auto", [""] * 9, "float32"),
        ("Q4_1", "dtype", [""] * 9, "float32"),
    ],
)
def test_a_gguf_file_stays_as_it_is(
    stored: str,
    weight_dtype: str,
    kinds: list[str],
    name: str,
    tiny: Callable[..., LoadedModel],
    tmp_path: Path,
    cpu: Device,
) -> None:
    kind = gguf.GGMLQuantizationType[stored]
    path = write_gguf(tiny("llama", kernels=False).module, tmp_path / "tiny.gguf", stored=kind)
    exact, got = (
        load_model(path, dtype="float32", weight_dtype=each, device=cpu, block_size=4)
        for each in ("dtype", weight_dtype)
    )
    assert kinds_of(got) == kinds
    assert (got.info.dtype, got.info.weight_dtype) == ("float32", name)
    assert (got.info.fingerprint == exact.info.fingerprint) == (name == "float32")
    ours, theirs = got.module.state_dict(), exact.module.state_dict()
    assert ours.keys() == theirs.keys()
    apart = max(float((ours[each] - theirs[each]).norm() / theirs[each].norm()) for each in ours)
    if name == "int4" and stored != "Q8_0":  # only the head has other levels, all others only rounded scales
        apart = max(float((ours[each] - theirs[each]).norm() / theirs[each].norm()) for each in ours if "proj" in each)
        assert 0 < apart < 4e-3
    else:
        assert apart <= {"float32": 0.0, "int8": 0.01, "int4": 0.1}[name]


def test_groups_that_are_not_the_weight_are_not_taken(
    tiny: Callable[..., LoadedModel], tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file's numbers differ from the model's, the weights are quantised like any others."""
    path = write_gguf(
        tiny("llama", kernels=False).module, tmp_path / "tiny.gguf", stored=gguf.GGMLQuantizationType.Q4_0
    )

    def other(octets: Any, type_name: str) -> Groups:
        found = read_groups(octets, type_name)
        return Groups(found.levels ^ 1, found.scales, found.lows)

    monkeypatch.setattr("kvforge.worker.loading.gguf_groups.read_groups", other)
    model = load_model(path, dtype="float32", weight_dtype="auto", device=cpu, block_size=4)
    assert kinds_of(model) == ["int8"] * 9


@pytest.mark.parametrize(
    ("problem", "settings"),
    [
        ("is not one of dtype, auto, fp8, int8, int4", {"weight_dtype": "int5"}),
        ("kernels = 'reference'", {"weight_dtype": "int8", "kernels": False}),
        ("float16 is not packed", {"weight_dtype": "int4", "dtype": "float16"}),
        ("StableLmForCausalLM runs transformers' own", {"weight_dtype": "int8", "model_type": "stablelm"}),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    problem: str, settings: dict[str, Any], tiny: Callable[..., LoadedModel]
) -> None:
    with pytest.raises(InvalidConfiguration, match=problem) as caught:
        tiny(settings.pop("model_type", "llama"), **settings)
    assert caught.value.field == "weight_dtype"


def test_a_gpu_and_a_cpu_without_the_instructions_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda", torch.device("cuda"), "NVIDIA H200")
    assert "kernels of Triton, which is not installed" in quantising_problem(gpu, torch.bfloat16, "int8")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    assert "avx512_vnni" in quantising_problem(CPU, torch.float32, "int8")
    assert "avx512_bf16" in quantising_problem(CPU, torch.float32, "int4")


def test_auto_is_satisfied_with_what_can_be(tiny: Callable[..., LoadedModel]) -> None:
    assert tiny("gemma2", weight_dtype="auto", head_dim=16).info.weight_dtype == "float32"
    assert kinds_of(tiny("llama", weight_dtype="auto")) == [""] * 9
    with pytest.raises(InvalidConfiguration, match="weight_dtype"):
        WorkerConfig(name="a", model="b", weight_dtype="fp6")


def test_a_product_that_is_wrong_is_refused(tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    product = quantised.Int8Weight.product
    monkeypatch.setattr(quantised.Int8Weight, "product", lambda self, x, bias=None: product(self, x, bias) * 1.01)
    problem = "quantised product kernel is wrong for 1 tokens, a weight of 97 x 64, int8: .*set weight_dtype = 'dtype'"
    with pytest.raises(KernelError, match=problem):
        tiny("llama", weight_dtype="int8")


def test_what_serves_is_compared_with_the_numbers_that_are_kept(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PackedOperations.quantise
    monkeypatch.setattr(
        PackedOperations, "quantise", lambda self, weight, *rest: made(self, weight.flip(0).contiguous(), *rest)
    )
    monkeypatch.setattr(
        "kvforge.worker.kernels.packed.PackedRows.weight",
        property(lambda self: self._packed.widened()[self._rows].flip(0)),
    )
    with pytest.raises(KernelError, match=r"with quantised weights: .*differs.*; set weight_dtype = 'dtype'"):
        tiny("llama", weight_dtype="int8")
