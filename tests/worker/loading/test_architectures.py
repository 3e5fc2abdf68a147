"""Any decoder that transformers builds: paged logits of ragged, chunked, batched runs against its own eager attention.

Weights are random and tiny; the tests cover every architecture's path through our attention: positions, windows, caps,
scaling, head grouping.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration, UnsupportedModel
from kvforge.worker.attention.pool import LayerShape
from kvforge.worker.device.device import Device
from kvforge.worker.loading import determinism, probe
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import BINDING, LoadedModel
from kvforge.worker.loading.verification import in_float32

from .random_models import DESCRIBED, LATENT, save

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
FOUR_LAYERS = {"num_hidden_layers": 4}
MIXED = ["sliding_attention", "full_attention"] * 2
ROTARY = {"rope_theta": 10000.0}
GPT_OSS = {
    **FOUR_LAYERS,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "layer_types": MIXED,
}

LARGER_VALUES = {**LATENT, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LARGER_VALUES |= {"topk_group": 1, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama MQA": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ROTARY}}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": (
        "qwen2",
        {**FOUR_LAYERS, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 MoE": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 7}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {**FOUR_LAYERS, "head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "gemma3_text",
        {**FOUR_LAYERS, "head_dim": 16, "sliding_window": 5, "layer_types": MIXED, "query_pre_attn_scalar": 7},
    ),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi": ("phi", {}),
    "axk1": ("axk1", {**LARGER_VALUES, "v_head_dim": 12}),  # without a description
    "axk1 larger values": ("axk1", LARGER_VALUES),
    "gpt2": ("gpt2", GPT2),
    "gpt2 inverse scaling": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
    "granite": ("granite", {"attention_multiplier": 0.4}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**FOUR_LAYERS, "sliding_window": 6, "layer_types": MIXED}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {**FOUR_LAYERS, "sliding_window": 6, "layer_types": MIXED}),
    "glm4": ("glm4", {"head_dim": 16}),
    "smollm3 without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
    "exaone4": ("exaone4", {**FOUR_LAYERS, "sliding_window": 6, "layer_types": MIXED}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "granite_swa": ("granite_swa", {**FOUR_LAYERS, "sliding_window": 6, "layer_types": MIXED}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": ("persimmon", {}),
}

LENGTHS = (41, 1, 23, 8)
# Four ways to run the same sequences: the tokens that each pass feeds for each sequence.
SCHEDULES = {
    "at once": [[41, 1, 23, 8]],
    "one by one": [[41, 0, 0, 0], [0, 1, 0, 0], [0, 0, 23, 0], [0, 0, 0, 8]],
    "chunks with decodes": [[5, 1, 2, 1], [30, 0, 7, 1], [1, 0, 1, 1], [1, 0, 1, 1], [4, 0, 12, 4]],
    "decodes": [[33, 1, 15, 1], *[[1, 0, 1, 1]] * 7, [1, 0, 1, 0]],
}


@pytest.fixture(autouse=True)
def _rows_are_tried_elsewhere(quick_loads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In test_row_independence.py for layers that transformers runs, and in test_families.py for described ones."""
    monkeypatch.setattr(determinism, "_unsteady", lambda *_: "")


# Soak tests: described families that test_families.py or test_fusion.py compares with transformers' layers. What
# their attention has, others have too: windows, a scale, heads of another size, factors of positions.
AGAIN = ("llama MQA", "llama yarn", "qwen2", "qwen3", "qwen3 MoE", "mistral", "mixtral", "gemma", "olmo2", "olmo3")
AGAIN += ("starcoder2", "cohere2", "glm4", "smollm3 without positions", "granite_swa")


def each_architecture() -> list[Any]:
    """Return the model type and the fields of each."""
    return [
        pytest.param(*values, id=name, marks=[pytest.mark.soak] if name in AGAIN else [])
        for name, values in ARCHITECTURES.items()
    ]


@pytest.mark.parametrize(("model_type", "fields"), each_architecture())
def test_paged_logits_are_eager_logits(
    model_type: str,
    fields: dict[str, Any],
    tiny: Callable[..., LoadedModel],
    eager_logits: Callable[..., torch.Tensor],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    model = tiny(model_type, **fields)
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, model.vocab_size, count) for count in LENGTHS]
    wanted = [eager_logits(model, sequence) for sequence in sequences]
    scale = max(float(want.abs().max()) for want in wanted)
    assert scale > 0.01
    for schedule in SCHEDULES.values():
        for got, want in zip(paged_logits(model, sequences, schedule), wanted, strict=True):
            assert float((got - want).abs().max()) <= 2e-5 * scale


@pytest.mark.parametrize("kernels", [True, False])
def test_sinks_in_bfloat16(
    kernels: bool,
    tiny: Callable[..., LoadedModel],
    eager_logits: Callable[..., torch.Tensor],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    """As near to float32 as transformers. Every token goes to all experts: after rounding it might take other ones."""
    fields = {**GPT_OSS, "num_experts_per_tok": 4}
    model, plain = (tiny("gpt_oss", dtype="bfloat16", kernels=each, **fields) for each in (kernels, False))
    sequences = [np.random.default_rng(4).integers(0, model.vocab_size, count) for count in LENGTHS]
    theirs = torch.cat([eager_logits(plain, sequence) for sequence in sequences])
    with in_float32(plain.module):
        exact = torch.cat([eager_logits(plain, sequence) for sequence in sequences])
    for schedule in SCHEDULES.values():
        ours = torch.cat(paged_logits(model, sequences, schedule))
        assert float((ours - exact).norm()) <= 1.1 * float((theirs - exact).norm()) < 0.1 * float(exact.norm())


def windows(model: LoadedModel) -> list[int]:
    modules = [module for module in model.module.modules() if BINDING in module.__dict__]
    return [module.__dict__[BINDING].options.window for module in modules]


def test_windows_come_from_the_masks(tiny: Callable[..., LoadedModel]) -> None:
    fields = ARCHITECTURES["gemma3"][1]
    assert windows(tiny("gemma3_text", **fields)) == [5, 0, 5, 0]
    assert windows(tiny("gemma3_text", **fields | {"sliding_window": 100})) == [100, 0, 100, 0]
    assert windows(tiny("gemma3_text", **fields | {"sliding_window": 128})) == [0, 0, 0, 0]  # the whole context


def test_layers_may_differ_in_shape(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("llama", num_hidden_layers=3, head_dim=8, num_key_value_heads=4)
    assert [(shape.kv_heads, shape.head_size) for shape in model.geometry.layers] == [(4, 8)] * 3
    assert model.geometry.bytes_per_block == 2 * 3 * 4 * 8 * 4 * 4


# As in the model cards of Qwen2.5 and Qwen3: everything else in the configuration stays unchanged.
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0, **ROTARY}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    **ROTARY,
}
LLAMA4 = {
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 32,
    "intermediate_size_mlp": 96,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, **ROTARY}


@pytest.mark.parametrize(
    ("model_type", "fields", "limit"),
    [
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}, 32),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, **ROTARY}}, 128),
        ("llama", {}, 128),
        ("qwen2", {"rope_scaling": QWEN_YARN}, 512),
        ("qwen3", {"head_dim": 16, "rope_scaling": QWEN_YARN | {"original_max_position_embeddings": 64}}, 256),
        ("qwen2", {"rope_scaling": QWEN_YARN, "max_position_embeddings": 512}, 512),  # extended already
        ("llama", {"rope_scaling": LINEAR}, 128),
        ("llama", {"rope_scaling": LLAMA3}, 128),
    ],
)
def test_context_ends_where_rotary_frequencies_would_depend_on_the_batch(
    model_type: str, fields: dict[str, Any], limit: int, tiny: Callable[..., LoadedModel]
) -> None:
    assert tiny(model_type, **fields).info.context_tokens_max == limit


@pytest.mark.parametrize(
    ("model_type", "fields", "most", "why"),
    [
        ("llama", {}, 128, "its max_position_embeddings is 128"),
        ("qwen2", {"rope_scaling": QWEN_YARN}, 512, "(yarn, factor 4, of 128) reaches to 512"),
        ("llama", {"rope_scaling": LINEAR}, 256, "(linear, factor 2, of 128) reaches to 256"),
        ("llama", {"rope_scaling": LLAMA3}, 256, "(llama3, factor 8, of 32) reaches to 256"),
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}, 32, "(longrope) changes after 32"),
        ("gpt2", GPT2, 128, "its max_position_embeddings is 128"),
        ("llama4_text", LLAMA4, 32, "its layers attend within chunks of 32"),
    ],
)
def test_a_context_may_be_set_as_far_as_the_rotary_embedding_reaches(
    model_type: str, fields: dict[str, Any], most: int, why: str, write_config: Callable[..., Path], cpu: Device
) -> None:
    folder = write_config(model_type, **fields)
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "device": cpu, "block_size": 4}
    for asked in (16, most):
        assert load_model(folder, **settings, context_tokens_max=asked).info.context_tokens_max == asked
    for asked in (most + 1, 7):
        with pytest.raises(InvalidConfiguration) as caught:
            load_model(folder, **settings, context_tokens_max=asked)
        assert caught.value.field == "context_tokens_max"
        assert f"is {asked}; this model supports 8 to {most}" in str(caught.value)
        assert why in str(caught.value)


def test_positions_beyond_the_stated_length_are_computed_as_transformers_does(
    tiny: Callable[..., LoadedModel],
    eager_logits: Callable[..., torch.Tensor],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    model = tiny("qwen2", rope_scaling=QWEN_YARN)
    sequence = np.random.default_rng(3).integers(0, model.vocab_size, 300)
    got, want = paged_logits(model, [sequence], [[299], [1]])[0], eager_logits(model, sequence)
    assert float((got - want).abs().max()) <= 2e-5 * float(want.abs().max())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon": ("falcon", {}, "never calls"),
    "falcon with ALiBi": ("falcon", {"alibi": True}, "it uses ALiBi"),
    "bloom": ("bloom", {}, "it uses ALiBi"),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "it uses ALiBi"),
    "other caches": ("rwkv", {}, "its layers keep a recurrent state in a cache of their own"),
    "positions from a cache": (  # and no description
        "llama4_text",
        {**LLAMA4, "num_experts_per_tok": 2},
        "length of a transformers cache",
    ),
    "latents and no description": (
        "deepseek_v3",
        {"n_routed_experts": 4, "n_group": 1, "num_key_value_heads": 4, "hidden_size": 68},
        "its attention over latents could not be described",
    ),
    "encoder-decoder": ("t5", {}, "encoder-decoder"),
    "cross-attention": ("gpt2", {**GPT2, "add_cross_attention": True}, "cross-attention"),
    "no decoder": ("vit", {}, "transformers has no decoder of the model type"),
    "unknown": ("hal9000", {}, "does not know"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
@pytest.mark.parametrize(("model_type", "fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_at_load_by_name(
    model_type: str, fields: dict[str, Any], reason: str, write_config: Callable[..., Path], cpu: Device
) -> None:
    folder = write_config(model_type, **fields)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(folder, load_format="dummy", dtype="float32", device=cpu, block_size=4)
    assert caught.value.model == model_type
    assert model_type in str(caught.value)
    assert reason in str(caught.value)


def test_a_layer_that_does_not_attend_is_refused(
    write_config: Callable[..., Path], cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor keeps a state: no model that transformers has is known to be of this kind."""
    real = probe._recording_pass
    monkeypatch.setattr(probe, "_recording_pass", lambda *arguments: real(*arguments)[:1])
    with pytest.raises(UnsupportedModel, match="1 of its 2 layers attend through the registered function"):
        load_model(write_config("llama"), load_format="dummy", dtype="float32", device=cpu, block_size=4)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_kimi_k2_is_a_model_of_deepseek_v3(load_format: str, tmp_path: Path, cpu: Device) -> None:
    """Its files name a model type that transformers does not know, and code of their own, which never runs."""
    model_type, fields = DESCRIBED["deepseek_v3"]
    folder = save(tmp_path / "kimi", model_type, fields)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    file.write_text(json.dumps(config | {"model_type": "kimi_k2", "auto_map": code}))
    source = folder if load_format == "auto" else file
    model = load_model(source, load_format=load_format, dtype="float32", device=cpu, block_size=4)
    assert model.info.architecture == "DeepseekV3ForCausalLM" and model.fused is not None
    assert model.info.kv_layout == "latents"
    assert model.geometry.layers[0] == LayerShape(1, 32, latent=24)
