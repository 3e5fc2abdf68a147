"""Random checkpoints with heads that draft, and what these compute by their published definitions.

The definitions are written with plain torch, and with transformers' own layers: nothing here uses kvforge's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.worker.loading.published_models import BLOCKS, LATENTS, QUANTISED, fp8_blocks
from tests.worker.loading.random_models import DESCRIBED, HYBRIDS, save

LAYERS = 3  # of the models
EPSILON = 1e-6
WEIGHTS = "model.safetensors"
# By family: the beginning of the module's names, then those of its own tensors.
NAMES = {
    "deepseek_v3": (f"model.layers.{LAYERS}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "mimo": ("model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "qwen3_next": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}
FP8 = "deepseek_v3 in fp8"
NAMES |= dict.fromkeys(("glm4_moe", "glm4_moe_lite", FP8), NAMES["deepseek_v3"])
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the root-mean-square norm of rows."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def fields_of(family: str) -> tuple[str, dict[str, Any]]:
    """Return transformers' model type of a family, and the settings of a tiny model."""
    if family == "mimo":
        return "qwen2", {"rms_norm_eps": EPSILON}
    if family == FP8:
        return "deepseek_v3", LATENTS | {"num_key_value_heads": 4, "intermediate_size": 128, "rms_norm_eps": EPSILON}
    kind, fields = HYBRIDS[family] if family in HYBRIDS else DESCRIBED[family]
    return kind, fields | {"rms_norm_eps": EPSILON}


def write_mtp(folder: Path, family: str, seed: int = 3) -> Path:
    """Write a checkpoint of a family with a multi-token prediction module.

    Args:
        folder: Where to make folders.
        family: A key of NAMES.
        seed: Of the module's weights.

    Returns:
        The folder of the checkpoint. Beside it lies `layer`, the module's layer as a model of its own.
    """
    kind, fields = fields_of(family)
    place = save(folder / family, kind, fields)
    one = {name: value for name, value in ONE_LAYER.items() if name == "num_hidden_layers" or name in fields}
    if family == "qwen3_next":
        one["layer_types"] = ["full_attention"]
    layer = save(folder / "layer", kind, fields | one)
    tensors, module = load_file(place / WEIGHTS), load_file(layer / WEIGHTS)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        module[name] = tensors[name]
    drawn = torch.Generator().manual_seed(seed)
    module |= {name: _other(name, weight, drawn) for name, weight in sorted(module.items()) if "layers." in name}
    save_file(module, layer / WEIGHTS, {"format": "pt"})
    hidden = len(tensors["model.norm.weight"])
    begin, (token_norm, hidden_norm, projection, final_norm) = NAMES[family]
    for name in (token_norm, hidden_norm):
        # Qwen3-Next stores what is added to 1.
        middle = 0 if family == "qwen3_next" else 1
        tensors[f"{begin}{name}.weight"] = middle + 0.3 * torch.randn(hidden, generator=drawn)
    tensors[f"{begin}{projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=drawn) * hidden**-0.5
    tensors[f"{begin}{final_norm}.weight"] = module["model.norm.weight"]
    if family not in ("mimo", "qwen3_next"):  # copies of the model's, which are not read
        tensors[f"{begin}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{begin}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for name, weight in module.items():
        if name.startswith("model.layers.0."):
            of_layer = "layers.0." if family == "qwen3_next" else ""
            tensors[begin + of_layer + name.removeprefix("model.layers.0.")] = weight
    save_file(tensors, place / WEIGHTS, {"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    changed: dict[str, Any] = {"num_nextn_predict_layers": 1} | ({"model_type": "mimo"} if family == "mimo" else {})
    if family == FP8:
        _quantise(place, layer, begin)
        changed["quantization_config"] = BLOCKS
    (place / "config.json").write_text(json.dumps(config | changed))
    return place


def _quantise(place: Path, layer: Path, begin: str) -> None:
    """Write the projections of a checkpoint as blocks of fp8, and the same numbers into `layer` and beside it."""
    tensors, module = load_file(place / WEIGHTS), load_file(layer / WEIGHTS)
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in tensors.items():
        stored[name] = plain[name] = weight
        if name.endswith(QUANTISED) and "eh_proj" not in name:
            codes, plain[name] = fp8_blocks(name, weight)
            stored |= codes
        if (own := name.replace(begin, "model.layers.0.")) in module and name.startswith(begin):
            module[own] = plain[name]
    other = place.with_name(f"{place.name} plain")
    other.mkdir()
    (other / "config.json").write_text((place / "config.json").read_text())
    for folder, found in ((place, stored), (layer, module), (other, plain)):
        save_file({name: each.contiguous() for name, each in found.items()}, folder / WEIGHTS, {"format": "pt"})


def _other(name: str, weight: torch.Tensor, drawn: torch.Generator) -> torch.Tensor:
    """Return other random numbers of about the same size: the module's weights are not the model's."""
    if "norm" in name or weight.dim() == 1:
        return weight
    return torch.randn(weight.shape, generator=drawn) * weight.std()


@dataclass
class Reference:
    """Results of a head for a sequence alone.

    Attributes:
        model: transformers' model.
        tensors: All tensors of the checkpoint.
    """

    model: Any
    tensors: Mapping[str, torch.Tensor]

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the hidden states that the head reads, [tokens, hidden]."""
        raise NotImplementedError

    def run(self, tokens: Sequence[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of all positions, and the hidden states that the next draft reads.

        before: the hidden states at the positions before, [tokens, hidden].
        """
        raise NotImplementedError

    def token(self, logits: torch.Tensor) -> int:
        """Return the greedy token of a row of logits."""
        return int(logits.argmax())

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits behind each token, given hidden states of the model at all positions before."""
        return self.run(tokens, self._before(tokens))[0]

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the greedy drafts behind tokens; the model has not computed the last one yet."""
        before, found = self._before(tokens), list[int]()
        while True:
            logits, hidden = self.run([*tokens, *found], before)
            found.append(self.token(logits[-1]))
            if len(found) == count:
                return found
            before = torch.cat((before, hidden[-1:]))

    def _before(self, tokens: Sequence[int]) -> torch.Tensor:
        hidden = self.hidden(tokens[:-1]) if len(tokens) > 1 else None
        first = torch.zeros(1, self.model.config.hidden_size)
        return first if hidden is None else torch.cat((first, hidden))


class MtpReference(Reference):
    """A multi-token prediction module: its layer is a model of transformers with given inputs."""

    def __init__(self, folder: Path, family: str) -> None:
        place = folder / (f"{family} plain" if family == FP8 else family)
        load = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.tensors = load_file(place / WEIGHTS)
        self.family, self.begin = family, NAMES[family][0]
        if family == "mimo":
            config = transformers.AutoConfig.from_pretrained(folder / "layer", num_hidden_layers=LAYERS)
            config.layer_types = ["full_attention"] * LAYERS
            self.model = transformers.AutoModelForCausalLM.from_pretrained(place, config=config, **load)
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(place, **load)
        self.layer = transformers.AutoModelForCausalLM.from_pretrained(folder / "layer", **load)

    def _own(self, index: int) -> torch.Tensor:
        return self.tensors[f"{self.begin}{NAMES[self.family][1][index]}.weight"]

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the model's final norm."""
        found: torch.Tensor = self.model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return found

    def run(self, tokens: Sequence[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the embedding with the hidden state, and run the layer; see `Reference.run`."""
        embedded = self.tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
        more = 1 if self.family == "qwen3_next" else 0
        parts = [rms(embedded, self._own(0) + more), rms(before, self._own(1) + more)]
        joined = torch.cat(parts[::-1] if self.family == "mimo" else parts, -1) @ self._own(2).T
        hidden = self.layer.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return self.layer.lm_head(hidden), hidden


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


def write_eagle(folder: Path, **fields: Any) -> Path:
    """Write a model of seven layers, `model`, and the folder of an EAGLE-3 head for it, which is returned.

    fields: changes of the head's configuration.
    """
    save(folder / "model", "llama", {"num_hidden_layers": EAGLE_LAYERS, "rms_norm_eps": EPSILON})
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
        found = self.model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in EAGLE_TAPS], 1) @ self.tensors["fc.weight"].T

    def token(self, logits: torch.Tensor) -> int:
        """Return the model's token of the head's greedy one."""
        chosen = int(logits.argmax())
        return chosen + int(self.tensors["d2t"][chosen])

    def run(self, tokens: Sequence[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer; see `Reference.run`."""
        of, own = self.tensors, "midlayer."
        embedded = self.model.model.embed_tokens.weight[torch.tensor(tokens)]
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


def write_right_mtp(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a checkpoint with a module that computes what the model does: each of its greedy drafts is right.

    The model has layers behind its first one that add zeros. The module has that layer, and reads the embedding alone:
    embeddings have a norm of 1. The last number of each hidden state is 0; another one there would change all drafts.

    Args:
        folder: Where to make a folder.
        seed: Of the weights.
        fields: Changes of the configuration.

    Returns:
        The folder of the checkpoint.
    """
    settings = {**RIGHT, **fields}
    config = transformers.AutoConfig.for_model("glm4_moe", **{**settings, "num_hidden_layers": 1})
    place, drawn = folder / f"right-{seed}", torch.Generator().manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    first = load_file(place / WEIGHTS)
    for name, weight in sorted(first.items()):
        numbers = torch.randn(weight.shape, generator=drawn) * (1.0 if "layers" in name else 0.3)
        first[name] = torch.ones_like(weight) if "norm" in name else numbers
    table = first["model.embed_tokens.weight"]
    table *= (1 - EPSILON) ** 0.5 * table.pow(2).mean(1, keepdim=True).rsqrt()
    first["model.norm.weight"][-1] = 0.0
    tensors, hidden = dict(first), len(first["model.norm.weight"])
    for name, weight in first.items():
        if name.startswith("model.layers.0."):
            adds_zeros = name.endswith(("o_proj.weight", "down_proj.weight"))
            for layer in range(1, LAYERS):
                other = torch.zeros_like(weight) if adds_zeros else weight.clone()
                tensors[name.replace(".0.", f".{layer}.", 1)] = other
            tensors[name.replace(".0.", f".{LAYERS}.", 1)] = weight.clone()
    projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    projection[:, -1] = 100.0
    begin = NAMES["glm4_moe"][0]
    tensors |= {f"{begin}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm")}
    tensors |= {f"{begin}eh_proj.weight": projection}
    tensors |= {f"{begin}shared_head.norm.weight": first["model.norm.weight"].clone()}
    save_file(tensors, place / WEIGHTS, {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config.to_dict() | {"num_hidden_layers": LAYERS}))
    return place


RIGHT = {
    "vocab_size": 3000,  # prompts and answers repeat no two tokens, so that lookup proposes nothing
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": EPSILON,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
