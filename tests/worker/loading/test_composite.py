"""Models of images and text: the text part is served, and computes what the whole model computes for text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.loading import find_source, split
from kvforge.worker.loading.composite import config_for, model_class
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.slices import TensorSlice
from kvforge.worker.loading.tied import tied_weights
from tests.worker.conftest import TINY

from .covering import EXPERTS, HYBRID, MIXER, covering
from .random_models import FEW_EXPERTS, LINEAR_HEADS, NEEDS_CACHE, PIXTRAL
from .several import say, several

pytestmark = pytest.mark.usefixtures("quick_loads")

TEXT = {**TINY, "head_dim": 16}
SIGLIP = {**PIXTRAL, "model_type": "siglip_vision_model"}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TOKENS = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {
    **WINDOWS,
    "num_kv_shared_layers": 0,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
}
GLM_VISION = {**QWEN_VISION, "image_size": 28}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
GLM_TOKENS = {
    "image_token_id": 96,
    "video_token_id": 95,
    "image_start_token_id": 94,
    "image_end_token_id": 93,
    "video_start_token_id": 92,
    "video_end_token_id": 91,
}
GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# model type, perhaps with a suffix -> (text, the rest, serving architecture)
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": PIXTRAL, "image_token_index": 96},
        "MistralForCausalLM",
    ),
    "qwen3_vl": (
        {"rope_parameters": MROPE},
        {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **TOKENS},
        "Qwen3VLTextForCausalLM",
    ),
    "qwen3_vl_moe": (
        {"rope_parameters": MROPE, **QWEN_EXPERTS},
        {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **TOKENS},
        "Qwen3VLMoeTextForCausalLM",
    ),
    "mistral3 ministral3": (
        {"model_type": "ministral3", "rope_parameters": MINISTRAL3_ROPE},
        {"vision_config": PIXTRAL, "image_token_index": 96},
        "Ministral3ForCausalLM",
    ),
    "glm4v": ({"rope_parameters": GLM_ROPE}, {"vision_config": GLM_VISION, **GLM_TOKENS}, "Glm4vTextForCausalLM"),
    "qwen3_5": (  # with layers that keep a recurrent state
        {"rope_parameters": MROPE, **LINEAR_HEADS, "num_hidden_layers": 4},
        {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16}, **TOKENS},
        "Qwen3_5ForCausalLM",
    ),
    "qwen3_5_moe": (
        {"rope_parameters": MROPE, **LINEAR_HEADS, **FEW_EXPERTS, "num_hidden_layers": 4},
        {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16}, **TOKENS},
        "Qwen3_5MoeForCausalLM",
    ),
    "glm46v": (
        {"model_type": "glm4v_text", "rope_parameters": GLM_ROPE},
        {"vision_config": {**GLM_VISION, "model_type": "glm4v_vision"}, **GLM_TOKENS},
        "Glm4vTextForCausalLM",
    ),
    "glm4v_moe": (
        {"rope_parameters": GLM_ROPE, **GLM_EXPERTS},
        {"vision_config": GLM_VISION, **GLM_TOKENS},
        "Glm4vMoeTextForCausalLM",
    ),
    "glm_ocr": ({"rope_parameters": GLM_ROPE}, {"vision_config": GLM_VISION, **GLM_TOKENS}, "GlmOcrTextForCausalLM"),
    "qwen2_5_vl": ({"rope_parameters": MROPE}, {"vision_config": QWEN_VISION, **TOKENS}, "Qwen2_5_VLTextForCausalLM"),
    "gemma3": (WINDOWS, {"vision_config": SIGLIP, "mm_tokens_per_image": 4}, "Gemma3ForCausalLM"),
    "gemma4": (
        GEMMA4,
        {"vision_config": PIXTRAL | {"model_type": "gemma4_vision"}, "audio_config": None, "image_token_id": 96},
        "Gemma4ForCausalLM",
    ),
    "llama4": (
        {"intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 128},
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 96,
        },
        "Llama4ForCausalLM",
    ),
    "llava": ({"model_type": "llama"}, {"vision_config": SIGLIP, "image_token_index": 96}, "LlamaForCausalLM"),
    "smolvlm": (
        {"model_type": "llama", "pad_token_id": 0},
        {"vision_config": {**SIGLIP, "model_type": "smolvlm_vision"}, "image_token_id": 96, "scale_factor": 1},
        "LlamaForCausalLM",
    ),
    "kimi_k25": (
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "head_dim": 8,  # of the rotary embedding
            "v_head_dim": 12,
            **GLM_EXPERTS,
        },
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
        },
        "DeepseekV3ForCausalLM",
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {"vision_config": {**PIXTRAL, "model_type": "internvl_vision", "image_size": [28, 28]}, "image_token_id": 96},
        "Qwen2ForCausalLM",
    ),
}


def whole(kind: str, vocab_size: int = TEXT["vocab_size"]) -> Any:
    """Return the model of images and text, with random weights."""
    text, rest, _ = FAMILIES[kind]
    fields = {**TEXT, **text, "vocab_size": vocab_size}
    if "hidden_size_per_layer_input" in text:
        fields["vocab_size_per_layer_input"] = vocab_size
    config = AutoConfig.for_model(kind.partition(" ")[0], text_config=fields, **rest)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()


# The families that serve text parts, in the terms of random_models.py; their names are in `FAMILIES` otherwise.
SERVED_BY = {
    "Qwen3VLTextForCausalLM": "qwen3",
    "Qwen3VLMoeTextForCausalLM": "qwen3_moe",
    "Glm4vTextForCausalLM": "glm4",
    "Glm4vMoeTextForCausalLM": "glm4_moe",
    "GlmOcrTextForCausalLM": "glm4",
    "Qwen2_5_VLTextForCausalLM": "qwen2",
    "Qwen3_5ForCausalLM": f"{HYBRID}qwen3_5",
    "Qwen3_5MoeForCausalLM": f"{HYBRID}qwen3_5_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


def cases() -> list[Any]:
    """Return each kind in float32, and a covering set of states and experts in bfloat16 too."""
    kinds: dict[str, str] = {}
    for kind, (_, _, architecture) in FAMILIES.items():
        kinds.setdefault(SERVED_BY.get(architecture, architecture.removesuffix("ForCausalLM").lower()), kind)
    few = {kinds[name] for name in covering(kinds, within=(*MIXER, *EXPERTS))}
    found = []
    for kind in FAMILIES:
        needs = [NEEDS_CACHE] if "linear_num_key_heads" in FAMILIES[kind][0] else []
        found.append(pytest.param(kind, "float32", marks=needs))
        found.append(pytest.param(kind, "bfloat16", marks=needs if kind in few else [*needs, pytest.mark.soak]))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "dtype"), cases())
def test_the_text_part_is_served(
    kind: str,
    dtype: str,
    tmp_path: Path,
    cpu: Device,
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    made = whole(kind)
    made.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype, device=cpu, block_size=4)
    assert model.info.architecture == FAMILIES[kind][2]
    assert model.fused is not None
    assert not any("vision" in name or "visual" in name for name, _ in model.module.named_parameters())
    if dtype == "float32":
        tokens = np.random.default_rng(0).integers(0, 90, 23)
        with torch.inference_mode():
            text = made.language_model if kind == "llama4" else made  # transformers' whole one needs images
            wanted = text(input_ids=torch.as_tensor(tokens)[None], use_cache=False).logits[0]
        (got,) = paged_logits(model, [tokens], [[9], [1], [13]])
        assert float((got - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


@pytest.mark.filterwarnings("ignore")
def test_names_of_older_files_are_read(tmp_path: Path, cpu: Device) -> None:
    """Files of 2024 have the decoder under `language_model.model`, newer ones under `model.language_model`."""
    whole("mistral3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    old = load_model(tmp_path, dtype="float32", device=cpu, block_size=4)
    weights = load_file(path)
    assert any(name.startswith("language_model.model.") for name in weights)

    def renamed(name: str) -> str:
        if name.startswith("language_model.model."):
            return name.replace("language_model.model.", "model.language_model.", 1)
        return name.removeprefix("language_model.") if "lm_head" in name else f"model.{name}"

    save_file({renamed(name): tensor for name, tensor in weights.items()}, path, metadata={"format": "pt"})
    new = load_model(tmp_path, dtype="float32", device=cpu, block_size=4)
    assert new.info.fingerprint == old.info.fingerprint


# transformers writes the layers of Kimi's text as blocks, and published files have layers.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "kimi_k25"])
def test_published_formats_find_all_names(kind: str, tmp_path: Path) -> None:
    """kvforge reads these files itself, without transformers' conversions of names."""
    made = whole(kind)
    made.save_pretrained(tmp_path)
    cls = model_class(made.config)
    with torch.device("meta"):
        text = cls._from_config(config_for(cls, made.config), attn_implementation="eager")
    tied = tied_weights(text, find_source(tmp_path, "auto"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        of = dict.fromkeys(file.keys(), file)
        names = [name for name, _ in text.named_parameters() if name not in tied]
        assert [name for name in names if split._found(name, TensorSlice(), of) is None] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", ["missing", "left over"])
def test_only_tensors_of_other_towers_may_be_left_over(change: str, tmp_path: Path, cpu: Device) -> None:
    whole("mistral3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "language_model.model.layers.1.mlp.down_proj.weight"
    if change == "missing":
        del weights[name]
    else:
        weights[name.replace("down_proj", "other_proj")] = torch.ones(3)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.(down|other)_proj\.weight"):
        load_model(tmp_path, dtype="float32", device=cpu, block_size=4)


@pytest.mark.filterwarnings("ignore")
def test_random_weights_have_no_towers(tmp_path: Path, cpu: Device) -> None:
    whole("qwen3_vl").config.save_pretrained(tmp_path)
    model = load_model(tmp_path, load_format="dummy", dtype="float32", device=cpu, block_size=4)
    assert isinstance(model, LoadedModel)
    assert model.info.architecture == "Qwen3VLTextForCausalLM"


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_divide_every_text_part(tmp_path: Path) -> None:
    models = []
    for kind in FAMILIES:
        folder = tmp_path / kind
        whole(kind, 264).save_pretrained(folder)
        if kind == "kimi_k25":  # see above
            weights = load_file(folder / "model.safetensors")
            renamed = {name.replace(".blocks.", ".layers."): tensor for name, tensor in weights.items()}
            save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        models.append((folder, "float32", "dtype"))
    ranks = several(2, models, tmp_path / "meeting")
    for kind, model, first, second in zip(FAMILIES, models, *ranks, strict=True):
        alone = say(*model)
        assert first.get("error") is second.get("error") is alone.get("error") is None, (kind, first)
        assert first["said"] == second["said"], kind
        assert tokens_of(first) == tokens_of(alone), kind
        assert first["fused"] or kind == "gemma4", kind  # gemma4: inputs of each token and layer


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of the answers. A model with recurrent states gives a single one."""
    said = answer["said"]
    return [[token for token, _ in each] for each in ([said] if isinstance(said[0][0], int) else said)]
