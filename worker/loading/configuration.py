"""Reads a model's transformers configuration, and chooses the dtype of its weights."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers

from kvforge.models import files
from kvforge.models.config_checks import check_config
from kvforge.models.files import stored_tensors
from kvforge.protocol.errors import InvalidConfiguration, ModelNotFound, UnsupportedModel
from kvforge.worker.device.device import Device

from .answer_ends import check_folder
from .gguf_config import apply_metadata
from .library_errors import refusing, sentence
from .source import Source

MODEL_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Stored dtypes and the dtypes they are loaded in; precision beyond float32 is dropped.
STORED_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Model types of files that transformers does not know, with layers of one that it knows.
SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Plausible sizes of a decoder. Without these limits transformers would build as many modules as a file asks for.
SIZES = {
    "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "hidden_size": (1, 1 << 24),
    "intermediate_size": (0, 1 << 28),
    "vocab_size": (1, 1 << 28),
    "head_dim": (1, 1 << 16),
    "max_position_embeddings": (1, 1 << 40),
    **dict.fromkeys(("n_layer", "n_head"), (1, 4096)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 1 << 14)),
}


def read_config(source: Source) -> Any:
    """Read the transformers configuration of a model.

    Raises:
        UnsupportedModel: The model cannot be served.
        ModelNotFound: The files cannot be read.
    """
    with refusing(source.name, "transformers cannot read its configuration"):
        if source.format == "safetensors":
            check_config(files.read_config(source.path), source.name)
            check_folder(source)
        config = _read(source)
        _check_sizes(config, source.name)
        _refuse_kinds(config)
        if source.format == "gguf":
            apply_metadata(source, config)
    return config


def _read(source: Source) -> Any:
    try:
        if source.format == "dummy":
            values = json.loads(source.files[0].read_text(encoding="utf-8"))
            if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
                raise ModelNotFound(str(source.path), "its config.json names no model_type")
            values["model_type"] = SAME_AS.get(values["model_type"], values["model_type"])
            if values["model_type"] not in transformers.CONFIG_MAPPING:
                raise UnsupportedModel(values["model_type"], "transformers does not know this model type")
            return transformers.AutoConfig.for_model(**values)
        stated = files.read_config(source.path).get("model_type") if source.format == "safetensors" else None
        if isinstance(stated, str) and stated in SAME_AS:
            kind = transformers.CONFIG_MAPPING[SAME_AS[stated]]
            return kind.from_dict(files.read_config(source.path) | {"model_type": SAME_AS[stated]})
        return transformers.AutoConfig.from_pretrained(source.folder, **source.keywords)
    except (FileNotFoundError, PermissionError) as error:
        raise ModelNotFound(str(source.path), f"cannot be read: {sentence(error)}") from error


def model_dtype(name: str, config: Any, source: Source, device: Device) -> torch.dtype:
    """Resolve the `dtype` setting.

    `auto` is the dtype in the configuration, else that of the stored weights. GGUF files name no dtype, and most are
    packed: on a GPU they become the device's best 16-bit dtype (or the stored one), on a CPU float32. Stored bfloat16
    stays bfloat16 on CPUs with instructions for it. On other CPUs it becomes float32, which is faster there.

    Args:
        name: auto, or a name in MODEL_DTYPES.
        config: The transformers configuration.
        source: The model's files.
        device: The device that computes.

    Returns:
        The dtype.

    Raises:
        InvalidConfiguration: The name is unknown (`dtype`).
    """
    if name != "auto":
        if name not in MODEL_DTYPES:
            raise InvalidConfiguration("dtype", f"{name!r} is not one of auto, {', '.join(MODEL_DTYPES)}")
        return MODEL_DTYPES[name]
    found = _stored_dtype(config, source, device)
    if found == torch.bfloat16 and not device.owns_memory and not device.multiplies_bfloat16:
        return torch.float32
    return found


def _stored_dtype(config: Any, source: Source, device: Device) -> torch.dtype:
    """Resolve `auto` for a device that computes in any dtype."""
    if source.format == "gguf":
        kinds = {tensor.type_name for tensor in source.gguf_header.tensors}
        if not device.owns_memory:
            return torch.bfloat16 if "BF16" in kinds and kinds <= {"BF16", "F32"} else torch.float32
        is_half = "F16" in kinds and kinds <= {"F16", "F32"}
        return torch.float16 if is_half else device.half_dtype
    wanted = getattr(config, "dtype", None)
    if isinstance(wanted, torch.dtype) and wanted in MODEL_DTYPES.values():
        return wanted
    if source.format == "dummy":
        return torch.float32
    sizes: dict[str, int] = {}
    for tensor in stored_tensors(source.model_files).values():
        if tensor.type_name in STORED_DTYPES:
            sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size
    return MODEL_DTYPES[STORED_DTYPES[max(sizes, key=lambda kind: sizes[kind])]] if sizes else torch.float32


def _check_sizes(config: Any, model: str) -> None:
    """Check the sizes in a configuration. Lists with one value per layer are skipped.

    Raises:
        UnsupportedModel: A size is not a number or not plausible.
    """
    for each in (config, config.get_text_config(decoder=True)):
        for name, (least, most) in SIZES.items():
            value = vars(each).get(name)
            if value is None or isinstance(value, list | tuple):
                continue
            if type(value) is not int or not least <= value <= most:
                problem = f"its configuration has {name} = {repr(value)[:100]}: expected a whole number"
                raise UnsupportedModel(model, f"{problem} from {least} to {most}")


def _refuse_kinds(config: Any) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModel(config.model_type, "it is an encoder-decoder; only decoders can be served")
    text = config.get_text_config(decoder=True)
    if getattr(text, "add_cross_attention", False):
        raise UnsupportedModel(config.model_type, "it has cross-attention layers")
    attention = getattr(text, "attn_config", None)
    in_attention = attention.get("alibi") if isinstance(attention, dict) else getattr(attention, "alibi", False)
    if config.model_type == "bloom" or getattr(text, "alibi", False) or in_attention:
        problem = "it uses ALiBi (a bias that grows with the distance of two tokens), which kvforge's attention has not"
        raise UnsupportedModel(config.model_type, problem)
