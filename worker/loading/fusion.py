"""Builds a decoder from its parts: fewer and larger operations than transformers' own layers.

`families` declares where transformers keeps the parts. Q, K and V are one matrix product, and so are gate and up. A
norm includes the residual sum before it. The rotary embedding is part of the KV write, and both are part of the product
for few tokens. Models of undeclared classes run through transformers. `verification` compares both paths with
transformers' own attention before a model is served.

No weight is stored twice: the parts of a joined matrix become views, layer by layer, of the joined or packed matrix
(see `kernels.packed`). The transformers module stays whole: it computes the same results, and its state keeps its
names. An embedding that is tied to the head is read from the packed head (see `kernels.packed_table`). If that is
impossible, a packed head that is a small part of the model is kept beside the embedding; a quantised one always is.

A rotary embedding that pairs neighbours becomes one that pairs halves: the rows of Q and K are reordered alike, which
changes no product of a query and a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvforge.worker.attention import AttentionOptions, PagedAttention
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.kernels import LayerOperations
from kvforge.worker.kernels.activations import Activation
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.layer_weights import (
    ExpertsBeside,
    FeedForward,
    FusedLayer,
    LatentAttention,
    MixtureOfExperts,
    Projection,
    TokenBlock,
    TokenInputs,
)
from kvforge.worker.kernels.packed import PackedRows
from kvforge.worker.kernels.packed_table import PackedEmbedding, PackedTable, table_of
from kvforge.worker.kernels.stored import StoredWeight

from .coded_parts import CodedLinear, coded_linears
from .description import Family, TokenBlocks
from .latents import LatentParts, absorbed
from .mixers import BoundMixer
from .mixtures import MixtureParts, packed_experts, packed_router
from .parts import DecoderParts, LayerParts, parts_of
from .quantisation import WeightPacker
from .reordered import ReorderedRows, halves_of_pairs, in_every_head
from .shared_experts import beside_shared
from .weight_stream import tensors_together

# Share of all weights' bytes: 0.21 for SmolLM2-135M and Llama-3.2-1B, 0.28 for Qwen2.5-0.5B. A worker may hold 1.3
# times its weights.
TIED_HEAD_SHARE_MAX = 0.29


def fuse(
    module: Any,
    options: Sequence[AttentionOptions],
    operations: LayerOperations,
    attention: PagedAttention,
    packer: WeightPacker | None = None,
    ranks: Ranks | None = None,
    is_packed_later: bool = False,
) -> FusedDecoder | None:
    """Make the fused form of a transformers model, which shares its weights.

    Args:
        module: The transformers model.
        options: Attention options of each layer, in order.
        operations: Operations of the layers.
        attention: Paged attention.
        packer: Makes the weights that `operations` multiply (see `quantisation`). The original weights are released one
            by one, so no other object may hold them, such as an earlier fused form. None: use the weights as they are.
        ranks: The ranks with the other parts of the weights (see `split`).
        is_packed_later: Whether another call will pack the weights. Shared experts are then apart, as they are when
            packed, so that both forms round alike.

    Returns:
        The fused form; None if the table does not list the class.

    Raises:
        KvforgeError: As raised by `packer`.
    """
    parts = parts_of(module)
    if parts is None or (ranks is not None and not parts.can_be_split):
        return None
    parts = replace(parts, joins_shared=packer is None and not is_packed_later)
    family, config = parts.family, module.config
    split = _rows_of(module.lm_head) < module.get_input_embeddings().num_embeddings
    embedding_scale = _embedding_scale(module, family)
    head, table = _head(module, packer)  # before the layers: later the module's original size is unknown
    attending = iter(options)
    layers = tuple(
        _fuse_layer(layer, next(attending), found, parts, packer, ranks is not None)
        if found.attends
        else _unattending_layer(layer, found, parts, packer, ranks is not None)
        for layer, found in zip(module.model.layers, parts.layers, strict=True)
    )
    return FusedDecoder(
        operations=operations,
        attention=attention,
        table=module.get_input_embeddings().weight if table is None else table,
        layers=layers,
        final_norm=parts.final_norm,
        head=head,
        rotary=parts.rotary,
        embedding_scale=embedding_scale,
        logit_scale=_setting(config, family.logit_scale, 1.0) / _setting(config, family.logit_divisor, 1.0),
        logit_softcap=_setting(config, family.logit_softcap, 0.0),
        ranks=ranks,
        head_is_split=split,
        token_inputs=_token_inputs(module.model, parts, packer),
    )


def is_known(module: Any) -> bool:
    """Return whether `fuse` supports a transformers model."""
    return parts_of(module) is not None


def _rows_of(part: Any) -> int:
    """Return the rows of a projection without widening its weight."""
    return part.out_features if isinstance(part, CodedLinear) else len(part.weight)


def _setting(config: Any, name: str, otherwise: float) -> float:
    value = getattr(config, name, None) if name else None
    return otherwise if value is None else float(value)


def _embedding_scale(module: Any, family: Family) -> float:
    """Return the factor of embeddings, rounded as transformers rounds it."""
    if family.embedding_scale:
        return _setting(module.config, family.embedding_scale, 1.0)
    table = module.get_input_embeddings()
    scale = getattr(table, "embed_scale", None)
    if family.embedding_factor:
        scale = getattr(module.model, family.embedding_factor)
    return 1.0 if scale is None else float(scale.to(table.weight.dtype))


@torch.no_grad()
def _head(module: Any, packer: WeightPacker | None) -> tuple[Projection, PackedTable | None]:
    """Return the vocabulary head, and the embedding table if it is read from the packed head."""
    if isinstance(module.lm_head, CodedLinear):
        return _join(module, ("lm_head",), packer), None
    weight, bias = module.lm_head.weight, module.lm_head.bias
    if packer is None or weight is not module.get_input_embeddings().weight:
        return _join(module, ("lm_head",), packer), None
    packed = packer.pack(weight, [module.lm_head])
    if (table := table_of(packed, weight)) is not None:
        module.lm_head = in_place_of(module.lm_head, PackedRows(packed, slice(0, len(weight)), bias))
        scale = getattr(module.get_input_embeddings(), "embed_scale", None)
        packed_table = PackedEmbedding(table, 1.0 if scale is None else float(scale.to(weight.dtype)))
        module.set_input_embeddings(packed_table)
        return Projection(packed, bias), table
    whole = sum(each.nbytes for each in module.parameters())
    if weight.nbytes > TIED_HEAD_SHARE_MAX * whole and not packer.quantises:
        return Projection(weight, bias), None
    return Projection(packed, bias), None


def _fuse_layer(
    layer: Any,
    options: AttentionOptions,
    found: LayerParts,
    parts: DecoderParts,
    packer: WeightPacker | None,
    is_split: bool,
) -> FusedLayer:
    """Make a layer that attends. is_split: whether ranks divide it."""
    family, attention = parts.family, getattr(layer, parts.family.attention)
    if found.latent is not None:
        return _fuse_latent_layer(layer, options, found, found.latent, parts, packer)
    head_size = attention.head_dim
    heads = getattr(attention, family.output).in_features // head_size
    names = [name for name in family.projected if getattr(attention, name, None) is not None]
    value_is_key = len(names) == 2 and len(family.projected) == 3
    others = sum(getattr(attention, name).out_features for name in names) // head_size - heads
    rotary = found.rotary
    orders: list[torch.Tensor | None] = [None] * len(names)
    if family.is_query_gated:
        others -= heads
        orders[0] = torch.arange(2 * heads * head_size).view(heads, 2, head_size).transpose(0, 1).flip(0).flatten()
    if family.interleaved and rotary is not None:
        order = halves_of_pairs(2 * len(parts.rotary[rotary].frequencies), head_size)
        orders[:-1] = [in_every_head(order, getattr(attention, name).out_features) for name in names[:-1]]
    return FusedLayer(
        options=options,
        rotary=rotary,
        heads=heads,
        kv_heads=others if value_is_key else others // 2,
        head_size=head_size,
        input_norm=found.input_norm,
        projected=_join(attention, names, packer, orders),
        head_norms=found.head_norms,
        output=_join(attention, (family.output,), packer),
        inner_norm=found.inner_norm,
        feed=_feed(layer, found, parts, packer),
        attended_norm=found.attended_norm,
        fed_norm=found.fed_norm,
        residual_scale=parts.residual_scale,
        is_parallel=family.is_parallel,
        query_scale=found.query_scale,
        clip=found.clip,
        value_scale=found.value_scale,
        value_is_key=value_is_key,
        kv_layer=found.kv_layer,
        experts_beside=_beside(layer, found, packer),
        token_block=_token_block(layer, found, family.token_blocks, packer),
        output_scale=found.output_scale,
        is_query_gated=family.is_query_gated,
        mixer=BoundMixer(family.mixer_of(layer), is_split) if family.mixes_beside else None,
        factors=found.factors,
        normed_residual=found.normed_residual,
    )


def _unattending_layer(
    layer: Any, found: LayerParts, parts: DecoderParts, packer: WeightPacker | None, is_split: bool
) -> FusedLayer:
    """Make a layer with a recurrent state in place of attention, which its own module computes, or with neither.

    is_split: whether ranks divide it.
    """
    nothing = Projection(parts.final_norm.weight.new_empty((0, 0)), None)
    return FusedLayer(
        options=AttentionOptions(scaling=1.0),
        rotary=None,
        heads=0,
        kv_heads=0,
        head_size=0,
        input_norm=found.input_norm,
        projected=nothing,
        head_norms=None,
        output=nothing,
        inner_norm=found.inner_norm,
        feed=_feed(layer, found, parts, packer),
        attended_norm=found.attended_norm,
        fed_norm=found.fed_norm,
        residual_scale=parts.residual_scale,
        is_parallel=parts.family.is_parallel,
        output_scale=found.output_scale,
        mixer=BoundMixer(parts.family.mixer_of(layer), is_split) if found.mixes else None,
        factors=found.factors,
        normed_residual=found.normed_residual,
    )


def _fuse_latent_layer(
    layer: Any,
    options: AttentionOptions,
    found: LayerParts,
    latent: LatentParts,
    parts: DecoderParts,
    packer: WeightPacker | None,
) -> FusedLayer:
    attention, names = layer.self_attn, latent.names
    absorb, expand, expansion = absorbed(attention, latent)
    queries = getattr(attention, names.query if latent.query_norm is None else names.query_up)
    order = latent.order_of_queries(queries.out_features)
    query = None if latent.query_norm is None else _join(attention, (names.query_up,), packer, (order,))
    orders = (order if query is None else None, latent.order_of_latents())
    return FusedLayer(
        options=options,
        rotary=found.rotary,
        heads=len(absorb),
        kv_heads=1,
        head_size=latent.head_size,
        input_norm=found.input_norm,
        projected=_join(attention, latent.projected, packer, orders),
        head_norms=None,
        output=_join(attention, (parts.family.output,), packer),
        inner_norm=found.inner_norm,
        feed=_feed(layer, found, parts, packer),
        attended_norm=found.attended_norm,
        fed_norm=found.fed_norm,
        residual_scale=parts.residual_scale,
        latent=LatentAttention(query, latent.query_norm, latent.latent_norm, absorb, expand, expansion, latent.rotated),
    )


def _feed(
    layer: Any, found: LayerParts, parts: DecoderParts, packer: WeightPacker | None
) -> FeedForward | MixtureOfExperts | None:
    if not found.feeds:
        return None
    feed = parts.family.feed_of(layer)
    if found.mixture is None:
        return replace(_feed_forward(feed, found.activation, parts, packer), gate_factor=found.factors.gate)
    shared = parts.family.shared_of(layer, feed) if found.mixture.is_shared else None
    dense = None if shared is None else _feed_forward(shared, found.activation, parts, packer)
    return _mixture(feed, found.mixture, dense, packer, parts.joins_shared)


def _beside(layer: Any, found: LayerParts, packer: WeightPacker | None) -> ExpertsBeside | None:
    beside = found.beside
    if beside is None:
        return None
    norms = (beside.input_norm, beside.router_norm, beside.dense_norm, beside.output_norm)
    return ExpertsBeside(_mixture(layer, beside.mixture, None, packer), *norms)


def _token_block(
    layer: Any, found: LayerParts, names: TokenBlocks | None, packer: WeightPacker | None
) -> TokenBlock | None:
    if names is None or found.token_norm is None:
        return None
    gate, output = _join(layer, (names.gate,), packer), _join(layer, (names.output,), packer)
    return TokenBlock(gate, found.activation, output, found.token_norm)


def _token_inputs(decoder: Any, parts: DecoderParts, packer: WeightPacker | None) -> TokenInputs | None:
    names = parts.family.token_blocks
    if names is None or parts.input_norm is None:
        return None
    table = getattr(decoder, names.table)
    return TokenInputs(
        table=table.weight,
        table_scale=float(table.embed_scale.to(table.weight.dtype)),
        projection=_join(decoder, (names.projection,), packer),
        projection_scale=getattr(decoder, names.projection_scale),
        norm=parts.input_norm,
        scale=getattr(decoder, names.scale),
    )


def _feed_forward(feed: Any, activation: Activation, parts: DecoderParts, packer: WeightPacker | None) -> FeedForward:
    family = parts.family
    return FeedForward(
        gate_up=_join(feed, family.gate_up, packer),
        down=_join(feed, (family.down,), packer),
        activation=activation,
        is_gated=family.is_gated,
    )


def _mixture(
    owner: Any,
    found: MixtureParts,
    shared: FeedForward | None,
    packer: WeightPacker | None,
    joins_shared: bool = False,
) -> MixtureOfExperts:
    mixture = found.mixture
    experts = found.experts
    gate = _join(owner, (mixture.shared_gate,), packer) if mixture.shared_gate else None
    matrices = experts.matrices if packer is None else packed_experts(experts, packer)
    router, latents = found.router, mixture.latents(owner)
    narrow, widen = (_join(owner, (name,), packer) for name in latents) if latents else (None, None)
    if shared is not None and joins_shared and not router.held and not mixture.scales_input and not latents:
        joined = beside_shared(matrices, shared, gate, found.activation, router.chosen)
        if joined is not None:
            matrices, router, shared = joined, replace(router, shared=joined.shared), None
    return MixtureOfExperts(
        gate=found.gate if packer is None else packed_router(found.gate, packer),
        router=router,
        choice_bias=found.choice_bias,
        factors=found.factors,
        scales_input=mixture.scales_input,
        matrices=matrices,
        activation=found.activation,
        interleaved=experts.interleaved,
        shared=shared,
        shared_gate=gate,
        narrow=narrow,
        widen=widen,
    )


@torch.no_grad()
def _join(
    owner: Any,
    names: Sequence[str],
    packer: WeightPacker | None,
    orders: Sequence[torch.Tensor | None] | None = None,
) -> Projection:
    """Join the projections of these names into one; the parts become views of its rows.

    orders: for each part the order of its rows in the result, [n] int64; None: as they are.
    """
    parts = [getattr(owner, name) for name in names]
    rows_of = [None] * len(parts) if orders is None else orders
    reordered = any(rows is not None for rows in rows_of)
    coded = coded_linears(parts, rows_of) if packer is None else None
    if coded is not None:
        return _join_coded(owner, names, parts, rows_of, coded)
    weight, bias = parts[0].weight, parts[0].bias
    if len(parts) > 1 or reordered:
        together = tensors_together([part.weight for part in parts]) if packer is None and not reordered else None
        weight = together
        if weight is None:
            weight = _joined(parts, rows_of)
        if bias is not None:
            bias = torch.cat([_in_order(part.bias, rows) for part, rows in zip(parts, rows_of, strict=True)])
    packed = None if packer is None else packer.pack(weight, parts, is_reordered=reordered)
    if packer is None and any(isinstance(part, CodedLinear) for part in parts):
        packed = weight  # of several formats: as numbers
    first = 0
    for name, part, moved in zip(names, parts, rows_of, strict=True):
        rows = slice(first, first + part.out_features)
        first = rows.stop
        part_bias = None if bias is None else bias[rows]
        if packed is not None:
            setattr(owner, name, in_place_of(part, PackedRows(packed, rows, part_bias, moved)))
        elif moved is not None:
            setattr(owner, name, in_place_of(part, ReorderedRows(weight[rows], part_bias, moved)))
        elif len(parts) > 1:
            part.weight = torch.nn.Parameter(weight[rows], requires_grad=False)
            if bias is not None:
                part.bias = torch.nn.Parameter(bias[rows], requires_grad=False)
    return Projection(weight if packed is None else packed, bias)


def _join_coded(
    owner: Any, names: Sequence[str], parts: Sequence[Any], orders: Sequence[torch.Tensor | None], joined: StoredWeight
) -> Projection:
    """Return the projection of a joined weight in codes; the parts become views of its rows."""
    bias = parts[0].bias
    if bias is not None and len(parts) > 1:
        bias = torch.cat([_in_order(part.bias, rows) for part, rows in zip(parts, orders, strict=True)])
    first = 0
    for name, part, moved in zip(names, parts, orders, strict=True):
        rows = slice(first, first + part.out_features)
        first = rows.stop
        if len(parts) > 1 or moved is not None:
            view = CodedLinear(joined, rows, None if bias is None else bias[rows], moved)
            setattr(owner, name, in_place_of(part, view))
    return Projection(joined, bias)


def _joined(parts: Sequence[Any], rows_of: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the weights of projections one below the other, each in the order of its rows."""
    if not any(isinstance(part, CodedLinear) for part in parts):
        return torch.cat([_in_order(part.weight, rows) for part, rows in zip(parts, rows_of, strict=True)])
    joined, first = None, 0
    for part, rows in zip(parts, rows_of, strict=True):  # one by one: weights in codes are expanded for this
        weight = _in_order(part.weight, rows)
        if joined is None:
            joined = weight.new_empty((sum(map(_rows_of, parts)), weight.shape[1]))
        joined[first : first + len(weight)] = weight
        first += len(weight)
    assert joined is not None, "there are parts"
    return joined


def _in_order(tensor: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return tensor if order is None else tensor[order.to(tensor.device)]


def in_place_of(part: Any, other: torch.nn.Module) -> torch.nn.Module:
    """Return `other` with the hooks of the part that it replaces (see `split`)."""
    other._forward_hooks.update(part._forward_hooks)
    other._forward_pre_hooks.update(part._forward_pre_hooks)
    return other
