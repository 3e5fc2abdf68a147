"""Shapes of about half a billion weights for benchmarks on a CPU, one for each family; weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PLAIN: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {  # 0.47 billion, with which a token multiplies in part: 4 of 20 experts
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 20,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "qwen3": {  # 0.43 billion
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2816,
    },
    "gemma-3": {  # 0.47 billion
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "hidden_size": 896,
        "num_hidden_layers": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 3584,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [("full_attention" if place % 6 == 5 else "sliding_attention") for place in range(20)],
    },
    "phi-3": {  # 0.46 billion
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 32064,
        "hidden_size": 1152,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 3072,
        "sliding_window": 2047,
        "original_max_position_embeddings": 4096,
    },
}


def write_shape(name: str, folder: Path, **changed: Any) -> Path:
    """Write the configuration of a shape, to be loaded with load_format "dummy"; return its folder."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(_PLAIN | SHAPES[name] | changed), encoding="utf-8")
    return made
