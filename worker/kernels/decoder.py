"""A whole decoder of fused layers: its weights, and its forward pass in terms of `LayerOperations`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvforge.worker.attention import KvLayer, PagedAttention, PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.exchange import ATTENTION, INNER, LOGITS
from kvforge.worker.device.ranks import Ranks

from .interface import LayerOperations
from .layer_weights import FusedLayer, Projection


@dataclass(frozen=True)
class FusedDecoder:
    """A whole decoder: embedding, layers, final norm and vocabulary head.

    Attributes:
        operations: Operations of the layers.
        attention: Paged attention.
        table: [vocab, hidden].
        layers: The layers.
        final_norm: [hidden].
        head: [vocab, hidden], or this rank's share of the vocabulary.
        frequencies: [head_size / 2] float32.
        rotary_scaling: Factor of cos and sin.
        epsilon: Epsilon of every norm.
        ranks: The ranks that hold the other heads and the other inner columns; this rank then computes one part of each
            sum.
        head_is_split: Whether the head has only this rank's share of the vocabulary.
    """

    operations: LayerOperations
    attention: PagedAttention
    table: torch.Tensor
    layers: tuple[FusedLayer, ...]
    final_norm: torch.Tensor
    head: Projection
    frequencies: torch.Tensor
    rotary_scaling: float
    epsilon: float
    ranks: Ranks | None = None
    head_is_split: bool = False

    def product_weights(self) -> Iterator[torch.Tensor]:
        """Yield every weight of a product, the head last."""
        for layer in self.layers:
            for projection in (layer.projected, layer.output, layer.gate_up, layer.down):
                yield projection.weight
        yield self.head.weight

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor | None,
        batch: PagedBatch,
        pool: KvPool,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one pass; see `LoadedModel.forward`.

        Every shape follows from the shapes of the arguments, and nothing waits for the device, so the pass can be
        captured in a graph.

        Args:
            token_ids: [tokens] int64 on the device.
            positions: [tokens] int64 on the device.
            logit_tokens: [sampled] int64 on the device; None: compute the logits of every token in order.
            batch: Structure of the batch.
            pool: The KV pool.
            logits: [sampled, vocab] float32, contiguous, receives the result; None: allocate it.

        Returns:
            The logits.
        """
        ops = self.operations
        normed = ops.decode(self, token_ids, positions, batch, pool) if self.ranks is None else None
        if normed is None:
            normed = self._layers(token_ids, positions, batch, pool)
        if logit_tokens is not None:
            normed = normed.index_select(0, logit_tokens)
        shares = self.ranks.count if self.ranks is not None and self.head_is_split else 1
        if logits is None:
            width = shares * len(self.head.weight)
            logits = torch.empty((len(normed), width), dtype=torch.float32, device=normed.device)
        if len(normed) == 0:  # all rows are prefill chunks in the middle of a prompt
            return logits
        if self.ranks is None or shares == 1:
            return ops.linear(normed, self.head.weight, self.head.bias, logits)
        return self._joined(self.ranks, normed, logits)

    def _joined(self, ranks: Ranks, normed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Concatenate the logits of all ranks' shares of the vocabulary."""
        shape, head = (len(normed), len(self.head.weight)), self.head
        place = ranks.shared.place(LOGITS, shape, torch.float32) if ranks.shared is not None else None
        share = torch.empty(shape, dtype=torch.float32, device=normed.device) if place is None else place
        self.operations.linear(normed, head.weight, head.bias, share)
        if place is not None and ranks.shared is not None:
            return ranks.shared.join(LOGITS, logits)
        logits.view(len(normed), ranks.count, -1).copy_(ranks.gather(share).transpose(0, 1))
        return logits

    def _layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool
    ) -> torch.Tensor:
        """Return the final norm of each token, [tokens, hidden]."""
        ops = self.operations
        residual, normed = ops.embed(token_ids, self.table, self.layers[0].input_norm, self.epsilon)
        cos, sin = ops.rotary(positions, self.frequencies, self.rotary_scaling, self.table.dtype)
        following = (*(layer.input_norm for layer in self.layers[1:]), self.final_norm)
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            cache = pool.layers[index]
            query = self.project(layer, normed, (cos, sin), cache, batch)
            attended = self.attention.attend(query, cache, batch, layer.options).flatten(1)
            normed = self._add(ATTENTION, attended, layer.output, residual, layer.inner_norm)
            inner = ops.gated(normed, layer.gate_up.weight, layer.gate_up.bias)
            normed = self._add(INNER, inner, layer.down, residual, next_norm)
        return normed

    def _add(
        self, which: int, x: torch.Tensor, projection: Projection, residual: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        """Add x weight^T to the residual, and return the norm of the sum [tokens, hidden].

        With several ranks, each rank's product is one part of the sum. It is always rounded, so the bits do not depend
        on the number of tokens. which: the buffer that ranks exchange it in.
        """
        ops, ranks, weight, bias = self.operations, self.ranks, projection.weight, projection.bias
        if ranks is None:
            return ops.add_norm(ops.linear_parts(x, weight, bias), residual, norm, self.epsilon)
        shape = (len(residual), residual.shape[1])
        place = ranks.shared.place(which, shape, residual.dtype) if ranks.shared is not None else None
        part = ops.linear(x, weight, bias, place)
        if place is not None and ranks.shared is not None:
            return ranks.shared.add_norm(which, residual, norm, self.epsilon)
        return ops.add_norm(ranks.gather(part), residual, norm, self.epsilon)

    def project(
        self,
        layer: FusedLayer,
        normed: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: KvLayer,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Project the new tokens to Q [tokens, heads, head_size], and store their K and V in the cache."""
        ops, weight, bias = self.operations, layer.projected.weight, layer.projected.bias
        if layer.rotates and layer.head_norms is None:
            query = ops.project(normed, weight, bias, *rotary, cache, partial(self.attention.kv_slots, batch))
            if query is not None:
                return query
        projected = ops.linear(normed, weight, bias)
        if layer.head_norms is not None:
            ops.head_norm(projected, *layer.head_norms, layer.heads, layer.kv_heads, self.epsilon)
        by_head = projected.view(len(projected), -1, layer.head_size)
        query, key, value = by_head.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
        if layer.rotates:
            return self.attention.write_rotated(query, key, value, *rotary, cache, batch)
        self.attention.write(key, value, cache, batch)
        return query
