"""A fleet as its commands see it: start, status, scale, end."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

import msgspec
import ray
import ray.util
from ray.exceptions import GetTimeoutError, RayError

from kvforge.fleet.messages import Status
from kvforge.protocol import keys
from kvforge.protocol.errors import InvalidRequest, NotReady, Unavailable

from ..deciding import reason_for_no_room
from ..settings import FleetFile
from . import store
from .controller import Controller
from .names import CONTROLLER, namespace

ANSWER_S = 30.0  # includes a restart of the controller
AGAIN_S = 0.2


class FleetClient:
    """A fleet in the cluster that this process has joined."""

    def __init__(self, name: str) -> None:
        self.name = name

    def up(self, file: FleetFile, text: str) -> None:
        """Start the fleet, or update it, replacing replicas one by one.

        Raises:
            NotReady: No node could ever have room; nothing was changed.
            Unavailable: The controller does not answer.
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
        """Return the state of the fleet.

        Raises:
            InvalidRequest: There is no such fleet.
            Unavailable: The controller does not answer.
        """
        return msgspec.json.decode(self._ask("status"), type=Status)

    def scale(self, count: int) -> None:
        """Set the number of replicas.

        Raises:
            InvalidRequest: There is no such fleet, or the number is not possible.
            Unavailable: The controller does not answer.
        """
        if problem := self._ask("scale", count):
            raise InvalidRequest("N", problem)

    def down(self) -> None:
        """Start to drain and remove the fleet.

        Raises:
            InvalidRequest: There is no such fleet.
            Unavailable: The controller does not answer.
        """
        self._ask("end")

    def close(self) -> None:
        """Remove the controller of a fleet that has ended."""
        try:
            ray.kill(ray.get_actor(CONTROLLER, namespace=namespace(self.name)), no_restart=True)
        except ValueError:
            return

    def _ask(self, what: str, *arguments: Any) -> Any:
        """Call the controller; retry while it restarts."""
        deadline = monotonic() + ANSWER_S
        while True:
            try:
                controller = ray.get_actor(CONTROLLER, namespace=namespace(self.name))
            except ValueError:
                there = ", ".join(store.fleets())
                known = f"it has {there}" if there else "it has none"
                raise InvalidRequest("name", f"there is no fleet {self.name!r} in this cluster; {known}") from None
            try:
                return ray.get(getattr(controller, what).remote(*arguments), timeout=max(0.1, deadline - monotonic()))
            except GetTimeoutError:
                raise Unavailable(f"the controller of {self.name} does not answer within {ANSWER_S:g} s") from None
            except RayError as error:
                if monotonic() >= deadline:
                    text = " ".join(str(error).split())[:300]
                    raise Unavailable(f"the controller of {self.name} cannot be reached: {text}") from None
                sleep(AGAIN_S)
