"""Where transformers keeps the parts of a decoder: one declaration for each family.

A declaration names modules and settings; `fusion` builds the decoder from it. Norms and biases are found by themselves.
A wrong or incomplete declaration is caught at load: the logits are compared with those of transformers' own layers
(`verification`), and the model then runs through these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvforge.worker.kernels.layer_weights import LayerFactors, NormedResidual
from kvforge.worker.kernels.positions import QueryScale
from kvforge.worker.kernels.router import Router

from .description import Beside, Family, Latent, Mixture, TokenBlocks


def _scaled_by_position(attention: Any) -> QueryScale | None:
    rope = attention.config.rope_parameters
    growth = rope["llama_4_scaling_beta"]
    return QueryScale(growth, rope["original_max_position_embeddings"]) if growth else None


def _scaled_without_rotation(attention: Any) -> QueryScale | None:
    if attention.use_rope or not attention.attn_temperature_tuning:
        return None
    return QueryScale(attention.attn_scale, attention.floor_scale, offset=1.0, rounds_first=False)


def _used(attention: Any) -> bool:
    return bool(attention.use_rope)


def _in_windows(attention: Any) -> bool:
    return attention.sliding_window is not None


def _in_windows_of_hybrids(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


def _rotary_of_theta(decoder: Any, layer: int) -> Any:
    theta = decoder.config.layer_rope_theta[layer]
    rotary = (each for each in decoder.rotary_embs if each.config.rope_parameters["rope_theta"] == theta)
    return next(rotary) if theta else None


def _last_of_kind(decoder: Any, layer: int) -> int | None:
    """Gemma 4's last layers read the K and V of the last layer of their kind that has its own."""
    kinds = decoder.config.layer_types
    first_shared = decoder.config.num_hidden_layers - decoder.config.num_kv_shared_layers
    if layer < first_shared:
        return None
    return max(index for index in range(first_shared) if kinds[index] == kinds[layer])


def _softmax_of_gemma(config: Any) -> Router:
    return Router(config.top_k_experts, normalises=True)


def _softmax(config: Any) -> Router:
    """All experts compete; the weights of the chosen ones may be divided by their sum."""
    return Router(config.num_experts_per_tok, normalises=bool(getattr(config, "norm_topk_prob", True)))


def _softmax_of_chosen(config: Any) -> Router:
    return Router(config.num_experts_per_tok, scores="", weights="softmax")


def _sigmoid_of_chosen(config: Any) -> Router:
    return Router(config.num_experts_per_tok, scores="", weights="sigmoid")


def _sigmoid(config: Any) -> Router:
    return Router(config.num_experts_per_tok, scores="sigmoid", normalises=True)


def _sigmoid_in_groups(config: Any) -> Router:
    """DeepSeek V3's router."""
    return Router(
        config.num_experts_per_tok,
        scores="sigmoid",
        groups=config.n_group,
        groups_chosen=config.topk_group,
        normalises=config.norm_topk_prob,
        sum_added=1e-20,
        scaling=config.routed_scaling_factor,
    )


def _softmax_in_groups(config: Any) -> Router:
    """DeepSeek V2's router: a group is as good as its best expert."""
    grouped = config.topk_method == "group_limited_greedy"
    return Router(
        config.num_experts_per_tok,
        groups=config.n_group if grouped else 1,
        groups_chosen=config.topk_group if grouped else 1,
        group_best=1,
        scaling=config.routed_scaling_factor,
    )


def _factors_of_falcon_h1(layer: Any) -> LayerFactors:
    return LayerFactors(
        attention_input=layer.attention_in_multiplier,
        key=layer.self_attn.key_multiplier,
        attended=layer.attn_out_multiplier,
        mixed=layer.ssm_out_multiplier,
        gate=layer.feed_forward.gate_multiplier,
        fed=layer.feed_forward.down_multiplier,
    )


def _factors_of_minimax(layer: Any) -> LayerFactors:
    mixing = layer.attn_beta_factor
    return LayerFactors(attended=mixing, mixed=mixing, fed=layer.mlp_beta_factor)


def _residual_of_minimax(layer: Any) -> NormedResidual:
    return NormedResidual(layer.attn_alpha_factor, layer.mlp_alpha_factor)


def _pairs_neighbours(attention: Any) -> bool:
    return bool(attention.config.rope_interleave)


def _never(_attention: Any) -> bool:
    return False


def _softmax_of_all(config: Any) -> Router:
    return Router(config.num_experts_per_tok)


def _sigmoid_of_lfm2(config: Any) -> Router:
    return Router(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalises=config.norm_topk_prob,
        sum_added=1e-6,
        scaling=config.routed_scaling_factor,
    )


def _position_embedding(decoder: Any, _layer: int) -> Any:
    return decoder.pos_emb


def _rotary_of_attention(decoder: Any, layer: int) -> Any:
    return decoder.layers[layer].temporal_block.rotary_emb


def _unrotated(_decoder: Any, _layer: int) -> None:
    return None


def _softmax_with_least_sum(config: Any) -> Router:
    return Router(config.num_experts_per_tok, normalises=True, sum_min=config.moe_norm_min)


def _softmax_of_hunyuan(config: Any) -> Router:
    return Router(config.moe_topk if isinstance(config.moe_topk, int) else config.moe_topk[0], normalises=True)


LLAMA = Family()
_OLMO2 = Family(
    input_norm="",
    attended_norm="post_attention_layernorm",
    inner_norm="",
    fed_norm="post_feedforward_layernorm",
)
_GEMMA2 = Family(
    attended_norm="post_attention_layernorm",
    inner_norm="pre_feedforward_layernorm",
    fed_norm="post_feedforward_layernorm",
    activation="hidden_activation",
    logit_softcap="final_logit_softcapping",
)
_GEMMA4 = replace(
    _GEMMA2,
    value_norm="v_norm",
    kv_layer=_last_of_kind,
    beside=Beside(
        Mixture(_softmax_of_gemma, gate="router", weight="proj", factors="router.per_expert_scale", wide=True)
    ),
    token_blocks=TokenBlocks(),
    output_scale="layer_scalar",
)
_LLAMA4 = Family(
    head_norms=("qk_norm", "qk_norm"),
    norms_after_rotation=True,
    rotates=_used,
    interleaved=True,
    query_scale=_scaled_without_rotation,
    counts_positions=True,
    feed="feed_forward",
    mixture=Mixture(_sigmoid_of_chosen, gate="router", scales_input=True, shared="shared_expert"),
)
_PHI3 = Family(projected=("qkv_proj",), gate_up=("gate_up_proj",))
_GRANITE = Family(
    embedding_scale="embedding_multiplier", residual_scale="residual_multiplier", logit_divisor="logits_scaling"
)
_GRANITE_SWA = replace(_GRANITE, rotary=_rotary_of_theta)
_GRANITE_EXPERTS = replace(
    _GRANITE,
    feed="block_sparse_moe",
    gate_up=("input_linear",),
    down="output_linear",
    mixture=Mixture(_softmax_of_chosen, gate="router", shared="shared_mlp", is_shared_outside=True),
)
_GLM4 = Family(
    attended_norm="post_self_attn_layernorm", fed_norm="post_mlp_layernorm", gate_up=("gate_up_proj",), interleaved=True
)
_DEEPSEEK_EXPERTS = Mixture(
    _sigmoid_in_groups, choice_bias="gate.e_score_correction_bias", wide=True, shared="shared_experts"
)
_GLM4_EXPERTS = Family(mixture=_DEEPSEEK_EXPERTS)
_DEEPSEEK = Family(latent=Latent(interleaved=_pairs_neighbours), mixture=_DEEPSEEK_EXPERTS)
_QWEN3_NEXT = Family(
    is_query_gated=True,
    mixers=("linear_attn",),
    mixture=Mixture(_softmax, shared="shared_expert", shared_gate="shared_expert_gate"),
)
_LFM2 = Family(
    input_norm="operator_norm",
    inner_norm="ffn_norm",
    output="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    mixers=("conv",),
    feed="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
    activation="silu",
    final_norm="embedding_norm",
)
_BAMBA = Family(inner_norm="pre_ff_layernorm", mixers=("mamba",), feed="feed_forward", final_norm="final_layernorm")
_FALCON_H1 = replace(
    _BAMBA,
    mixes_beside=True,
    factors=_factors_of_falcon_h1,
    embedding_scale="embedding_multiplier",
    logit_scale="lm_head_multiplier",
)
_HUNYUAN = Family(head_norms=("query_layernorm", "key_layernorm"), norms_after_rotation=True)

# By the folder in transformers.models and the class of the model.
FAMILIES = {
    "apertus.ApertusForCausalLM": Family(
        input_norm="attention_layernorm", inner_norm="feedforward_layernorm", gate_up=("up_proj",), is_gated=False
    ),
    "bamba.BambaForCausalLM": _BAMBA,
    "cohere.CohereForCausalLM": Family(inner_norm="", interleaved=True, is_parallel=True, logit_scale="logit_scale"),
    "cohere2.Cohere2ForCausalLM": Family(
        inner_norm="", rotates=_in_windows, interleaved=True, is_parallel=True, logit_scale="logit_scale"
    ),
    "deepseek_v2.DeepseekV2ForCausalLM": Family(
        latent=Latent(), mixture=Mixture(_softmax_in_groups, wide=True, shared="shared_experts")
    ),
    "deepseek_v3.DeepseekV3ForCausalLM": _DEEPSEEK,
    "ernie4_5.Ernie4_5ForCausalLM": Family(interleaved=True),
    "exaone4.Exaone4ForCausalLM": replace(_OLMO2, rotates=_in_windows_of_hybrids),
    "ernie4_5_moe.Ernie4_5_MoeForCausalLM": Family(
        interleaved=True,
        mixture=Mixture(
            _softmax_with_least_sum, choice_bias="gate.moe_statics.e_score_correction_bias", shared="shared_experts"
        ),
    ),
    "falcon_h1.FalconH1ForCausalLM": _FALCON_H1,
    "gemma.GemmaForCausalLM": Family(),
    "gemma2.Gemma2ForCausalLM": _GEMMA2,
    "gemma3.Gemma3ForCausalLM": _GEMMA2,
    "gemma4.Gemma4ForCausalLM": _GEMMA4,
    "glm.GlmForCausalLM": Family(gate_up=("gate_up_proj",), interleaved=True),
    "glm4.Glm4ForCausalLM": _GLM4,
    "glm4_moe.Glm4MoeForCausalLM": _GLM4_EXPERTS,
    "glm4_moe_lite.Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "glm4v.Glm4vTextForCausalLM": _GLM4,
    "glm4v_moe.Glm4vMoeTextForCausalLM": _GLM4_EXPERTS,
    "glm_ocr.GlmOcrTextForCausalLM": _GLM4,
    "gpt_oss.GptOssForCausalLM": Family(mixture=Mixture(_softmax_of_chosen, gate="router")),
    "granite.GraniteForCausalLM": _GRANITE,
    "granite_swa.GraniteSWAForCausalLM": _GRANITE_SWA,
    "granitemoe.GraniteMoeForCausalLM": _GRANITE_EXPERTS,
    "granitemoe_swa.GraniteMoeSWAForCausalLM": replace(_GRANITE_EXPERTS, rotary=_rotary_of_theta),
    "granitemoehybrid.GraniteMoeHybridForCausalLM": replace(_GRANITE_EXPERTS, mixers=("mamba",)),
    "granitemoeshared.GraniteMoeSharedForCausalLM": _GRANITE_EXPERTS,
    "hunyuan_v1_dense.HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "hunyuan_v1_moe.HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN, mixture=Mixture(_softmax_of_hunyuan, weight="wg", wide=True, shared="shared_mlp")
    ),
    "jamba.JambaForCausalLM": replace(_BAMBA, rotary=_unrotated, mixture=Mixture(_softmax_of_all, gate="router")),
    "kimi_linear.KimiLinearForCausalLM": replace(
        _DEEPSEEK, latent=Latent(interleaved=_never), mixers=("self_attn",), rotary=_unrotated
    ),
    "lfm2.Lfm2ForCausalLM": _LFM2,
    "lfm2_moe.Lfm2MoeForCausalLM": replace(
        _LFM2, rotary=_position_embedding, mixture=Mixture(_sigmoid_of_lfm2, choice_bias="expert_bias", wide=True)
    ),
    "llama.LlamaForCausalLM": LLAMA,
    "llama4.Llama4ForCausalLM": _LLAMA4,
    "mimo_v2_flash.MiMoV2FlashForCausalLM": Family(
        value_size="v_head_dim",
        value_scale="v_scale",
        mixture=Mixture(_sigmoid_in_groups, choice_bias="gate.e_score_correction_bias", wide=True),
    ),
    "minicpm3.MiniCPM3ForCausalLM": Family(
        latent=Latent(interleaved=_never), residual_factor="residual_scale", logit_divisor="logits_scaling"
    ),
    "minimax.MiniMaxForCausalLM": Family(
        mixers=("self_attn",),
        factors=_factors_of_minimax,
        normed_residual=_residual_of_minimax,
        mixture=Mixture(_softmax, wide=True),
    ),
    "minimax_m2.MiniMaxM2ForCausalLM": Family(
        mixture=Mixture(_sigmoid, choice_bias="e_score_correction_bias", wide=True)
    ),
    "ministral.MinistralForCausalLM": LLAMA,
    "ministral3.Ministral3ForCausalLM": Family(query_scale=_scaled_by_position),
    "mistral.MistralForCausalLM": LLAMA,
    "mixtral.MixtralForCausalLM": Family(mixture=Mixture(_softmax, wide=True)),
    "nemotron.NemotronForCausalLM": Family(gate_up=("up_proj",), is_gated=False),
    "nemotron_h.NemotronHForCausalLM": Family(
        input_norm="norm",
        inner_norm="",
        attention="mixer",
        mixers=("mixer",),
        one_block=True,
        rotary=_unrotated,
        feed="mixer",
        gate_up=("up_proj",),
        is_gated=False,
        activation="mlp_hidden_act",
        mixture=replace(_DEEPSEEK_EXPERTS, narrow="fc1_latent_proj", widen="fc2_latent_proj"),
        final_norm="norm_f",
    ),
    "olmo.OlmoForCausalLM": Family(clip="clip_qkv"),
    "olmo2.Olmo2ForCausalLM": _OLMO2,
    "olmo3.Olmo3ForCausalLM": _OLMO2,
    "olmoe.OlmoeForCausalLM": Family(clip="clip_qkv", mixture=Mixture(_softmax)),
    "phi3.Phi3ForCausalLM": _PHI3,
    "qwen2.Qwen2ForCausalLM": LLAMA,
    "qwen2_5_vl.Qwen2_5_VLTextForCausalLM": LLAMA,
    "qwen2_moe.Qwen2MoeForCausalLM": Family(
        mixture=Mixture(_softmax, shared="shared_expert", shared_gate="shared_expert_gate")
    ),
    "qwen3.Qwen3ForCausalLM": LLAMA,
    "qwen3_5.Qwen3_5ForCausalLM": _QWEN3_NEXT,
    "qwen3_5_moe.Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
    "qwen3_next.Qwen3NextForCausalLM": _QWEN3_NEXT,
    "qwen3_moe.Qwen3MoeForCausalLM": Family(mixture=Mixture(_softmax)),
    "qwen3_vl.Qwen3VLTextForCausalLM": LLAMA,
    "qwen3_vl_moe.Qwen3VLMoeTextForCausalLM": Family(mixture=Mixture(_softmax)),
    "recurrent_gemma.RecurrentGemmaForCausalLM": Family(
        input_norm="temporal_pre_norm",
        inner_norm="channel_pre_norm",
        attention="temporal_block",
        mixers=("temporal_block",),
        rotary=_rotary_of_attention,
        feed="mlp_block",
        activation="hidden_activation",
        embedding_factor="normalizer",
        logit_softcap="logits_soft_cap",
        final_norm="final_norm",
    ),
    "seed_oss.SeedOssForCausalLM": LLAMA,
    "smollm3.SmolLM3ForCausalLM": Family(rotates=_used),
    "starcoder2.Starcoder2ForCausalLM": Family(gate_up=("c_fc",), is_gated=False, down="c_proj"),
    "youtu.YoutuForCausalLM": Family(latent=Latent(interleaved=_pairs_neighbours)),
}


def family_of(module: Any) -> Family | None:
    """Return the declaration of a transformers model's class; None if there is none."""
    return family_of_class(type(module))


def family_of_class(kind: type) -> Family | None:
    """Return the declaration of a class of transformers; None if there is none."""
    parts = kind.__module__.split(".")
    if parts[:2] != ["transformers", "models"]:
        return None
    return FAMILIES.get(f"{parts[2]}.{kind.__qualname__}")


def counts_positions(module: Any) -> bool:
    """Return whether a model's attention counts positions itself, so that only its description can serve it."""
    family = family_of(module)
    return family is not None and family.counts_positions


def latent_of(module: Any) -> Latent | None:
    """Return the declaration of a model's attention over latents; None: it attends over K and V."""
    family = family_of(module)
    return None if family is None else family.latent


def needs_description(module: Any) -> bool:
    """Return whether transformers' layers cannot serve a model in place of its description."""
    return counts_positions(module) or latent_of(module) is not None
