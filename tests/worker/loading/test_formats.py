"""Quantised folders: transformers dequantises fp8 and mxfp4, and formats that are not read are refused by name.

`test_published` has the formats that kvforge reads itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.loading.formats import complete_dtype
from kvforge.worker.loading.load import load_model
from tests.worker.conftest import TINY

Weights = dict[str, torch.Tensor]


def folder(
    path: Path, kind: str, quantisation: dict[str, Any], change: Callable[[Weights], Weights], **more: Any
) -> Any:
    """Write a model with weights packed by `change`; return the unpacked model."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY, **more})).float()
    made.save_pretrained(path)
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return made


def in_blocks(weights: Weights, size: int) -> Weights:
    """Every projection in fp8 with a scale for each block."""
    packed: Weights = {}
    for name, tensor in weights.items():
        packed[name] = tensor
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            tiles = tensor.reshape(rows // size, size, columns // size, size)
            scales = tiles.abs().amax((1, 3)) / 448
            wide = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
            packed[name], packed[f"{name}_scale_inv"] = (tensor / wide).to(torch.float8_e4m3fn), scales
    return packed


def per_tensor(weights: Weights) -> Weights:
    packed: Weights = {}
    for name, tensor in weights.items():
        packed[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            packed[name], packed[f"{name}_scale_inv"] = (tensor / scale).to(torch.float8_e4m3fn), scale
    return packed


BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
ONE_SCALE = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["blocks", "tensors"])
def test_fp8_is_dequantised(kind: str, tmp_path: Path, cpu: Device) -> None:
    fields = {"hidden_size": 64, "head_dim": 16}
    if kind == "blocks":
        made = folder(tmp_path, "qwen3", BLOCKS, lambda weights: in_blocks(weights, 32), **fields)
    else:
        made = folder(tmp_path, "qwen3", ONE_SCALE, per_tensor, **fields)
    model = load_model(tmp_path, dtype="float32", device=cpu, block_size=4)
    assert model.info.architecture == "Qwen3ForCausalLM"
    got = dict(model.module.named_parameters())
    for name, wanted in made.named_parameters():
        if name in got and got[name].shape == wanted.shape:
            assert float((got[name] - wanted).abs().max()) <= 0.07 * float(wanted.abs().max()), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda w: {k: v for k, v in w.items() if "1.mlp.up_proj.weight_scale" not in k}, "without scales"),
        (lambda w: {k: v[:1] if "1.mlp.up_proj.weight_scale" in k else v for k, v in w.items()}, "not those of blocks"),
        (
            lambda w: {k: v.to(torch.int8) if "1.mlp.up_proj.weight" in k else v for k, v in w.items()},
            r"1\.mlp\.up_proj\.weight",
        ),
    ],
)
def test_scales_are_those_of_the_blocks(
    change: Callable[[Weights], Weights], word: str, tmp_path: Path, cpu: Device
) -> None:
    """transformers derives the block size from the grid of scales: 96 rows in 2 blocks instead of 3 of 32."""
    folder(tmp_path, "qwen3", BLOCKS, lambda weights: change(in_blocks(weights, 32)), head_dim=16)
    with pytest.raises(UnsupportedModel, match=word):
        load_model(tmp_path, dtype="float32", device=cpu, block_size=4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "awq", "bits": 3, "group_size": 128},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"load_in_8bit": True},
        {"quant_method": "squeezed"},
        {"bits": 4},
        "awq",
        ["awq"],
    ],
)
def test_other_formats_are_refused_by_name_before_weights(quantisation: Any, tmp_path: Path, cpu: Device) -> None:
    def broken(weights: Weights) -> Weights:
        return {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}

    folder(tmp_path, "llama", quantisation, broken)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(tmp_path, dtype="float32", device=cpu, block_size=4)
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else "awq"
    words = str(caught.value).lower()
    assert (method or "quantis").lower().replace("_", " ") in words or "quantization_config has " in words
    assert "NaN" not in str(caught.value)


def test_dequantised_weights_get_the_dtype_of_the_model() -> None:
    """transformers 5.17 leaves experts in mxfp4 in bfloat16, also where float32 is asked for."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model[0].weight.data = torch.tensor([[1.5, -6.0], [0.5, 3.0]], dtype=torch.bfloat16)
    model[1].weight = model[0].weight
    complete_dtype(model, torch.float32)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert model[0].weight is model[1].weight and model[0].weight.tolist() == [[1.5, -6.0], [0.5, 3.0]]
    complete_dtype(model, torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.float32}, "weights that are kept in float32 stay so"
