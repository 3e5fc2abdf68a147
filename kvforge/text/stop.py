"""Text up to a stop string.

A stop string is found where text is known: in the client, which then ends the request after the token that completed
it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text through until one of the stop strings appears; the stop string itself is not passed.

    What might be the beginning of one is held back until it is decided. found: one has appeared; matched: which one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        self.matched = ""

    def push(self, piece: str) -> str:
        """The text that is now certain to come before any stop string; may be empty."""
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
        """What was held back and is no stop string after all."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
