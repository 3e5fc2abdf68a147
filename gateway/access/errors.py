"""What is wrong with a caller."""

from __future__ import annotations

from kvforge.protocol.errors import NotAllowed


class Unauthenticated(NotAllowed):
    """There is no key, or it is none of ours."""

    def __init__(self, problem: str) -> None:
        super().__init__("connect", problem)
