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
from .partition import apply_aligned
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
    """

    query: Norm
    key: Norm
    after_rotation: bool = False


@dataclass(frozen=True)
class RotaryTable:
    """Frequencies of a rotary embedding.

    Attributes:
        frequencies: [rotated / 2] float32; the first `rotated` numbers of each head are rotated.
        scaling: Factor of cos and sin.
    """

    frequencies: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with the position p: 1 + growth x log(1 + floor((p + offset) / length)).

    Ministral 3 and Llama 4 (arXiv 2501.19399) keep attention sharp over many keys with it.

    Attributes:
        growth: Factor of the logarithm.
        length: Positions from one step of the factor to the next.
        offset: Added to the position.
        rounds_first: Round the factor to the dtype of queries before the product, not only the product.
    """

    growth: float
    length: float
    offset: float = 0.0
    rounds_first: bool = True

    def factors(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the factor of each position.

        Args:
            positions: [tokens] int64.
            dtype: Dtype of queries.

        Returns:
            [tokens, 1, 1] float32, or `dtype` where the factor is rounded.
        """
        steps = torch.floor((positions.float() + self.offset) / self.length)
        found = 1.0 + self.growth * apply_aligned(torch.log1p, steps)
        return (found.to(dtype) if self.rounds_first else found)[:, None, None]


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward block.

    Attributes:
        gate_up: [2 x inner, hidden], the gate first; without a gate [inner, hidden].
        down: [hidden, inner].
        activation: Applied to the gate, or to the only projection.
        is_gated: Whether `gate_up` has a gate.
    """

    gate_up: Projection
    down: Projection
    activation: Activation = SILU
    is_gated: bool = True

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
        matrices: Their matrices.
        activation: Applied to the gate of each expert.
        interleaved: Whether rows of gate and up alternate.
        shared: Experts that every token uses, as one dense block; None: none.
        shared_gate: Projection to one number, whose sigmoid is the factor of `shared`; None: 1.
    """

    gate: Projection
    router: Router
    choice_bias: torch.Tensor | None
    matrices: ExpertMatrices
    activation: Activation
    interleaved: bool = False
    shared: FeedForward | None = None
    shared_gate: Projection | None = None

    def product_weights(self) -> Iterator[torch.Tensor]:
        """Yield every weight of a product but the router's."""
        for matrices in (self.matrices.up, self.matrices.down):
            yield from (matrices,) if isinstance(matrices, torch.Tensor) else matrices
        if self.shared is not None:
            yield from self.shared.product_weights()


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one decoder layer.

    With the residual x, and q, k and v projected from input_norm(x):

        x += residual_scale * attended_norm(output(attend(q, k, v)))
        x += residual_scale * fed_norm(feed(inner_norm(x)))

    In parallel, `feed` reads the same input_norm(x) as attention.

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
        feed: The feed-forward block.
        fed_norm: Norm of its result.
        residual_scale: Factor of both results.
        is_parallel: Whether attention and feed-forward read the same norm.
        query_scale: Factor of rotated queries by position; None: none.
        clip: Largest size of numbers of Q, K and V before the rotation; 0: unlimited.
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
    feed: FeedForward | MixtureOfExperts
    attended_norm: Norm | None = None
    fed_norm: Norm | None = None
    residual_scale: float = 1.0
    is_parallel: bool = False
    query_scale: QueryScale | None = None
    clip: float = 0.0

    @property
    def dense(self) -> FeedForward | None:
        """The dense feed-forward block, or the shared experts; None: neither."""
        return self.feed if isinstance(self.feed, FeedForward) else self.feed.shared

    @property
    def is_plain(self) -> bool:
        """Whether it is a layer of Llama, Mistral, Qwen2 or Qwen3."""
        norms = (self.input_norm, self.inner_norm)
        if not all(norm is not None and norm.is_plain for norm in norms):
            return False
        if self.attended_norm is not None or self.fed_norm is not None or self.residual_scale != 1.0:
            return False
        if self.query_scale is not None or self.clip:
            return False
        feed = self.feed
        has_plain_feed = isinstance(feed, FeedForward) and feed.is_gated and feed.activation == SILU
        return not self.is_parallel and self.has_plain_heads and has_plain_feed

    @property
    def has_plain_heads(self) -> bool:
        """Whether Q and K have no norms, or those of Qwen3."""
        return self.head_norms is None or (
            not self.head_norms.after_rotation and self.norms_each_head and self.head_norms.query.is_plain
        )

    @property
    def norms_each_head(self) -> bool:
        """Whether the norms of Q and K apply to each head by itself."""
        return self.head_norms is not None and len(self.head_norms.query.weight) == self.head_size
