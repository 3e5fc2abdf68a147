"""Facts about one request that go into headers: its id, and the fields that were ignored."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders

from .ignored import HEADER, Ignored

_NOTES = "kvforge.notes"


class Notes:
    """Facts about one request. request_id: used where the coordinator has not numbered the request."""

    __slots__ = ("ignored", "request_id")

    def __init__(self) -> None:
        self.request_id = f"req_{secrets.token_hex(12)}"
        self.ignored = Ignored()

    def start(self, *, strict: bool) -> Ignored:
        """Begin to note what of the request's body is not read. strict: it is refused instead."""
        self.ignored = Ignored(strict=strict)
        return self.ignored

    def mark(self, headers: MutableHeaders, name: str) -> None:
        """Put the request's id, under this name, and what was ignored into an answer's headers."""
        headers.setdefault(name, self.request_id)
        if shown := self.ignored.header:
            headers[HEADER] = shown


def notes_of(scope: MutableMapping[str, Any]) -> Notes:
    """The notes of the request with this ASGI scope, made when they are first asked for."""
    notes = scope.get(_NOTES)
    if notes is None:
        notes = scope[_NOTES] = Notes()
    assert isinstance(notes, Notes)
    return notes
