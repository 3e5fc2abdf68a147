"""The weights of one decoder layer, as few and large matrices, and the parts that a decoder is described by.

`kvforge.worker.loading.families` names where transformers keeps these parts. An attribute at
its default leaves the operation out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvforge.worker.attention import AttentionOptions

from .activations import SILU, Activation
from .expert_loop import ExpertMatrices
from .positions import QueryScale
from .recurrent import Mixer
from .router import Router


@dataclass(frozen=True)
class Projection:
    """A linear projection. weight: [n, k], packed for `PackedOperations`. bias: [n], or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Norm:
    """A norm of rows, computed in float32.

    Attributes:
        weight: [n].
        epsilon: Added to the mean of squares.
        bias: [n], or None.
        offset: Added to the weight (Gemma: 1).
        centred: Subtract the mean first: a layer norm.
        rounds_first: Round the normalised row to the dtype of the result before the weight is applied (Llama), not only
            after it (Gemma, OLMo 2).
    """

    weight: torch.Tensor
    epsilon: float
    bias: torch.Tensor | None = None
    offset: float = 0.0
    centred: bool = False
    rounds_first: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is the norm of Llama, for which every device has kernels."""
        return self.bias is None and not self.offset and not self.centred and self.rounds_first


@dataclass(frozen=True)
class HeadNorms:
    """Norms of Q and K.

    Attributes:
        query: With [head_size] numbers for each head, or [heads x head_size] for all heads of a token together.
        key: As `query`, for the KV heads.
        after_rotation: Whether they follow the rotary embedding (Hunyuan), not precede it.
        value: As `key`, for V (Gemma 4); None: none.
    """

    query: Norm
    key: Norm
    after_rotation: bool = False
    value: Norm | None = None


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward block.

    Attributes:
        gate_up: [2 x inner, hidden], the gate first; without a gate [inner, hidden].
        down: [hidden, inner].
        activation: Applied to the gate, or to the only projection.
        is_gated: Whether `gate_up` has a gate.
        gate_factor: Factor of the gate before its activation.
    """

    gate_up: Projection
    down: Projection
    activation: Activation = SILU
    is_gated: bool = True
    gate_factor: float = 1.0

    def product_weights(self) -> Iterator[torch.Tensor]:
        """Yield both weights."""
        yield self.gate_up.weight
        yield self.down.weight


@dataclass(frozen=True)
class MixtureOfExperts:
    """A feed-forward block of experts.

    Attributes:
        gate: The router's weight [experts, hidden].
        router: The choice from its logits.
        choice_bias: [experts] float32, added to scores for the choice only; None: none.
        matrices: Their matrices, also those of shared experts if `router` chooses them.
        factors: [experts], a factor of each expert's weight (Gemma 4); None: none.
        activation: Applied to the gate of each expert.
        interleaved: Whether rows of gate and up alternate.
        shared: Experts that every token uses, as one dense block; None: none, or they are in `matrices`.
        scales_input: Whether the only expert's weight is a factor of its input, not of its result (Llama 4).
        shared_gate: Projection to one number, whose sigmoid is the factor of shared experts; None: 1.
        narrow: Projection of the experts' input, without a bias; None: none.
        widen: Projection of the sum of their results, without a bias; None: none.
    """

    gate: Projection
    router: Router
    choice_bias: torch.Tensor | None
    matrices: ExpertMatrices
    activation: Activation
    interleaved: bool = False
    shared: FeedForward | None = None
    shared_gate: Projection | None = None
    factors: torch.Tensor | None = None
    scales_input: bool = False
    narrow: Projection | None = None
    widen: Projection | None = None

    def product_weights(self) -> Iterator[torch.Tensor]:
        """Yield every weight of a product but the router's."""
        yield from (each.weight for each in (self.narrow, self.widen) if each is not None)
        for matrices in (self.matrices.up, self.matrices.down):
            yield from (matrices,) if isinstance(matrices, torch.Tensor) else matrices
        yield from (each for each in (self.matrices.shared_up, self.matrices.shared_down) if each is not None)
        if self.shared is not None:
            yield from self.shared.product_weights()


@dataclass(frozen=True)
class ExpertsBeside:
    """Experts beside a dense feed-forward block, both of the same residual (Gemma 4).

    With the dense result d and the residual x, the block's result is

        dense_norm(d) + output_norm(mixture(input_norm(x)))

    Attributes:
        mixture: The experts; the router reads router_norm(x).
        input_norm: Norm before the experts.
        router_norm: Norm before the router.
        dense_norm: Norm of the dense result.
        output_norm: Norm of the experts' result.
    """

    mixture: MixtureOfExperts
    input_norm: Norm
    router_norm: Norm
    dense_norm: Norm
    output_norm: Norm


@dataclass(frozen=True)
class TokenBlock:
    """A third block of a layer, with an input of the token itself t (Gemma 4): x += norm(output(gate(x) * t)).

    Attributes:
        gate: [n, hidden], with an activation behind it.
        activation: The activation.
        output: [hidden, n].
        norm: Norm of the result.
    """

    gate: Projection
    activation: Activation
    output: Projection
    norm: Norm


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of every layer's `TokenBlock`.

        scale * (norm(projection_scale * projection(embedding)) + table_scale * table[token])

    Attributes:
        table: [vocab, layers x n].
        table_scale: Factor of its rows.
        projection: [layers x n, hidden].
        projection_scale: Factor of its result.
        norm: Norm of n numbers.
        scale: Factor of the sum.
    """

    table: torch.Tensor
    table_scale: float
    projection: Projection
    projection_scale: float
    norm: Norm
    scale: float


@dataclass(frozen=True)
class LayerFactors:
    """Factors within a layer (Falcon-H1, MiniMax).

    Attributes:
        attention_input: Of what attention reads.
        key: Of K before the rotation.
        attended: Of the result of attention.
        mixed: Of the result of a mixer, beside attention or in its place.
        gate: Of the gate of the feed-forward block, before its activation.
        fed: Of the result of that block.
    """

    attention_input: float = 1.0
    key: float = 1.0
    attended: float = 1.0
    mixed: float = 1.0
    gate: float = 1.0
    fed: float = 1.0


NO_FACTORS = LayerFactors()


@dataclass(frozen=True)
class NormedResidual:
    """Residuals of normed numbers: a block's result is added to what the block reads, times a factor (MiniMax).

    Attributes:
        mixed: The factor beside the result of attention, or of what takes its place.
        fed: The factor beside the result of the feed-forward block.
    """

    mixed: float
    fed: float


@dataclass(frozen=True)
class LatentAttention:
    """The projections of attention over latents, absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C).

    A head's key is its part of `absorb` times the latent, then the rotary key of all heads. Instead of expanding every
    key, its query is multiplied by `absorb` once; the sum of latents is multiplied by `expand` afterwards.

    Attributes:
        query: Projection of the queries' own latent to all heads; None: `FusedLayer.projected` has the queries.
        query_norm: Norm of that latent; None: none.
        latent_norm: Norm of a token's latent before it is stored; None: none.
        absorb: [heads, numbers of a query without rotation, latent], any strides.
        expand: [heads, latent, numbers of a value], any strides.
        expansion: [heads x (numbers of a query without rotation + of a value), latent], contiguous: both, by head.
        rotated: Numbers of a rotary key, behind those without rotation in each query.
    """

    query: Projection | None
    query_norm: Norm | None
    latent_norm: Norm | None
    absorb: torch.Tensor
    expand: torch.Tensor
    expansion: torch.Tensor
    rotated: int

    @property
    def size(self) -> int:
        """Numbers of a latent."""
        return self.absorb.shape[2]

    @property
    def is_expandable(self) -> bool:
        """Whether a value has a place in the memory of a key."""
        return self.expand.shape[2] <= self.absorb.shape[1] + self.rotated

    @property
    def width(self) -> int:
        """Numbers that are stored for a token."""
        return self.size + self.rotated


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one decoder layer.

    With the residual x, and q, k and v projected from input_norm(x):

        x += residual_scale * attended_norm(output(attend(q, k, v)))
        x += residual_scale * fed_norm(feed(inner_norm(x)))

    In parallel, `feed` reads the same input_norm(x) as attention. With a normed residual the sums are

        x = normed_residual.mixed * input_norm(x) + ...
        x = normed_residual.fed * inner_norm(x) + ...

    Attributes:
        options: Attention options.
        rotary: Index of the decoder's rotary table; None: no rotation.
        heads: Query heads.
        kv_heads: KV heads.
        head_size: Numbers of a head.
        input_norm: Norm before attention.
        projected: Q, then K, then V.
        head_norms: Norms of Q and K.
        output: Projection of the heads' results.
        attended_norm: Norm of the result of attention.
        inner_norm: Norm before the feed-forward block.
        feed: The feed-forward block; None: none.
        fed_norm: Norm of its result.
        residual_scale: Factor of both results.
        is_parallel: Whether attention and feed-forward read the same norm.
        query_scale: Factor of rotated queries by position; None: none.
        clip: Largest size of numbers of Q, K and V before the rotation; 0: unlimited.
        value_scale: Factor of V.
        value_is_key: Whether V is K before norm and rotation; `projected` then has Q and K only.
        kv_layer: Index of the layer with the K and V that this layer reads; `projected` then has Q only. None: its own.
        experts_beside: Experts beside the dense block `feed`; None: none.
        token_block: The third block; None: none.
        output_scale: Factor of the residual after the last block.
        latent: Attention over latents: `projected` is Q or its latent, then the token's latent, then its rotary key.
            None: over K and V.
        mixer: A recurrent state in place of attention, with `projected` and `output` empty, or beside attention: both
            read the same norm, and the residual gets both results. None: it attends, or has the feed-forward block
            alone, which then reads `input_norm`.
        is_query_gated: Whether Q follows a gate of as many numbers, whose sigmoid is a factor of the heads' results.
        factors: Factors of inputs and results.
        normed_residual: Factors of what both results are added to; None: the residual as it is.
    """

    options: AttentionOptions
    rotary: int | None
    heads: int
    kv_heads: int
    head_size: int
    input_norm: Norm | None
    projected: Projection
    head_norms: HeadNorms | None
    output: Projection
    inner_norm: Norm | None
    feed: FeedForward | MixtureOfExperts | None
    attended_norm: Norm | None = None
    fed_norm: Norm | None = None
    residual_scale: float = 1.0
    is_parallel: bool = False
    query_scale: QueryScale | None = None
    clip: float = 0.0
    value_scale: float = 1.0
    value_is_key: bool = False
    kv_layer: int | None = None
    experts_beside: ExpertsBeside | None = None
    token_block: TokenBlock | None = None
    output_scale: float = 1.0
    latent: LatentAttention | None = None
    mixer: Mixer | None = None
    is_query_gated: bool = False
    factors: LayerFactors = NO_FACTORS
    normed_residual: NormedResidual | None = None

    @property
    def attends(self) -> bool:
        """Whether it has attention, maybe beside a mixer."""
        return self.heads > 0

    @property
    def mixture(self) -> MixtureOfExperts | None:
        """The experts, of the feed-forward block or beside it; None: none."""
        if self.experts_beside is not None:
            return self.experts_beside.mixture
        return self.feed if isinstance(self.feed, MixtureOfExperts) else None

    def product_weights(self) -> Iterator[torch.Tensor]:
        """Yield every weight of a product but the router's."""
        if self.attends:
            yield self.projected.weight
            if self.latent is not None and self.latent.query is not None:
                yield self.latent.query.weight
            yield self.output.weight
        if self.feed is not None:
            yield from self.feed.product_weights()
        if self.experts_beside is not None:
            yield from self.experts_beside.mixture.product_weights()
        if self.token_block is not None:
            yield self.token_block.gate.weight
            yield self.token_block.output.weight

    @property
    def dense(self) -> FeedForward | None:
        """The dense feed-forward block, or the shared experts; None: neither."""
        return self.feed.shared if isinstance(self.feed, MixtureOfExperts) else self.feed

    @property
    def is_plain(self) -> bool:
        """Whether it is a layer of Llama, Mistral, Qwen2 or Qwen3."""
        if self.input_norm is None or not self.input_norm.is_plain or not self.sums_into_norms:
            return False
        if (
            self.value_scale != 1.0
            or self.query_scale is not None
            or self.clip
            or self.value_is_key
            or self.kv_layer is not None
            or self.latent is not None
            or self.mixer is not None
            or self.is_query_gated
            or self.factors != NO_FACTORS
        ):
            return False
        feed = self.feed
        has_plain_feed = isinstance(feed, FeedForward) and feed.is_gated and feed.activation == SILU
        return self.has_plain_heads and has_plain_feed

    @property
    def sums_into_norms(self) -> bool:
        """Whether both results are added to the residual as they are, and a plain norm follows the first one.

        With several ranks, one kernel then adds their parts and computes the norm (see `kernels.exchange`).
        """
        if self.inner_norm is None or not self.inner_norm.is_plain or self.is_parallel:
            return False
        if self.attended_norm is not None or self.fed_norm is not None or self.residual_scale != 1.0:
            return False
        if self.factors != NO_FACTORS or (self.mixer is not None and self.attends) or self.normed_residual is not None:
            return False
        return self.experts_beside is None and self.token_block is None and self.output_scale == 1.0

    @property
    def has_plain_heads(self) -> bool:
        """Whether Q and K have no norms, or those of Qwen3."""
        return self.head_norms is None or (
            not self.head_norms.after_rotation
            and self.head_norms.value is None
            and self.norms_each_head
            and self.head_norms.query.is_plain
        )

    @property
    def norms_each_head(self) -> bool:
        """Whether the norms of Q and K apply to each head by itself."""
        return self.head_norms is not None and len(self.head_norms.query.weight) == self.head_size
