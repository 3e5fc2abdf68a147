"""The interface of the operations of a decoder layer, and the limits of every implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from kvforge.worker.attention import KvLayer, PagedAttention, PagedBatch
from kvforge.worker.attention.pool import KvPool

from .activations import SILU, Activation
from .expert_loop import ExpertMatrices
from .layer_weights import FusedLayer, Norm
from .positions import RotaryTable
from .recurrent import StateOperations
from .router import Router

SLAB = 32  # rows per product where products must not depend on the row count, but ours and torch's differ
HIDDEN_MAX, HEAD_SIZE_MAX = 16384, 256  # longest rows of a norm among the tested configurations


class LayerOperations(StateOperations, Protocol):
    """An implementation of the operations.

    A sum may be passed in parts [parts, tokens, n], which the next operation adds in order: see `linear_parts`.
    """

    def embed(
        self, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up tokens, and normalise the rows.

        Args:
            tokens: [tokens] int on the device.
            table: [vocab, hidden].
            weight: [hidden], weight of the norm.
            epsilon: Epsilon of the norm.

        Returns:
            The rows and their norms, two new tensors [tokens, hidden].
        """

    def look_up(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Look up tokens [tokens] int in a table [vocab, hidden], without a norm: new rows [tokens, hidden]."""

    def add_norm(
        self, addend: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add to the residual in place, and normalise the sum.

        Args:
            addend: [parts, tokens, hidden].
            residual: [tokens, hidden], contiguous; changed.
            weight: [hidden], weight of the norm.
            epsilon: Epsilon of the norm.

        Returns:
            The normalised rows, a new tensor [tokens, hidden].
        """

    def head_norm(
        self,
        projected: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> None:
        """Normalise each head of Q and K in place (Qwen3).

        Args:
            projected: [tokens, (heads + 2 x kv_heads) x head_size], contiguous; changed.
            query_weight: [head_size].
            key_weight: [head_size].
            heads: Query heads.
            kv_heads: KV heads.
            epsilon: Epsilon of the norm.
        """

    def norm(self, x: torch.Tensor, norm: Norm, output: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise rows.

        Args:
            x: [tokens, n] or [tokens, heads, n], the last dimension contiguous.
            norm: The norm, of n numbers.
            output: Receives the result, of the shape of x; may be x. None: allocate it.

        Returns:
            The normalised rows, in the shape and the dtype of x.
        """

    def norm_heads(self, projected: torch.Tensor, query: Norm, key: Norm, heads: int, kv_heads: int) -> None:
        """Normalise each head of Q and K in place, as `head_norm` does, with norms that differ only in their weights.

        Args:
            projected: [tokens, (heads + 2 x kv_heads) x head_size], contiguous; changed.
            query: Of [head_size].
            key: Of [head_size].
            heads: Query heads.
            kv_heads: KV heads.
        """

    def combine(
        self,
        addend: torch.Tensor,
        residual: torch.Tensor,
        after: Norm | None,
        scale: float,
        following: Norm | None,
    ) -> torch.Tensor:
        """Add `scale` times the norm of a sum to the residual in place, and normalise the result.

        Args:
            addend: [parts, tokens, hidden].
            residual: [tokens, hidden], contiguous; changed.
            after: Norm of the sum of parts; None: none.
            scale: Factor.
            following: Norm of the new residual; None: none.

        Returns:
            The normalised rows, a new tensor [tokens, hidden]; `residual` itself without `following`.
        """

    def gated(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation = SILU,
    ) -> torch.Tensor:
        """Compute activation(gate) x up of x [tokens, k].

        Args:
            x: [tokens, k].
            weight: [2n, k], the gate first.
            bias: [2n], the gate first.
            activation: The activation.

        Returns:
            [tokens, n].
        """

    def activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """Compute activation(x weight^T + bias): a feed-forward layer without a gate.

        Args:
            x: [tokens, k].
            weight: [n, k].
            bias: [n].
            activation: The activation.

        Returns:
            [tokens, n].
        """

    def route(
        self,
        logits: torch.Tensor,
        router: Router,
        bias: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token, independently of other tokens.

        Args:
            logits: [tokens, experts], contiguous; or [parts, tokens, experts] from `linear_parts`. Their sum is then
                rounded to the dtype of x.
            router: The router.
            bias: [experts] float32, added to the scores for the choice only.
            factors: [experts] float32, factors of the weights.
            x: [tokens, hidden], what `shared_gate` multiplies; None: a sum of parts is not rounded.
            shared_gate: [1, hidden], contiguous. The sigmoid of its product is the weight of `router.shared` experts;
                None: that weight is 1.

        Returns:
            The experts [tokens, chosen + shared] int32, in falling order of their scores and with the shared ones last,
            and their weights [tokens, chosen + shared] float32. With `router.held`: indices in this rank's experts, and
            AWAY for those of other ranks.
        """

    def experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        matrices: ExpertMatrices,
        activation: Activation,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Compute the experts of each token, weight their results, and add them in the order of the router.

        Args:
            x: [tokens, hidden].
            chosen: [tokens, experts per token] int32 or int64; each expert at most once per token. AWAY adds nothing.
            weights: [tokens, experts per token] float.
            matrices: The matrices; without a gate, `up` has as many rows as `down` has columns.
            activation: The activation.
            interleaved: Whether rows of gate and up alternate, as gpt-oss stores them; else the gate comes first.

        Returns:
            [tokens, hidden].
        """

    def expert_parts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        matrices: ExpertMatrices,
        activation: Activation,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Compute `experts` as a sum [parts, tokens, hidden] for the next operation to add."""

    def rotary(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute cos and sin of a rotary embedding.

        Args:
            positions: [tokens] int on the device.
            frequencies: [n] float32.
            scaling: Factor of both results.
            dtype: Dtype of the results.

        Returns:
            cos and sin, each [tokens, 2 x n]; both halves are equal.
        """

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute x weight^T + bias.

        Args:
            x: [tokens, k].
            weight: [n, k].
            bias: [n].
            output: [tokens, n] float, contiguous, receives the result in its own dtype. None: allocate it in the dtype
                of x.

        Returns:
            [tokens, n].
        """

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x weight^T + bias in float32.

        Args:
            x: [tokens, k].
            weight: [n, k] float32, of few rows.
            bias: [n] float32, or None.

        Returns:
            [tokens, n] float32.
        """

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply each head by its own matrix.

        Args:
            x: [tokens, heads, k], the last dimension contiguous.
            weight: [heads, k, n], any strides.
            output: [tokens, heads, n] in the dtype of x, the last dimension contiguous, receives the result. None:
                allocate it.

        Returns:
            [tokens, heads, n].
        """

    def latent_inputs(
        self,
        own: torch.Tensor,
        queries: torch.Tensor,
        norm: Norm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        absorbed: torch.Tensor,
    ) -> torch.Tensor:
        """Make what attention over latents reads of new tokens.

        Args:
            own: [tokens, latent + rotated], the last dimension contiguous: latents and rotary keys, as projected.
            queries: [tokens, heads, rotated], the last dimension contiguous: what is rotated of queries.
            norm: Norm of the latents; None: none.
            cos: From `rotary`.
            sin: From `rotary`.
            absorbed: As `queries`, in the dtype of `own`; receives the rotated queries.

        Returns:
            Normed latents and rotated keys, a new tensor [tokens, latent + rotated].
        """

    def project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KvLayer,
        slots: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """Project x to Q, K and V, rotate Q and K, and store K and V.

        Args:
            x: [tokens, k].
            weight: [(heads + 2 x kv_heads) x head_size, k]: Q first, then K, then V.
            bias: As many numbers as weight has rows.
            cos: From `rotary`.
            sin: From `rotary`.
            layer: The layer's KV cache.
            slots: Returns [tokens] int32 on the device, each token's position in `layer`; -1: do not store.

        Returns:
            Q, a new tensor [tokens, heads, head_size]. None if unsupported, with no effect: use `linear` and the
            `write_rotated` of PagedAttention instead.
        """

    def linear_parts(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `linear` as a sum [parts, tokens, n] for the next operation to add; float32 if parts > 1."""

    def decode(
        self,
        decoder: DecoderParts,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
    ) -> torch.Tensor | None:
        """Run all layers of a step, from embedding to final norm, with the bits of the single operations.

        Returns:
            [tokens, hidden], valid until the next call. None if unsupported, with no effect: use the single operations.
        """


class DecoderParts(Protocol):
    """The parts of a decoder that `LayerOperations.decode` uses; see `decoder.FusedDecoder`, which has them."""

    @property
    def operations(self) -> LayerOperations:
        """Operations of the layers."""

    @property
    def attention(self) -> PagedAttention:
        """Paged attention."""

    @property
    def table(self) -> torch.Tensor:
        """Embedding, [vocab, hidden]."""

    @property
    def layers(self) -> tuple[FusedLayer, ...]:
        """The layers."""

    @property
    def final_norm(self) -> Norm:
        """The last norm."""

    @property
    def rotary(self) -> tuple[RotaryTable, ...]:
        """The tables of rotary embeddings."""

    def norms(self) -> Iterator[Norm]:
        """Yield the norms of the residual."""

    @property
    def is_plain(self) -> bool:
        """Whether every layer is one of Llama's."""
