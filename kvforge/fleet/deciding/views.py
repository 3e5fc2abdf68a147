"""What is known of a fleet, what is wanted of it, and what can be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..settings import FleetFile
from ..told import DRAINING, FAILED, GATEWAY, PLACING, READY, REPLICA, SILENT, STARTING, STOPPED, UNREADY, Told

LEAVING = (DRAINING, STOPPED)
ON_THE_WAY = (PLACING, STARTING, UNREADY, SILENT)


@dataclass(frozen=True, slots=True)
class Replica:
    """told: what it said last. silent_s: for how long nothing was heard of it, where its phase is that."""

    name: str
    revision: str
    told: Told
    silent_s: float = 0.0

    @property
    def phase(self) -> str:
        """See `told`."""
        return self.told.phase

    @property
    def leaving(self) -> bool:
        """It has been told to go."""
        return self.phase in LEAVING

    @property
    def serves_nobody(self) -> bool:
        """There is nothing on it that would have to end first."""
        return self.phase in (PLACING, STARTING, FAILED)


@dataclass(frozen=True, slots=True)
class Gateway(Replica):
    """The same of a gateway."""


@dataclass(frozen=True, slots=True)
class View:
    """What is there."""

    replicas: tuple[Replica, ...] = ()
    gateways: tuple[Gateway, ...] = ()

    def known(self, replica: Replica) -> bool:
        """Whether all gateways that serve send requests to it."""
        return all(replica.name in each.told.ready for each in self.gateways if each.phase == READY)


@dataclass(frozen=True, slots=True)
class Wanted:
    """file: the fleet's. count: replicas, where another number was decided, or said by somebody. ended: it is to be no
    more. again: who cannot start is tried anew at once."""

    file: FleetFile
    count: int | None = None
    ended: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Place a new one."""

    kind: str
    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell a replica to take nothing new; what has not ended in `deadline_s` is handed back."""

    name: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell it to end."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Give its place back: it has ended, or is given up."""

    kind: str
    name: str


Action = Create | Drain | Stop | Remove


def words(action: Action) -> str:
    """What is done, for people."""
    if isinstance(action, Create):
        return f"{action.kind} {action.name} is to come"
    if isinstance(action, Drain):
        return f"{action.name} takes nothing new, and what runs there may take {action.deadline_s:g} s"
    return f"{action.kind} {action.name} {'ends' if isinstance(action, Stop) else 'is gone'}"


@dataclass(slots=True)
class Decision:
    """actions, in order. count: replicas that are wanted now. sentences: why it is not as it should be."""

    names: list[str]
    count: int = 0
    actions: list[Action] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def act(self, action: Action) -> None:
        """Once for each: what was decided of it first is done."""
        if all(action.name != other.name for other in self.actions):
            self.actions.append(action)

    def create(self, kind: str, revision: str) -> None:
        """As far as there are names for new ones: the rest the next time."""
        if self.names:
            self.act(Create(kind, self.names.pop(0), revision))

    def say(self, one: Replica, words: str) -> None:
        """Why something waits for it."""
        self.sentences.append(f"{words} {one.phase}" + (f": {one.told.reason}" if one.told.reason else ""))

    def leave(self, one: Replica, file: FleetFile) -> None:
        """It goes: at once where nobody would notice, else when what runs there has ended."""
        kind = GATEWAY if isinstance(one, Gateway) else REPLICA
        if one.phase == SILENT:
            if one.silent_s >= file.replicas.silent_s:
                self.act(Remove(kind, one.name))
            else:
                self.sentences.append(f"{one.name} is to leave, and nothing is heard of it")
        elif one.phase == PLACING:
            self.act(Remove(kind, one.name))
        elif kind == GATEWAY or one.serves_nobody:
            self.act(Stop(kind, one.name))
        else:
            self.act(Drain(one.name, file.replicas.drain_s))


def order_of_leaving(one: Replica) -> tuple[int, int, str]:
    """Who leaves first: who serves nobody, then who has least to do."""
    rank = (FAILED, PLACING, SILENT, STARTING, UNREADY, READY)
    return rank.index(one.phase), one.told.running + one.told.pending, one.name


Amounts = Mapping[str, float]
