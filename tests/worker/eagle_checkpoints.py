"""Random folders of EAGLE-3 heads beside models for them, and what these compute by the published definition.

The definition is written with plain torch: nothing here uses kvforge's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.worker.loading.random_models import HYBRIDS, save

from .head_checkpoints import EPSILON, WEIGHTS, Reference, rms

EAGLE = "eagle3"
EAGLE_LAYERS, EAGLE_TAPS, EAGLE_TOKENS, THETA = 7, (2, 3, 4), 61, 10_000.0
EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "draft_vocab_size": EAGLE_TOKENS,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
}


# Models with recurrent states that heads draft for; some of the layers that they read have such a state.
LINEAR = ["linear_attention"]
MIXED: dict[str, dict[str, Any]] = {
    "falcon_h1": {},  # both in every layer
    "granite": {"layer_types": ["mamba", "mamba", "attention", "mamba", "attention", "mamba", "mamba"]},
    "minimax": {"layer_types": ["full_attention", *LINEAR * 2, "full_attention", *LINEAR * 3]},
    "qwen3_next": {"layer_types": [*LINEAR * 2, "full_attention", *LINEAR, "full_attention", *LINEAR * 2]},
}


def write_eagle(folder: Path, family: str = "llama", **fields: Any) -> Path:
    """Write a model of seven layers, `model`, and the folder of an EAGLE-3 head for it, which is returned.

    Args:
        folder: Where to make the folders.
        family: "llama", or a key of MIXED.
        fields: Changes of the head's configuration.
    """
    kind, own = (family, {}) if family == "llama" else HYBRIDS[family]
    own = {**own, **MIXED.get(family, {}), "num_hidden_layers": EAGLE_LAYERS}
    save(folder / "model", kind, own | {"rms_norm_eps": EPSILON})
    drawn, place = torch.Generator().manual_seed(7), folder / EAGLE
    config: dict[str, Any] = EAGLE_CONFIG | fields
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], 8
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"fc": (hidden, 3 * 64), "lm_head": (config["draft_vocab_size"], hidden)}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"midlayer.self_attn.{name}_proj"] = (count * size, 2 * hidden)
    shapes["midlayer.self_attn.o_proj"] = (hidden, heads * size)
    shapes |= {f"midlayer.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    shapes["midlayer.mlp.down_proj"] = (hidden, inner)
    tensors = {f"{name}.weight": torch.randn(each, generator=drawn) * each[-1] ** -0.5 for name, each in shapes.items()}
    norms = ("norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {f"{name}.weight": 1 + 0.3 * torch.randn(hidden, generator=drawn) for name in norms}
    known = torch.randperm(97, generator=drawn)[:EAGLE_TOKENS].sort().values
    tensors["d2t"] = known - torch.arange(EAGLE_TOKENS)
    tensors["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill_(0, known, True)
    place.mkdir()
    save_file(tensors, place / WEIGHTS, {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    return place


class EagleReference(Reference):
    """An EAGLE-3 head in plain torch."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation="eager"
        )
        self.tensors = load_file(folder / EAGLE / WEIGHTS)
        self.config = json.loads((folder / EAGLE / "config.json").read_text())

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return what three layers read, projected to one hidden state."""
        ids = torch.tensor([tokens])
        found = self.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in EAGLE_TAPS], 1) @ self.tensors["fc.weight"].T

    def token(self, logits: torch.Tensor) -> int:
        """Return the model's token of the head's greedy one."""
        chosen = int(logits.argmax())
        return chosen + int(self.tensors["d2t"][chosen])

    def run(self, tokens: Sequence[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer; see `Reference.run`."""
        of, own = self.tensors, "midlayer."
        embedded = self.model.get_input_embeddings().weight[torch.tensor(tokens)]
        normed = rms(before, of[f"{own}hidden_norm.weight"])
        given = torch.cat((rms(embedded, of[f"{own}input_layernorm.weight"]), normed), 1)
        residual = normed if self.config.get("norm_before_residual") else before
        count, size = len(tokens), 8
        query, key, value = (
            (given @ of[f"{own}self_attn.{name}_proj.weight"].T).view(count, -1, size).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(count)[:, None] * THETA ** (-torch.arange(0, size, 2) / size)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(x: torch.Tensor) -> torch.Tensor:
            return x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

        shared = len(query) // len(key)
        key, value = (each.repeat_interleave(shared, 0) for each in (turned(key), value))
        scores = turned(query) @ key.transpose(1, 2) * size**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        residual = residual + attended @ of[f"{own}self_attn.o_proj.weight"].T
        normed = rms(residual, of[f"{own}post_attention_layernorm.weight"])
        gate, up = (normed @ of[f"{own}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        residual = residual + (torch.nn.functional.silu(gate) * up) @ of[f"{own}mlp.down_proj.weight"].T
        return rms(residual, of["norm.weight"]) @ of["lm_head.weight"].T, residual


RIGHT_SEED, RIGHT_RECURRENT_SEED = 1, 3  # greedy answers to the prompts of tests repeat no two tokens
INNER = 32
RIGHT_SIZES = {
    "vocab_size": 3000,  # prompts and answers repeat no two tokens, so that lookup proposes nothing
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
RIGHT: dict[str, Any] = RIGHT_SIZES | {
    "num_hidden_layers": EAGLE_LAYERS,
    "rms_norm_eps": EPSILON,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Of the layers behind the first one, and of feed-forward blocks, the projections that add to the sum.
ADDS = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "output_linear.weight")
RECURRENT_RIGHT = (
    "granitemoehybrid",
    {
        "layer_types": ["attention", *["mamba"] * (EAGLE_LAYERS - 1)],
        "position_embedding_type": "rope",
        "attention_multiplier": 0.25,
        "num_local_experts": 0,
        "shared_intermediate_size": INNER,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
)


def write_right_eagle(folder: Path, seed: int = RIGHT_SEED, recurrent: bool = False) -> tuple[Path, Path]:
    """Write a model and a head that computes what the model does: each of the head's greedy drafts is right.

    The model's first layer attends, and all others add zeros. Embeddings lie in the first half of the hidden state, and
    what the layer adds in the second half, which alone the vocabulary head reads. The EAGLE-3 head has that layer, and
    begins its sum with zeros: its norm of the hidden state leaves out all numbers but one. That one is 0 in the model;
    another one there would change all drafts.

    Args:
        folder: Where to make the folders.
        seed: Of the weights.
        recurrent: Whether the other layers have a recurrent state.

    Returns:
        The folders of the model and of the head.
    """
    place, head = folder / f"right-{seed}", folder / f"right-{seed}-{EAGLE}"
    kind, fields = RECURRENT_RIGHT if recurrent else ("llama", {"intermediate_size": INNER})
    config = transformers.AutoConfig.for_model(kind, **RIGHT, **fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    tensors, drawn = load_file(place / WEIGHTS), torch.Generator().manual_seed(seed)
    hidden, check = RIGHT["hidden_size"], RIGHT["hidden_size"] // 2 - 1
    for name, weight in sorted(tensors.items()):
        numbers = torch.randn(weight.shape, generator=drawn)
        if "norm" in name:
            numbers = torch.ones_like(weight)
        elif "o_proj" in name and ".0." in name:
            numbers[: hidden // 2] = 0
        elif name.endswith(ADDS):
            numbers = torch.zeros_like(weight)
        elif "embed" in name:
            numbers[:, check:] = 0
        tensors[name] = numbers
    tensors["model.norm.weight"][: hidden // 2] = 0
    save_file(tensors, place / WEIGHTS, {"format": "pt"})
    own = {name: tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkvo"}
    made = {
        f"midlayer.self_attn.{name}_proj.weight": torch.cat((own[name], torch.zeros_like(own[name])), 1)
        for name in "qkv"
    }
    made["midlayer.self_attn.o_proj.weight"] = own["o"]
    made |= {f"midlayer.mlp.{name}_proj.weight": torch.zeros(INNER, hidden) for name in ("gate", "up")}
    made["midlayer.mlp.down_proj.weight"] = torch.zeros(hidden, INNER)
    made |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    made["midlayer.hidden_norm.weight"] = torch.zeros(hidden)
    made["midlayer.hidden_norm.weight"][check] = 1
    made["fc.weight"] = torch.zeros(hidden, 3 * hidden)
    made["fc.weight"][check, [check, hidden + check, 2 * hidden + check]] = 1
    made["norm.weight"] = tensors["model.norm.weight"].clone()
    made["norm.weight"][check] = 1
    made["lm_head.weight"] = tensors["lm_head.weight"].clone()
    made["lm_head.weight"][:, check] *= 100
    head.mkdir()
    save_file(made, head / WEIGHTS, {"format": "pt"})
    changed = {"draft_vocab_size": RIGHT["vocab_size"], "intermediate_size": INNER, "norm_before_residual": True}
    (head / "config.json").write_text(json.dumps(EAGLE_CONFIG | RIGHT_SIZES | changed))
    return place, head
