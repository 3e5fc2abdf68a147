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


def store_hidden(hidden: torch.Tensor, layer: KvLayer, slots: torch.Tensor) -> None:
    """Store the hidden states of a step's tokens.

    Args:
        hidden: [tokens, size] float on the device.
        layer: The layer, of numbers that are not quantised.
        slots: [tokens] int64 on the device, the slot of each; for padding of a static batch one that nothing reads.
    """
    states = layer.keys.view(-1, layer.keys.shape[3])
    states.index_copy_(0, slots, hidden.to(states.dtype))


def hidden_before(layer: KvLayer, batch: PagedBatch) -> torch.Tensor:
    """Return the hidden state at the position before each token, [tokens, size]; zeros before position 0."""
    slots = batch.device_array("slots before", slots_before).long()[:, None]
    states = layer.keys.view(-1, layer.keys.shape[3])
    return states.index_select(0, slots[:, 0].clamp(min=0)).masked_fill(slots < 0, 0.0)


def slots_before(batch: PagedBatch) -> Int32Array:
    """Return the slot of the position before each token, [tokens] int32; NONE before position 0, and of padding."""
    counts, slots, positions = batch.counts, batch.kv_slots, batch.starts
    rows = places = None
    if not (len(counts) == len(slots) and (counts == 1).all()):  # a step of decodes: a row is a token
        rows = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = batch.starts[rows] + offsets
        places = batch.query_starts[rows] + offsets
        slots = slots[places]
    found = np.where((slots >= 0) & (positions > 0), slots - 1, NONE)  # in the same block
    (first,) = np.nonzero((positions % batch.block_size == 0) & (found != NONE))
    if len(first):
        of = first if rows is None else rows[first]
        found[first] = batch.kv_slots_of(of, positions[first, None] - 1)[:, 0]
    if places is None:
        return found.astype(np.int32)
    whole = np.full(len(batch.kv_slots), NONE, np.int32)
    whole[places] = found
    return whole
