"""Who asks, and what that one may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvforge.protocol.errors import NotAllowed

GENERATE, SEE, ADMIN = RIGHTS = ("generate", "see", "admin")


@dataclass(frozen=True, slots=True)
class Caller:
    """name: of its key; "" where none is needed."""

    name: str = ""
    tenant: str = "default"
    rights: frozenset[str] = frozenset(RIGHTS)

    def need(self, right: str) -> None:
        """Raises NotAllowed."""
        if right not in self.rights:
            raise NotAllowed(right, f"the key {self.name!r} does not have it")


class Access:
    """The callers that are known."""

    def caller(self, headers: Mapping[str, str], host: str) -> Caller:  # noqa: ARG002
        """Raises Unauthenticated."""
        return Caller()
