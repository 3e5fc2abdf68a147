"""Hidden states of tokens in the blocks of a pool, for heads that draft: at each position they read the one before.

They are a layer of the pool with one number of `LayerShape.head_size` for each token, and are stored as K and V are: a
prefix hit, a fork, a copy to another tier and a token that takes the place of a rejected draft bring them along.
"""

from __future__ import annotations

import numpy as np
import torch

from .batch import Int32Array, PagedBatch
from .geometry import LayerShape
from .interface import KvLayer

NONE = -1


def hidden_shape(size: int) -> LayerShape:
    """Return the layer that stores hidden states of `size` numbers."""
    return LayerShape(1, size, latent=size)


def store_hidden(hidden: torch.Tensor, layer: KvLayer, batch: PagedBatch, spare: int) -> None:
    """Store the hidden states of a step's tokens.

    Args:
        hidden: [tokens, size] float on the device.
        layer: The layer, of numbers that are not quantised.
        batch: The step. Padding of a static one goes to the slot `spare`.
        spare: A slot of the layer that nothing reads.
    """
    slots = batch.kv_slots_on_device.long()
    states = layer.keys.view(-1, layer.keys.shape[3])
    states.index_copy_(0, torch.where(slots < 0, spare, slots), hidden.to(states.dtype))


def hidden_before(layer: KvLayer, batch: PagedBatch) -> torch.Tensor:
    """Return the hidden state at the position before each token, [tokens, size]; zeros before position 0."""
    slots = batch.device_array("slots before", slots_before).long()[:, None]
    states = layer.keys.view(-1, layer.keys.shape[3])
    return torch.where(slots < 0, 0.0, states.index_select(0, slots[:, 0].clamp(min=0)))


def slots_before(batch: PagedBatch) -> Int32Array:
    """Return the slot of the position before each token, [tokens] int32; NONE before position 0, and of padding."""
    counts, tokens = batch.counts, len(batch.kv_slots)
    rows = np.repeat(np.arange(len(counts)), counts)
    first = batch.query_starts[:-1]
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    positions = np.repeat(batch.starts, counts) + places - np.repeat(first, counts) - 1
    held = (batch.kv_slots[places] >= 0) & (positions >= 0)
    found = np.full(tokens, NONE, np.int32)
    found[places[held]] = batch.kv_slots_of(rows[held], positions[held, None])[:, 0]
    return found
