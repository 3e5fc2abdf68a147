"""Mixers that keep their state elsewhere than in transformers' cache of states: how each runs with a row's state.

MiniMax has a cache of its own. Neither its interface nor its layout of a state is that of the other mixers. Layers of
RecurrentGemma keep their state in attributes, and continue it with single tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.worker.kernels.recurrent import CONVOLUTION, RECURRENT

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


def _gated_unit(mixer: Any, forward: Callable[..., Any], hidden: torch.Tensor, held: RowCache) -> torch.Tensor:
    """Run RecurrentGemma's. Its convolution's state is one shorter than ours: the oldest input there is never read."""
    inputs, count = held.get_conv_state(0), hidden.shape[1]
    if inputs is None:
        mixer.conv1d_state = hidden.new_zeros((1, mixer.lru_width, mixer.conv1d_width - 1))
        mixer.rg_lru.recurrent_states = hidden.new_zeros((1, mixer.lru_width), dtype=torch.float32)
        places = torch.arange(count, device=hidden.device)
    else:
        assert count == 1, "several tokens behind a state"
        state = held.get_recurrent_state(0)
        assert state is not None, "a convolution without the unit behind it"
        mixer.conv1d_state, mixer.rg_lru.recurrent_states = inputs[..., 1:], state[..., 0]
        places = torch.ones(1, dtype=torch.int64, device=hidden.device)  # any but the first
    try:
        mixed: torch.Tensor = forward(hidden, position_ids=places[None], attention_mask=None, use_cache=True)[0]
        held.state[CONVOLUTION] = torch.nn.functional.pad(mixer.conv1d_state, (1, 0))
        held.state[RECURRENT] = mixer.rg_lru.recurrent_states[..., None]
        return mixed
    finally:
        mixer.conv1d_state = mixer.rg_lru.recurrent_states = None


# By the folder in transformers.models and the class of the mixer.
OWN_STATES = {
    "minimax.MiniMaxLightningAttention": OwnState(_lightning),
    "recurrent_gemma.RecurrentGemmaRecurrentBlock": OwnState(_gated_unit, chunk=1),
}


def own_state_of(kind: type) -> OwnState | None:
    """Return how mixers of a class run; None: with a cache that keeps states."""
    parts = kind.__module__.split(".")
    return OWN_STATES.get(f"{parts[2]}.{kind.__qualname__}") if parts[:2] == ["transformers", "models"] else None
