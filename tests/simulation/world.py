"""One simulated world: the real core, the real turn and the real tables; simulated time, network, workers, clients.

An event is one `Machine.apply` call or one message that reaches a client or a worker. Everything random was drawn from
the seed, by streams of their own for the actions, for each connection and for each worker's life: the same scenario
always runs the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from coordinator.core.events import ClientGone, Effect, Event, FromClient, ToClient
from coordinator.core.groups import Group
from coordinator.core.machine import Machine
from coordinator.turn import TurnLimits, TurnLoop
from protocol import codec
from protocol.messages import (
    CLIENT_REPLIES,
    WORKER_REPLIES,
    Accepted,
    Message,
    PoolRegistered,
    Refused,
    RemoveSequences,
    Step,
    Stream,
    Submit,
    UnrefBlock,
    Welcome,
    WorkerWelcome,
)
from protocol.tables import TablesWriter
from tests.simulation.actions import Action
from tests.simulation.checks import Checker, Generations
from tests.simulation.clients import SimulatedClient
from tests.simulation.digest import digest, snapshot
from tests.simulation.ledger import Ledger
from tests.simulation.model import Oracle
from tests.simulation.network import Clock, Connection, Delays, SimulatedPeers
from tests.simulation.performing import Performer
from tests.simulation.settings import Settings
from tests.simulation.workers import SimulatedWorker, Violation

IDLE_TURN_US = 1_000_000
# The light checks run after every event; the core's own, which cost as much as ten events, now and then.
FULL_CHECK_EVERY = 64
COMPARE_EVERY = 32
CALM_TURNS_MAX = 4_000


class WatchedMachine(Machine):
    """The real machine; every event is counted and checked."""

    world: World

    def apply(self, event: Event, now_us: int) -> list[Effect]:
        """Applies, then checks. A refusal must leave the state as it was."""
        before = snapshot(self) if self.world.watches(event) else b""
        effects = super().apply(event, now_us)
        self.world.applied(event, effects, before)
        return effects


class World:
    """Runs one scenario. Raises Violation or AssertionError where a promise is broken."""

    def __init__(self, settings: Settings, seed: str, folder: Path, full_check_every: int = FULL_CHECK_EVERY) -> None:
        self.settings, self.seed = settings, seed
        self.calm = False
        self.events = self.turns = 0
        self.trace: list[str] | None = None
        self.clock = Clock()
        self.ledger = Ledger(settings)
        self._full_check_every = full_check_every
        self._compare_every = min(COMPARE_EVERY, full_check_every)
        self._turn_planned = False
        self._mark = (0, 0, 0)
        self._numbers = 0
        self._delays = Delays(settings.short_us, settings.long_us, settings.long_share)
        self._entropy = Random(f"{seed}/entropy")
        key = hashlib.blake2b(seed.encode()).digest()[:32]
        self.machine = WatchedMachine(settings.limits(), "b" * 32, key)
        self.machine.world = self
        self.tables = TablesWriter(folder / "tables", settings.geometry(), self.machine.boot)
        clock, delays = self.clock, self._delays
        client_replies, worker_replies = codec.Decoder(CLIENT_REPLIES), codec.Decoder(WORKER_REPLIES)
        self._client_side = SimulatedPeers(clock, delays, self._number, self.wake, client_replies, self._to_client)
        self._worker_side = SimulatedPeers(clock, delays, self._number, self.wake, worker_replies, self._to_worker)
        self.loop = TurnLoop(
            self.machine,
            self.tables,
            self._client_side,
            self._worker_side,
            lambda: self._entropy.getrandbits(64),
            TurnLimits(messages_per_turn_max=8, clients_max=16),
        )
        self._checker, self._generations = Checker(self.machine, self.tables), Generations(self.machine)
        self.clients = {
            name: SimulatedClient(name, self._client_side, seed, self.delivered)
            for name in (f"c{i}" for i in range(settings.clients))
        }
        self.workers = {
            f"w{i}": SimulatedWorker(f"w{i}", blocks, self, self._worker_side, seed)
            for i, blocks in enumerate(settings.workers)
        }
        for client in self.clients.values():
            client.duplicate_share = settings.duplicate_share
        self._performer = Performer(self)
        self._plan = self.machine.scheduler.plan
        self.machine.scheduler.plan = self._planned  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Snapshots of the core end here: it holds references to the world that watches it."""
        return (str, ("the world",))

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def id_of(self, label: str) -> int | None:
        """What a label turned out to be, whoever was told."""
        return next((c.ids[label] for c in self.clients.values() if label in c.ids), None)

    def oracle(self, request_id: int) -> Oracle:
        """What a request must generate."""
        return self.ledger.requests[request_id].oracle

    def counts(self, request_id: int) -> bool:
        """Whether a row of the request can still count."""
        return request_id in self.machine.requests.live

    # ------------------------------------------------------------------------------------------------------- watching

    def delivered(self) -> None:
        """A message reached a client or a worker."""
        self.events += 1

    def watches(self, event: Event) -> bool:
        """Whether the state is compared around the event. Not every one: a comparison costs as much as ten events."""
        return isinstance(event, FromClient) and self.events % self._compare_every == 0

    def applied(self, event: Event, effects: list[Effect], before: bytes) -> None:
        """Checks after each event."""
        self.events += 1
        if isinstance(event, FromClient):
            reply = effects[-1].message if effects and isinstance(effects[-1], ToClient) else None
            if isinstance(reply, Refused) and before and before != snapshot(self.machine):
                raise Violation(f"a refused command changed the state: {event.message!r} -> {reply.error}")
            if isinstance(reply, Accepted) and isinstance(event.message, Submit):
                size = self.machine.requests.live[reply.request_id].prompt.size
                self.ledger.prompt_sizes[reply.request_id] = size
        elif isinstance(event, ClientGone):
            self.ledger.gone_clients.add(event.client)
        cache = self.machine.cache
        mark = (len(cache.sequences.changed_rows), len(cache.sequences.changed_cells), len(cache.blocks.changed))
        if mark != self._mark:  # whatever touches a row or a block says so, or it would not be published
            self._mark = mark
            self._checker.light()
            self._generations.check()
        if self.events % self._full_check_every == 0:
            self._checker.full()

    def _to_client(self, connection: Connection, number: int, message: Message) -> None:
        self._note(f"c{number}", message)
        if isinstance(message, Stream):
            self.ledger.streamed(number, message)
        else:
            rid: Any = getattr(message, "rid", 0)
            found = connection.commands.get(rid)
            self.ledger.replied(number, found[0] if found else None, message)

    def _to_worker(self, _connection: Connection, number: int, message: Message) -> None:
        self._note(f"w{number}", message)
        if isinstance(message, Step):
            self._within_limits(message)
        elif isinstance(message, PoolRegistered):
            self.ledger.model_known = True

    def _planned(self, group: Group, now_us: int) -> Step | None:
        """Plans a step, and looks at it before anything else happens."""
        step = self._plan(group, now_us)
        if step is not None:
            self._checker.planned(group, step)
        return step

    def _within_limits(self, step: Step) -> None:
        settings = self.settings
        if step.slots.size > settings.step_rows_max or int(step.counts.sum()) > settings.step_tokens_max:
            raise Violation(f"step {step.step_id} has {step.slots.size} rows of {int(step.counts.sum())} tokens")
        if len(set(step.slots.tolist())) != step.slots.size:
            raise Violation(f"step {step.step_id} names a slot twice")

    def _note(self, whom: str, message: Message) -> None:
        if self.trace is not None and not isinstance(
            message, Welcome | WorkerWelcome
        ):  # a welcome names a temporary folder
            body = hashlib.blake2b(b"|".join(bytes(frame) for frame in codec.encode(message)), digest_size=8)
            self.trace.append(f"{self.clock.now_us:>9} -> {whom:<4} {type(message).__name__:<14} {body.hexdigest()}")

    # ---------------------------------------------------------------------------------------------------------- turns

    def wake(self) -> None:
        """Something arrived at the coordinator: it takes a turn soon."""
        if not self._turn_planned:
            self._turn_planned = True
            self.clock.after(self.settings.turn_us, self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        self._mark = (0, 0, 0)
        self.turns += 1
        self.loop.turn(self.clock.now_us)
        if self._mark != (0, 0, 0):  # a change that nobody told of shows in the next turn that tells of one
            self._checker.published()
        if self.trace is not None:
            self.trace.append(f"{self.clock.now_us:>9} turn {self.turns}: {digest(self.machine)}")
        turns = self.turns
        self.clock.after(IDLE_TURN_US, lambda: self.wake() if self.turns == turns else None)
        if self._client_side.waiting or self._worker_side.waiting:
            self.wake()

    # ------------------------------------------------------------------------------------------------------------ run

    def run(self, actions: Iterable[Action], events_max: int) -> list[Action]:
        """Performs actions until there are none left or `events_max` events happened, then calms down and ends.

        Returns the actions that were performed.
        """
        performed: list[Action] = []
        self._rest: Iterator[Action] = iter(actions)
        for worker in self.workers.values():
            self.clock.after(1 + self._entropy.randrange(2_000), worker.start)
        self._plan_next(performed, events_max)
        while self._acting:
            if not self.clock.step():
                raise Violation("nothing is planned any more")
        self._calm_down()
        return performed

    def _plan_next(self, performed: list[Action], events_max: int) -> None:
        action = next(self._rest, None) if self.events < events_max else None
        self._acting = action is not None
        if action is not None:
            self.clock.at(action[0], lambda: self._perform(action, performed, events_max))

    def _perform(self, action: Action, performed: list[Action], events_max: int) -> None:
        performed.append(action)
        if self.trace is not None:
            self.trace.append(f"{self.clock.now_us:>9} action {action}")
        self._performer.perform(action)
        self._plan_next(performed, events_max)

    # -------------------------------------------------------------------------------------------------------- liveness

    def _calm_down(self) -> None:
        """No more faults: everything accepted ends, then everything is given back, and the pools are empty."""
        self.calm = self._delays.calm = True
        for worker in self.workers.values():
            worker.garble = ""
        for client in self.clients.values():
            client.duplicate_share = 0.0
            client.connect()
        self._until("all workers are ready", lambda: len(self.machine.cache.groups) == len(self.workers))
        self._until("clients are answered", self._answered)
        first = self.turns
        while self.machine.requests.live:  # what a request leaves behind may be what the next one waits for
            self._give_back(idle_only=True)
            pause_until = self.turns + 50
            self._until("it goes on", partial(self._paused, pause_until))
            if self.turns - first > CALM_TURNS_MAX:
                self._too_long("everything accepted ends")
        self._give_back(idle_only=False)
        for client in self.clients.values():
            client.goodbye()
        self._until("clients are gone", lambda: not self.machine.clients)
        self._until("nothing is under way", self._settled)
        self._checker.full()
        self._empty()

    def _paused(self, turn: int) -> bool:
        return not self.machine.requests.live or self.turns >= turn

    def _answered(self) -> bool:
        return all(not client.unanswered for client in self.clients.values() if client.connection is not None)

    def _settled(self) -> bool:
        groups = self.machine.cache.groups.values()
        return not any(group.sent or group.owes_copies or group.pool.quarantined for group in groups)

    def _until(self, what: str, done: Any) -> None:
        first = self.turns
        while not done():
            if self.turns - first > CALM_TURNS_MAX or not self.clock.step():
                self._too_long(what)

    def _too_long(self, what: str) -> None:
        live = [f"{r.id} {r.state}" for r in self.machine.requests.live.values()]
        raise Violation(f"without faults, {CALM_TURNS_MAX} turns were not enough until {what}; live: {live}")

    def _give_back(self, idle_only: bool) -> None:
        """Someone removes every sequence (that no request uses) and every named holder."""
        client = next(iter(self.clients.values()))
        s, blocks = self.machine.cache.sequences, self.machine.cache.blocks
        for sequence_id, slot in list(s.slot_of.items()):
            if s.owned[slot] and not (idle_only and s.request[slot]):
                client.send(RemoveSequences, sequence_ids=np.array([sequence_id], np.int64))
        for block, names in list(blocks.external.items()):
            for name in list(names):
                client.send(UnrefBlock, block_id=block, holder=name)
        self._until("everything is given back", self._answered)

    def _empty(self) -> None:
        machine = self.machine
        if len(machine.cache.sequences) or machine.scheduler.waiting or machine.requests.live:
            raise Violation("sequences or requests are left over at the end")
        for group in machine.cache.groups.values():
            pool = group.pool
            if pool.free + pool.cached != pool.count or machine.cache.blocks.refcount.any():
                raise Violation(f"blocks of {group.name} are left over at the end")
        for request_id, booked in self.ledger.requests.items():
            if not booked.reason and booked.client not in self.ledger.gone_clients:
                raise Violation(f"request {request_id} never ended for its client")
