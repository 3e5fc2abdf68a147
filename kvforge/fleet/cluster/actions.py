"""Executes decisions: creates and removes placement groups and actors, and sends orders."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvforge.fleet.deciding import Action, CreateAction, DrainAction, RemoveAction, StopAction
from kvforge.fleet.messages import REPLICA, BeginOrder, DrainOrder, Order, Place, StopOrder, UseOrder, encode
from kvforge.fleet.settings import FleetFile

from .keeper import Keeper
from .names import FleetMember, namespace
from .store import Spec
from .watcher import FleetWatcher

ANSWER_S = 5.0
log = logging.getLogger(__name__)


class ActionExecutor:
    """The actions of one controller."""

    def __init__(self, fleet: str, watch: FleetWatcher) -> None:
        self._namespace, self._watch = namespace(fleet), watch
        self._used: dict[str, tuple[str, str, dict[str, Place]]] = {}  # by gateway: the last order to its keeper

    async def do(self, action: Action, file: FleetFile, spec: Spec) -> None:
        """Execute an action. One that is impossible now is decided again at the next look.

        Raises:
            RayError: Ray failed.
            TimeoutError: The keeper did not answer.
            ValueError: The actor is gone.
        """
        log.info("%s", action)
        if isinstance(action, CreateAction):
            self.create(FleetMember(action.kind, action.name, action.revision), file, spec)
            return
        member = next(one for one in self._watch.members if one.name == action.name)
        if isinstance(action, RemoveAction) or (isinstance(action, StopAction) and self._watch.died(member)):
            self._remove(member)
        elif isinstance(action, StopAction):
            await self._order(member, StopOrder())
        elif isinstance(action, DrainAction):
            await self._order(member, DrainOrder(deadline_s=action.deadline_s))

    def create(self, member: FleetMember, file: FleetFile, spec: Spec) -> None:
        """Create a member's placement group, if it has none yet, and its actor."""
        begin = BeginOrder(name=member.name, address="", text=spec.text, public=spec.public)
        cls = ray.remote(Keeper)
        shared = {
            "name": member.actor,
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": -1,
            "get_if_exists": True,
        }
        if member.kind != REPLICA:
            begin = BeginOrder(name=member.name, address="", text=spec.text, public=spec.public, secret=spec.secret)
            bundle = file.gateway_bundle
            cls.options(num_cpus=bundle.get("CPU", 0), scheduling_strategy="SPREAD", **shared).remote(
                member.kind, encode(begin)
            )
            return
        bundle = file.bundle
        group = self._group(member)
        if group is None:
            # One bundle, so that the coordinator and all ranks are on the same node.
            name = f"{self._namespace}/{member.actor}"
            group = ray.util.placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")
        others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        cls.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=others or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            **shared,
        ).remote(member.kind, encode(begin))

    async def update_gateways(self, spec: Spec, places: dict[str, Place], lives: dict[FleetMember, str]) -> None:
        """Send the replicas and the file to each gateway that does not have them yet.

        Args:
            spec: The fleet's document.
            places: The replicas.
            lives: The gateways with the lives of their keepers.
        """
        if not places:
            return  # keep the known replicas: they return, or others will come
        for member, life in lives.items():
            sent = (life, spec.text, places)
            if self._used.get(member.name) != sent:
                with suppress(RayError, TimeoutError, ValueError):
                    await self._order(member, UseOrder(text=spec.text, places=places))
                    self._used[member.name] = sent

    async def _order(self, member: FleetMember, order: Order) -> None:
        handle = self._watch.handle(member)
        await asyncio.wait_for(handle.order.remote(encode(order)), ANSWER_S)

    def _group(self, member: FleetMember) -> Any:
        with suppress(ValueError):
            return ray.util.get_placement_group(f"{self._namespace}/{member.actor}")
        return None

    def _remove(self, member: FleetMember) -> None:
        with suppress(ValueError):
            ray.kill(self._watch.handle(member), no_restart=True)
        if (group := self._group(member)) is not None:
            ray.util.remove_placement_group(group)
        self._watch.forget(member)
        self._used.pop(member.name, None)
