"""Mixers that keep their state elsewhere than in transformers' cache of states: how each runs with a row's state.

MiniMax has a cache of its own. Neither its interface nor its layout of a state is that of the other mixers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .row_cache import RowCache

Mix = Callable[[Any, Callable[..., Any], torch.Tensor, RowCache], torch.Tensor]


@dataclass(frozen=True)
class OwnState:
    """How a mixer runs with the state of a row. Its layer expects a pair from it, with the result first.

    Attributes:
        mix: From the mixer, its own `forward`, hidden states [1, tokens, hidden size] and a row's state to its result,
            the very tensor that its last projection returned. It replaces the state.
        chunk: The most tokens of a prompt that it is given at once; 0: as mixers without a chunk size.
    """

    mix: Mix
    chunk: int = 0


class _LightningCache:
    """The state of a row in the interface of `MiniMaxCache`.

    transformers keeps a head's sum of k v^T as [K, V] in the dtype of the model. It is kept as that of state spaces
    here, [V, K] in float32: a sum of thousands of tokens loses those that follow in 16 bits.

    Args:
        held: The row's state.
        dtype: In which the mixer computes.
    """

    def __init__(self, held: RowCache, dtype: torch.dtype) -> None:
        self._held, self._dtype = held, dtype

    def get_linear_cache(self, layer: int) -> torch.Tensor | None:
        state = self._held.get_recurrent_state(layer)
        return None if state is None else state.transpose(2, 3).to(self._dtype)

    def set_linear_cache(self, layer: int, state: torch.Tensor) -> None:
        self._held.update_recurrent_state(state.transpose(2, 3).float().contiguous(), layer)


def _lightning(_mixer: Any, forward: Callable[..., Any], hidden: torch.Tensor, held: RowCache) -> torch.Tensor:
    cache = _LightningCache(held, hidden.dtype)
    mixed: torch.Tensor = forward(hidden, position_embeddings=None, attention_mask=None, cache=cache)[0]
    return mixed


# By the folder in transformers.models and the class of the mixer.
OWN_STATES = {"minimax.MiniMaxLightningAttention": OwnState(_lightning)}


def own_state_of(kind: type) -> OwnState | None:
    """Return how mixers of a class run; None: with a cache that keeps states."""
    parts = kind.__module__.split(".")
    return OWN_STATES.get(f"{parts[2]}.{kind.__qualname__}") if parts[:2] == ["transformers", "models"] else None
