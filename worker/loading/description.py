"""The terms of a declaration: where transformers keeps the parts of a decoder. `families` has the declarations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvforge.worker.kernels.layer_weights import NO_FACTORS, LayerFactors, NormedResidual
from kvforge.worker.kernels.positions import QueryScale
from kvforge.worker.kernels.router import Router


def _always(_attention: Any) -> bool:
    return True


def _unscaled(_attention: Any) -> None:
    return None


def _no_factors(_layer: Any) -> LayerFactors:
    return NO_FACTORS


def _as_it_is(_layer: Any) -> None:
    return None


def _own(_decoder: Any, _layer: int) -> None:
    return None


def _rotary(decoder: Any, _layer: int) -> Any:
    return decoder.rotary_emb


@dataclass(frozen=True)
class Mixture:
    """The names of the parts of a mixture of experts, in the feed-forward module of a layer.

    Attributes:
        router: Settings to the router; the dtype that weights are rounded to is that of the model, unless `wide`.
        gate: The module with the router's weight.
        weight: Its weight, or the module inside that has it.
        choice_bias: Tensor that is added to scores for the choice, by its path; "": none.
        factors: Tensor with a factor of each expert's weight, by its path; "": none.
        scales_input: Whether an expert's weight is a factor of its input, and its module is that of Llama 4.
        wide: Whether the weights of experts stay in float32.
        experts: transformers' module of experts.
        shared: The module of shared experts, whose projections are those of the family; "": none.
        is_shared_outside: Whether the layer has that module, not its feed-forward module. A layer without the latter
            is dense.
        shared_gate: Projection whose sigmoid is their factor; "": none.
        narrow, widen: Projections before and behind the experts, which the router and shared experts have not; "":
            none. A model without them has other modules there.
    """

    router: Callable[[Any], Router]
    gate: str = "gate"
    weight: str = ""
    choice_bias: str = ""
    factors: str = ""
    scales_input: bool = False
    wide: bool = False
    experts: str = "experts"
    shared: str = ""
    is_shared_outside: bool = False
    shared_gate: str = ""
    narrow: str = ""
    widen: str = ""

    def latents(self, feed: Any) -> tuple[str, ...]:
        """Return the names of the projections around the experts of a feed-forward module; none in most models."""
        return tuple(name for name in (self.narrow, self.widen) if name and hasattr(getattr(feed, name), "in_features"))


@dataclass(frozen=True)
class Beside:
    """The names of the parts of experts beside a dense block, in a layer. The defaults are Gemma 4's.

    Attributes:
        mixture: The experts, with names in the layer.
        input_norm: Norm before the experts.
        router: The router. Its norm has no weight: a scale per number and one of all follow.
        router_norm: Its norm.
        router_scale: Its scale of each number.
        router_factor: Its scale of all numbers.
        dense_norm: Norm of the dense result.
        output_norm: Norm of the experts' result.
    """

    mixture: Mixture
    input_norm: str = "pre_feedforward_layernorm_2"
    router: str = "router"
    router_norm: str = "norm"
    router_scale: str = "scale"
    router_factor: str = "scalar_root_size"
    dense_norm: str = "post_feedforward_layernorm_1"
    output_norm: str = "post_feedforward_layernorm_2"


@dataclass(frozen=True)
class TokenBlocks:
    """The names of blocks with an input of the token itself. The defaults are Gemma 4's.

    Attributes:
        table: The decoder's table of inputs.
        projection: The decoder's projection of embeddings to inputs.
        projection_scale: Factor of that projection.
        projection_norm: Norm of its result.
        scale: Factor of the sum.
        gate: A layer's projection of the residual.
        output: A layer's projection to the residual.
        norm: A layer's norm of the result.
    """

    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    projection_scale: str = "per_layer_model_projection_scale"
    projection_norm: str = "per_layer_projection_norm"
    scale: str = "per_layer_input_scale"
    gate: str = "per_layer_input_gate"
    output: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True)
class Latent:
    """The names of the parts of attention over latents, in an attention module. The defaults are DeepSeek's.

    Attributes:
        query: Projection to Q, in models without a latent of queries.
        query_down: Projection to the latent of queries.
        query_norm: Norm of that latent.
        query_up: Projection from it to Q.
        latent: Projection to a token's latent and its rotary key.
        latent_norm: Norm of the latent.
        expansion: Projection from the latent to each head's key without rotation and value.
        latent_size: Attribute with the numbers of a latent.
        plain_size: Attribute with the numbers of a head of Q and K that are not rotated.
        rotated_size: Attribute with those that are rotated, which follow.
        value_size: Attribute with the numbers of a head of V.
        interleaved: Whether an attention module pairs neighbours, not halves.
    """

    query: str = "q_proj"
    query_down: str = "q_a_proj"
    query_norm: str = "q_a_layernorm"
    query_up: str = "q_b_proj"
    latent: str = "kv_a_proj_with_mqa"
    latent_norm: str = "kv_a_layernorm"
    expansion: str = "kv_b_proj"
    latent_size: str = "kv_lora_rank"
    plain_size: str = "qk_nope_head_dim"
    rotated_size: str = "qk_rope_head_dim"
    value_size: str = "v_head_dim"
    interleaved: Callable[[Any], bool] = _always

    @property
    def by_head(self) -> tuple[str, ...]:
        """The projections with rows that belong to heads."""
        return self.query, self.query_up, self.expansion


@dataclass(frozen=True)
class Family:
    """The names of one family's parts. The defaults are Llama's.

    Attributes:
        input_norm: Norm before attention; "": none.
        attended_norm: Norm of the result of attention; "": none.
        inner_norm: Norm before the feed-forward block; "": none.
        fed_norm: Norm of its result; "": none.
        projected: Projections to Q, K and V in order, or the joined one.
        attention: The module with these projections in a layer that attends.
        output: Projection of the heads' results.
        is_query_gated: Whether each head's rows of Q are followed by rows of a gate, whose sigmoid is a factor of the
            head's result.
        mixers: Modules with a recurrent state, one of which a layer has in place of attention; see `mixers`.
        mixes_beside: Whether a layer has it beside attention.
        one_block: Whether a layer has one block, a mixer, attention or the feed-forward block, in a module with one
            name for all.
        factors: Factors within a layer.
        normed_residual: Factors of a layer's normed residuals; None: its residual is not normed.
        head_norms: Norms of Q and K; both may be missing in a model.
        norms_after_rotation: Whether these follow the rotary embedding.
        value_norm: Norm of V; "": none.
        value_size: Attribute of an attention module with the size of the heads of V, if it differs from that of K.
        value_scale: Attribute with the factor of V; "": none.
        kv_layer: Index of the layer with the K and V of a layer, from the decoder and the layer's index; None: its own.
        rotates: Whether an attention module rotates Q and K.
        rotary: The module with the rotary embedding of a layer, from the decoder and the layer's index; None: none.
        query_scale: An attention module's factor of queries by position; None: none.
        counts_positions: Whether attention modules count positions themselves, so that only the description serves.
        latent: Attention over latents, which only the description serves; None: over K and V.
        clip: Setting with the largest size of numbers of Q, K and V; "": none.
        interleaved: Whether the rotary embedding pairs neighbours (numbers 2i and 2i + 1), not halves.
        feed: The feed-forward module of a layer.
        gate_up: Its projections to gate and up in order, or the joined one; without a gate, one name.
        is_gated: Whether there is a gate.
        down: Its last projection.
        activation: Setting that names the activation, or its name.
        mixture: The mixture of experts, in layers that have one.
        is_parallel: Whether attention and feed-forward read the same norm.
        beside: Experts beside the dense block, in models that have them.
        token_blocks: Blocks with an input of the token, in models that have them.
        output_scale: Tensor with the factor of the residual after a layer; "": none.
        embedding_scale: Setting with the factor of embeddings; "": that of the embedding module, or none.
        embedding_factor: Tensor of the decoder with that factor; "": none.
        residual_scale: Setting with the factor of both results; "": none.
        residual_factor: Attribute of layers with that factor; "": none.
        logit_scale: Setting with the factor of logits; "": none.
        logit_divisor: Setting with the divisor of logits; "": none.
        logit_softcap: Setting with the cap of logits; "": none.
        final_norm: Norm before the head.
    """

    input_norm: str = "input_layernorm"
    attended_norm: str = ""
    inner_norm: str = "post_attention_layernorm"
    fed_norm: str = ""
    projected: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention: str = "self_attn"
    output: str = "o_proj"
    is_query_gated: bool = False
    mixers: tuple[str, ...] = ()
    mixes_beside: bool = False
    one_block: bool = False
    factors: Callable[[Any], LayerFactors] = _no_factors
    normed_residual: Callable[[Any], NormedResidual | None] = _as_it_is
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_after_rotation: bool = False
    value_norm: str = ""
    value_size: str = ""
    value_scale: str = ""
    kv_layer: Callable[[Any, int], int | None] = _own
    rotates: Callable[[Any], bool] = _always
    rotary: Callable[[Any, int], Any] = _rotary
    query_scale: Callable[[Any], QueryScale | None] = _unscaled
    counts_positions: bool = False
    latent: Latent | None = None
    clip: str = ""
    interleaved: bool = False
    feed: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    is_gated: bool = True
    down: str = "down_proj"
    activation: str = "hidden_act"
    mixture: Mixture | None = None
    is_parallel: bool = False
    beside: Beside | None = None
    token_blocks: TokenBlocks | None = None
    output_scale: str = ""
    embedding_scale: str = ""
    embedding_factor: str = ""
    residual_scale: str = ""
    residual_factor: str = ""
    logit_scale: str = ""
    logit_divisor: str = ""
    logit_softcap: str = ""
    final_norm: str = "norm"

    @property
    def joins_gate(self) -> bool:
        """Whether the gate of a feed-forward block is in one projection with what it gates."""
        return len(self.gate_up) < 1 + self.is_gated

    def mixer_of(self, layer: Any) -> Any:
        """Return a layer's module with a recurrent state; None: it attends.

        Layers of either kind may have their module under one name: one with projections to Q, or to latents, attends.
        """
        found = (getattr(layer, name, None) for name in self.mixers)
        attends = self.projected[0] if self.latent is None else self.latent.latent
        return next(
            (each for each in found if each is not None and not hasattr(each, attends) and not self._only_feeds(each)),
            None,
        )

    def attends(self, layer: Any) -> bool:
        """Return whether a layer has attention."""
        if self.one_block and self._only_feeds(getattr(layer, self.feed)):
            return False
        return self.mixes_beside or self.mixer_of(layer) is None

    def feed_of(self, layer: Any) -> Any:
        """Return a layer's module with the feed-forward block, or with the experts; None: it has another block."""
        feed = getattr(layer, self.feed)
        if self.one_block:
            return feed if self._only_feeds(feed) else None
        return self.shared_of(layer, feed) if feed is None else feed

    def _only_feeds(self, block: Any) -> bool:
        """Return whether the only block of a layer is the feed-forward block."""
        names = (self.gate_up[0], *([] if self.mixture is None else [self.mixture.experts]))
        return self.one_block and any(hasattr(block, name) for name in names)

    def shared_of(self, layer: Any, feed: Any) -> Any:
        """Return the module of shared experts of a layer with experts; None: none."""
        assert self.mixture is not None
        owner = layer if self.mixture.is_shared_outside else feed
        return getattr(owner, self.mixture.shared, None) if self.mixture.shared else None
