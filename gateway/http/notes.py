"""Facts about one request that go into response headers: its id and its ignored fields."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders

from .ignored import HEADER, Ignored

_NOTES = "kvforge.notes"


class RequestNotes:
    """Facts about one request.

    Attributes:
        request_id: Used until the coordinator has assigned its own.
        pins: How many prefixes were pinned, and how many that should be were not.
    """

    __slots__ = ("ignored", "pins", "request_id")

    def __init__(self) -> None:
        self.request_id = f"req_{secrets.token_hex(12)}"
        self.ignored = Ignored()
        self.pins = (0, 0)

    def start(self, *, strict: bool) -> Ignored:
        """Begin to collect ignored fields. With `strict` they are refused instead."""
        self.ignored = Ignored(strict=strict)
        return self.ignored

    def mark(self, headers: MutableHeaders, name: str) -> None:
        """Add the request's id, under this name, and the ignored fields to response headers."""
        headers.setdefault(name, self.request_id)
        if shown := self.ignored.header:
            headers[HEADER] = shown


def notes_of(scope: MutableMapping[str, Any]) -> RequestNotes:
    """Return the notes of the request with this ASGI scope, creating them on first use."""
    notes = scope.get(_NOTES)
    if notes is None:
        notes = scope[_NOTES] = RequestNotes()
    assert isinstance(notes, RequestNotes)
    return notes
