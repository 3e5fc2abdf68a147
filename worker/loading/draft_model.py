"""Joins a model with its draft model: a small one with the same vocabulary, which drafts the next tokens.

The draft model's K and V lie in the same blocks as the model's (`KvGeometry.beside`), and each pass of the model over
prompt tokens writes them too (`LoadedModel.write_draft`). Forks, prefix hits and copies between tiers therefore serve
both models. The K and V of generated tokens come with the next proposal (`attention.draft_backlog`).

Vocabularies are compared by their tokenizers: sizes alone tell little, because models of one family pad theirs to
different sizes. A few tokens may differ, as special ones do, because a wrong draft changes no answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from kvforge.protocol.errors import InvalidConfiguration, KvforgeError
from kvforge.text.tokenizer import Tokenizer

from .heads import DraftHead
from .model import LoadedModel

OTHER_MAX = 100  # vocabularies are the same if at most one token in so many is missing or has another id
log = logging.getLogger("worker")


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
    if draft.geometry.states:
        problem = f"{name!r} has recurrent states, which take back no wrong draft: choose a model without"
        raise InvalidConfiguration("draft_model", problem)
    problem = vocabulary_problem(_token_ids(model), _token_ids(draft), model.vocab_size, draft.vocab_size)
    if problem:
        problem = f"{name!r} {problem} as {model.info.name}: choose a model with the same vocabulary"
        raise InvalidConfiguration("draft_model", problem)
    return replace(model, draft=draft, geometry=model.geometry.joined(draft.geometry))


def join_head(model: LoadedModel, head: DraftHead) -> LoadedModel:
    """Return the model with a head that drafts. Its geometry has the layers of both."""
    return replace(model, draft=head, geometry=model.geometry.joined(head.geometry))


def vocabulary_problem(
    own: Mapping[str, int] | None, other: Mapping[str, int] | None, own_size: int, other_size: int
) -> str:
    """Return how a draft model's vocabulary differs; "" if drafts can fit.

    Args:
        own: The ids of the model's tokens; None: it has no tokenizer.
        other: The same of the draft model.
        own_size: The size of the model's vocabulary.
        other_size: The same of the draft model. Counts only without both tokenizers.
    """
    if own is None or other is None:
        return "" if own_size == other_size else f"has not the same number of tokens, {other_size} and not {own_size},"
    alike = sum(other.get(token) == number for token, number in own.items())
    apart = max(len(own), len(other)) - alike
    if apart * OTHER_MAX > len(own):
        return f"gives only {alike} of {len(own)} tokens the same ids"
    return ""


def _token_ids(model: LoadedModel) -> Mapping[str, int] | None:
    """Return the ids of a model's tokens; None without a tokenizer that can be read."""
    try:
        return Tokenizer.load(model.info.source).token_ids
    except KvforgeError as error:
        log.debug("draft model: vocabularies are compared by their sizes: %s", error)
        return None
