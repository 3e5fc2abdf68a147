"""One simulated world: the real core, the real turn and the real tables; simulated time, network, workers, clients.

An event is one `Machine.apply` call or one message that reaches a client or a worker. Everything random was drawn from
the seed, by streams of their own for the actions, for each connection and for each worker's life: the same scenario
always runs the same way.

The world calls the loop when something arrives and exactly when the loop said, never by itself: what nobody waits for
does not happen. It also asks for more than that (`_probe`): until the moment that was told, another Turn must find
nothing to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from coordinator.core.cache.groups import Group
from coordinator.core.cache.placement import Placement
from coordinator.core.events import (
    Applied,
    Boot,
    ClientFull,
    ClientGone,
    Effect,
    Event,
    FromClient,
    ToClient,
    Turn,
    WorkerGone,
)
from coordinator.core.machine import Machine
from coordinator.core.requests.lifecycle import NO_SLOT, Request
from coordinator.outbox import Sent
from coordinator.turn import TurnLimits, TurnLoop
from kvforge.protocol import codec
from kvforge.protocol.errors import CapacityExceeded, KvforgeError
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    WORKER_REPLIES,
    Accepted,
    Done,
    Drain,
    GetHealth,
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
from kvforge.protocol.tables import TablesWriter
from tests.simulation.actions import Action
from tests.simulation.checks import Checker, Generations
from tests.simulation.clients import SimulatedClient
from tests.simulation.digest import digest, snapshot
from tests.simulation.ledger import Ledger
from tests.simulation.model import Oracle
from tests.simulation.network import Clock, Delays, SimulatedPeers
from tests.simulation.performing import Performer
from tests.simulation.progress import Progress
from tests.simulation.replay import Left, Recording
from tests.simulation.settings import Settings
from tests.simulation.workers import SimulatedWorker, Violation

REPLACED_US = 5_000
# The light checks run after every event; the core's own, which cost as much as ten events, now and then.
FULL_CHECK_EVERY = 64
COMPARE_EVERY = 32
# So often it is tried out whether what a turn left undone would have been done by another one: two comparisons each.
PROBE_EVERY = 16
SAME_INSTANT_MAX = 32
# Two dozen small requests, each of which gets on in every step: a few hundred turns at most.
CALM_TURNS_MAX = 1_000


class WatchedMachine(Machine):
    """The real machine; every event is counted and checked."""

    world: World

    def apply(self, event: Event, now_us: int) -> Applied:
        """Applies, then checks. A refusal must leave the state as it was."""
        before = snapshot(self) if self.world.watches(event) else b""
        self.world.cause = event
        applied = super().apply(event, now_us)
        self.world.core_due_us = applied.due_us
        if self.world.recording is not None:
            self.world.recording.applied(self, event, now_us, applied)
        self.world.applied(event, applied.effects, before)
        return applied

    def gauges(self, now_us: int) -> list[int]:
        """The last thing that is published."""
        self.world.published = True
        return super().gauges(now_us)


class World:
    """Runs one scenario. Raises Violation or AssertionError where a promise is broken."""

    def __init__(self, settings: Settings, seed: str, folder: Path, full_check_every: int = FULL_CHECK_EVERY) -> None:
        self.settings, self.seed = settings, seed
        self.calm = False
        self.events = self.turns = 0
        self.trace: list[str] | None = None
        self.recording: Recording | Left | None = None
        self.clock = Clock()
        self.cause: Event | None = None
        self.core_due_us: int | None = None
        self.published = False
        self._full_check_every = full_check_every
        self._compare_every = min(COMPARE_EVERY, full_check_every)
        self._turn_planned = False
        self._due_us = self._turned_us = self._turns_at_once = 0
        self._mark = (0, 0, 0)
        self._flushed = self._unpublished = False
        self._numbers = 0
        self._delays = Delays(settings.short_us, settings.long_us, settings.long_share)
        self._entropy = Random(f"{seed}/entropy")
        key = hashlib.blake2b(seed.encode()).digest()[:32]
        self.boot = Boot("b" * 32, key, settings.limits())
        self.machine = WatchedMachine(self.boot, 0)
        self.machine.world = self
        self.ledger = Ledger(settings, self.machine.requests.known)
        self._replies = codec.Decoder(CLIENT_REPLIES)
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
            lambda: self.clock.now_us,
            TurnLimits(messages_per_turn_max=8, clients_max=16, client_backlog_max=settings.backlog_max),
            self,
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
        self._watch()

    def _watch(self) -> None:
        """Puts itself between the parts of the core, to see what no message tells."""
        machine = self.machine
        self._progress = Progress(machine, self.settings)
        self._plan, self._end = machine.scheduler.plan, machine.endings.end
        self._start, self._add = machine.admission._start, machine.admission.waiting.add
        machine.scheduler.plan = self._planned  # type: ignore[method-assign]
        machine.endings.end = self._ended  # type: ignore[method-assign]
        machine.admission._start = self._started  # type: ignore[method-assign]
        machine.admission.waiting.add = self._added  # type: ignore[method-assign]
        self._requeue = machine.admission.requeue
        machine.admission.requeue = self._requeued  # type: ignore[method-assign]
        self._make_way, self._asking = machine.scheduler._make_way, NO_SLOT
        machine.scheduler._make_way = self._making_way  # type: ignore[method-assign]

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
        now_us = self.clock.now_us
        if isinstance(event, FromClient):
            self._replied(event, effects, before)
        elif isinstance(event, ClientGone):
            self.ledger.client_gone(event.client, event.goodbye, now_us)
            self._unpublished |= self.published
        elif isinstance(event, ClientFull):
            self.ledger.streamed(event.client, event.lost, now_us, lost=True)
        elif isinstance(event, WorkerGone):
            self._progress.disturbed()
        elif isinstance(event, Turn):
            self._flushed = True
            self.ledger.dues.turn(now_us)
            self._checker.turned(now_us)
        self._check()

    def _replied(self, event: FromClient, effects: list[Effect], before: bytes) -> None:
        """Books the answer to a command, as it can be read from its bytes."""
        answer = effects[-1]
        assert isinstance(answer, ToClient)
        reply = self._replies.decode([bytes(frame) for frame in codec.encode(answer.message)])
        if isinstance(reply, Refused) and before and before != snapshot(self.machine):
            raise Violation(f"a refused command changed the state: {event.message!r} -> {reply.error}")
        if isinstance(reply, Accepted) and not reply.repeated:
            size = self.machine.requests.live[reply.request_id].prompt.size
            self.ledger.prompt_sizes[reply.request_id] = size
        if isinstance(event.message, Drain) and isinstance(reply, Done):
            self.ledger.dues.drain(event.message.deadline_ms, self.clock.now_us)
        self.ledger.replied(event.client, event.message, reply, self.clock.now_us)

    def _check(self) -> None:
        cache = self.machine.cache
        s = cache.sequences
        rows = len(s.changed_rows) + len(s.changed_lengths)
        mark = (rows, len(s.changed_cells), len(cache.blocks.changed))
        if mark != self._mark:  # whatever touches a row or a block says so, or it would not be published
            self._mark = mark
            self._checker.light()
            self._generations.check()
        if self.events % self._full_check_every == 0:
            self._checker.full()
            self._progress.check_shares()

    def _to_client(self, number: int, message: Message, sent: Sent) -> None:
        if sent is Sent.GONE:
            self.ledger.telling.gone(number)
        elif sent is Sent.DONE:
            self._note(f"c{number}", message)
            if isinstance(message, Stream):
                self.ledger.streamed(number, message, self.clock.now_us)

    def _to_worker(self, number: int, message: Message, _sent: Sent) -> None:
        self._note(f"w{number}", message)
        if isinstance(message, Step):
            self._within_limits(message)
        elif isinstance(message, PoolRegistered):
            self.ledger.model_known = True

    def _planned(self, group: Group) -> Step | None:
        """Plans a step, and looks at it before anything else happens."""
        step = self._plan(group)
        if step is not None:
            self._checker.planned(group, step)
            self._progress.planned(group, step)
        return step

    def _ended(
        self,
        request: Request,
        event: str,
        reason: str,
        error: KvforgeError | None,
        keep: int | None = None,
    ) -> None:
        """Ends a request, and asks why."""
        if event == "fail" and isinstance(error, CapacityExceeded):
            self._progress.hopeless(request)
            self.ledger.hopeless.add(request.id)
        self._end(request, event, reason, error, keep)
        self.ledger.over(request, self.clock.now_us, self.cause)
        self._progress.over(request)
        self._progress.disturbed()

    def _started(self, request: Request, placement: Placement) -> None:
        """Starts a request, and looks at whom it passes."""
        self._progress.starts(request, placement.group)
        self._start(request, placement)
        self._progress.started(request)

    def _making_way(self, group: Group, slot: int, count: int) -> bool:
        """Room is made for a row: whoever is preempted meanwhile is preempted for it."""
        self._asking = slot
        return self._make_way(group, slot, count)

    def _requeued(self, request: Request) -> None:
        """A running request waits again: because its worker is gone, or because the scheduler wants its blocks."""
        if isinstance(self.cause, Turn) and request.worker in self._names():
            self._progress.preempted(request, self._asking)
        self._requeue(request)

    def _names(self) -> set[str]:
        return {worker.name for worker in self.machine.workers.values()}

    def _added(self, request: Request) -> None:
        """A request joins the queue."""
        queue = self.machine.admission.waiting
        before = float(queue.service[request.tenant])
        self._add(request)
        self._progress.added(queue, request.tenant, before)

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

    # ------------------------------------------------------------------------------------------------------ processes

    def watch(self, worker: int, pid: int, descriptor: int) -> None:
        """A worker connected: coordinator.turn.Processes."""

    def leave(self, worker: int) -> None:
        """Its connection ended."""

    def replace(self, worker: int, pid: int, reason: str, now_us: int) -> None:
        """Whoever keeps workers running ends the process, and starts another one."""
        for one in self.workers.values():
            if one.pid == pid:
                one.kill(1 + self._entropy.randrange(REPLACED_US))

    def act(self, now_us: int) -> int | None:
        """Nothing is left to do."""
        return None

    # ---------------------------------------------------------------------------------------------------------- turns

    def wake(self) -> None:
        """Something arrived at the coordinator: it takes a turn soon."""
        if not self._turn_planned:
            self._turn_planned = True
            self.clock.after(self.settings.turn_us, self._turn)

    def _turn(self) -> None:
        now_us = self.clock.now_us
        if self.turns % PROBE_EVERY == 0 or now_us >= self._due_us:
            self._probe(max(self._turned_us, min(now_us, self._due_us - 1)))
        self._turn_planned = False
        self._mark = (0, 0, 0)
        self._flushed = self._unpublished = self.published = False
        self.turns += 1
        self.ledger.dues.late(now_us)
        self.ledger.telling.late(now_us - self.settings.turn_us)
        self._due_us = self.loop.turn(now_us)
        self._turned_us, before_us = now_us, self._turned_us
        if self._flushed:
            self.ledger.telling.turn_ends(self.machine.clients)
        self._progress.turned(self.clock.now_us)
        # A change that nobody told of shows in the next turn that tells of one.
        if self._mark != (0, 0, 0) and not self._unpublished:
            self._checker.published()
        if self.trace is not None:
            self.trace.append(f"{now_us:>9} turn {self.turns}: {digest(self.machine)}")
        self._turns_at_once = self._turns_at_once + 1 if now_us == before_us else 0
        if self._turns_at_once > SAME_INSTANT_MAX:
            raise Violation("the loop spins: it asks for turn after turn at the same moment")
        turns = self.turns
        self.clock.at(self._due_us, lambda: self._turn() if self.turns == turns else None)
        if self._client_side.waiting or self._worker_side.waiting:
            self.wake()

    def _probe(self, at_us: int) -> None:
        """Another Turn, after the last one and before the next is due, must change nothing: what it could do was left
        undone, or became due and nobody was told."""
        machine = self.machine
        if (self.core_due_us is not None and self.core_due_us <= at_us) or machine.streams.due_us is not None:
            return  # what was lost or given up when the last turn sent its messages is for the next one
        before = snapshot(machine)
        if machine.due_us() != machine.due_us() or before != snapshot(machine):
            raise Violation("asking when something is due changed the state")
        turns, machine.turns = machine.turns, machine.turns
        effects = Machine.apply(machine, Turn(), at_us).effects
        machine.turns = turns
        if effects or before != snapshot(machine):
            raise Violation(f"nothing was due at {at_us} us, and yet another turn had something to do: {effects}")

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
            client.read_on()
            client.connect(resume=True)
            client.send(GetHealth)  # one that was dropped learns it now
        self._drain()
        arrived_us = self.clock.now_us + self._delays.long_us + self._delays.short_us
        self._until("what was on its way has arrived", lambda: self.clock.now_us > arrived_us)
        self._until("all workers are ready", lambda: len(self.machine.cache.groups) == len(self.workers))
        self._until("clients are answered", self._answered)
        first = self.turns
        while self.machine.requests.live:  # what a request leaves behind may be what the next one waits for
            self._give_back(idle_only=True)
            pause_until = self.turns + 50
            self._until("it goes on", partial(self._paused, pause_until))
            if self.turns - first > CALM_TURNS_MAX:
                self._too_long("everything accepted ends")
        self._until("every stream has ended", self._all_read)
        self._give_back(idle_only=False)
        for client in self.clients.values():
            client.goodbye()
        self._until("clients are gone", lambda: not self.machine.clients)
        self._until("nothing is under way", self._settled)
        self._checker.full()
        self._empty()

    def _drain(self) -> None:
        """Some runs end with a Drain, or a signal; a request that comes after it is refused."""
        drain_ms, now_us = self.settings.drain_ms, self.clock.now_us
        if drain_ms >= 0:
            client = next(iter(self.clients.values()))
            if self.settings.drain_by_signal:
                self.loop.begin_drain(now_us, now_us + drain_ms * 1000 if drain_ms else 0)
                self.ledger.dues.drain(drain_ms, now_us)
                self.wake()
            else:
                client.send(Drain, deadline_ms=drain_ms)
            client.send(Submit, ("never",), max_tokens=1, prompt=np.array([1], np.int32))

    def _all_read(self) -> bool:
        return not any(client.readings.unfinished() for client in self.clients.values())

    def _paused(self, turn: int) -> bool:
        return not self.machine.requests.live or self.turns >= turn

    def _answered(self) -> bool:
        return all(not client.unanswered for client in self.clients.values() if client.connection is not None)

    def _settled(self) -> bool:
        groups = self.machine.cache.groups.values()
        return not any(group.sent or group.copies or group.pool.quarantined for group in groups)

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
        if len(machine.cache.sequences) or machine.admission.waiting or machine.requests.live:
            raise Violation("sequences or requests are left over at the end")
        for group in machine.cache.groups.values():
            pool = group.pool
            if pool.free + pool.cached != pool.count or machine.cache.blocks.refcount.any():
                raise Violation(f"blocks of {group.name} are left over at the end")
        if self.ledger.live:
            raise Violation(f"requests {list(self.ledger.live)} never ended")
