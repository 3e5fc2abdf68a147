"""Random checkpoints of tiny models: every weight, norm and bias matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvforge.worker.loading.mixers import FIRST_VERSION
from tests.worker.conftest import TINY

LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
HEADS = {"head_dim": 16}
YARN_BY_POSITION = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.3,
    "attention_bias": True,
}
ATTENDING = {"layer_types": ["full_attention"] * 3, "shared_intermediate_size": 80}

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# Configurations of every described family, with each of its features on.
DESCRIBED: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),  # with xIELU
    "apertus with relu2": ("apertus", {"hidden_act": "relu2"}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {**HEADS, **LAYERS, "logit_scale": 0.25}),
    "ernie4_5": ("ernie4_5", {**HEADS, "use_bias": True}),
    "exaone4": ("exaone4", {**HEADS, **LAYERS}),
    "gemma": ("gemma", {**HEADS, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": (
        "gemma2",
        {
            **HEADS,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("gemma3_text", {**HEADS, **LAYERS, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}),
    "gemma4": (  # with inputs of each token, and K and V of another layer
        "gemma4_text",
        {
            **HEADS,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", *["full_attention"] * 3],
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 97,
            "num_kv_shared_layers": 1,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "glm": ("glm", {**HEADS, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4": ("glm4", {**HEADS, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "granite": ("granite", GRANITE),
    "granite_swa": ("granite_swa", {**GRANITE, **LAYERS, "layer_rope_theta": [1e3, 0, 1e4]}),  # and sinks
    "granitemoehybrid dense": (
        "granitemoehybrid",
        {**GRANITE, **ATTENDING, "position_embedding_type": "rope", "num_local_experts": 0},
    ),
    "hunyuan": ("hunyuan_v1_dense", HEADS),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with gelu": ("llama", {"hidden_act": "gelu"}),
    "minicpm3": (
        "minicpm3",
        {
            **LATENT,
            "v_head_dim": None,
            "scale_emb": 3,
            "scale_depth": 1.1,
            "dim_model_base": 16,
            "attention_bias": True,
        },
    ),
    "ministral": ("ministral", {**HEADS, **LAYERS}),
    "ministral3": ("ministral3", {**HEADS, "rope_parameters": YARN_BY_POSITION}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5}),
    "olmo": ("olmo", {"clip_qkv": 0.8}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", LAYERS),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", HEADS),
    "seed_oss": ("seed_oss", {**HEADS, "attention_bias": True, "attention_out_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
    "youtu": ("youtu", LATENT),
}

LINEAR_HEADS = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FEW_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
MULTIPLIERS = {
    "embedding_multiplier": 1.4,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.7, 1.2],
    "key_multiplier": 1.3,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.1,
    "ssm_multipliers": [0.8, 1.2, 0.7, 1.3, 0.9],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
}
FOUR = {"num_hidden_layers": 4}
THREE_LINEAR = {**FOUR, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
# Models with layers that keep a recurrent state beside layers that attend, and the tests of them.
NEEDS_CACHE = pytest.mark.skipif(
    not hasattr(transformers.Cache, "get_conv_state"), reason=f"transformers is older than {FIRST_VERSION}"
)
MAMBA_1 = {"state_size": 8, "time_step_rank": 8, "intermediate_size": 128}
# Models in which no layer attends.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_mamba": ("falcon_mamba", MAMBA_1),
    "mamba": ("mamba", MAMBA_1),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16}),
}
MINIMAX_FACTORS = {
    "full_attn_alpha_factor": 1.4,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 0.9,
    "mlp_beta_factor": 1.3,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    **RECURRENT,
    "bamba": ("bamba", {**MAMBA_2, "attn_layer_indices": [1], "num_hidden_layers": 3}),
    "falcon_h1": ("falcon_h1", {**MAMBA_2, **MULTIPLIERS, "mamba_d_ssm": 128}),  # both in every layer
    "granite": (
        "granitemoehybrid",
        {
            **MAMBA_2,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
    ),
    "jamba": (
        "jamba",
        {
            **FOUR,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            # Few layers and heads: transformers' rule in plain torch takes 20 ms for 64 tokens of four heads.
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "lfm2": ("lfm2", CONVOLUTIONS),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **CONVOLUTIONS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "minimax": (
        "minimax",
        {
            **FOUR,
            # transformers' cache asks the first layer for positions
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            **HEADS,
            **MINIMAX_FACTORS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **HEADS,
            **FOUR,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
        },
    ),
    "nemotron_h with experts": (
        "nemotron_h",
        {
            **HEADS,
            "layers_block_type": ["mamba", "moe", "mamba", "mamba", "attention", "moe", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 96,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron_h with latent experts": (
        "nemotron_h",
        {
            **HEADS,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "moe_latent_size": 32,
            "moe_shared_expert_intermediate_size": 96,
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {**THREE_LINEAR, **LINEAR_HEADS, "linear_num_key_heads": 4, "linear_value_head_dim": 16},
    ),
    "qwen3_5": ("qwen3_5_text", {**HEADS, **LINEAR_HEADS, **FOUR}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**HEADS, **LINEAR_HEADS, **FEW_EXPERTS, **FOUR}),
    "qwen3_next": ("qwen3_next", {**HEADS, **LINEAR_HEADS, **FEW_EXPERTS, **FOUR}),
    "recurrent_gemma": ("recurrent_gemma", {**FOUR, "num_key_value_heads": 1, "attention_window_size": 24}),
}

PIXTRAL = {  # the vision part of Mistral Small 3.2
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
SHARED = {"shared_intermediate_size": 80}
SHARED_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "n_shared_experts": 2}
DESCRIBED |= {
    "deepseek_v2": (  # with latents of queries, and groups of experts
        "deepseek_v2",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**LATENT, **SHARED_EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_parameters": YARN,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **HEADS,
            "moe_num_experts": 8,
            "moe_k": 4,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
        },
    ),
    "gemma4 with experts": (  # and V from K
        "gemma4_text",
        {
            **HEADS,
            **LAYERS,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **HEADS,
            **SHARED_EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "glm4_moe_lite": (  # without a latent of queries, and halves
        "glm4_moe_lite",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "q_lora_rank": None,
            "rope_interleave": False,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "routed_scaling_factor": 1.8,
        },
    ),
    "gpt_oss": ("gpt_oss", {**HEADS, **LAYERS, **LOCAL_EXPERTS, "attention_bias": True}),  # and sinks
    "granitemoe": ("granitemoe", {**GRANITE, **LOCAL_EXPERTS}),
    "granitemoe_swa": (
        "granitemoe_swa",
        {**GRANITE, **LAYERS, **LOCAL_EXPERTS, **SHARED, "layer_rope_theta": [1e4, 0, 1e4]},
    ),
    "granitemoehybrid": (  # without rotation
        "granitemoehybrid",
        {**GRANITE, **ATTENDING, **LOCAL_EXPERTS, **SHARED},
    ),
    "granitemoeshared": ("granitemoeshared", {**GRANITE, **LOCAL_EXPERTS, **SHARED}),
    "hunyuan_moe": ("hunyuan_v1_moe", {**HEADS, "num_experts": 8, "moe_topk": 3}),
    "llama4": (
        "llama4_text",
        {
            **HEADS,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 80,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 2,
            "attn_scale": 3.0,
        },
    ),
    "mimo_v2_flash": (  # with sinks in layers with a window, and twice their K and V heads
        "mimo_v2_flash",
        {
            **HEADS,
            **LAYERS,
            **LOCAL_EXPERTS,
            "num_key_value_heads": 1,
            "v_head_dim": 8,
            "attention_value_scale": 0.6,
            "attention_bias": True,
            "moe_intermediate_size": 48,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 1e4), ("sliding_attention", 1e3))
            },
        },
    ),
    "minimax_m2": ("minimax_m2", {**HEADS, **LOCAL_EXPERTS, "rotary_dim": 8}),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "clip_qkv": 0.8}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", {**HEADS, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
}


@torch.no_grad()
def save(folder: Path, model_type: str, fields: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint of three layers with random weights.

    Args:
        folder: Where to write; created.
        model_type: transformers' name of the family.
        fields: Settings that differ from `TINY`.
        dtype: Dtype of the weights.

    Returns:
        The folder.
    """
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, "num_hidden_layers": 3, **fields})
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, weight in module.named_parameters():
        numbers = torch.empty(weight.shape).normal_(generator=generator)
        if "norm" in name:
            weight.add_(0.3 * numbers)
        else:
            weight.copy_(numbers * (0.5 if weight.dim() == 1 else 1.3 * weight.shape[-1] ** -0.5))
    for name, buffer in module.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.2 * torch.empty(buffer.shape).normal_(generator=generator))
        if "layer_scalar" in name:
            buffer.fill_(0.7)
    module.save_pretrained(folder)
    return folder
