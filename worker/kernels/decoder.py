"""A whole decoder of described layers: its weights, and its forward pass in terms of `LayerOperations`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from kvforge.worker.attention import KvLayer, PagedAttention, PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.reference import rotate
from kvforge.worker.device.exchange import ATTENTION, INNER, LOGITS
from kvforge.worker.device.ranks import Ranks

from .heads import Rotary, norm_heads, own_query
from .interface import LayerOperations
from .latent import attend_latents, store_latents
from .layer_weights import (
    ExpertsBeside,
    FeedForward,
    FusedLayer,
    MixtureOfExperts,
    Norm,
    Projection,
    TokenInputs,
)
from .partition import apply_aligned
from .positions import RotaryTable
from .taps import Taps
from .token_inputs import add_token_block, token_inputs


@dataclass(frozen=True)
class FusedDecoder:
    """A whole decoder: embedding, layers, final norm and vocabulary head.

    Attributes:
        operations: Operations of the layers.
        attention: Paged attention.
        table: [vocab, hidden].
        layers: The layers.
        final_norm: The norm before the head.
        head: [vocab, hidden], or this rank's share of the vocabulary.
        rotary: The tables of rotary embeddings.
        embedding_scale: Factor of embeddings.
        logit_scale: Factor of logits.
        logit_softcap: Logits become softcap x tanh(logits / softcap); 0: unchanged.
        ranks: The ranks that hold the other heads and the other inner columns; this rank then computes one part of each
            sum.
        head_is_split: Whether the head has only this rank's share of the vocabulary.
        token_inputs: Inputs of the layers' third blocks; None: none.
    """

    operations: LayerOperations
    attention: PagedAttention
    table: torch.Tensor
    layers: tuple[FusedLayer, ...]
    final_norm: Norm
    head: Projection
    rotary: tuple[RotaryTable, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    ranks: Ranks | None = None
    head_is_split: bool = False
    token_inputs: TokenInputs | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every layer is one of Llama's, so that devices may run a step in one call."""
        return (
            all(layer.is_plain for layer in self.layers)
            and self.final_norm.is_plain
            and len({norm.epsilon for norm in self.norms()}) == 1
            and len(self.rotary) == 1
            and self.embedding_scale == 1.0
        )

    @property
    def sums_into_norms(self) -> bool:
        """Whether a plain norm follows every sum over ranks, so that one kernel may compute both."""
        following = (*(layer.input_norm for layer in self.layers[1:]), self.final_norm)
        return all(layer.sums_into_norms for layer in self.layers) and all(
            norm is not None and norm.is_plain for norm in following
        )

    def norms(self) -> Iterator[Norm]:
        """Yield the norms of the residual, the final one last."""
        for layer in self.layers:
            yield from filter(None, (layer.input_norm, layer.attended_norm, layer.inner_norm, layer.fed_norm))
        yield self.final_norm

    def product_weights(self) -> Iterator[torch.Tensor]:
        """Yield every weight of a product, the head last."""
        for layer in self.layers:
            yield from layer.product_weights()
        if self.token_inputs is not None:
            yield self.token_inputs.projection.weight
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
        normed = self.hidden(token_ids, positions, batch, pool)
        if logit_tokens is not None:
            normed = normed.index_select(0, logit_tokens)
        return self.logits(normed, logits)

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Run the layers, and return what the head multiplies: [tokens, hidden], valid until the next pass.

        taps: keeps what some layers read; None: nothing is kept.
        """
        normed = None
        if self.ranks is None and taps is None:
            normed = self.operations.decode(self, token_ids, positions, batch, pool)
        return self._layers(token_ids, positions, batch, pool, taps) if normed is None else normed

    def write(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool) -> None:
        """Run the layers for their K and V alone: the last one that stores any computes nothing else."""
        if self.ranks is None and self.operations.decode(self, token_ids, positions, batch, pool) is not None:
            return
        storing = [number for number, layer in enumerate(self.layers) if layer.attends and layer.kv_layer is None]
        whole = not storing or any(layer.mixer is not None for layer in self.layers)
        self._layers(token_ids, positions, batch, pool, None, None if whole else storing[-1])

    def logits(self, normed: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of rows of `hidden`, [n, vocab] float32, in `logits` if it is given."""
        shares = self.ranks.count if self.ranks is not None and self.head_is_split else 1
        if logits is None:
            width = shares * len(self.head.weight)
            logits = torch.empty((len(normed), width), dtype=torch.float32, device=normed.device)
        if len(normed) == 0:  # all rows are prefill chunks in the middle of a prompt
            return logits
        if self.ranks is None or shares == 1:
            self.operations.linear(normed, self.head.weight, self.head.bias, logits)
        else:
            self._join(self.ranks, normed, logits)
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.logit_softcap:
            logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits

    def _join(self, ranks: Ranks, normed: torch.Tensor, logits: torch.Tensor) -> None:
        """Concatenate the logits of all ranks' shares of the vocabulary."""
        shape, head = (len(normed), len(self.head.weight)), self.head
        place = ranks.shared.place(LOGITS, shape, torch.float32) if ranks.shared is not None else None
        share = torch.empty(shape, dtype=torch.float32, device=normed.device) if place is None else place
        self.operations.linear(normed, head.weight, head.bias, share)
        if place is not None and ranks.shared is not None:
            ranks.shared.join(LOGITS, logits)
        else:
            logits.view(len(normed), ranks.count, -1).copy_(ranks.gather(share).transpose(0, 1))

    def _layers(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
        taps: Taps | None,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Return the final norm of each token, [tokens, hidden]. stop: see `run_layers`."""
        residual, normed = self._embed(token_ids)
        inputs = None
        if self.token_inputs is not None:
            inputs = token_inputs(self.operations, self.token_inputs, token_ids, residual)
        return self.run_layers(residual, normed, positions, batch, pool, inputs, taps, stop)

    def run_layers(
        self,
        residual: torch.Tensor,
        normed: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: KvPool,
        inputs: torch.Tensor | None = None,
        taps: Taps | None = None,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Run all layers.

        Args:
            residual: The sum that the first layer adds to, [tokens, hidden]; changed.
            normed: The input of the first layer, [tokens, n].
            positions: [tokens] int64 on the device.
            batch: Structure of the batch.
            pool: The KV pool.
            inputs: Inputs of the layers' third blocks, [tokens, layers, n]; None: none.
            taps: Keeps what some layers read; None: nothing is kept.
            stop: The index of a layer that attends: it stores its K and V, and nothing behind is computed. None: none.

        Returns:
            The final norm of each token, [tokens, hidden]; behind `stop`, what that layer read.
        """
        ops = self.operations
        rotary = self._angles(positions)
        scales = {layer.query_scale for layer in self.layers if layer.query_scale is not None}
        query_factors = {scale: scale.factors(positions, residual.dtype) for scale in scales}
        following = (*(layer.input_norm for layer in self.layers[1:]), self.final_norm)
        places = count()
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            last = None if layer.token_block is not None or layer.output_scale != 1.0 else next_norm
            before, scale, factors = normed, layer.residual_scale, layer.factors
            if taps is not None and index in taps.layers:
                taps.found[index] = residual.clone()
            mixed = None if layer.mixer is None else layer.mixer(ops, normed, batch, pool)[None]
            if layer.normed_residual is not None:
                torch.mul(normed, layer.normed_residual.mixed, out=residual)
            inner_norm = last if layer.feed is None else layer.inner_norm
            if not layer.attends and mixed is not None:
                own_scale = scale * factors.mixed
                normed = self._add_mixed(ATTENTION, mixed, residual, layer.attended_norm, own_scale, inner_norm)
            elif layer.attends:
                if mixed is not None:
                    self._add_mixed(ATTENTION, mixed, residual, None, scale * factors.mixed, None)
                given = normed if factors.attention_input == 1.0 else normed * factors.attention_input
                own = next(places)
                place = own if layer.kv_layer is None else layer.kv_layer
                angles = None if layer.rotary is None else rotary[layer.rotary]
                factor = None if layer.query_scale is None else query_factors[layer.query_scale]
                if index == stop:
                    self._store_keys(layer, given, angles, pool.layers[place], pool.batch_of(place, batch))
                    return normed
                attended = self._attend(layer, given, angles, factor, pool.layers[place], pool.batch_of(place, batch))
                own_scale = scale * factors.attended
                normed = self.add(
                    ATTENTION, attended, layer.output, residual, layer.attended_norm, own_scale, inner_norm
                )
            if layer.normed_residual is not None:
                torch.mul(normed, layer.normed_residual.fed, out=residual)
            scale *= factors.fed
            feed, x = layer.feed, before if layer.is_parallel else normed
            if feed is None:
                assert mixed is not None or layer.attends, "a layer without blocks"
            elif isinstance(feed, MixtureOfExperts):
                mixed = self.mix(feed, x)
                normed = self._add_mixed(INNER, mixed, residual, layer.fed_norm, scale, last)
            elif layer.experts_beside is not None:
                both = self._feed_beside(feed, layer.experts_beside, x, residual)
                normed = combine(ops, both[None], residual, layer.fed_norm, scale, last)
            else:
                inner = self.feed(feed, x)
                normed = self.add(INNER, inner, feed.down, residual, layer.fed_norm, scale, last)
            if last is not next_norm:
                if layer.token_block is not None and inputs is not None:
                    add_token_block(ops, layer.token_block, inputs[:, index], residual)
                if layer.output_scale != 1.0:
                    residual.mul_(layer.output_scale)
                normed = residual if next_norm is None else ops.norm(residual, next_norm)
        return normed

    def write_keys(
        self, normed: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, pool: KvPool, layer: int = 0
    ) -> None:
        """Store K and V of a layer, without its attention and its feed-forward block.

        Args:
            normed: The input of the layer, [tokens, n].
            positions: [tokens] int64 on the device.
            batch: Structure of the batch.
            pool: The KV pool.
            layer: Its index, also in the pool.
        """
        own, rotary = self.layers[layer], self._angles(positions)
        angles = None if own.rotary is None else rotary[own.rotary]
        self._store_keys(own, normed, angles, pool.layers[layer], batch)

    def _store_keys(
        self, layer: FusedLayer, normed: torch.Tensor, angles: Rotary | None, cache: KvLayer, batch: PagedBatch
    ) -> None:
        """Store K and V, or latents, of a layer's new tokens."""
        if layer.latent is not None and angles is not None:
            store_latents(self.operations, self.attention, layer, normed, angles, cache, batch)
            return
        self.project(layer, normed, angles, cache, batch)

    def _angles(self, positions: torch.Tensor) -> list[Rotary]:
        """Return cos and sin of each rotary table."""
        ops, dtype = self.operations, self.table.dtype
        return [ops.rotary(positions, each.frequencies, each.scaling, dtype) for each in self.rotary]

    def _attend(
        self,
        layer: FusedLayer,
        normed: torch.Tensor,
        angles: Rotary | None,
        factor: torch.Tensor | None,
        cache: KvLayer,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Return the heads' results, [tokens, heads x head size]. factor: of Q, by position."""
        if layer.latent is not None and angles is not None:
            return attend_latents(self.operations, self.attention, layer, normed, angles, cache, batch)
        query, gate = self.project(layer, normed, angles, cache, batch)
        if factor is not None:
            query.mul_(factor)
        attended = self.attention.attend(query, cache, batch, layer.options).flatten(1)
        return attended if gate is None else attended * apply_aligned(torch.sigmoid, gate)

    def _feed_beside(
        self, feed: FeedForward, beside: ExpertsBeside, normed: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of a dense block and the experts beside it, [tokens, hidden]."""
        ops = self.operations
        dense = ops.linear(self.feed(feed, normed), feed.down.weight, feed.down.bias)
        routed = ops.norm(residual, beside.router_norm)
        mixed = self.mix(beside.mixture, ops.norm(residual, beside.input_norm), routed, whole=True)[0]
        return ops.norm(dense, beside.dense_norm).add_(ops.norm(mixed, beside.output_norm))

    def _embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings and their norms, [tokens, hidden] each."""
        ops, norm = self.operations, self.layers[0].input_norm
        if norm is not None and norm.is_plain and self.embedding_scale == 1.0:
            return ops.embed(token_ids, self.table, norm.weight, norm.epsilon)
        residual = ops.look_up(token_ids, self.table)
        if self.embedding_scale != 1.0:
            residual = residual * self.embedding_scale
        return residual, residual if norm is None else ops.norm(residual, norm)

    def feed(self, feed: FeedForward, normed: torch.Tensor) -> torch.Tensor:
        """Return the input of the last projection of a feed-forward block, [tokens, inner]."""
        ops, weight, bias = self.operations, feed.gate_up.weight, feed.gate_up.bias
        if feed.gate_factor != 1.0:
            gate, up = ops.linear(normed, weight, bias).chunk(2, dim=1)
            return feed.activation.gate(gate * feed.gate_factor, up)
        if feed.is_gated:
            return ops.gated(normed, weight, bias, feed.activation)
        return ops.activated(normed, weight, bias, feed.activation)

    def mix(
        self, experts: MixtureOfExperts, normed: torch.Tensor, routed: torch.Tensor | None = None, whole: bool = False
    ) -> torch.Tensor:
        """Compute a mixture of experts.

        Args:
            experts: The mixture.
            normed: [tokens, hidden].
            routed: What the router reads, [tokens, hidden]; None: `normed`.
            whole: Whether to return one part.

        Returns:
            The result as a sum [parts, tokens, hidden]. With several ranks: one part, which is this rank's.
        """
        ops, gate = self.operations, experts.gate
        routed = normed if routed is None else routed
        if gate.weight.dtype != normed.dtype:  # a router in float32
            logits = ops.wide_linear(routed, gate.weight, gate.bias)
        else:
            logits = ops.linear_parts(routed, gate.weight, gate.bias)
        shared_gate = None
        if experts.router.shared and experts.shared_gate is not None:
            shared_gate = experts.shared_gate.weight
        chosen, weights = ops.route(logits, experts.router, experts.choice_bias, experts.factors, normed, shared_gate)
        whole = whole or experts.shared is not None or experts.widen is not None or self.ranks is not None
        run = ops.experts if whole else ops.expert_parts
        x = normed if experts.narrow is None else ops.linear(normed, experts.narrow.weight)
        if experts.scales_input:
            x, weights = (normed * weights).to(normed.dtype), torch.ones_like(weights)
        mixed = run(x, chosen, weights, experts.matrices, experts.activation, experts.interleaved)
        if experts.widen is not None:
            mixed = ops.linear(mixed, experts.widen.weight)
        if experts.shared is None:
            return mixed[None] if whole else mixed
        shared = experts.shared
        found = ops.linear(self.feed(shared, normed), shared.down.weight, shared.down.bias)
        if experts.shared_gate is not None:
            factor = ops.linear(normed, experts.shared_gate.weight, experts.shared_gate.bias)
            found = apply_aligned(torch.sigmoid, factor) * found
        return mixed.add_(found)[None]

    def add(
        self,
        which: int,
        x: torch.Tensor,
        projection: Projection,
        residual: torch.Tensor,
        after: Norm | None,
        scale: float,
        following: Norm | None,
    ) -> torch.Tensor:
        """Add the norm of x weight^T to the residual, and return the next norm of the sum.

        With several ranks, each rank's product is one part of the sum. It is always rounded, so the bits do not depend
        on the number of tokens.

        Args:
            which: The buffer that ranks exchange the product in.
            x: [tokens, k].
            projection: [hidden, k].
            residual: [tokens, hidden]; changed.
            after: Norm of the product; None: none.
            scale: Factor of the product after its norm.
            following: Norm of the sum; None: return the residual.

        Returns:
            [tokens, hidden].
        """
        ops, ranks, weight, bias = self.operations, self.ranks, projection.weight, projection.bias
        if ranks is None:
            parts = ops.linear_parts(x, weight, bias)
        else:
            shape = (len(residual), residual.shape[1])
            place = ranks.shared.place(which, shape, residual.dtype) if ranks.shared is not None else None
            part = ops.linear(x, weight, bias, place)
            if place is not None and ranks.shared is not None:
                assert self.sums_into_norms and following is not None, "ranks share memory for plain sums only"
                return ranks.shared.add_norm(which, residual, following.weight, following.epsilon)
            parts = ranks.gather(part)
        return combine(ops, parts, residual, after, scale, following)

    def _add_mixed(
        self,
        which: int,
        mixed: torch.Tensor,
        residual: torch.Tensor,
        after: Norm | None,
        scale: float,
        following: Norm | None,
    ) -> torch.Tensor:
        """Add the result [parts, tokens, hidden] of a mixture or of a mixer as `add` adds a product."""
        if self.ranks is None:
            return combine(self.operations, mixed, residual, after, scale, following)
        shared = self.ranks.shared
        shape = (len(residual), residual.shape[1])
        place = shared.place(which, shape, residual.dtype) if shared is not None else None
        if place is None or shared is None:
            return combine(self.operations, self.ranks.gather(mixed[0]), residual, after, scale, following)
        assert self.sums_into_norms and following is not None, "ranks share memory for plain sums only"
        place.copy_(mixed[0])
        return shared.add_norm(which, residual, following.weight, following.epsilon)

    def project(
        self, layer: FusedLayer, normed: torch.Tensor, rotary: Rotary | None, cache: KvLayer, batch: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Project the new tokens to Q, K and V, and store K and V in the cache.

        Returns:
            Q [tokens, heads, head_size], and the gate of the heads' results [tokens, heads x head_size], None for none.
        """
        ops, weight, bias = self.operations, layer.projected.weight, layer.projected.bias
        is_plain = layer.head_norms is None and not layer.clip and layer.value_scale == layer.factors.key == 1.0
        if rotary is not None and is_plain and not layer.is_query_gated:
            query = ops.project(normed, weight, bias, *rotary, cache, partial(self.attention.kv_slots, batch))
            if query is not None:
                return query, None
        projected, gate = ops.linear(normed, weight, bias), None
        if layer.is_query_gated:
            size = layer.heads * layer.head_size
            gate, projected = projected[:, :size], projected[:, size:]
        return self.store(layer, projected, rotary, cache, batch), gate

    def store(
        self, layer: FusedLayer, projected: torch.Tensor, rotary: Rotary | None, cache: KvLayer, batch: PagedBatch
    ) -> torch.Tensor:
        """Return Q [tokens, heads, head_size] of the projected new tokens, and store their K and V in the cache."""
        ops = self.operations
        if layer.kv_layer is not None:
            return own_query(ops, layer, projected, rotary)
        if layer.value_is_key:
            projected = torch.cat((projected, projected[:, layer.heads * layer.head_size :]), dim=1)
        norms = layer.head_norms
        if norms is not None and not norms.after_rotation:
            norm_heads(ops, layer, norms, projected)
        if layer.clip:
            projected.clamp_(-layer.clip, layer.clip)
        by_head = projected.view(len(projected), -1, layer.head_size)
        query, key, value = by_head.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
        if layer.value_scale != 1.0:
            value.mul_(layer.value_scale)
        if layer.factors.key != 1.0:
            key.mul_(layer.factors.key)
        if norms is not None and norms.after_rotation:
            if rotary is not None:
                by_head[:, : layer.heads + layer.kv_heads] = rotate(by_head[:, : layer.heads + layer.kv_heads], *rotary)
            norm_heads(ops, layer, norms, projected)
        elif rotary is not None:
            return self.attention.write_rotated(query, key, value, *rotary, cache, batch)
        self.attention.write(key, value, cache, batch)
        return query


def combine(
    ops: LayerOperations,
    parts: torch.Tensor,
    residual: torch.Tensor,
    after: Norm | None,
    scale: float,
    following: Norm | None,
) -> torch.Tensor:
    """Run `LayerOperations.combine`, or its faster case `add_norm`."""
    if after is None and scale == 1.0 and following is not None and following.is_plain:
        return ops.add_norm(parts, residual, following.weight, following.epsilon)
    return ops.combine(parts, residual, after, scale, following)
