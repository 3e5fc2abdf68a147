"""Finds the members of a fleet by the names of actors and placement groups, and queries their status."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any, NamedTuple

import ray
import ray.util
from ray.exceptions import ActorDiedError, RayError

from kvforge.fleet.deciding import Gateway, Replica, View, reason_for_no_room
from kvforge.fleet.deciding.room import wanted
from kvforge.fleet.messages import FAILED, PLACING, REPLICA, SILENT, STARTING, NodeStatus, Place, node_status_of
from kvforge.fleet.settings import FleetFile

from .names import FleetMember, member_of, namespace

ANSWER_S = 2.0
PLACED = "CREATED"
GONE = "REMOVED"


class MemberPresence(NamedTuple):
    """The existing parts of a member.

    Attributes:
        actor: Whether it has an actor.
        placed: The state of its placement group, "" if it has none.
    """

    actor: bool
    placed: str


class FleetWatcher:
    """Looks at a fleet repeatedly, and remembers silent members and those that died at their start."""

    def __init__(self, fleet: str) -> None:
        self._fleet, self._namespace = fleet, namespace(fleet)
        self._seen: dict[FleetMember, float] = {}
        self._heard: dict[FleetMember, float] = {}
        self._dead: dict[FleetMember, tuple[str, float]] = {}
        self.places: dict[str, Place] = {}  # the last known one of each replica
        self.members: dict[FleetMember, MemberPresence] = {}

    async def look(self, file: FleetFile) -> View:
        """Return the present state of all members."""
        self.members = self._find()
        self._forget()
        answers = await asyncio.gather(*(self._ask(member, there, file) for member, there in self.members.items()))
        replicas: list[Replica] = []
        gateways: list[Gateway] = []
        for member, status in zip(self.members, answers, strict=True):
            silent_s = monotonic() - self._heard.get(member, self._seen[member]) if status.phase == SILENT else 0.0
            if member.kind == REPLICA:
                replicas.append(Replica(member.name, member.revision, status, silent_s))
                if status.place is not None:
                    self.places[member.name] = status.place
            else:
                gateways.append(Gateway(member.name, member.revision, status, silent_s))
        names = {replica.name for replica in replicas}
        self.places = {name: place for name, place in self.places.items() if name in names}
        return View(tuple(replicas), tuple(gateways))

    def died(self, member: FleetMember) -> bool:
        """Return whether a member's actor died at its start, so that it cannot receive orders."""
        return member in self._dead

    def forget(self, member: FleetMember) -> None:
        """Forget a member that was removed."""
        self._dead.pop(member, None)

    def handle(self, member: FleetMember) -> Any:
        """Return a member's actor.

        Raises:
            ValueError: It is gone.
        """
        return ray.get_actor(member.actor, namespace=self._namespace)

    def _find(self) -> dict[FleetMember, MemberPresence]:
        found: dict[FleetMember, MemberPresence] = {}
        for each in ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == self._namespace and (member := member_of(each["name"])) is not None:
                found[member] = MemberPresence(actor=True, placed="")
        start = f"{self._namespace}/"
        for group in ray.util.placement_group_table().values():
            name = str(group["name"])
            if not name.startswith(start) or group["state"] == GONE:
                continue
            if (member := member_of(name.removeprefix(start))) is not None:
                found[member] = MemberPresence(actor=member in found, placed=str(group["state"]))
        for member in self._dead:
            found.setdefault(member, MemberPresence(actor=False, placed=""))
        return dict(sorted(found.items()))

    def _forget(self) -> None:
        now = monotonic()
        self._seen = {member: self._seen.get(member, now) for member in self.members}
        self._heard = {member: at for member, at in self._heard.items() if member in self.members}

    async def _ask(self, member: FleetMember, there: MemberPresence, file: FleetFile) -> NodeStatus:
        if member in self._dead:
            reason, at = self._dead[member]
            return NodeStatus(phase=FAILED, reason=reason, failed_s=monotonic() - at)
        if member.kind == REPLICA and there.placed != PLACED:
            return NodeStatus(phase=PLACING, reason=self._no_room(file.bundle, "a replica"))
        try:
            answer: bytes = await asyncio.wait_for(self.handle(member).look.remote(), ANSWER_S)
        except ActorDiedError as error:
            if member not in self._heard:  # it died at its start
                self._dead[member] = (_last_line(error), monotonic())
            return self._unheard(member, file)
        except (RayError, TimeoutError, ValueError):
            return self._unheard(member, file)
        self._heard[member] = monotonic()
        return node_status_of(answer)

    def _unheard(self, member: FleetMember, file: FleetFile) -> NodeStatus:
        if member in self._heard:
            return NodeStatus(phase=SILENT, reason="its node or its keeper is gone or slow")
        age_s = monotonic() - self._seen[member]
        reason = "" if member.kind == REPLICA else self._no_room(file.gateway_bundle, "a gateway")
        return NodeStatus(phase=STARTING, reason=reason or "its keeper is starting", age_s=age_s)

    def _no_room(self, bundle: Mapping[str, float], what: str) -> str:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return reason_for_no_room(bundle, nodes, what) or (
            f"no node has {wanted(bundle)} free for {what}" if what == "a replica" else ""
        )


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"its keeper cannot start: {lines[-1] if lines else error!r}"
