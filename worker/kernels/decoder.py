"""A whole decoder of fused layers: its weights, and its forward pass over `LayerOperations`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from worker.attention import AttentionOptions, KvLayer, PagedAttention, PagedBatch
from worker.attention.pool import KvPool
from worker.device.exchange import ATTENTION, INNER, LOGITS
from worker.device.ranks import Ranks

from . import LayerOperations


@dataclass(frozen=True)
class Projection:
    """weight: [n, k], packed where `PackedOperations` serve. bias: [n], or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one decoder layer. head_norms: [head_size] of Q and of K. rotates: has rotary embedding."""

    options: AttentionOptions
    rotates: bool
    heads: int
    kv_heads: int
    head_size: int
    input_norm: torch.Tensor
    projected: Projection
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Projection
    inner_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class FusedDecoder:
    """A whole decoder: embedding, layers, final norm and vocabulary head.

    table: [vocab, hidden]. head: [vocab, hidden]. frequencies: [head_size / 2] float32. epsilon: of every norm.
    ranks: those that hold the other heads and the other numbers between two products, where there are several: then
    what this one computes of a sum is one part of it. head_is_split: the head has this rank's share of the vocabulary.
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
        """Every weight that is multiplied with, the head last."""
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
        """As LoadedModel.forward; logit_tokens None: the logits of every token, in order.

        logits: where they go, [sampled, vocab] float32, contiguous; None: new memory.
        Every shape follows from the arguments' shapes, and nothing waits for the device: it can be captured in a graph.
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
        if len(normed) == 0:  # prefill of chunks that end nobody's prompt
            return logits
        if self.ranks is None or shares == 1:
            return ops.linear(normed, self.head.weight, self.head.bias, logits)
        return self._joined(self.ranks, normed, logits)

    def _joined(self, ranks: Ranks, normed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks' shares of the vocabulary, side by side."""
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
        """The final norm of each token, [tokens, hidden]."""
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
        """The norm of residual + x weight^T [tokens, hidden], which residual then is.

        Of several ranks, each one's product is one part of the sum. It is rounded, whatever computes it: so the bits
        are those of any number of tokens. which: the place where ranks exchange it.
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
        """Q of the new tokens, [tokens, heads, head_size]; their K and V are in the cache then."""
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
