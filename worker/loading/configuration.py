"""What a model's files say about it: its transformers configuration, and the dtype it is loaded in."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from kvforge.models.files import stored_tensors
from kvforge.protocol.errors import InvalidConfiguration, KvforgeError, ModelNotFound, UnsupportedModel
from worker.device.device import Device

from .gguf_config import apply_metadata
from .source import Source

MODEL_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What weights are stored as, and what they are loaded as; more than float32 holds is given up.
STORED_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(source: Source) -> Any:
    """The transformers configuration. Errors: UnsupportedModel, ModelNotFound (unreadable)."""
    try:
        if source.format == "dummy":
            values = json.loads(source.files[0].read_text(encoding="utf-8"))
            if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
                raise ModelNotFound(str(source.path), "its config.json names no model_type")
            if values["model_type"] not in transformers.CONFIG_MAPPING:
                raise UnsupportedModel(values["model_type"], "transformers does not know this model type")
            config = transformers.AutoConfig.for_model(**values)
        else:
            config = transformers.AutoConfig.from_pretrained(source.folder, **source.keywords)
    except KvforgeError:
        raise
    except (OSError, EOFError) as error:
        raise ModelNotFound(str(source.path), f"cannot be read: {sentence(error)}") from error
    except Exception as error:  # an unknown architecture or a wrong field: transformers has many errors for these
        raise UnsupportedModel(source.name, sentence(error)) from error
    _refuse_kinds(config)
    if source.format == "gguf":
        apply_metadata(source, config)
    else:
        _check_quantisation(source, config)
    return config


def model_dtype(name: str, config: Any, source: Source, device: Device) -> torch.dtype:
    """The dtype that `name` stands for. auto: the one the configuration names, else that of the stored weights.

    A GGUF file names none, and most of them are packed: on a GPU they become what it computes best in 16 bits (or the
    16 bits that they are stored in), on a CPU float32. bfloat16 of either kind of file stays bfloat16 on a CPU that has
    instructions for it, and becomes float32 on others, faster in that. Errors: InvalidConfiguration (`dtype`).
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
    """What `auto` stands for where the device computes in anything."""
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


def sentence(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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


def _check_quantisation(source: Source, config: Any) -> None:
    """A method that transformers does not know is passed over by it, and packed weights are then taken for plain ones.

    Errors: UnsupportedModel.
    """
    wanted = getattr(config, "quantization_config", None)
    if wanted is None:
        wanted = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if wanted is None:
        return
    values = wanted if isinstance(wanted, dict) else wanted.to_dict()
    method = values.get("quant_method")
    method = getattr(method, "value", method)
    if not method and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        return
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != "bitsandbytes":
        problem = f"its quantization_config has the quant_method {method!r}, which transformers does not know"
        raise UnsupportedModel(source.name, problem)
