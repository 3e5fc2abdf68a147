"""The controller: looks at the fleet, decides, and acts, in a loop.

It is a detached actor with a fixed name. If it is killed, Ray restarts it, and it finds its fleet by the names of its
actors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from contextlib import suppress
from time import monotonic

import msgspec
from ray.exceptions import RayError

from kvforge.fleet.messages import DRAINING, REPLICA, STOPPED, Seen, Status
from kvforge.protocol.errors import KvforgeError

from ..deciding import Memory, StopAction, View, Wanted, carried, decide, words
from ..settings import REPLICAS_MAX, FleetFile, parse
from . import store
from .actions import ActionExecutor
from .store import Spec
from .watcher import FleetWatcher

TURN_S = 0.5
FIRST_S = 10.0  # limit for the first look
CREATED_MAX = 32  # per turn
log = logging.getLogger(__name__)


class Controller:
    """The controller of one fleet.

    All changes pass through it, so that it is the only writer of the fleet's document.
    """

    async def __init__(self, fleet: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._fleet = fleet
        self._watch = FleetWatcher(fleet)
        self._executor = ActionExecutor(fleet, self._watch)
        self._memory = Memory()
        self._again = False
        self._status = Status(fleet=fleet, sentences=("the controller is starting",))
        self._looked = asyncio.Event()
        self._news = asyncio.Event()
        self._running = asyncio.ensure_future(self._run())

    async def status(self) -> bytes:
        """Return the fleet's `Status`. A controller that has just started looks first."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._looked.wait(), FIRST_S)
        return msgspec.json.encode(self._status)

    async def use(self, data: bytes) -> None:
        """Replace the fleet's `Spec`, and retry members that cannot start."""
        new = msgspec.msgpack.decode(data, type=Spec)
        old = store.get(self._fleet)
        if old is not None:
            count = None if old.ended else carried(parse(old.text), old.count, parse(new.text))
            new = msgspec.structs.replace(new, public=old.public, secret=old.secret, count=count)
        store.put(self._fleet, new)
        self._changed()
        self._again = True

    async def scale(self, count: int) -> str:
        """Set the number of replicas.

        Returns:
            Why that is not possible, "" if it is.
        """
        spec = store.get(self._fleet)
        if spec is None or spec.ended:
            return "there is no such fleet, or it is shutting down"
        if (rule := parse(spec.text).autoscale) is not None:
            bounds = f"between replicas_min = {rule.replicas_min} and replicas_max = {rule.replicas_max}"
            return f"this fleet scales itself, {bounds}: change [autoscale] and run `kvforge fleet up` again"
        if not 1 <= count <= REPLICAS_MAX:
            return f"{count} is not 1 to {REPLICAS_MAX}; use `kvforge fleet down` to end the fleet"
        if count == 1 and parse(spec.text).replicas.surge == 0:
            return "with one replica and replicas.surge = 0, an update would interrupt the service"
        store.put(self._fleet, msgspec.structs.replace(spec, count=count))
        self._changed()
        return ""

    async def end(self) -> None:
        """Drain and remove the fleet."""
        if (spec := store.get(self._fleet)) is not None:
            store.put(self._fleet, msgspec.structs.replace(spec, ended=True))
        self._changed()

    def _changed(self) -> None:
        self._status = msgspec.structs.replace(self._status, sentences=("a change has just been requested",))
        self._news.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except (RayError, KvforgeError, TimeoutError, ValueError, OSError) as error:
                log.warning("retrying after an error: %r", error)
            except Exception:
                log.exception("retrying after an unexpected error")
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), TURN_S)
            except TimeoutError:
                continue

    async def _turn(self) -> None:
        spec = store.get(self._fleet)
        if spec is None:
            self._status = Status(fleet=self._fleet, ended=True, pid=os.getpid())
            self._looked.set()
            return
        file = parse(spec.text)
        view = await self._watch.look(file)
        wanted = Wanted(file, spec.count, spec.ended, self._again)
        fresh = [secrets.token_hex(3) for _ in range(CREATED_MAX)]
        decision, self._memory = decide(wanted, view, self._memory, monotonic(), fresh)
        if spec.ended and not view.replicas and not view.gateways:
            store.remove(self._fleet)
            return
        if store.get(self._fleet) != spec:
            self._news.set()  # the wanted state has changed meanwhile: decide again
            return
        self._again = False
        if not spec.ended and decision.count != (file.count if spec.count is None else spec.count):
            store.put(self._fleet, spec := msgspec.structs.replace(spec, count=decision.count))
        begun = [words(action) for action in decision.actions]
        self._status = self._seen(view, decision.count, file, spec, (*decision.sentences, *begun))
        self._looked.set()
        self._restore(file, spec)
        stopped = {action.name for action in decision.actions if isinstance(action, StopAction)}
        places = {name: place for name, place in self._watch.places.items() if name not in stopped}
        lives = {
            member: gateway.status.life
            for gateway in view.gateways
            for member in self._watch.members
            if member.name == gateway.name and gateway.status.life and gateway.phase not in (DRAINING, STOPPED)
        }
        await self._executor.update_gateways(spec, places, lives)
        for action in decision.actions:
            await self._executor.do(action, file, spec)

    def _restore(self, file: FleetFile, spec: Spec) -> None:
        """Create missing actors of placement groups: an earlier controller died between the two."""
        for member, there in self._watch.members.items():
            if member.kind == REPLICA and not there.actor and not self._watch.died(member) and not spec.ended:
                self._executor.create(member, file, spec)

    def _seen(self, view: View, count: int, file: FleetFile, spec: Spec, sentences: tuple[str, ...]) -> Status:
        return Status(
            fleet=self._fleet,
            count=count,
            revision=file.revision,
            ended=spec.ended,
            sentences=sentences,
            replicas=tuple(Seen(name=one.name, revision=one.revision, status=one.status) for one in view.replicas),
            gateways=tuple(Seen(name=one.name, revision=one.revision, status=one.status) for one in view.gateways),
            pid=os.getpid(),
        )
