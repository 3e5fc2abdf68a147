"""The end of a simulated world: no more faults, and everything gets on. What was accepted ends, what was taken is given
back, and the pools are empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvforge.coordinator.core.machine import Machine
from kvforge.protocol.messages import Drain, GetHealth, RemoveSequences, Submit, UnrefBlock
from tools.simulation.workers import Violation

if TYPE_CHECKING:
    from tools.simulation.world import World

# Two dozen small requests, each of which gets on in every step: a few hundred turns at most.
CALM_TURNS_MAX = 1_000


class Calm:
    """Sees one world to its end."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def _machine(self) -> Machine:
        return self._world.coordinator.machine

    def come(self) -> None:
        """Raises Violation where something does not get on, or is left over."""
        world = self._world
        world.calm = world.delays.calm = True
        world.coordinator.death = None
        self._until("the coordinator is there", lambda: world.coordinator.up and not world.coordinator.stands)
        for worker in world.workers.values():
            worker.garble = ""
        for client in world.clients.values():
            client.duplicate_share = 0.0
            client.read_on()
            client.connect(resume=True)
            client.send(GetHealth)  # one that was dropped learns it now
        self._drain()
        arrived_us = world.clock.now_us + world.delays.long_us + world.delays.short_us
        self._until("what was on its way has arrived", lambda: world.clock.now_us > arrived_us)
        self._until("all workers are ready", self._all_ready)
        self._until("clients are answered", self._answered)
        first = world.turns
        while self._machine.requests.live:  # what a request leaves behind may be what the next one waits for
            self._give_back(idle_only=True)
            pause_until = world.turns + 50
            self._until("it goes on", partial(self._paused, pause_until))
            if world.turns - first > CALM_TURNS_MAX:
                self._too_long("everything accepted ends")
        self._until("every stream has ended", self._all_read)
        self._give_back(idle_only=False)
        for client in world.clients.values():
            client.goodbye()
        self._until("clients are gone", lambda: not self._machine.clients)
        self._until("nothing is under way", self._settled)
        world.coordinator.checker.full()
        self._empty()

    def _drain(self) -> None:
        """Some runs end with a Drain, or a signal; a request that comes after it is refused."""
        world = self._world
        drain_ms, now_us = world.settings.drain_ms, world.steady_us
        for name in sorted(world.settings.bound.keys() & world.clients.keys()):
            world.clients[name].send(Drain)  # which it may not
        if drain_ms >= 0:
            client = next(iter(world.clients.values()))
            if world.settings.drain_by_signal:
                world.coordinator.begin_drain(now_us, now_us + drain_ms * 1000 if drain_ms else 0)
                world.ledger.dues.drain(drain_ms, now_us)
            else:
                client.send(Drain, deadline_ms=drain_ms)
            client.send(Submit, ("never",), max_tokens=1, prompt=np.array([1], np.int32))

    def _all_ready(self) -> bool:
        groups = self._machine.cache.groups.values()
        return len(groups) == len(self._world.settings.workers) and not any(group.away for group in groups)

    def _all_read(self) -> bool:
        return not any(client.readings.unfinished() for client in self._world.clients.values())

    def _paused(self, turn: int) -> bool:
        return not self._machine.requests.live or self._world.turns >= turn

    def _answered(self) -> bool:
        return all(not client.unanswered for client in self._world.clients.values() if client.connection is not None)

    def _settled(self) -> bool:
        groups = self._machine.cache.groups.values()
        return not any(group.sent or group.copies or group.pool.quarantined for group in groups)

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        world, first = self._world, self._world.turns
        while not done():
            if world.turns - first > CALM_TURNS_MAX or not world.clock.step():
                self._too_long(what)

    def _too_long(self, what: str) -> None:
        live = [f"{r.id} {r.state}" for r in self._machine.requests.live.values()]
        raise Violation(f"without faults, {CALM_TURNS_MAX} turns were not enough until {what}; live: {live}")

    def _give_back(self, idle_only: bool) -> None:
        """Someone removes every sequence (that no request uses) and every named holder."""
        client = next(iter(self._world.clients.values()))
        s, blocks = self._machine.cache.sequences, self._machine.cache.blocks
        for sequence_id, slot in list(s.slot_of.items()):
            if s.owned[slot] and not (idle_only and s.request[slot]):
                client.send(RemoveSequences, sequence_ids=np.array([sequence_id], np.int64))
        for block, names in list(blocks.external.items()):
            for name in list(names):
                client.send(UnrefBlock, block_id=block, holder=name)
        self._until("everything is given back", self._answered)

    def _empty(self) -> None:
        machine = self._machine
        if len(machine.cache.sequences) or machine.admission.waiting or machine.requests.live:
            raise Violation("sequences or requests are left over at the end")
        for group in machine.cache.groups.values():
            pool = group.pool
            if pool.free + pool.cached != pool.count or machine.cache.blocks.refcount.any():
                raise Violation(f"blocks of {group.name} are left over at the end")
        if self._world.ledger.live:
            raise Violation(f"requests {list(self._world.ledger.live)} never ended")
