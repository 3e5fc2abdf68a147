"""GGUF files of tiny models as llama.cpp's converter writes them, with its names, orders and offsets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# About the largest number of a type for a scale of 1.
TYPICAL = {"Q4_0": 8, "Q4_1": 8, "Q4_K": 500, "IQ4_NL": 127, "IQ4_XS": 4000, "Q8_0": 127, "Q5_0": 16, "Q5_1": 16} | {
    "Q5_K": 1000,
    "Q6_K": 4000,
}
Tensors = dict[str, np.ndarray]
Metadata = dict[str, Any]


def write_gguf(
    module: Any,
    path: Path,
    architecture: str = "llama",
    metadata: Metadata | None = None,
    change: Callable[[Tensors], object] = lambda _: None,
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    made_up: dict[str, str] | None = None,
) -> Path:
    """Write a file of a transformers model.

    metadata: keys to add ("rope.freq_base" gets the architecture in front; None: omit the key). change: may alter the
    tensors, by their names in the file. stored: type of the matrices; all other tensors are float32. made_up: name of
    the type of the tensors with the key in their names, which get random numbers.
    """
    config = module.config
    writer = gguf.GGUFWriter(path, architecture)
    values: Metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 1e-6)),
        "rope.freq_base": 10000.0,
        "vocab_size": config.vocab_size,
        **(metadata or {}),
    }
    for key, value in values.items():
        _add(writer, f"{architecture}.{key}", value)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    tensors = converted(module, architecture)
    change(tensors)
    for name, array in tensors.items():
        made = next((each for part, each in (made_up or {}).items() if part in name), None)
        if made is not None:
            octets = random_octets(made, array.shape, len(name))
            writer.add_tensor(name, octets, raw_dtype=gguf.GGMLQuantizationType[made])
            continue
        kind = stored if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_octets(name: str, shape: tuple[int, ...], seed: int, size: float = 1.0) -> np.ndarray:
    """Return random blocks of a quantised type: any byte is a valid level, but not every scale is finite or small."""
    block, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rng = np.random.default_rng(seed)
    octets = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, count), dtype=np.uint8)
    if name == "MXFP4":
        octets[..., 0] = rng.integers(118, 124, octets.shape[:-1])
        return octets.reshape(*shape[:-1], -1)
    first = 208 if name == "Q6_K" else 0
    floats = 2 if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    scales = rng.uniform(0.5, 1.0, (*octets.shape[:-1], floats)) * size / TYPICAL[name]
    if floats == 2:  # the other one: about the middle of the levels
        scales[..., 1] *= -8 if name == "Q4_1" else -16 if name == "Q5_1" else 8 if name == "Q4_K" else 16
    octets[..., first : first + 2 * floats] = scales.astype(np.float16).view(np.uint8)
    return octets.reshape(*shape[:-1], -1)


def converted(module: Any, architecture: str) -> Tensors:
    """Return the model's tensors as float32 under their names in a GGUF file."""
    config = module.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = bool(config.tie_word_embeddings)
    found: Tensors = {}
    for name, tensor in module.state_dict().items():
        array = tensor.float().numpy()
        if tied and name == "lm_head.weight":
            continue
        if name.endswith("experts.gate_up_proj"):  # [experts, 2 * size, hidden]: two tensors in a file
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = half
            continue
        if architecture == "llama" and "q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        elif architecture == "llama" and "k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        elif architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            array = array + 1
        elif name.endswith("shared_expert_gate.weight"):
            array = array[0]
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        found[stored if stored.endswith((".weight", ".bias")) else f"{stored}.weight"] = array
    return found


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a Llama model's q or k in the order of a GGUF file."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
