"""Quantised formats of folders that transformers dequantises at load; `published` has those kept as stored.

transformers converts `fp8` (DeepSeek, Qwen: scales per block; Mistral: per tensor) and `mxfp4` (gpt-oss) to plain
weights of the model's dtype. Every stored tensor is compared with its scales first, because transformers derives the
block size from the grid of scales and treats a tensor without scales as plain numbers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvforge.models.config_checks import DEQUANTISED
from kvforge.models.safetensors_header import StoredTensor
from kvforge.protocol.errors import UnsupportedModel

EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2"})
SCALES = ("_scale_inv", "_scale")  # suffixes of a weight's name; `X.scale` means `X.weight_scale_inv`
MODELOPT_FILE = "hf_quant_config.json"  # beside a config.json without a quantization_config, until 2025
log = logging.getLogger("worker")


def dequantise(config: Any, model: str) -> str:
    """Configure transformers to dequantise at load. Return the method; "" for plain weights."""
    wanted = _declared(config)
    if wanted is None:
        return ""
    method, values = _read(wanted)
    if method not in DEQUANTISED:
        return ""
    forget_format(config)
    config.quantization_config = {**values, "quant_method": method, "dequantize": True}
    log.info("%s: dequantising its %s weights at load", model, method)
    return method


def complete_dtype(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give dequantised weights the dtype of the model: some versions of transformers leave them in bfloat16.

    Weights that a model keeps in float32 stay so.
    """
    for parameter in module.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def declared_format(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a transformers configuration; None if it has none or names no method."""
    wanted = _declared(config)
    method, values = _read(wanted)
    return {**values, "quant_method": method} if method else None


def format_of_folder(folder: Path, config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a folder, or the content of ModelOpt's own file; None: it has neither.

    Args:
        folder: The folder.
        config: Its transformers configuration.

    Raises:
        UnsupportedModel: ModelOpt's file cannot be read.
    """
    found, file = declared_format(config), folder / MODELOPT_FILE
    if found is not None or not file.is_file():
        return found
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnsupportedModel(folder.name, f"its {MODELOPT_FILE} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UnsupportedModel(folder.name, f"its {MODELOPT_FILE} is not a JSON object")
    return {**values, "quant_method": "modelopt"}


def forget_format(config: Any) -> None:
    """Remove the `quantization_config`, so that transformers builds plain modules."""
    for owner in _owners(config):
        owner.quantization_config = None
        del owner.quantization_config


def check_scales(method: str, config: Any, stored: Mapping[str, StoredTensor], model: str) -> None:
    """Compare every quantised tensor with its scales.

    Args:
        method: As `dequantise` returned it.
        config: The transformers configuration.
        stored: The files' tensors, by name.
        model: The name for errors.

    Raises:
        UnsupportedModel: A tensor has no scales, or transformers would use other blocks.
    """
    if method == "mxfp4":
        _check_mxfp4(stored, model)
    if method == "fp8":
        _, values = _read(_declared(config))
        _check_fp8(values.get("weight_block_size"), stored, model)


def is_read(method: str, name: str, tensor: StoredTensor) -> bool:
    """Return whether a stored tensor of an unusual type belongs to the format that `check_scales` has checked."""
    if method == "mxfp4":
        return tensor.type_name == "U8" and name.endswith(("_blocks", "_scales"))
    return method == "fp8" and (tensor.type_name in EIGHT_BITS or (tensor.type_name == "F8_E8M0" and "scale" in name))


def _check_fp8(blocks: Any, stored: Mapping[str, StoredTensor], model: str) -> None:
    if blocks is not None and not (
        isinstance(blocks, list | tuple) and len(blocks) == 2 and all(type(b) is int and b > 0 for b in blocks)
    ):
        raise UnsupportedModel(model, f"its quantization_config.weight_block_size is {blocks!r}: expected two numbers")
    for name, tensor in stored.items():
        if tensor.type_name not in EIGHT_BITS:
            continue
        scales = _scales_of(name, stored)
        if scales is None:
            raise UnsupportedModel(model, f"its tensor {name} is stored as {tensor.type_name} without scales")
        if scales.type_name == "U8":
            raise UnsupportedModel(model, f"its tensor {scales.name} holds scales as U8, which kvforge does not read")
        _check_blocks(tensor, scales, blocks, model)


def _check_blocks(tensor: StoredTensor, scales: StoredTensor, blocks: Any, model: str) -> None:
    if len(tensor.shape) < 2:
        raise UnsupportedModel(model, f"its tensor {tensor.name} {list(tensor.shape)} is stored as {tensor.type_name}")
    grid = (1, 1, *scales.shape)[-2:]
    for size, count, block in zip(tensor.shape[-2:], grid, blocks or (None, None), strict=True):
        whole = count == 1 and (block is None or size <= block)
        if not whole and (block is None or count * block != size):
            of = f"blocks of {list(blocks)}" if blocks else "one scale"
            problem = f"{list(tensor.shape)} has scales {list(scales.shape)}, which are not those of {of}"
            raise UnsupportedModel(model, f"its tensor {tensor.name} {problem}: it cannot be dequantised")


def _scales_of(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    owner = name.removesuffix(".weight")
    for other in (*(f"{name}{ending}" for ending in SCALES), f"{owner}.scale", f"{owner}.qscale_weight"):
        if other in stored:
            return stored[other]
    return None


def _check_mxfp4(stored: Mapping[str, StoredTensor], model: str) -> None:
    for name, tensor in stored.items():
        if not name.endswith("_blocks"):
            continue
        scales = stored.get(re.sub("_blocks$", "_scales", name))
        if scales is None or scales.type_name != "U8" or tensor.shape[:-1] != scales.shape:
            found = "no scales" if scales is None else f"scales {scales.type_name} {list(scales.shape)}"
            problem = f"its tensor {name} {list(tensor.shape)} has {found}; mxfp4 has one U8 for each 16 bytes"
            raise UnsupportedModel(model, problem)


def _owners(config: Any) -> list[Any]:
    text = config.get_text_config(decoder=True)
    return [each for each in {id(config): config, id(text): text}.values() if hasattr(each, "quantization_config")]


def _declared(config: Any) -> Any:
    found = [each.quantization_config for each in _owners(config) if each.quantization_config is not None]
    return found[0] if found else None


def _read(wanted: Any) -> tuple[str, dict[str, Any]]:
    if wanted is None:
        return "", {}
    values = wanted if isinstance(wanted, dict) else wanted.to_dict() if hasattr(wanted, "to_dict") else {"": wanted}
    method = values.get("quant_method")
    return str(getattr(method, "value", method) or ""), values
