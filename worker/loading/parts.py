"""Finds the parts of a transformers model that `fusion` builds a decoder from, or why it has none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.worker.device.target import HEAD_UNIT
from kvforge.worker.kernels import HEAD_SIZE_MAX, HIDDEN_MAX
from kvforge.worker.kernels.activations import NAMES, Activation
from kvforge.worker.kernels.layer_weights import HeadNorms, Norm, QueryScale, RotaryTable

from .description import Family
from .families import family_of
from .mixtures import MixtureParts, mixture_of
from .norms import norm_of
from .reordered import ReorderedRows
from .rope import STATIC_ROPE

log = logging.getLogger("worker")


@dataclass(frozen=True)
class LayerParts:
    """The small parts of one layer; see `FusedLayer`. The projections are in its modules."""

    rotary: int | None
    input_norm: Norm | None
    head_norms: HeadNorms | None
    attended_norm: Norm | None
    inner_norm: Norm | None
    fed_norm: Norm | None
    mixture: MixtureParts | None = None
    query_scale: QueryScale | None = None
    clip: float = 0.0


@dataclass(frozen=True)
class DecoderParts:
    """The small parts of a decoder; see `FusedDecoder`."""

    family: Family
    layers: tuple[LayerParts, ...]
    final_norm: Norm
    rotary: tuple[RotaryTable, ...]
    activation: Activation
    residual_scale: float
    head_size: int

    @property
    def can_be_split(self) -> bool:
        """Whether ranks share layers by heads and inner columns: no projection or norm covers those of several ranks.

        transformers cuts a joined projection elsewhere, and gathers its output.
        """
        family = self.family
        norms = [layer.head_norms.query for layer in self.layers if layer.head_norms is not None]
        is_joined = len(family.projected) < 3 or len(family.gate_up) < 1 + family.is_gated
        return not is_joined and all(len(norm.weight) == self.head_size for norm in norms)


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
    name = getattr(config, family.activation, None) or getattr(config, "hidden_act", None)
    if name not in NAMES:
        raise _NotDescribedError(f"its activation is {name!r}")
    if config.hidden_size > HIDDEN_MAX or config.hidden_size % HEAD_UNIT:
        raise _NotDescribedError(f"its hidden size is {config.hidden_size}")
    if getattr(config, "clip_qkv", None) is not None and not family.clip:
        raise _NotDescribedError("it clips Q, K and V")
    _check_linears(module, family)
    tables = _RotaryTables()
    layers = tuple(_layer(layer, index, decoder, family, tables) for index, layer in enumerate(decoder.layers))
    return DecoderParts(
        family=family,
        layers=layers,
        final_norm=_norm(decoder, "norm", decoder.embed_tokens.weight[0]),
        rotary=tuple(tables.found),
        activation=Activation(NAMES[name]),
        head_size=int(decoder.layers[0].self_attn.head_dim),
        residual_scale=float(getattr(config, family.residual_scale)) if family.residual_scale else 1.0,
    )


def _check_linears(module: Any, family: Family) -> None:
    """Check that the module's products are plain, not replaced by quantised ones for example."""
    mixture = family.mixture
    routers = (
        [] if mixture is None else [getattr(family.feed_of(layer), mixture.gate, None) for layer in module.model.layers]
    )
    apart = {id(part) for router in routers if router is not None for part in router.modules()}
    linears = [part for part in module.modules() if hasattr(part, "in_features") and id(part) not in apart]
    if odd := next((part for part in linears if type(part) not in (torch.nn.Linear, ReorderedRows)), None):
        raise _NotDescribedError(f"it has a {type(odd).__name__}")
    dtypes = {w.dtype for part in module.modules() if id(part) not in apart for w in part.parameters(recurse=False)}
    if len(dtypes) > 1:
        raise _NotDescribedError(f"its weights have several dtypes: {', '.join(sorted(map(str, dtypes)))}")


class _RotaryTables:
    """The tables of a decoder's layers, each once."""

    def __init__(self) -> None:
        self.found: list[RotaryTable] = []
        self._index: dict[tuple[int, str], int] = {}

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
    attention, config = layer.self_attn, decoder.config
    if attention.head_dim > HEAD_SIZE_MAX or attention.head_dim % 2:
        raise _NotDescribedError(f"its head size is {attention.head_dim}")
    rotary = family.rotary(decoder, index) if family.rotates(attention) else None
    query, key = family.head_norms
    hidden = decoder.embed_tokens.weight[0]
    norms = None
    if getattr(attention, query, None) is not None:
        head = hidden.new_ones(attention.head_dim)
        norms = HeadNorms(_norm(attention, query, head), _norm(attention, key, head), family.norms_after_rotation)
    return LayerParts(
        rotary=None if rotary is None else tables.index(rotary, attention),
        head_norms=norms,
        mixture=_mixture(layer, family, config),
        query_scale=family.query_scale(attention),
        clip=float((getattr(config, family.clip) if family.clip else None) or 0.0),
        **{
            name: _norm(layer, getattr(family, name), hidden) if getattr(family, name) else None
            for name in ("input_norm", "attended_norm", "inner_norm", "fed_norm")
        },
    )


def _mixture(layer: Any, family: Family, config: Any) -> MixtureParts | None:
    feed = family.feed_of(layer)
    if family.mixture is None or not hasattr(feed, family.mixture.experts):
        return None  # a dense layer
    found = mixture_of(feed, family.mixture, config, family.shared_of(layer, feed) is not None)
    if found is None:
        raise _NotDescribedError("its experts compute in another way")
    return found


def _norm(owner: Any, name: str, like: torch.Tensor) -> Norm:
    norm = norm_of(getattr(owner, name), like)
    if norm is None:
        raise _NotDescribedError(f"its {name} is a norm of another kind")
    return norm
