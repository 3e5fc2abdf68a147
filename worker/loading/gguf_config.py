"""GGUF metadata about the model's form: each key is applied to the configuration or rejected.

transformers applies some keys, different ones for each architecture, and ignores the rest. Its defaults, the values of
one particular model, would stand in for them.
"""

from __future__ import annotations

import math
from typing import Any

from kvforge.protocol.errors import UnsupportedModel

from .gguf_rope import GgufRope
from .source import Source

# Key after the architecture's name -> its names in transformers' configurations.
FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "vocab_size": ("vocab_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "use_parallel_residual": ("use_parallel_residual",),
}
# Values for which a key has no effect.
NOTHING: dict[str, Any] = {
    "attention.causal": True,
    "pooling_type": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_gating_func": 1,  # softmax
    "expert_weights_scale": 1.0,
    "feed_forward_length": 0,
    "attention.sliding_window": 0,
    "nextn_predict_layers": 0,
    "attention.clamp_kqv": 0.0,
}
# Row order before conversion, as written by old converters.
IRRELEVANT = frozenset({"tensor_data_layout"})
# For other model types a window in the configuration has no effect on the layers.
WINDOWED = frozenset({"gemma2", "gemma3_text", "mistral", "phi3", "starcoder2"})
# transformers reads these architectures' files by another path, which ignores nothing.
READ_WHOLE = frozenset({"qwen35", "qwen35moe", "lfm2"})
# Gemma's largest models, recognised by their number of layers as in llama.cpp, scale queries by the nominal head size.
UNUSUAL_SCALING = {("gemma2", 46), ("gemma3", 62)}


def apply_metadata(source: Source, config: Any) -> None:
    """Apply a GGUF file's metadata to the configuration that transformers made.

    Raises:
        UnsupportedModel: Names the key that cannot be applied.
    """
    try:
        _apply_all(source, config)
    except UnsupportedModel:
        raise
    except Exception as error:  # a wrong type or a missing value: transformers' errors vary
        raise UnsupportedModel(source.name, f"its GGUF metadata cannot be applied: {error}") from error


def _apply_all(source: Source, config: Any) -> None:
    header = source.gguf_header
    architecture = header.metadata["general.architecture"]
    if architecture in READ_WHOLE:
        return
    keys = {
        key.removeprefix(f"{architecture}."): _single(value)
        for key, value in header.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    if heads := keys.get("attention.head_count"):  # llama.cpp's defaults for missing keys
        if hasattr(config, "num_key_value_heads"):
            keys.setdefault("attention.head_count_kv", heads)
        if getattr(config, "head_dim", None) and isinstance(heads, int):
            keys.setdefault("attention.key_length", config.hidden_size // heads)
    for key, value in keys.items():
        if not key.startswith("rope.") and key not in IRRELEVANT and not _same(value, NOTHING.get(key)):
            _apply(config, key, value, f"{architecture}.{key}", source.name)
    if (architecture, config.num_hidden_layers) in UNUSUAL_SCALING:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    if rope := _rope(source, config):
        rope.apply(config, _head_size(config))


def check_rotation(source: Source, module: Any) -> None:
    """Compare a model's rotary embedding with that of its GGUF file.

    Raises:
        UnsupportedModel: They differ.
    """
    if rope := _rope(source, module.config):
        rope.check(module, source.name)


def _rope(source: Source, config: Any) -> GgufRope | None:
    is_read = source.gguf_header.metadata["general.architecture"] in READ_WHOLE
    if is_read or not getattr(config, "rope_parameters", None):
        return None
    return GgufRope.read(source.gguf_header, source.path, source.name, _head_size(config))


def _apply(config: Any, key: str, value: Any, full: str, model: str) -> None:
    if key == "attention.sliding_window_pattern" and value == _window_pattern(config, value):
        return
    if key == "attention.max_alibi_bias":
        raise UnsupportedModel(model, f"it uses ALiBi ({full} = {value:g}), which kvforge's attention has not")
    names = [name for name in FIELDS.get(key, ()) if hasattr(config, name)]
    if not names and FIELDS.get(key) == ("head_dim",) and value == _head_size(config):
        return
    if key == "attention.sliding_window" and value >= config.max_position_embeddings:
        return
    if not names and key == "attention.head_count_kv" and value == config.num_attention_heads:
        return
    is_window_of_none = key == "attention.sliding_window" and config.model_type not in WINDOWED
    if not names or isinstance(value, (list, str)) or is_window_of_none:
        shown = f"{value!r}" if len(repr(value)) < 80 else f"{len(value)} values"
        raise UnsupportedModel(model, f"its {full} = {shown} cannot be applied")
    if not _same(getattr(config, names[0]), value):
        setattr(config, names[0], value)


def _window_pattern(config: Any, like: Any) -> Any:
    """Return which layers have a window: as flags, or as the distance between layers without one."""
    windows = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    if isinstance(like, list):
        return windows
    if not windows or type(like) is not int or like < 1:
        return None
    return like if windows == [bool((index + 1) % like) for index in range(len(windows))] else None


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _single(value: Any) -> Any:
    """Reduce a list of equal values, one per layer, to one value."""
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)  # files store float32
    return bool(one == other)
