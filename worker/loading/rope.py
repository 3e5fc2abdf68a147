"""The context length that a model's rotary embedding supports, and frequencies with individual divisors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvforge.protocol.errors import InvalidConfiguration, UnsupportedModel

# A type in `rope_parameters` of kvforge's own: each frequency has its own divisor, in "divisors".
DIVIDED = "kvforge_divided"
# Types with frequencies that depend only on the configuration.
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional", DIVIDED})
# Layers that know at most distances within a window.
UNPLACED = frozenset({"mamba", "linear_attention", "sliding_attention"})
UNLIMITED_USUAL, UNLIMITED_MOST = 1 << 17, 1 << 30  # tokens, for models without positions
CONTEXT_TOKENS_MIN = 8  # the checks at load need as many


@dataclass(frozen=True)
class ContextRange:
    """Positions that a model supports.

    Attributes:
        usual: Positions served by default.
        most: The largest sensible setting.
        why: The reason for `most`.
    """

    usual: int
    most: int
    why: str


def context_range(config: Any) -> ContextRange:
    """Return the context length of a model.

    - `yarn`: max_position_embeddings may be the length before or after the extension. The trained length times the
      factor is what was meant (as Qwen documents it).
    - `linear` and `llama3`: max_position_embeddings is the stated length; the factor gives the possible one.
    - Llama 4's layers attend within chunks: such models are served up to the length of one.
    - `dynamic` and `longrope`: every frequency changes once the longest sequence *of the batch* passes a length, so a
      request's tokens would depend on its neighbours. Such models are served up to that length.

    Raises:
        UnsupportedModel: The configuration does not state it.
    """
    text = config.get_text_config(decoder=True)
    stated = getattr(text, "max_position_embeddings", None)
    if stated is None and _has_no_positions(text):
        return ContextRange(UNLIMITED_USUAL, UNLIMITED_MOST, "no layer of its attends to all tokens")
    if not isinstance(stated, int) or stated < 1:
        name = str((getattr(config, "architectures", None) or [config.model_type])[0])
        raise UnsupportedModel(name, "its configuration gives no max_position_embeddings")
    found = ContextRange(stated, stated, f"its max_position_embeddings is {stated}")
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        stated = min(stated, chunk)
        found = ContextRange(stated, stated, f"its layers attend within chunks of {chunk}")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind, factor = parameters.get("rope_type"), float(parameters.get("factor") or 1.0)
        original = parameters.get("original_max_position_embeddings")
        original = int(original or getattr(text, "original_max_position_embeddings", None) or stated)
        if kind in ("dynamic", "longrope"):
            usual = min(found.usual, original)
            found = ContextRange(usual, usual, f"its rotary embedding ({kind}) changes after {original}")
        elif kind in ("yarn", "linear", "llama3") and factor > 1:
            most = max(stated, int(factor * (stated if kind == "linear" else original)))
            why = f"its rotary embedding ({kind}, factor {factor:g}, of {stated if kind == 'linear' else original})"
            found = ContextRange(most if kind == "yarn" else stated, most, f"{why} reaches to {most}")
    return found


def _has_no_positions(config: Any) -> bool:
    """Return whether a model has recurrent layers and windows alone, and therefore computes any number of tokens."""
    kinds = getattr(config, "layer_types", None)
    return isinstance(kinds, list | tuple) and bool(kinds) and all(kind in UNPLACED for kind in kinds)


def context_tokens(config: Any, asked: int) -> int:
    """Return the positions to serve.

    Args:
        config: The transformers configuration.
        asked: The setting `context_tokens_max`; 0: unset.

    Returns:
        Positions.

    Raises:
        InvalidConfiguration: The setting is out of range.
        UnsupportedModel: The configuration states no context length.
    """
    found = context_range(config)
    if not asked:
        return found.usual
    if not CONTEXT_TOKENS_MIN <= asked <= found.most:
        problem = f"is {asked}; this model supports {CONTEXT_TOKENS_MIN} to {found.most}: {found.why}"
        raise InvalidConfiguration("context_tokens_max", problem)
    return asked


def _divided(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[torch.Tensor, float]:
    """Return frequencies [dimensions / 2] float32 on the device, and the factor of cos and sin."""
    del seq_len
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    divisors = torch.tensor(parameters["divisors"], dtype=torch.float64)
    steps = torch.arange(len(divisors), dtype=torch.float64) / len(divisors)
    frequencies = 1.0 / (divisors * parameters["rope_theta"] ** steps)
    return frequencies.to(torch.float32).to(device), float(parameters.get("attention_factor", 1.0))


ROPE_INIT_FUNCTIONS[DIVIDED] = _divided
