"""Fused layers compute what transformers' own do; each kernel computes what its plain-torch reference does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import ModelNotFound, WorkerError
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.targets import current_target
from kvforge.worker.kernels import LayerOperations, PlainOperations
from kvforge.worker.kernels.activations import SILU
from kvforge.worker.loading import MODEL_CONFIGS, find_source, known_configs, read_config
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from kvforge.worker.kernels.fused import FusedOperations  # noqa: E402 - it imports triton
from kvforge.worker.kernels.launching import LaunchSettings  # noqa: E402
from kvforge.worker.kernels.linear import LinearTiles, linear_parts, split_depth  # noqa: E402
from kvforge.worker.kernels.plain import sum_parts  # noqa: E402
from kvforge.worker.kernels.selftest import self_test  # noqa: E402

interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="only under Triton's interpreter")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROTARY = {"rope_theta": 10000.0}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama MQA, wide heads": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ROTARY}}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3 without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
}
NOT_FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "another class": ("stablelm", {}),
    "another activation": ("llama", {"hidden_act": "gelu_new"}),
    "frequencies that change": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, **ROTARY}}),
}
SCHEDULE = [[5, 1, 2], [30, 0, 7], [1, 0, 1], [5, 0, 13]]
LENGTHS = (41, 1, 23)


def sequences_of(model: LoadedModel) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, model.vocab_size, count) for count in LENGTHS]


def with_random_biases(model: LoadedModel) -> LoadedModel:
    """Randomise biases and norms, because zeros and ones hide mistakes; equal for models of one configuration."""
    torch.manual_seed(4)
    for name, weight in model.module.named_parameters():
        if name.endswith("bias") or "norm" in name:
            weight.normal_()
    return model


# Soak tests: the others have more than these.
AGAIN = ("llama", "mistral", "qwen2")


def each_fused() -> list[Any]:
    return [
        pytest.param(*values, id=name, marks=[pytest.mark.soak] if name in AGAIN else [])
        for name, values in FUSED.items()
    ]


@pytest.mark.parametrize(("model_type", "fields"), each_fused())
@torch.inference_mode()
def test_fused_layers_are_transformers_layers(
    model_type: str,
    fields: dict[str, Any],
    tiny: Callable[..., LoadedModel],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    packed = with_random_biases(tiny(model_type, **fields))
    model = with_random_biases(tiny(model_type, kernels=False, **fields))
    assert model.fused is not None
    # transformers' layers unpack packed weights and compute the same.
    fused = [model, packed, replace(packed, fused=None)]
    if knobs.runtime.interpret:
        fused.append(replace(model, fused=replace(model.fused, operations=FusedOperations(model.device))))
    sequences = sequences_of(model)
    wanted = paged_logits(replace(model, fused=None), sequences, SCHEDULE)
    scale = max(float(want.abs().max()) for want in wanted)
    for other in fused:
        for got, want in zip(paged_logits(other, sequences, SCHEDULE), wanted, strict=True):
            assert float((got - want).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize(("model_type", "fields"), NOT_FUSED.values(), ids=NOT_FUSED)
def test_what_is_not_known_is_not_fused(
    model_type: str, fields: dict[str, Any], tiny: Callable[..., LoadedModel]
) -> None:
    assert tiny(model_type, **fields).fused is None


def test_no_weight_is_held_twice(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("qwen2", kernels=False)
    assert model.fused is not None
    layer, parts = model.fused.layers[1], model.module.model.layers[1]
    q, k, v = parts.self_attn.q_proj, parts.self_attn.k_proj, parts.self_attn.v_proj
    start = layer.projected.weight.data_ptr()
    size = layer.projected.weight.element_size() * 64
    assert [each.weight.data_ptr() - start for each in (q, k, v)] == [0, 64 * size, 96 * size]
    assert layer.projected.bias is not None and q.bias.data_ptr() == layer.projected.bias.data_ptr()
    assert torch.equal(torch.cat((q.weight, k.weight, v.weight)), layer.projected.weight)
    assert parts.mlp.gate_proj.weight.data_ptr() == layer.feed.gate_up.weight.data_ptr()
    assert parts.mlp.down_proj.weight.data_ptr() == layer.feed.down.weight.data_ptr()
    assert "model.layers.1.self_attn.k_proj.bias" in model.module.state_dict()


def test_decode_gives_the_logits_of_every_row(
    tiny: Callable[..., LoadedModel], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    model = tiny("llama")

    class Decode:
        """A model that runs every pass through `decode`."""

        geometry, device = model.geometry, model.device

        def forward(self, tokens: Any, positions: Any, _: Any, batch: Any, pool: Any) -> torch.Tensor:
            return model.decode(tokens, positions, batch, pool)

    sequences = sequences_of(model)
    left, right = paged_logits(model, sequences, SCHEDULE), paged_logits(Decode(), sequences, SCHEDULE)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@interpreted
def test_a_pass_may_want_no_logits(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("llama", kernels=False)
    assert model.fused is not None
    model = replace(model, fused=replace(model.fused, operations=FusedOperations(model.device)))
    pool = KvPool(model.geometry, 2, model.device)
    batch = PagedBatch.build(
        np.arange(2, dtype=np.int32)[None], np.zeros(1, np.int32), np.full(1, 5, np.int32), 4, model.device
    )
    every, none = torch.arange(5), torch.zeros(0, dtype=torch.int64)
    assert model.forward(every + 1, every, none, batch, pool).shape == (0, model.vocab_size)
    assert float(pool.layers[1].keys.flatten(0, 1)[:5].abs().min()) > 0
    pool.close()


def test_layers_that_differ_are_left_alone(
    write_config: Callable[..., Path],
    cpu: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Wrong(PlainOperations):
        def add_norm(self, addend: Any, residual: Any, weight: Any, epsilon: float) -> torch.Tensor:
            return super().add_norm(2 * addend, residual, weight, epsilon)

    monkeypatch.setattr("kvforge.worker.loading.load.choose_operations", lambda *_: Wrong())
    model = load_model(write_config("llama"), load_format="dummy", dtype="float32", device=cpu, block_size=4)
    assert model.fused is None
    assert "one operation at a time" in caplog.text


@interpreted
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_self_test_names_the_kernel(model_type: str, tiny: Callable[..., LoadedModel]) -> None:
    class Wrong(FusedOperations):
        def gated(self, x: Any, weight: Any, bias: Any = None, activation: Any = SILU) -> torch.Tensor:
            output = super().gated(x, weight, bias, activation)
            output[-1, -1] += 0.01 * output.abs().max()
            return output

    model = with_random_biases(tiny(model_type, head_dim=16, kernels=False))
    assert model.fused is not None
    self_test(replace(model.fused, operations=FusedOperations(model.device)), model.device)
    with pytest.raises(WorkerError, match="gate kernel is wrong for 1 tokens, hidden size 64, float32"):
        self_test(replace(model.fused, operations=Wrong(model.device)), model.device)


# ------------------------------------------------------------------------------------------------------------- kernels

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
INTERPRETED = {torch.float32: 2e-6, torch.float16: 2e-3}  # Triton's interpreter has no products of bfloat16


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm()) <= tolerance


def check_operations(ops: LayerOperations, device: Device, dtype: torch.dtype, tolerance: float) -> None:
    """Every operation but the products, on odd sizes."""
    torch.manual_seed(0)
    plain = PlainOperations()

    def random(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device.torch_device).to(like)

    hidden, rows = 72, 5
    weight = random(hidden)
    tokens = torch.tensor([3, 0, 10, 3, 9], device=device.torch_device)
    table = random(11, hidden)
    for got, want in zip(ops.embed(tokens, table, weight, 1e-6), plain.embed(tokens, table, weight, 1e-6), strict=True):
        assert near(got, want, tolerance)
    for parts, kind in ((1, dtype), (3, torch.float32)):
        addend, left = random(parts, rows, hidden, like=kind), random(rows, hidden)
        right = left.clone()
        got, want = ops.add_norm(addend, left, weight, 1e-6), plain.add_norm(addend, right, weight, 1e-6)
        assert near(got, want, tolerance) and near(left, right, tolerance)
    left = random(rows, (4 + 2 * 2) * 24)
    right = left.clone()
    query_weight, key_weight = random(24), random(24)
    ops.head_norm(left, query_weight, key_weight, 4, 2, 1e-6)
    plain.head_norm(right, query_weight, key_weight, 4, 2, 1e-6)
    assert near(left, right, tolerance) and torch.equal(left[:, -48:], right[:, -48:])
    positions = torch.tensor([0, 1, 77, 4096, 100_000], device=device.torch_device)
    frequencies = 1 / 10000 ** (torch.arange(0, 24, 2, device=device.torch_device) / 24)
    for got, want in zip(
        ops.rotary(positions, frequencies, 1.1, dtype), plain.rotary(positions, frequencies, 1.1, dtype), strict=True
    ):
        assert near(got, want, 10 * tolerance)  # two ways to reduce 100,000 radians
    for tokens in (rows, 100):
        x, weight = random(tokens, 256) / 16, random(130, 256)
        wide = torch.full((tokens, 130), float("nan"), device=device.torch_device)
        assert ops.linear(x, weight, None, wide) is not None
        assert near(wide, plain.linear(x.float(), weight.float()), tolerance)
    for n, k in ((1100, hidden), (128, 256)):
        x, gate_up = random(rows, k) / k**0.5, random(2 * n, k)
        for bias in (None, random(2 * n)):
            assert near(ops.gated(x, gate_up, bias), plain.gated(x, gate_up, bias), 2 * tolerance)


@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), INTERPRETED.items(), ids=str)
def test_operations(dtype: torch.dtype, tolerance: float, cpu: Device) -> None:
    check_operations(FusedOperations(cpu), cpu, dtype, tolerance)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
def test_operations_on_a_gpu(dtype: torch.dtype, tolerance: float, overlap: bool) -> None:
    device = open_device()
    ops = FusedOperations(device)
    check_operations(FusedOperations(device, overlap and ops.overlap), device, dtype, tolerance)


PRODUCTS = [  # tokens, n, k, tiles
    (1, 128, 256, LinearTiles(64, 64, 16, 1, 4, 2)),
    (3, 96, 200, LinearTiles(64, 64, 16, 2, 4, 2)),
    (17, 130, 384, LinearTiles(64, 64, 16, 3, 4, 2)),
    (33, 128, 512, LinearTiles(64, 128, 64, 2, 4, 2)),
    (3, 96, 200, LinearTiles(64, 64, 16, 2, 4, 2, described=True)),
    (50, 192, 512, LinearTiles(64, 128, 64, 2, 4, 3, prefetch=2, described=True)),
]


def check_product(
    device: Device, dtype: torch.dtype, tolerance: float, case: tuple[int, int, int, LinearTiles], overlap: bool = False
) -> None:
    tokens, n, k, tiles = case
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, device=device.torch_device).to(dtype) for shape in ((tokens, k + 8), (2 * n, k), (2 * n,))
    )
    x = x[:, :k] / k**0.5  # tokens may be non-contiguous
    wide = x.double(), weight.double(), bias.double()
    want = torch.nn.functional.linear(wide[0], wide[1][:n], wide[2][:n])
    launch = LaunchSettings(current_target(device), overlap)
    parts = linear_parts(launch, x, weight[:n], bias[:n], tiles, torch.float32)
    assert len(parts) == split_depth(k, tiles)[0]
    assert near(sum_parts(parts, torch.float32), want, tolerance)
    assert torch.equal(parts, linear_parts(launch, x, weight[:n], bias[:n], tiles, torch.float32))
    gated = linear_parts(launch, x, weight, bias, replace(tiles, parts=1), dtype, gated=True)
    assert near(gated[0], PlainOperations().gated(*wide), 2 * tolerance)


@interpreted
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), INTERPRETED.items(), ids=str)
def test_products(dtype: torch.dtype, tolerance: float, case: tuple[int, int, int, LinearTiles], cpu: Device) -> None:
    check_product(cpu, dtype, tolerance, case)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
def test_products_on_a_gpu(dtype: torch.dtype, tolerance: float, case: tuple[int, int, int, LinearTiles]) -> None:
    device = open_device()
    for overlap in {False, FusedOperations(device).overlap}:
        check_product(device, dtype, tolerance, case, overlap)


@interpreted
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_that_a_program_adds_have_the_bits_of_parts_that_are_added(parts: int, biased: bool, cpu: Device) -> None:
    torch.manual_seed(parts)
    x, weight = torch.randn((21, 768)).half(), torch.randn((48, 768)).half()
    bias = torch.randn(48).half() if biased else None
    launch = LaunchSettings(current_target(cpu))
    few = linear_parts(launch, x, weight, bias, LinearTiles(16, 64, 16, parts, 2, 3), torch.float32)
    many = linear_parts(launch, x, weight, bias, LinearTiles(16, 64, 64, 1, 2, 4, inside=parts), torch.float32)
    assert few.shape == (parts, 21, 48) and many.shape == (1, 21, 48)
    assert torch.equal(reduce(torch.add, few), many[0])
    assert not torch.equal(many, linear_parts(launch, x, weight, bias, LinearTiles(16, 64, 16, 1, 2, 4), torch.float32))


@interpreted
def test_nothing_beyond_the_inputs_is_read(cpu: Device) -> None:
    """NaN after the last token and after the last weight."""
    x, weight = torch.full((5, 96), float("nan")), torch.full((80, 96), float("nan"))
    x[:3], weight[:72] = 1.0, 1.0
    for described in (False, True):
        tiles = LinearTiles(64, 64, 16, 2, 4, 2, described=described)
        parts = linear_parts(LaunchSettings(current_target(cpu)), x[:3], weight[:72], None, tiles, torch.float32)
        assert torch.equal(parts.sum(0), torch.full((3, 72), 96.0))


# ------------------------------------------------------------------------------------------------------- known shapes


def test_known_shapes_are_whole() -> None:
    assert {"llama-3.1-8b", "llama-3.2-1b", "qwen3-8b"} <= set(known_configs())
    sizes = {}
    for name in known_configs():
        source = find_source(name, "dummy")
        config = read_config(source)
        written = json.loads((MODEL_CONFIGS / f"{name}.json").read_text())
        assert source.name == name
        assert all(getattr(config, field) == value for field, value in written.items() if field != "dtype")
        sizes[name] = (config.num_hidden_layers, config.hidden_size)
    assert sizes["llama-3.1-8b"] == (32, 4096)


def test_a_known_shape_is_a_name_for_dummy_weights_only(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        find_source("llama-3.1-8b", "auto")
    with pytest.raises(ModelNotFound, match=r"llama-3\.1-8b"):
        find_source(tmp_path / "llama-3.2-8b", "dummy")
