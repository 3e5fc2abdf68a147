"""Joins a model with its draft model: a small one with the same vocabulary, which drafts the next tokens.

The draft model's K and V lie in the same blocks as the model's (`KvGeometry.beside`), and each pass of the model writes
them too (`LoadedModel.write_draft`). Forks, prefix hits and copies between tiers therefore serve both models.
"""

from __future__ import annotations

from dataclasses import replace

from kvforge.protocol.errors import InvalidConfiguration

from .model import LoadedModel


def join_draft_model(model: LoadedModel, draft: LoadedModel) -> LoadedModel:
    """Return the model with its draft model.

    Args:
        model: The model that answers.
        draft: The model that drafts, loaded without limits of windows and with the same block size.

    Returns:
        The model. Its geometry has the layers of both.

    Raises:
        InvalidConfiguration: Names `draft_model`: the two models do not fit.
    """
    name = draft.info.name
    if model.geometry.states:
        problem = f"{name!r}, but {model.info.name} has recurrent states, which take back no wrong draft: leave it out"
        raise InvalidConfiguration("draft_model", problem)
    if draft.geometry.states:
        problem = f"{name!r} has recurrent states, which take back no wrong draft: choose a model without"
        raise InvalidConfiguration("draft_model", problem)
    if draft.vocab_size != model.vocab_size:
        problem = f"{name!r} has {draft.vocab_size} tokens in its vocabulary, {model.info.name} {model.vocab_size}"
        raise InvalidConfiguration("draft_model", f"{problem}: choose a model with the same vocabulary")
    return replace(model, draft=draft, geometry=replace(model.geometry, beside=draft.geometry))
