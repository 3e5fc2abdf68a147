"""Random checkpoints with heads that draft, and what these compute by their published definitions.

The definitions are written with plain torch, and with transformers' own layers: nothing here uses kvforge's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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


@dataclass(frozen=True)
class Module:
    """How a family stores its multi-token prediction module.

    Attributes:
        begin: The beginning of the names of its tensors.
        own: Its tensors before its layer: the norms of the embedding and of the hidden state, and the projection.
        final_norm: Its final norm.
        layer: The beginning of the names of its layer's tensors, behind `begin`.
        fields: Fields of the layer's configuration that are not those of the model.
        adds_one: Whether a stored norm is what is added to 1.
        hidden_first: Whether the hidden state comes first in what is projected.
        has_copies: Whether it has copies of the model's embeddings and head.
        renamed: A part of its layer's names in transformers, and in the files.
        is_composite: Whether the checkpoint is that of a model of images and text.
    """

    begin: str
    own: tuple[str, str, str]
    final_norm: str
    layer: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    adds_one: bool = False
    hidden_first: bool = False
    has_copies: bool = False
    renamed: tuple[str, str] = ("", "")
    is_composite: bool = False


FP8 = "deepseek_v3 in fp8"
_DEEPSEEK = Module(
    f"model.layers.{LAYERS}.",
    ("enorm", "hnorm", "eh_proj"),
    "shared_head.norm",
    fields={"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
    has_copies=True,
)
_QWEN = Module(
    "mtp.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"),
    "norm",
    "layers.0.",
    {"layer_types": ["full_attention"]},
    adds_one=True,
)
MODULES = {
    "deepseek_v3": _DEEPSEEK,
    FP8: _DEEPSEEK,
    "ernie4_5_moe": Module(
        "model.",
        ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"),
        "norm",
        "mtp_block.0.",
        {"moe_layer_start_index": 1},
    ),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "mimo": Module(
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj"),
        "final_layernorm",
        hidden_first=True,
    ),
    "mimo_v2_flash": Module(
        "model.mtp.layers.0.",
        ("enorm", "hnorm", "eh_proj"),
        "final_layernorm",
        fields={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        renamed=("post_attention_layernorm", "pre_mlp_layernorm"),
    ),
    "qwen3_5": replace(_QWEN, is_composite=True),
    "qwen3_5_moe": replace(_QWEN, is_composite=True),
    "qwen3_next": _QWEN,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
IMAGES = {
    "image_token_id": 96,
    "video_token_id": 95,
    "vision_start_token_id": 94,
    "vision_end_token_id": 93,
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "num_position_embeddings": 16,
    },
}


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
    if MODULES[family].is_composite:  # as published, the small models share embeddings and head
        fields = fields | {"rope_parameters": MROPE, "tie_word_embeddings": family == "qwen3_5"}
    return kind, fields | {"rms_norm_eps": EPSILON}


def write_mtp(folder: Path, family: str, seed: int = 3) -> Path:
    """Write a checkpoint of a family with a multi-token prediction module.

    Args:
        folder: Where to make folders.
        family: A key of MODULES.
        seed: Of the module's weights.

    Returns:
        The folder of the checkpoint. Beside it lies `layer`, the module's layer as a model of its own; for a model of
        images and text also its text part as a model of its own, and for one in fp8 the same numbers in float32.
    """
    kind, fields = fields_of(family)
    place, stored = save(folder / family, kind, fields), MODULES[family]
    one = {name: value for name, value in stored.fields.items() if name in fields or name == "layer_types"}
    layer = save(folder / "layer", kind, fields | one | {"num_hidden_layers": 1})
    tensors, module = load_file(place / WEIGHTS), load_file(layer / WEIGHTS)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        module[name] = tensors[name]
    drawn = torch.Generator().manual_seed(seed)
    module |= {name: _other(name, weight, drawn) for name, weight in sorted(module.items()) if "layers." in name}
    hidden = len(tensors["model.norm.weight"])
    begin, (token_norm, hidden_norm, projection) = stored.begin, stored.own
    for name in (token_norm, hidden_norm):
        tensors[f"{begin}{name}.weight"] = 1 - stored.adds_one + 0.3 * torch.randn(hidden, generator=drawn)
    tensors[f"{begin}{projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=drawn) * hidden**-0.5
    module["model.norm.weight"] = tensors.setdefault(f"{begin}{stored.final_norm}.weight", module["model.norm.weight"])
    save_file(module, layer / WEIGHTS, {"format": "pt"})
    if stored.has_copies:  # these are not read
        tensors[f"{begin}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{begin}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for name, weight in module.items():
        if name.startswith("model.layers.0."):
            own = name.removeprefix("model.layers.0.").replace(*stored.renamed)
            tensors[begin + stored.layer + own] = weight
    save_file(tensors, place / WEIGHTS, {"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    changed: dict[str, Any] = {"num_nextn_predict_layers": 1} | ({"model_type": "mimo"} if family == "mimo" else {})
    if family == FP8:
        _quantise(place, layer, begin)
        changed["quantization_config"] = BLOCKS
    (place / "config.json").write_text(json.dumps(config | changed))
    if stored.is_composite:
        _make_composite(place, family)
    return place


def _make_composite(place: Path, family: str) -> None:
    """Make a checkpoint that of a model of images and text, without its vision part, and keep the text's beside it."""
    plain = place.with_name(f"{place.name} plain")
    plain.mkdir()
    for name in ("config.json", WEIGHTS):
        (plain / name).write_bytes((place / name).read_bytes())
    tensors = load_file(place / WEIGHTS)
    moved = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    save_file(moved, place / WEIGHTS, {"format": "pt"})
    text = json.loads((place / "config.json").read_text())
    whole = {"model_type": family, "tie_word_embeddings": text["tie_word_embeddings"], "dtype": "float32", **IMAGES}
    (place / "config.json").write_text(json.dumps(whole | {"text_config": text}))


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
    """Results of a head for a sequence alone; what was computed is kept, because tests with graphs ask the same again.

    Attributes:
        model: transformers' model.
        tensors: All tensors of the checkpoint.
    """

    model: Any
    tensors: Mapping[str, torch.Tensor]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], list[int]]:
        """Drafts by the tokens before them."""
        return {}

    @cached_property
    def _states(self) -> dict[tuple[int, ...], torch.Tensor]:
        """Hidden states by their tokens."""
        return {}

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
        known = self._known.get((*tokens,), [])
        if len(known) >= count:
            return known[:count]
        before, found = self._before(tokens), list[int]()
        while True:
            logits, hidden = self.run([*tokens, *found], before)
            found.append(self.token(logits[-1]))
            if len(found) == count:
                self._known[*tokens,] = found
                return found
            before = torch.cat((before, hidden[-1:]))

    def _before(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return what a head reads at each token: the hidden states of one position before, or of a longer text."""
        first = torch.zeros(1, self.model.config.hidden_size)
        if len(tokens) == 1:
            return first
        own = (*tokens[:-1],)
        longer = next((known for known in self._states if known[: len(own)] == own), own)
        if longer not in self._states:
            self._states[own] = self.hidden(own)
        return torch.cat((first, self._states[longer][: len(own)]))


class MtpReference(Reference):
    """A multi-token prediction module: its layer is a model of transformers with given inputs."""

    def __init__(self, folder: Path, family: str) -> None:
        has_plain = family == FP8 or MODULES[family].is_composite
        place = folder / (f"{family} plain" if has_plain else family)
        load = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.tensors = load_file(place / WEIGHTS)
        self.stored = MODULES[family]
        if family == "mimo":
            config = transformers.AutoConfig.from_pretrained(folder / "layer", num_hidden_layers=LAYERS)
            config.layer_types = ["full_attention"] * LAYERS
            self.model = transformers.AutoModelForCausalLM.from_pretrained(place, config=config, **load)
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(place, **load)
        self.layer = transformers.AutoModelForCausalLM.from_pretrained(folder / "layer", **load)

    def _own(self, index: int) -> torch.Tensor:
        return self.tensors[f"{self.stored.begin}{self.stored.own[index]}.weight"]

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the model's final norm."""
        found: torch.Tensor = self.model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return found

    def run(self, tokens: Sequence[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the embedding with the hidden state, and run the layer; see `Reference.run`."""
        embedded = self.tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
        more = int(self.stored.adds_one)
        parts = [rms(embedded, self._own(0) + more), rms(before, self._own(1) + more)]
        joined = torch.cat(parts[::-1] if self.stored.hidden_first else parts, -1) @ self._own(2).T
        hidden = self.layer.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return self.layer.lm_head(hidden), hidden


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
    begin = MODULES["glm4_moe"].begin
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
