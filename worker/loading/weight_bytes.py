"""The memory that a model's weights take."""

from __future__ import annotations

from .model import LoadedModel


def weight_bytes(model: LoadedModel) -> int:
    """Return the bytes of a model's weights, and of those of its draft model or heads."""
    return model.bytes + (0 if model.draft is None else model.draft.bytes)
