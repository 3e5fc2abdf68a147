"""Where transformers keeps the parts of a decoder: one declaration for each family.

A declaration names modules and settings; `fusion` builds the decoder from it. Norms and biases are found by themselves.
A wrong or incomplete declaration is caught at load: the logits are compared with those of transformers' own layers
(`verification`), and the model then runs through these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvforge.worker.kernels.layer_weights import QueryScale
from kvforge.worker.kernels.router import Router


def _unscaled(_attention: Any) -> None:
    return None


def _scaled_by_position(attention: Any) -> QueryScale | None:
    rope = attention.config.rope_parameters
    growth = rope["llama_4_scaling_beta"]
    return QueryScale(growth, rope["original_max_position_embeddings"]) if growth else None


def _always(_attention: Any) -> bool:
    return True


def _used(attention: Any) -> bool:
    return bool(attention.use_rope)


def _in_windows(attention: Any) -> bool:
    return attention.sliding_window is not None


def _in_windows_of_hybrids(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


def _softmax(config: Any) -> Router:
    """All experts compete; the weights of the chosen ones may be divided by their sum."""
    return Router(config.num_experts_per_tok, normalises=bool(getattr(config, "norm_topk_prob", True)))


def _softmax_of_chosen(config: Any) -> Router:
    return Router(config.num_experts_per_tok, scores="", weights="softmax")


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


def _softmax_with_least_sum(config: Any) -> Router:
    return Router(config.num_experts_per_tok, normalises=True, sum_min=config.moe_norm_min)


def _softmax_of_hunyuan(config: Any) -> Router:
    return Router(config.moe_topk if isinstance(config.moe_topk, int) else config.moe_topk[0], normalises=True)


@dataclass(frozen=True)
class Mixture:
    """The names of the parts of a mixture of experts, in the feed-forward module of a layer.

    Attributes:
        router: Settings to the router; the dtype that weights are rounded to is that of the model, unless `wide`.
        gate: The module with the router's weight.
        weight: Its weight, or the module inside that has it.
        choice_bias: Tensor that is added to scores for the choice, by its path; "": none.
        wide: Whether the weights of experts stay in float32.
        experts: transformers' module of experts.
        shared: The module of shared experts, whose projections are those of the family; "": none.
        shared_gate: Projection whose sigmoid is their factor; "": none.
    """

    router: Callable[[Any], Router]
    gate: str = "gate"
    weight: str = ""
    choice_bias: str = ""
    wide: bool = False
    experts: str = "experts"
    shared: str = ""
    shared_gate: str = ""


@dataclass(frozen=True)
class Family:
    """The names of one family's parts. The defaults are Llama's.

    Attributes:
        input_norm: Norm before attention; "": none.
        attended_norm: Norm of the result of attention; "": none.
        inner_norm: Norm before the feed-forward block; "": none.
        fed_norm: Norm of its result; "": none.
        projected: Projections to Q, K and V in order, or the joined one.
        output: Projection of the heads' results.
        head_norms: Norms of Q and K; both may be missing in a model.
        norms_after_rotation: Whether these follow the rotary embedding.
        rotates: Whether an attention module rotates Q and K.
        query_scale: An attention module's factor of queries by position; None: none.
        interleaved: Whether the rotary embedding pairs neighbours (numbers 2i and 2i + 1), not halves.
        feed: The feed-forward module of a layer.
        gate_up: Its projections to gate and up in order, or the joined one; without a gate, one name.
        is_gated: Whether there is a gate.
        down: Its last projection.
        activation: Setting that names the activation.
        mixture: The mixture of experts, in layers that have one.
        is_parallel: Whether attention and feed-forward read the same norm.
        embedding_scale: Setting with the factor of embeddings; "": that of the embedding module, or none.
        residual_scale: Setting with the factor of both results; "": none.
        logit_scale: Setting with the factor of logits; "": none.
        logit_divisor: Setting with the divisor of logits; "": none.
        logit_softcap: Setting with the cap of logits; "": none.
    """

    input_norm: str = "input_layernorm"
    attended_norm: str = ""
    inner_norm: str = "post_attention_layernorm"
    fed_norm: str = ""
    projected: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_after_rotation: bool = False
    rotates: Callable[[Any], bool] = _always
    query_scale: Callable[[Any], QueryScale | None] = _unscaled
    interleaved: bool = False
    feed: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    is_gated: bool = True
    down: str = "down_proj"
    activation: str = "hidden_act"
    mixture: Mixture | None = None
    is_parallel: bool = False
    embedding_scale: str = ""
    residual_scale: str = ""
    logit_scale: str = ""
    logit_divisor: str = ""
    logit_softcap: str = ""


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
_PHI3 = Family(projected=("qkv_proj",), gate_up=("gate_up_proj",))
_GRANITE = Family(
    embedding_scale="embedding_multiplier", residual_scale="residual_multiplier", logit_divisor="logits_scaling"
)
_HUNYUAN = Family(head_norms=("query_layernorm", "key_layernorm"), norms_after_rotation=True)

# By the folder in transformers.models and the class of the model.
FAMILIES = {
    "apertus.ApertusForCausalLM": Family(
        input_norm="attention_layernorm", inner_norm="feedforward_layernorm", gate_up=("up_proj",), is_gated=False
    ),
    "cohere.CohereForCausalLM": Family(inner_norm="", interleaved=True, is_parallel=True, logit_scale="logit_scale"),
    "cohere2.Cohere2ForCausalLM": Family(
        inner_norm="", rotates=_in_windows, interleaved=True, is_parallel=True, logit_scale="logit_scale"
    ),
    "ernie4_5.Ernie4_5ForCausalLM": Family(interleaved=True),
    "exaone4.Exaone4ForCausalLM": replace(_OLMO2, rotates=_in_windows_of_hybrids),
    "ernie4_5_moe.Ernie4_5_MoeForCausalLM": Family(
        interleaved=True,
        mixture=Mixture(
            _softmax_with_least_sum, choice_bias="gate.moe_statics.e_score_correction_bias", shared="shared_experts"
        ),
    ),
    "gemma.GemmaForCausalLM": Family(),
    "gemma2.Gemma2ForCausalLM": _GEMMA2,
    "gemma3.Gemma3ForCausalLM": _GEMMA2,
    "glm.GlmForCausalLM": Family(gate_up=("gate_up_proj",), interleaved=True),
    "glm4.Glm4ForCausalLM": Family(
        attended_norm="post_self_attn_layernorm",
        fed_norm="post_mlp_layernorm",
        gate_up=("gate_up_proj",),
        interleaved=True,
    ),
    "glm4_moe.Glm4MoeForCausalLM": Family(
        mixture=Mixture(
            _sigmoid_in_groups, choice_bias="gate.e_score_correction_bias", wide=True, shared="shared_experts"
        )
    ),
    "gpt_oss.GptOssForCausalLM": Family(mixture=Mixture(_softmax_of_chosen, gate="router")),
    "granite.GraniteForCausalLM": _GRANITE,
    "granitemoe.GraniteMoeForCausalLM": replace(
        _GRANITE, feed="block_sparse_moe", mixture=Mixture(_softmax_of_chosen, gate="router")
    ),
    "hunyuan_v1_dense.HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "hunyuan_v1_moe.HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN, mixture=Mixture(_softmax_of_hunyuan, weight="wg", wide=True, shared="shared_mlp")
    ),
    "llama.LlamaForCausalLM": LLAMA,
    "minimax_m2.MiniMaxM2ForCausalLM": Family(
        mixture=Mixture(_sigmoid, choice_bias="e_score_correction_bias", wide=True)
    ),
    "ministral.MinistralForCausalLM": LLAMA,
    "ministral3.Ministral3ForCausalLM": Family(query_scale=_scaled_by_position),
    "mistral.MistralForCausalLM": LLAMA,
    "mixtral.MixtralForCausalLM": Family(mixture=Mixture(_softmax, wide=True)),
    "nemotron.NemotronForCausalLM": Family(gate_up=("up_proj",), is_gated=False),
    "olmo2.Olmo2ForCausalLM": _OLMO2,
    "olmo3.Olmo3ForCausalLM": _OLMO2,
    "olmoe.OlmoeForCausalLM": Family(mixture=Mixture(_softmax)),
    "phi3.Phi3ForCausalLM": _PHI3,
    "qwen2.Qwen2ForCausalLM": LLAMA,
    "qwen2_moe.Qwen2MoeForCausalLM": Family(
        mixture=Mixture(_softmax, shared="shared_expert", shared_gate="shared_expert_gate")
    ),
    "qwen3.Qwen3ForCausalLM": LLAMA,
    "qwen3_moe.Qwen3MoeForCausalLM": Family(mixture=Mixture(_softmax)),
    "qwen3_vl.Qwen3VLTextForCausalLM": LLAMA,
    "seed_oss.SeedOssForCausalLM": LLAMA,
    "smollm3.SmolLM3ForCausalLM": Family(rotates=_used),
    "starcoder2.Starcoder2ForCausalLM": Family(gate_up=("c_fc",), is_gated=False, down="c_proj"),
}


def family_of(module: Any) -> Family | None:
    """Return the declaration of a transformers model's class; None if there is none."""
    kind = type(module)
    parts = kind.__module__.split(".")
    if parts[:2] != ["transformers", "models"]:
        return None
    return FAMILIES.get(f"{parts[2]}.{kind.__qualname__}")
