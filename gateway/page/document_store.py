"""The page's documents other than the map. A viewer receives those that changed since it last read."""

from __future__ import annotations

from typing import Any

import msgspec


class DocumentStore:
    """Documents by name, each as JSON with the number of its last change."""

    def __init__(self) -> None:
        self.number = 0
        self._documents: dict[str, tuple[int, bytes]] = {}

    def put(self, name: str, document: Any) -> None:
        """Publish `document` under `name`."""
        encoded = msgspec.json.encode(document)
        if name not in self._documents or self._documents[name][1] != encoded:
            self.number += 1
            self._documents[name] = self.number, encoded

    def since(self, number: int) -> bytes:
        """Return events for a viewer that has read up to `number`, the oldest change first."""
        news = sorted((at, name, encoded) for name, (at, encoded) in self._documents.items() if at > number)
        return b"".join(event(name, encoded) for _, name, encoded in news)


def event(name: str, document: bytes) -> bytes:
    """Encode one server-sent event. `document` is JSON, which has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), document)
