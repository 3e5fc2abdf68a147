"""What actors and placement groups are called: their names alone say what they are."""

from __future__ import annotations

from typing import NamedTuple

from ..told import KINDS

NAMESPACE = "kvforge-fleet-"
CONTROLLER = "controller"


class Member(NamedTuple):
    """kind: replica or gateway. name: of it, never used again. revision: of what it was made."""

    kind: str
    name: str
    revision: str

    @property
    def actor(self) -> str:
        """The name of its actor, and of its placement group."""
        return f"{self.kind}/{self.name}/{self.revision}"


def namespace(fleet: str) -> str:
    """Ray's, of a fleet."""
    return NAMESPACE + fleet


def member_of(actor: str) -> Member | None:
    """Whom an actor's name means; None: no member of a fleet."""
    parts = actor.split("/")
    return Member(*parts) if len(parts) == len(Member._fields) and parts[0] in KINDS else None
