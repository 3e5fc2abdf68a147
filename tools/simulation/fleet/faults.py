"""Faults of the gateway's routing and moving, to prove that the fleet's simulator finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import msgspec

from kvforge.gateway.replicas import failover
from kvforge.gateway.replicas.stream import MovingStream
from kvforge.protocol.errors import QueueFull
from kvforge.routing.router import Router

_FOLLOW, _CHOOSE, _SEEDED, _MOVE = MovingStream.follow, Router.choose, failover.seeded, failover.FailoverRequest._move
_drawn = count(1)


def _follows_at_once(self: MovingStream, inner: Any) -> None:
    """A moved request forgets the tokens that it has already delivered."""
    _FOLLOW(self, inner)
    self._behind = False


def _asks_for_no_key(self: Router, prompt_tokens: int, offers: Any, **options: Any) -> str | None:
    """A replica that knows the request's key gets no preference."""
    unknown = {
        name: replace(offer, found=msgspec.structs.replace(offer.found, known=False)) for name, offer in offers.items()
    }
    return _CHOOSE(self, prompt_tokens, unknown, **options)


def _draws_again(options: Any) -> Any:
    """A request with a key gets a new seed on each submit."""
    if options.idempotency_key and options.sampling.seed is None:
        options = replace(options, sampling=replace(options.sampling, seed=next(_drawn)))
    return _SEEDED(options)


def _drops_the_full(self: Any, error: Any) -> None:
    """An accepted request is refused when the next replica's queue is full."""
    if self._accepted and isinstance(error, QueueFull):
        self._fail(error)
    else:
        _MOVE(self, error)


def _remembers(self: Router, question: int) -> None:
    """Decisions count even for replicas that already report their effect."""
    self._open.pop(question, None)


def _forgets_nothing(self: Any) -> None:
    """A finished request stays in the list of guests."""


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "tokens_are_forgotten_on_the_way": (MovingStream, "follow", _follows_at_once),
    "a_key_is_not_looked_for": (Router, "choose", _asks_for_no_key),
    "a_seed_is_drawn_again": (failover, "seeded", _draws_again),
    "the_accepted_are_refused": (failover.FailoverRequest, "_move", _drops_the_full),
    "decisions_are_kept": (Router, "close", _remembers),
    "guests_are_kept": (failover.FailoverRequest, "_drop_if_over", _forgets_nothing),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Install a fault inside the block."""
    place, attribute, fault = FAULTS[name]
    with patch.object(place, attribute, fault):
        yield
