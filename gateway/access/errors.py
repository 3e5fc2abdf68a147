"""Authentication errors."""

from __future__ import annotations

from kvforge.protocol.errors import NotAllowed


class Unauthenticated(NotAllowed):
    """The API key is missing, unknown or expired."""

    def __init__(self, problem: str) -> None:
        super().__init__("connect", problem)
