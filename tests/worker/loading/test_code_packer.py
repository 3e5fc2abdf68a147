"""Weights that are quantised at load for a GPU's kernels. Without a GPU, Triton's interpreter runs the kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels import experts_selftest, selftest, stored_selftest
from kvforge.worker.kernels.packed import dense
from kvforge.worker.kernels.stored import code_name
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.serving_kernels import serving_kernels

pytestmark = pytest.mark.usefixtures("quick_loads")

DEVICE = open_device("auto")
runs_kernels = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
SHAPE |= {"head_dim": 64, "num_hidden_layers": 1, "vocab_size": 130}
EXPERTS = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}

Load = Callable[..., LoadedModel]


@pytest.fixture
def load(write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a model of random weights with kernels for its layers, also where they are interpreted."""

    def run(weight_dtype: str, model_type: str = "llama", dtype: str = "float16", **shape: int) -> LoadedModel:
        if not DEVICE.runs_kernels:
            monkeypatch.setattr(Device, "runs_kernels", property(lambda device: device.kernels))
            for module in (selftest, experts_selftest, stored_selftest):
                monkeypatch.setattr(module, "TOKENS", (1, 9))
        folder = write_config(model_type, **(shape or SHAPE))
        return load_model(
            folder,
            load_format="dummy",
            dtype=dtype,
            weight_dtype=weight_dtype,
            device=DEVICE,
            block_size=4,
            attention="reference",
        )

    return run


@runs_kernels
@pytest.mark.parametrize(
    ("weight_dtype", "kinds"),
    [("fp8", {"fp8": 5}), ("int8", {"int8": 5}), ("int4", {"int4": 4, "int8": 1})],
)
def test_every_product_is_quantised(weight_dtype: str, kinds: dict[str, int], load: Load) -> None:
    """`load_model` compares the logits with those of transformers' layers over the dequantised numbers."""
    plain, got = load("dtype"), load(weight_dtype)
    assert got.fused is not None and plain.fused is not None
    assert Counter(map(code_name, got.fused.product_weights())) == kinds
    assert got.info.weight_dtype == weight_dtype and plain.info.weight_dtype == "float16"
    assert got.info.fingerprint != plain.info.fingerprint
    what = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    assert serving_kernels(got)["layers"] == f"Triton; weights multiplied as they are stored: {what}"
    for ours, exact in zip(got.fused.product_weights(), plain.fused.product_weights(), strict=True):
        apart = (dense(ours) - exact.float()).abs().max() / exact.float().abs().max()
        assert float(apart) < (0.08 if weight_dtype == "int4" else 0.04)
    state = got.module.state_dict()
    assert all(torch.isfinite(each).all() for each in state.values()) and len(state) == len(plain.module.state_dict())


@runs_kernels
@pytest.mark.parametrize("weight_dtype", [pytest.param("fp8", marks=pytest.mark.soak), "int4"])
def test_experts_are_quantised(weight_dtype: str, load: Load) -> None:
    got = load(weight_dtype, "qwen3_moe", **EXPERTS)
    assert got.fused is not None
    assert Counter(map(code_name, got.fused.product_weights()))[weight_dtype] >= 4  # the head has 8 bits
    assert all(map(code_name, got.fused.product_weights()))


@runs_kernels
def test_a_weight_of_another_shape_keeps_its_numbers(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    got = load("int4", **SHAPE | {"intermediate_size": 72})
    assert got.fused is not None
    assert Counter(map(code_name, got.fused.product_weights())) == {"int4": 3, "int8": 1, "": 1}
    assert "a weight of [64, 72] stays in torch.float16: its 72 columns are not a multiple of 64" in caplog.text


@runs_kernels
def test_float32_is_refused(load: Load) -> None:
    with pytest.raises(InvalidConfiguration, match="products with float32 are not quantised on a GPU: use dtype"):
        load("fp8", dtype="float32")


def test_fp8_is_refused_on_a_cpu(write_config: Callable[..., Path], cpu: Device) -> None:
    with pytest.raises(InvalidConfiguration, match="fp8 weights are multiplied by kernels of a GPU; use 'dtype'"):
        load_model(write_config("llama"), load_format="dummy", weight_dtype="fp8", device=cpu, block_size=4)
