"""The calm end of a simulated world: without further faults, all accepted work ends and the pools are empty."""

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

# Two dozen small requests that progress in every step need a few hundred turns at most.
CALM_TURNS_MAX = 1_000


class Calm:
    """Brings one world to its end."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def _machine(self) -> Machine:
        return self._world.coordinator.machine

    def run(self) -> None:
        """Run the world to its end; raise Violation if work stalls or anything is left over."""
        world = self._world
        world.calm = world.delays.calm = True
        world.coordinator.death = None
        self._until("the coordinator runs", lambda: world.coordinator.up and not world.coordinator.stands)
        for worker in world.workers.values():
            worker.garble = ""
            worker.calm()
        for client in world.clients.values():
            client.duplicate_share = 0.0
            client.read_on()
            client.connect(resume=True)
            client.send(GetHealth)  # a dropped client notices it here
        self._drain()
        arrived_us = world.clock.now_us + world.delays.long_us + world.delays.short_us
        self._until("all messages in transit have arrived", lambda: world.clock.now_us > arrived_us)
        self._until("all workers are ready", self._all_ready)
        self._until("clients are answered", self._answered)
        first = world.turns
        while self._machine.requests.live:  # the next request may wait for what this one releases
            self._give_back(idle_only=True)
            pause_until = world.turns + 50
            self._until("the pause ends", partial(self._paused, pause_until))
            if world.turns - first > CALM_TURNS_MAX:
                self._too_long("every accepted request ends")
        self._until("every stream has ended", self._all_read)
        self._give_back(idle_only=False)
        for client in world.clients.values():
            client.goodbye()
        self._until("clients are gone", lambda: not self._machine.clients)
        self._until("no step is in flight", self._settled)
        world.coordinator.checker.full()
        self._empty()

    def _drain(self) -> None:
        """End some runs with a Drain or a signal; later requests must be refused."""
        world = self._world
        drain_ms, now_us = world.settings.drain_ms, world.steady_us
        for name in sorted(world.settings.bound.keys() & world.clients.keys()):
            world.clients[name].send(Drain)  # it lacks the right
        if drain_ms >= 0:
            client = next(iter(world.clients.values()))
            if world.settings.drain_by_signal:
                world.coordinator.begin_drain(now_us, now_us + drain_ms * 1000 if drain_ms else 0)
                world.ledger.due_times.drain(drain_ms, now_us)
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
        disks = [group.disk for group in groups if group.disk is not None]
        if any(disk.orders or disk.scanning or (disk.wanted and not disk.off) for disk in disks):
            return False
        if any(group.host.tier.unwiped for group in groups if group.host is not None):
            return False
        return not any(group.sent or group.copies or group.pool.quarantined for group in groups)

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        world, first = self._world, self._world.turns
        while not done():
            if world.turns - first > CALM_TURNS_MAX or not world.clock.step():
                self._too_long(what)

    def _too_long(self, what: str) -> None:
        live = [f"{r.id} {r.state}" for r in self._machine.requests.live.values()]
        raise Violation(f"{CALM_TURNS_MAX} turns without faults were not enough until {what}; live: {live}")

    def _give_back(self, idle_only: bool) -> None:
        """Remove every sequence (with `idle_only`, those without a request) and every named holder."""
        client = next(iter(self._world.clients.values()))
        s, blocks = self._machine.cache.sequences, self._machine.cache.blocks
        for sequence_id, slot in list(s.slot_of.items()):
            if s.owned[slot] and not (idle_only and s.request[slot]):
                client.send(RemoveSequences, sequence_ids=np.array([sequence_id], np.int64))
        for block, names in list(blocks.external.items()):
            for name in list(names):
                client.send(UnrefBlock, block_id=block, holder=name)
        self._until("everything is released", self._answered)

    def _empty(self) -> None:
        machine = self._machine
        if len(machine.cache.sequences) or machine.admission.waiting or machine.requests.live:
            raise Violation("leaked sequences or requests")
        for group in machine.cache.groups.values():
            pool = group.pool
            if pool.free + pool.cached != pool.count or machine.cache.blocks.refcount.any():
                raise Violation(f"leaked blocks of {group.name}")
        if self._world.ledger.live:
            raise Violation(f"requests {list(self._world.ledger.live)} never ended")
