"""Finds the parts of a transformers model that `fusion` builds a decoder from, or why it has none."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvforge.worker.device.target import HEAD_UNIT
from kvforge.worker.kernels import HIDDEN_MAX
from kvforge.worker.kernels.activations import NAMES, SILU, Activation
from kvforge.worker.kernels.layer_weights import NO_FACTORS, HeadNorms, LayerFactors, Norm, NormedResidual
from kvforge.worker.kernels.positions import QueryScale, RotaryTable

from .coded_parts import CodedLinear
from .description import Beside, Family, TokenBlocks
from .families import family_of
from .latents import LatentParts, latent_parts
from .mixtures import MixtureParts, mixture_of
from .norms import norm_of
from .reordered import ReorderedRows
from .rope import STATIC_ROPE
from .xielu import xielu_of

HEAD_LIMIT = 512  # heads of more than HEAD_SIZE_MAX attend in plain torch on a GPU
log = logging.getLogger("worker")


@dataclass(frozen=True)
class BesideParts:
    """The small parts of experts beside a dense block; see `ExpertsBeside`."""

    mixture: MixtureParts
    input_norm: Norm
    router_norm: Norm
    dense_norm: Norm
    output_norm: Norm


@dataclass(frozen=True)
class LayerParts:
    """The small parts of one layer; see `FusedLayer`. The projections are in its modules.

    mixes, attends, feeds: whether it has a recurrent state in place of attention, attention, and a feed-forward block.
    """

    rotary: int | None
    input_norm: Norm | None
    head_norms: HeadNorms | None
    attended_norm: Norm | None
    inner_norm: Norm | None
    fed_norm: Norm | None
    mixture: MixtureParts | None = None
    query_scale: QueryScale | None = None
    clip: float = 0.0
    value_scale: float = 1.0
    activation: Activation = SILU
    kv_layer: int | None = None
    beside: BesideParts | None = None
    token_norm: Norm | None = None
    output_scale: float = 1.0
    head_size: int = 0
    latent: LatentParts | None = None
    mixes: bool = False
    attends: bool = True
    feeds: bool = True
    factors: LayerFactors = NO_FACTORS
    normed_residual: NormedResidual | None = None

    @property
    def can_be_split(self) -> bool:
        """Whether ranks share the layer by heads and inner columns, as they share all mixers (see `mixer_slices`)."""
        if self.kv_layer is not None or self.beside is not None or self.token_norm is not None:
            return False
        return self.head_norms is None or len(self.head_norms.query.weight) == self.head_size


@dataclass(frozen=True)
class DecoderParts:
    """The small parts of a decoder; see `FusedDecoder`. joins_shared: whether shared experts are among the others."""

    family: Family
    layers: tuple[LayerParts, ...]
    final_norm: Norm
    rotary: tuple[RotaryTable, ...]
    residual_scale: float
    input_norm: Norm | None = None
    joins_shared: bool = False

    @property
    def can_be_split(self) -> bool:
        """Whether ranks share layers by heads and inner columns: no norm covers those of several ranks."""
        return all(layer.can_be_split for layer in self.layers)


class _NotDescribedError(Exception):
    """A part that no description covers; the message names it."""


def parts_of(module: Any) -> DecoderParts | None:
    """Find the parts of a transformers model.

    Args:
        module: The model, with its weights.

    Returns:
        Its parts; None if its class is not declared, or a part cannot be described.
    """
    family = family_of(module)
    if family is None:
        return None
    try:
        return _parts(module, family)
    except (_NotDescribedError, AttributeError) as error:
        log.info("%s runs through transformers: %s", type(module).__name__, error)
        return None


def _parts(module: Any, family: Family) -> DecoderParts:
    decoder, config = module.model, module.config
    if config.hidden_size > HIDDEN_MAX or config.hidden_size % HEAD_UNIT:
        raise _NotDescribedError(f"its hidden size is {config.hidden_size}")
    if getattr(config, "clip_qkv", None) is not None and not family.clip:
        raise _NotDescribedError("it clips Q, K and V")
    _check_linears(module, family)
    tables = _RotaryTables()
    layers = tuple(_layer(layer, index, decoder, family, tables) for index, layer in enumerate(decoder.layers))
    if not any(layer.attends for layer in layers):
        raise _NotDescribedError("none of its layers attends")
    return DecoderParts(
        family=family,
        layers=layers,
        final_norm=_norm(decoder, family.final_norm, decoder.get_input_embeddings().weight[0]),
        rotary=tuple(tables.found),
        residual_scale=_residual_scale(decoder, family),
        input_norm=_input_norm(decoder, family.token_blocks),
    )


def _residual_scale(decoder: Any, family: Family) -> float:
    if family.residual_factor:
        return float(getattr(decoder.layers[0], family.residual_factor))
    return float(getattr(decoder.config, family.residual_scale)) if family.residual_scale else 1.0


def _check_linears(module: Any, family: Family) -> None:
    """Check that the module's products are plain, not replaced by quantised ones for example."""
    mixture = family.mixture
    mixers = [part for layer in module.model.layers for part in _parts_of_mixer(layer, family)]
    if any(isinstance(part, CodedLinear) for part in mixers):
        raise _NotDescribedError("the weights of its recurrent layers are quantised")
    routers = (
        [] if mixture is None else [getattr(family.feed_of(layer), mixture.gate, None) for layer in module.model.layers]
    )
    apart = {id(part) for router in routers if router is not None for part in router.modules()}
    apart |= set(map(id, mixers))
    linears = [part for part in module.modules() if hasattr(part, "in_features") and id(part) not in apart]
    if odd := next((part for part in linears if type(part) not in (torch.nn.Linear, ReorderedRows, CodedLinear)), None):
        raise _NotDescribedError(f"it has a {type(odd).__name__}")
    dtypes = {w.dtype for part in module.modules() if id(part) not in apart for w in part.parameters(recurse=False)}
    if len(dtypes) > 1:
        raise _NotDescribedError(f"its weights have several dtypes: {', '.join(sorted(map(str, dtypes)))}")


def _parts_of_mixer(layer: Any, family: Family) -> list[Any]:
    mixer = family.mixer_of(layer)
    return [] if mixer is None else list(mixer.modules())


class _RotaryTables:
    """The tables of a decoder's layers, each once."""

    def __init__(self) -> None:
        self.found: list[RotaryTable] = []
        self._index: dict[tuple[int, str], int] = {}

    def still(self, rotated: int, like: torch.Tensor) -> int:
        """Return the index of the table that rotates `rotated` numbers by nothing, which changes no number of them.

        like: A tensor on the device.
        """
        if (0, str(rotated)) not in self._index:
            self._index[0, str(rotated)] = len(self.found)
            self.found.append(RotaryTable(like.new_zeros(rotated // 2, dtype=torch.float32), 1.0))
        return self._index[0, str(rotated)]

    def index(self, rotary: Any, attention: Any) -> int:
        """Return the index of the table in transformers' module `rotary` for an attention module."""
        kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else None
        kind = "" if kinds is None else str(getattr(attention, "layer_type", None) or attention.attention_type)
        if (id(rotary), kind) not in self._index:
            rope_type = rotary.rope_type if kinds is None else kinds[kind]
            if rope_type not in STATIC_ROPE:
                raise _NotDescribedError(f"its rotary embedding ({rope_type}) changes with the length")
            prefix = f"{kind}_" if kind else ""
            frequencies = getattr(rotary, f"{prefix}inv_freq")
            self._index[id(rotary), kind] = len(self.found)
            self.found.append(RotaryTable(frequencies.float(), float(getattr(rotary, f"{prefix}attention_scaling"))))
        return self._index[id(rotary), kind]


def _layer(layer: Any, index: int, decoder: Any, family: Family, tables: _RotaryTables) -> LayerParts:
    whole = _blocks(layer, decoder, family)
    return _attending(whole, layer, index, decoder, family, tables) if whole.attends else whole


def _blocks(layer: Any, decoder: Any, family: Family) -> LayerParts:
    """Find the parts of a layer beside its attention."""
    config, hidden = decoder.config, decoder.get_input_embeddings().weight[0]
    input_norm, attended_norm, inner_norm, fed_norm = (
        _norm(layer, name, hidden) if name else None
        for name in (family.input_norm, family.attended_norm, family.inner_norm, family.fed_norm)
    )
    return LayerParts(
        rotary=None,
        input_norm=input_norm,
        head_norms=None,
        attended_norm=attended_norm,
        inner_norm=inner_norm,
        fed_norm=fed_norm,
        mixture=_mixture(layer, family, config),
        activation=_activation(layer, family, config),
        beside=_beside(layer, family.beside, config, hidden),
        token_norm=_token_norm(layer, family.token_blocks, hidden),
        output_scale=float(getattr(layer, family.output_scale)) if family.output_scale else 1.0,
        mixes=family.mixer_of(layer) is not None and not family.mixes_beside,
        attends=family.attends(layer),
        feeds=family.feed_of(layer) is not None,
        factors=family.factors(layer),
        normed_residual=family.normed_residual(layer),
    )


def _attending(
    found: LayerParts, layer: Any, index: int, decoder: Any, family: Family, tables: _RotaryTables
) -> LayerParts:
    """Add the parts of a layer's attention."""
    attention, config = getattr(layer, family.attention), decoder.config
    latent = _latent(attention, family)
    head_size = int(attention.head_dim) if latent is None else latent.head_size
    if head_size > HEAD_LIMIT or head_size % 2:
        raise _NotDescribedError(f"its head size is {head_size}")
    rotary = family.rotary(decoder, index) if family.rotates(attention) else None
    hidden = decoder.get_input_embeddings().weight[0]
    norms = None
    if getattr(attention, family.head_norms[0], None) is not None:
        head = hidden.new_ones(head_size)
        norms = _head_norms(attention, family, head)
    table = None if rotary is None else tables.index(rotary, attention)
    if table is None and latent is not None:
        table = tables.still(latent.rotated, hidden)
    return replace(
        found,
        rotary=table,
        head_norms=norms,
        query_scale=family.query_scale(attention),
        kv_layer=family.kv_layer(decoder, index),
        value_scale=float(getattr(attention, family.value_scale)) if family.value_scale else 1.0,
        head_size=head_size,
        latent=latent,
        clip=float((getattr(config, family.clip) if family.clip else None) or 0.0),
    )


def _latent(attention: Any, family: Family) -> LatentParts | None:
    if family.latent is None:
        return None
    found = latent_parts(attention, family.latent)
    if found is None:
        raise _NotDescribedError("a norm of its latents is of another kind")
    return found


def _activation(layer: Any, family: Family, config: Any) -> Activation:
    name = getattr(config, family.activation, None) or getattr(config, "hidden_act", None) or family.activation
    if name in NAMES:
        return Activation(NAMES[name])
    found = xielu_of(getattr(family.feed_of(layer), "act_fn", None)) if name == "xielu" else None
    if found is None:
        raise _NotDescribedError(f"its activation is {name!r}")
    return found


def _head_norms(attention: Any, family: Family, head: torch.Tensor) -> HeadNorms:
    query, key, value = *family.head_norms, family.value_norm
    norm = _norm(attention, query, head)
    return HeadNorms(
        norm,
        _norm(attention, key, head) if hasattr(attention, key) else norm,  # K of another layer
        family.norms_after_rotation,
        _norm(attention, value, head) if value and hasattr(attention, value) else None,
    )


def _beside(layer: Any, names: Beside | None, config: Any, hidden: torch.Tensor) -> BesideParts | None:
    router = None if names is None else getattr(layer, names.router, None)
    if names is None or router is None:
        return None
    found = mixture_of(layer, names.mixture, config, is_shared=False)
    if found is None:
        raise _NotDescribedError("its experts compute in another way")
    scale = getattr(router, names.router_scale) * getattr(router, names.router_factor)
    return BesideParts(
        found,
        _norm(layer, names.input_norm, hidden),
        replace(_norm(router, names.router_norm, hidden), weight=scale.detach(), rounds_first=True),
        _norm(layer, names.dense_norm, hidden),
        _norm(layer, names.output_norm, hidden),
    )


def _token_norm(layer: Any, names: TokenBlocks | None, hidden: torch.Tensor) -> Norm | None:
    return _norm(layer, names.norm, hidden) if names is not None and hasattr(layer, names.norm) else None


def _input_norm(decoder: Any, names: TokenBlocks | None) -> Norm | None:
    if names is None or not hasattr(decoder, names.projection_norm):
        return None
    return _norm(decoder, names.projection_norm, decoder.get_input_embeddings().weight[0])


def _mixture(layer: Any, family: Family, config: Any) -> MixtureParts | None:
    feed = family.feed_of(layer)
    if family.mixture is None or not hasattr(feed, family.mixture.experts):
        return None  # a dense layer
    if any(getattr(feed, name).bias is not None for name in family.mixture.latents(feed)):
        raise _NotDescribedError("the projections around its experts have biases")  # each rank would add them
    found = mixture_of(feed, family.mixture, config, family.shared_of(layer, feed) is not None)
    if found is None:
        raise _NotDescribedError("its experts compute in another way")
    return found


def _norm(owner: Any, name: str, like: torch.Tensor) -> Norm:
    norm = norm_of(getattr(owner, name), like)
    if norm is None:
        raise _NotDescribedError(f"its {name} is a norm of another kind")
    return norm
