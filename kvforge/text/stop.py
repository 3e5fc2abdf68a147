"""Cuts text at a stop string.

Stop strings are matched in text, and therefore in the client. It then ends the request after the token that completed
the string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text through until a stop string appears, which is not passed.

    A possible beginning of a stop string is held back until it is decided.

    Attributes:
        found: Whether one has appeared.
        matched: The stop string found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        self.matched = ""

    def push(self, piece: str) -> str:
        """Return the text that certainly comes before any stop string; may be empty."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        places = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            at, self.matched = min(places)
            self.found, self._held = True, ""
            return text[:at]
        held = max(_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text held back that turned out to be no stop string."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that starts `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
