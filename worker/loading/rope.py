"""How many positions a model's rotary embedding tells apart, and frequencies that are given one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvforge.protocol.errors import InvalidConfiguration, UnsupportedModel

# Of `rope_parameters`: every frequency of the plain embedding is divided by a number of its own, in "divisors".
DIVIDED = "kvforge_divided"
# Types whose frequencies depend on nothing but the configuration.
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", DIVIDED})
CONTEXT_TOKENS_MIN = 8  # what the checks at load need


@dataclass(frozen=True)
class ContextRange:
    """Positions. usual: as many as are served where nobody says how many. most: more make no sense. why: of `most`."""

    usual: int
    most: int
    why: str


def context_range(config: Any) -> ContextRange:
    """How long a context a model has. Errors: UnsupportedModel where the configuration does not say.

    Of `yarn`, max_position_embeddings may be the length before or after it was extended; a factor for the length that
    the model was trained on says what is meant (as Qwen documents it). Of `linear` and `llama3` it is what the model is
    said to do; the factor tells how far it could be taken. `dynamic` and `longrope` change every frequency once the
    longest sequence *of the batch* passes a length, which would make a request's tokens depend on its neighbours; such
    models are served up to that length.
    """
    text = config.get_text_config(decoder=True)
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        name = str((getattr(config, "architectures", None) or [config.model_type])[0])
        raise UnsupportedModel(name, "its configuration gives no max_position_embeddings")
    found = ContextRange(stated, stated, f"its max_position_embeddings is {stated}")
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


def context_tokens(config: Any, asked: int) -> int:
    """The positions that are served. asked: by the setting `context_tokens_max`, 0: not.

    Errors: InvalidConfiguration, UnsupportedModel.
    """
    found = context_range(config)
    if not asked:
        return found.usual
    if not CONTEXT_TOKENS_MIN <= asked <= found.most:
        problem = f"is {asked}; of this model it can be {CONTEXT_TOKENS_MIN} to {found.most}: {found.why}"
        raise InvalidConfiguration("context_tokens_max", problem)
    return asked


def _divided(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[torch.Tensor, float]:
    """As transformers wants it: [dimensions / 2] float32 device, and the factor of cos and sin."""
    del seq_len
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    divisors = torch.tensor(parameters["divisors"], dtype=torch.float64)
    steps = torch.arange(len(divisors), dtype=torch.float64) / len(divisors)
    frequencies = 1.0 / (divisors * parameters["rope_theta"] ** steps)
    return frequencies.to(torch.float32).to(device), float(parameters.get("attention_factor", 1.0))


ROPE_INIT_FUNCTIONS[DIVIDED] = _divided
