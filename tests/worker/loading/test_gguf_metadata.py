"""The metadata of a GGUF file determines the model, compared with transformers' models of the same weights and
settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.loading import build, find_source, read_config
from tests.pairs import every_pair
from tests.worker.conftest import TINY
from tests.worker.loading.gguf_files import Tensors, write_gguf

HALF = 8  # frequencies in a head of 16
TOKENS = torch.arange(3, 103)[None] % TINY["vocab_size"]
ROTARY = {"rope_theta": 10000.0}
WIDE = {"max_position_embeddings": 128}
WINDOWS = ["sliding_attention", "full_attention"]
NO_HEAD_SIZE = ("qwen2_moe", "stablelm")
Values = dict[str, Any]


def reference(model_type: str, **fields: Any) -> Any:
    """A transformers model with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **(TINY | ({} if model_type in NO_HEAD_SIZE else {"head_dim": 16}) | fields)
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(module: Any) -> torch.Tensor:
    found: torch.Tensor = module(input_ids=TOKENS, use_cache=False).logits[0]
    return found


def fill(path: Path, device: Device) -> Any:
    source = find_source(path, "auto")
    return build(source, read_config(source), torch.float32, device, lambda _phase, _done: None, 0)


def assert_same(path: Path, wanted: Any, other: Any, device: Device) -> None:
    """Compare with the expected model and check that others differ, or the comparison would prove nothing."""
    got, right, wrong = logits(fill(path, device)), logits(wanted), logits(other)
    scale = float(right.abs().max())
    assert float((got - right).abs().max()) <= 1e-4 * scale
    assert float((got - wrong).abs().max()) >= 1e-2 * scale


def llama3_divisors(factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Return the divisors as llama.cpp's converter writes them (conversion of Llama 3)."""
    divisors = []
    for index in range(HALF):
        length = 2 * math.pi * 10000.0 ** (index / HALF)
        smooth = (original / length - low) / (high - low)
        middle = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if length < original / high else factor if length > original / low else middle)
    return np.array(divisors, np.float32)


LINEAR = {"rope_type": "linear", "factor": 4.0, **ROTARY}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **ROTARY}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.finetuned": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    **ROTARY,
}
FREQS = {"rope_freqs.weight": llama3_divisors(8.0, 1.0, 4.0, 32)}
# transformers' settings, the file's metadata, and additional tensors.
SCALINGS: dict[str, tuple[Values, Values, Tensors]] = {
    "linear": (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    "linear as it was": (LINEAR, {"rope.scale_linear": 4.0}, {}),
    "yarn": (YARN, YARN_KEYS, {}),
    "yarn from the context": (
        YARN | {"original_max_position_embeddings": 128},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {},
    ),
    "yarn with all it has": (
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3 * (1 + 0.1 * math.log(4))},
        YARN_KEYS
        | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 1.3},
        {},
    ),
    "llama3": (LLAMA3, {}, FREQS),
    "base": ({"rope_type": "default", "rope_theta": 500.0}, {"rope.freq_base": 500.0}, {}),
}


@pytest.mark.parametrize(("architecture", "scaling"), every_pair(["llama", "qwen2"], SCALINGS))
def test_rotary_scaling(architecture: str, scaling: str, tmp_path: Path, cpu: Device) -> None:
    rope, metadata, tensors = SCALINGS[scaling]
    wanted = reference(architecture, rope_scaling=dict(rope))
    path = write_gguf(wanted, tmp_path / "tiny.gguf", architecture, metadata, lambda found: found.update(tensors))
    assert_same(path, wanted, reference(architecture), cpu)


def test_longrope(tmp_path: Path, cpu: Device) -> None:
    """Up to the training length; beyond it every frequency changes, so that length is the context."""
    short, long = np.linspace(1, 3, HALF, dtype=np.float32), np.linspace(2, 9, HALF, dtype=np.float32)
    rope = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(), "factor": 4.0}
    fields = {"original_max_position_embeddings": 104, "rope_scaling": rope | ROTARY | {"attention_factor": 1.2}}
    wanted = reference("phi3", **fields)
    metadata = {
        "rope.scaling.original_context_length": 104,
        "rope.scaling.attn_factor": 1.2,
        "rope.dimension_count": 16,
    }
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    path = write_gguf(wanted, tmp_path / "tiny.gguf", "phi3", metadata, lambda found: found.update(tensors))
    assert_same(path, wanted, reference("phi3", **fields | {"rope_scaling": None}), cpu)


def test_part_of_a_head_is_rotated(tmp_path: Path, cpu: Device) -> None:
    wanted = reference("phi3", partial_rotary_factor=0.5)
    path = write_gguf(wanted, tmp_path / "tiny.gguf", "phi3", {"rope.dimension_count": 8})
    assert_same(path, wanted, reference("phi3"), cpu)


def test_only_the_full_layers_of_gemma_3_are_scaled(tmp_path: Path, cpu: Device) -> None:
    fields = {"num_hidden_layers": 6, "sliding_window": 512, "query_pre_attn_scalar": 256}
    local = {"rope_type": "default", **ROTARY}
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
    wanted = reference("gemma3_text", rope_parameters={"sliding_attention": local, "full_attention": scaled}, **fields)
    plain = {"rope_type": "default", "rope_theta": 500.0}
    other = reference("gemma3_text", rope_parameters={"sliding_attention": local, "full_attention": plain}, **fields)
    keys = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 512}
    keys |= {"attention.sliding_window_pattern": 6}
    rope = {"rope.freq_base": 500.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert_same(write_gguf(wanted, tmp_path / "tiny.gguf", "gemma3", keys | rope), wanted, other, cpu)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_queries_by_their_width(
    architecture: str, layers: int, tmp_path: Path, cpu: Device
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": layers, "num_key_value_heads": 1}
    tiny = reference("gemma2" if architecture == "gemma2" else "gemma3_text", **small)
    path = write_gguf(tiny, tmp_path / "tiny.gguf", architecture, {"attention.key_length": 16})
    assert read_config(find_source(path, "auto")).query_pre_attn_scalar == 32 // 4


def test_a_window_that_transformers_passes_over(tmp_path: Path, cpu: Device) -> None:
    wanted = reference("phi3", sliding_window=9)
    path = write_gguf(wanted, tmp_path / "tiny.gguf", "phi3", {"attention.sliding_window": 9})
    assert_same(path, wanted, reference("phi3"), cpu)


def test_starcoder2_has_the_base_of_its_file(tmp_path: Path, cpu: Device) -> None:
    wanted = reference("starcoder2", rope_theta=500.0, norm_epsilon=1e-3, tie_word_embeddings=False)
    keys = {"rope.freq_base": 500.0, "attention.layer_norm_epsilon": 1e-3, "attention.layer_norm_rms_epsilon": None}
    path = write_gguf(wanted, tmp_path / "tiny.gguf", "starcoder2", keys)
    assert_same(path, wanted, reference("starcoder2", norm_epsilon=1e-3, tie_word_embeddings=False), cpu)


HEAD_OF_32 = {"attention.key_length": 32, "attention.value_length": 32}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
SOFT = {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0, "attention.sliding_window": 9}
LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-3}
FORMS: dict[str, tuple[str, str, Values, Values]] = {
    "llama": ("llama", "llama", {"head_dim": 32}, {**HEAD_OF_32, "rope.dimension_count": 32}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, HEAD_OF_32),
    "qwen2 MoE": (
        "qwen2_moe",
        "qwen2moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
        },
        {**EXPERTS, "expert_shared_feed_forward_length": 40},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 32, "sliding_window": 9, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
        {**HEAD_OF_32, **SOFT},
    ),
    "nemotron": (
        "nemotron",
        "nemotron",
        {"norm_eps": 1e-3, "partial_rotary_factor": 0.25},
        {**LAYER_NORM, "rope.dimension_count": 4, "rope.scaling.type": "none"},
    ),
    "stablelm": (
        "stablelm",
        "stablelm",
        {"layer_norm_eps": 1e-3, "partial_rotary_factor": 0.75, "use_qkv_bias": True},
        {**LAYER_NORM, "rope.dimension_count": 12, "use_parallel_residual": False},
    ),
}


@pytest.mark.parametrize(("model_type", "architecture", "fields", "metadata"), FORMS.values(), ids=FORMS)
def test_forms_that_are_not_the_usual_ones(
    model_type: str, architecture: str, fields: Values, metadata: Values, tmp_path: Path, cpu: Device
) -> None:
    """All of these numbers differ from the defaults of their class."""
    wanted = reference(model_type, **fields)
    path = write_gguf(wanted, tmp_path / "tiny.gguf", architecture, metadata)
    got, right = logits(fill(path, cpu)), logits(wanted)
    assert float((got - right).abs().max()) <= 1e-4 * float(right.abs().max())


def test_a_file_without_key_value_heads_and_rotation(tmp_path: Path) -> None:
    """GPT-2 as published."""
    writer = gguf.GGUFWriter(tmp_path / "gpt2.gguf", "gpt2")
    for key, value in (("context_length", 128), ("embedding_length", 64), ("feed_forward_length", 200)):
        writer.add_uint32(f"gpt2.{key}", value)
    for key, value in (("block_count", 2), ("attention.head_count", 4)):
        writer.add_uint32(f"gpt2.{key}", value)
    writer.add_layer_norm_eps(1e-3)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = read_config(find_source(tmp_path, "auto"))
    assert (config.n_positions, config.n_inner, config.layer_norm_epsilon) == (128, 200, pytest.approx(1e-3))


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({"rope.scaling.type": "su", "rope.scaling.factor": 4.0}, {}, "type 'su'"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, {}, "type 'longrope'"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {}, None),
        ({"rope.scaling.alpha": 1000.0}, {}, "llama.rope.scaling.alpha = 1000.0 cannot be applied"),
        ({"rope.dimension_sections": [2, 3, 3]}, {}, "llama.rope.dimension_sections"),
        (YARN_KEYS | {"rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor = 0.5 cannot be applied"),
        (YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier"),
        (YARN_KEYS, FREQS, "rope_freqs.weight with rope.scaling.type 'yarn' cannot be applied"),
        ({"rope.scaling.attn_factor": 1.2}, {}, "attn_factor = 1.2 without a scaling"),
        ({}, {"rope_freqs.weight": np.ones(7, np.float32)}, "rope_freqs.weight is not 8 positive numbers"),
        ({}, {"rope_freqs.weight": np.zeros(8, np.float32)}, "rope_freqs.weight is not 8 positive numbers"),
        ({}, {"rope_factors_long.weight": np.ones(8, np.float32)}, "rope_factors_long.weight with rope.scaling"),
        ({"rope.dimension_count": 8, "attention.key_length": 16}, {}, "8 dimensions, factor 1) cannot be applied"),
        ({"attention.scale": 0.5}, {}, "llama.attention.scale = 0.5 cannot be applied"),
        ({"attention.max_alibi_bias": 8.0}, {}, "it uses ALiBi (llama.attention.max_alibi_bias = 8)"),
        ({"attention.causal": False}, {}, "llama.attention.causal = False cannot be applied"),
        ({"attention.sliding_window": 9}, {}, "llama.attention.sliding_window = 9 cannot be applied"),
        ({"attention.head_count_kv": [2, 1]}, {}, "num_key_value_heads"),
        ({"attention.sliding_window_pattern": 6}, {}, "llama.attention.sliding_window_pattern = 6 cannot be applied"),
        ({"residual_scale": 0.5}, {}, "llama.residual_scale = 0.5 cannot be applied"),
        ({"something.new": "x"}, {}, "llama.something.new = 'x' cannot be applied"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(
    metadata: Values, tensors: Tensors, words: str | None, tmp_path: Path, cpu: Device
) -> None:
    path = write_gguf(reference("llama"), tmp_path / "tiny.gguf", "llama", metadata, lambda f: f.update(tensors))
    if words is None:  # a factor without a base is omitted
        fill(path, cpu)
        return
    with pytest.raises(UnsupportedModel) as caught:
        fill(path, cpu)
    assert words in str(caught.value)
    assert "model tiny cannot be served" in str(caught.value)


HOSTILE = ("x", 0, 2**32 - 1, -1.0, float("nan"), float("inf"), [1, 2], ["a", "b"], True)
KEYS = (
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "expert_count",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("key", KEYS)
def test_hostile_values_end_in_a_typed_error(key: str, tmp_path: Path, cpu: Device) -> None:
    """Any value of any type is refused, or gives a configuration equal to the file."""
    module = reference("llama")
    refused = 0
    for value in HOSTILE:
        rope = {} if not key.startswith("rope.scaling") else {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
        path = write_gguf(module, tmp_path / "tiny.gguf", "llama", rope | {key: value})
        try:
            read_config(find_source(path, "auto"))
        except UnsupportedModel:
            refused += 1
    assert refused >= 2


def test_what_says_nothing_is_passed_over(tmp_path: Path, cpu: Device) -> None:
    keys = {
        "attention.causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "pooling_type": 0,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 4096,
        "rope.dimension_count": 16,
        "rope.scaling.type": "none",
        "rope.scaling.finetuned": False,
        "tensor_data_layout": "Meta AI original pth",
    }
    wanted = reference("llama")
    path = write_gguf(wanted, tmp_path / "tiny.gguf", "llama", keys)
    assert torch.allclose(logits(fill(path, cpu)), logits(wanted), atol=1e-5)
