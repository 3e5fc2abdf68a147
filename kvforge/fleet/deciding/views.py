"""The present and the wanted state of a fleet, and the actions on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvforge.fleet.messages import (
    DRAINING,
    FAILED,
    GATEWAY,
    PLACING,
    READY,
    REPLICA,
    SILENT,
    STARTING,
    STOPPED,
    UNREADY,
    NodeStatus,
)

from ..settings import FleetFile

LEAVING = (DRAINING, STOPPED)
ON_THE_WAY = (PLACING, STARTING, UNREADY, SILENT)


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica.

    Attributes:
        status: Its last status.
        silent_s: How long it has not answered, if its phase is silent.
    """

    name: str
    revision: str
    status: NodeStatus
    silent_s: float = 0.0

    @property
    def phase(self) -> str:
        """Return its phase; see `status`."""
        return self.status.phase

    @property
    def leaving(self) -> bool:
        """Return whether it was ordered to leave."""
        return self.phase in LEAVING

    @property
    def can_end_at_once(self) -> bool:
        """Return whether it has no requests that must end first."""
        return self.phase in (PLACING, STARTING, FAILED)


@dataclass(frozen=True, slots=True)
class Gateway(Replica):
    """A gateway."""


@dataclass(frozen=True, slots=True)
class View:
    """The present state."""

    replicas: tuple[Replica, ...] = ()
    gateways: tuple[Gateway, ...] = ()

    def known(self, replica: Replica) -> bool:
        """Return whether all ready gateways send requests to a replica."""
        return all(replica.name in each.status.ready for each in self.gateways if each.phase == READY)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted state.

    Attributes:
        file: The fleet's file.
        count: The number of replicas, if it differs from the file.
        ended: The fleet is to be removed.
        again: Members that cannot start are replaced at once.
    """

    file: FleetFile
    count: int | None = None
    ended: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class CreateAction:
    """Place a new member."""

    kind: str
    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class DrainAction:
    """Stop admission on a replica, and hand back requests that have not ended after `deadline_s`."""

    name: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StopAction:
    """Order a member to end."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class RemoveAction:
    """Free the place of a member that has ended or is given up."""

    kind: str
    name: str


Action = CreateAction | DrainAction | StopAction | RemoveAction


def words(action: Action) -> str:
    """Return an action in words."""
    if isinstance(action, CreateAction):
        return f"creating {action.kind} {action.name}"
    if isinstance(action, DrainAction):
        return f"draining {action.name} for at most {action.deadline_s:g} s"
    return f"{'stopping' if isinstance(action, StopAction) else 'removing'} {action.kind} {action.name}"


@dataclass(slots=True)
class Decision:
    """The actions in order.

    Attributes:
        names: Names for new members.
        count: The wanted number of replicas.
        sentences: Why the fleet is not in its wanted state.
    """

    names: list[str]
    count: int = 0
    actions: list[Action] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def act(self, action: Action) -> None:
        """Add an action, unless there is one for the same member."""
        if all(action.name != other.name for other in self.actions):
            self.actions.append(action)

    def create(self, kind: str, revision: str) -> None:
        """Create a member, if there is a name left for it."""
        if self.names:
            self.act(CreateAction(kind, self.names.pop(0), revision))

    def explain(self, one: Replica, words: str) -> None:
        """Add a sentence on what the fleet waits for."""
        reason = one.status.reason
        self.sentences.append(f"{words} {one.phase}" + (f": {reason}" if reason else ""))

    def leave(self, one: Replica, file: FleetFile) -> None:
        """Make a member leave: at once if it has no requests, else after these have ended."""
        kind = GATEWAY if isinstance(one, Gateway) else REPLICA
        if one.phase == SILENT:
            if one.silent_s >= file.replicas.unresponsive_timeout_s:
                self.act(RemoveAction(kind, one.name))
            else:
                self.sentences.append(f"{one.name} should leave but does not answer")
        elif one.phase == PLACING:
            self.act(RemoveAction(kind, one.name))
        elif kind == GATEWAY or one.can_end_at_once:
            self.act(StopAction(kind, one.name))
        else:
            self.act(DrainAction(one.name, file.replicas.drain_s))


def order_of_leaving(one: Replica) -> tuple[int, int, str]:
    """Return the sort key for leaving: members that do not serve first, then those with the fewest requests."""
    rank = (FAILED, PLACING, SILENT, STARTING, UNREADY, READY)
    return rank.index(one.phase), one.status.running + one.status.pending, one.name


Amounts = Mapping[str, float]
