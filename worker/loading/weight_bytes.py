"""The memory that a model's weights take."""

from __future__ import annotations

from itertools import chain

from kvforge.worker.kernels.packed import stored_bytes

from .model import LoadedModel


def weight_bytes(model: LoadedModel) -> int:
    """Return the bytes of parameters, buffers and packed weights. A tensor that layers share counts once.

    Those of a draft model are added.
    """
    tensors = chain(model.module.parameters(), model.module.buffers())
    plain = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    draft = 0 if model.draft is None else weight_bytes(model.draft)
    return plain + sum(map(stored_bytes, model.packed_weights())) + draft
