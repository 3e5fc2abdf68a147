"""A fleet, for whoever commands it from outside: brought up, looked at, scaled, ended."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

import msgspec
import ray
import ray.util
from ray.exceptions import GetTimeoutError, RayError

from kvforge.protocol import keys
from kvforge.protocol.errors import InvalidRequest, NotReady, Unavailable

from ..deciding import reason_for_no_room
from ..settings import FleetFile
from ..told import Status
from . import store
from .controller import Controller
from .names import CONTROLLER, namespace

ANSWER_S = 30.0  # also of a controller that is being started again
AGAIN_S = 0.2


class Fleet:
    """One of those in the cluster that this process is in."""

    def __init__(self, name: str) -> None:
        self.name = name

    def up(self, file: FleetFile, text: str) -> None:
        """Makes it, or makes it another: then replicas take each other's place one by one.

        Raises NotReady where no node could ever have room, and has changed nothing then; Unavailable.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for bundle, what in ((file.bundle, "a replica"), (file.gateway_bundle, "a gateway")):
            if reason := reason_for_no_room(bundle, nodes, what):
                raise NotReady(reason)
        pair = keys.make()
        spec = store.Spec(text=text, public=pair.public, secret=pair.secret)
        options = {"name": CONTROLLER, "namespace": namespace(self.name), "lifetime": "detached", "max_restarts": -1}
        ray.remote(Controller).options(get_if_exists=True, num_cpus=0, **options).remote(self.name)
        self._ask("use", msgspec.msgpack.encode(spec))

    def status(self) -> Status:
        """Raises InvalidRequest where there is no such fleet, Unavailable."""
        return msgspec.json.decode(self._ask("status"), type=Status)

    def scale(self, count: int) -> None:
        """So many replicas. Raises InvalidRequest, Unavailable."""
        if problem := self._ask("scale", count):
            raise InvalidRequest("N", problem)

    def down(self) -> None:
        """Begins to end it. Raises InvalidRequest, Unavailable."""
        self._ask("end")

    def close(self) -> None:
        """It has ended: its controller goes, too."""
        try:
            ray.kill(ray.get_actor(CONTROLLER, namespace=namespace(self.name)), no_restart=True)
        except ValueError:
            return

    def _ask(self, what: str, *arguments: Any) -> Any:
        """Of the controller; again, while it is being started again."""
        deadline = monotonic() + ANSWER_S
        while True:
            try:
                controller = ray.get_actor(CONTROLLER, namespace=namespace(self.name))
            except ValueError:
                there = ", ".join(store.fleets())
                known = f"there are {there}" if there else "there is none"
                raise InvalidRequest("name", f"there is no fleet {self.name!r} in this cluster; {known}") from None
            try:
                return ray.get(getattr(controller, what).remote(*arguments), timeout=max(0.1, deadline - monotonic()))
            except GetTimeoutError:
                raise Unavailable(f"the controller of {self.name} does not answer within {ANSWER_S:g} s") from None
            except RayError as error:
                if monotonic() >= deadline:
                    said = " ".join(str(error).split())[:300]
                    raise Unavailable(f"the controller of {self.name} cannot be asked: {said}") from None
                sleep(AGAIN_S)
