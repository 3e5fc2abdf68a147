"""Names of actors and placement groups, which identify the members of a fleet."""

from __future__ import annotations

from typing import NamedTuple

from kvforge.fleet.messages import KINDS

NAMESPACE = "kvforge-fleet-"
CONTROLLER = "controller"


class FleetMember(NamedTuple):
    """A replica or gateway.

    Attributes:
        kind: replica or gateway.
        name: Its name, never reused.
        revision: The revision that it was created from.
    """

    kind: str
    name: str
    revision: str

    @property
    def actor(self) -> str:
        """Return the name of its actor and of its placement group."""
        return f"{self.kind}/{self.name}/{self.revision}"


def namespace(fleet: str) -> str:
    """Return Ray's namespace for a fleet."""
    return NAMESPACE + fleet


def member_of(actor: str) -> FleetMember | None:
    """Return the member that an actor's name identifies, None if it is not of a fleet."""
    parts = actor.split("/")
    return FleetMember(*parts) if len(parts) == len(FleetMember._fields) and parts[0] in KINDS else None
