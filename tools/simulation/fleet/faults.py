"""Faults of the gateway's routing and moving, planted to see that the fleet's simulator finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import msgspec

from kvforge.gateway.replicas import work
from kvforge.gateway.replicas.stream import MovingStream
from kvforge.protocol.errors import QueueFull
from kvforge.routing.router import Router

_FOLLOW, _CHOOSE, _SEEDED, _MOVE = MovingStream.follow, Router.choose, work.seeded, work.Work._move
_drawn = count(1)


def _follows_at_once(self: MovingStream, inner: Any) -> None:
    """What was given out is forgotten when it moves."""
    _FOLLOW(self, inner)
    self._behind = False


def _asks_for_no_key(self: Router, prompt_tokens: int, offers: Any, **options: Any) -> str | None:
    """Who knows a key is chosen like all others."""
    unknown = {
        name: replace(offer, found=msgspec.structs.replace(offer.found, known=False)) for name, offer in offers.items()
    }
    return _CHOOSE(self, prompt_tokens, unknown, **options)


def _draws_again(options: Any) -> Any:
    """The seed of a request with a key is another one each time."""
    if options.key and options.sampling.seed is None:
        options = replace(options, sampling=replace(options.sampling, seed=next(_drawn)))
    return _SEEDED(options)


def _drops_the_full(self: Any, error: Any) -> None:
    """What was accepted is refused where the next one's queue is full."""
    if self._accepted and isinstance(error, QueueFull):
        self._fail(error)
    else:
        _MOVE(self, error)


def _remembers(self: Router, question: int) -> None:
    """Decisions are added to answers that know them."""
    self._open.pop(question, None)


def _forgets_nothing(self: Any) -> None:
    """Who is done stays in the list of guests."""


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "tokens_are_forgotten_on_the_way": (MovingStream, "follow", _follows_at_once),
    "a_key_is_not_looked_for": (Router, "choose", _asks_for_no_key),
    "a_seed_is_drawn_again": (work, "seeded", _draws_again),
    "the_accepted_are_refused": (work.Work, "_move", _drops_the_full),
    "decisions_are_kept": (Router, "close", _remembers),
    "guests_are_kept": (work.Work, "_drop_if_over", _forgets_nothing),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """While it is entered."""
    place, attribute, fault = FAULTS[name]
    with patch.object(place, attribute, fault):
        yield
