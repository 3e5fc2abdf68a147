"""One life of the simulated coordinator: the real core, the real turn and the real tables, with checks on all sides.

The loop runs when a message arrives and when its reported due time comes, never by itself, so work without a wake-up
does not happen. In addition, `_probe` checks that another turn before the due time would find nothing to do.

This module holds what dies with the process. The peers' knowledge, the clock and the ledger belong to the world.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from kvforge.coordinator.access import Gate
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.placement import Placement
from kvforge.coordinator.core.events import (
    Applied,
    ClientCame,
    ClientFull,
    ClientGone,
    Effect,
    Event,
    FromClient,
    FromWorker,
    Restarted,
    ToClient,
    Turn,
    WorkerGone,
)
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.requests.request import NO_SLOT, Request
from kvforge.coordinator.publish import publish
from kvforge.coordinator.transport.outbox import Sent
from kvforge.coordinator.turn import TurnLimits, TurnLoop
from kvforge.protocol import codec
from kvforge.protocol.errors import CapacityExceeded, KvforgeError
from kvforge.protocol.messages import (
    Accepted,
    Done,
    Drain,
    Message,
    PoolRegistered,
    Refused,
    Step,
    Stream,
    Submit,
)
from kvforge.protocol.tables import TablesWriter
from tools.simulation.checks import Checker, Generations
from tools.simulation.crashes import AFTER, Crash, CrashingJournal, CrashPlan, LedgerCopy, copied
from tools.simulation.digest import digest
from tools.simulation.due_scan import check_due
from tools.simulation.mirroring import Mirrored
from tools.simulation.progress import Progress
from tools.simulation.snapshots import NOTHING, Snapshot, Snapshots
from tools.simulation.state_equality import equality_digest
from tools.simulation.workers import Violation

if TYPE_CHECKING:
    from tools.simulation.world import World

# Probe period: check whether another turn would find work. The check costs two comparisons. Probe more often before
# turns that are due by timer, where a missing or early wake-up shows.
PROBE_EVERY, PROBE_DUE_EVERY = 32, 8
# Share of the probes that also compare right after asking for the due time. The others notice a change at their end,
# unless the turn undoes it.
ASK_EVERY = 8
COMPARE_EVERY = 32
# Check waiting requests after this many turns; a forgotten one mostly waits for longer.
WAITS_EVERY = 3
SAME_INSTANT_MAX = 32
REPLACED_US = 5_000
NO_END = -1
NO_CHANGES = (0, (0, 0, 0))


class WatchedMachine(Machine):
    """The real machine, with every event counted and checked."""

    watcher: SimulatedCoordinator

    def apply(self, event: Event, now_us: int) -> Applied:
        """Apply an event, then check; a refusal must leave the state unchanged."""
        watcher = self.watcher
        before = watcher.snapshots.capture() if watcher.compares(event) else NOTHING
        watcher.begins(event)
        applied = super().apply(event, now_us)
        watcher.applied(event, now_us, applied, before)
        return applied

    def gauges(self, now_us: int, journal: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the gauges, the last data that is published."""
        self.watcher.published = True
        return super().gauges(now_us, journal)


class SparseTables(TablesWriter):
    """The real tables in a sparse file, without allocating its pages."""

    @staticmethod
    def _make_room(handle: int, size: int) -> None:
        os.ftruncate(handle, size)


class SimulatedCoordinator:
    """Machine, tables and loop of one process between the world's two networks; records events in the ledger."""

    def __init__(
        self, world: World, machine: Machine, folder: Path, entropy: Random, journal: CrashingJournal | None = None
    ) -> None:
        """Create a coordinator for a machine.

        Args:
            world: the world.
            machine: the core.
            folder: for the published tables.
            entropy: the source of random seeds.
            journal: where events are written, or None.
        """
        settings = world.settings
        self._world, self._clock, self._ledger, self._entropy = world, world.clock, world.ledger, entropy
        self._cause: Event | None = None
        self.published = False
        self._compare_every = min(COMPARE_EVERY, world.full_check_every)
        self._core_due_us: int | None = None
        self._probes = 0
        self._turn_planned = False
        self._due_us = self._turned_us = self._turns_at_once = 0
        self._mark = NO_CHANGES
        self._flushed = self._unpublished = False
        self.death: CrashPlan | None = None  # how the next turn ends
        self.up, self.dead = True, False
        self._stands = False  # the process is stopped and takes no turn
        self._processes: dict[int, int] = {}  # process ids of workers, by connection
        self._ledger_copy: LedgerCopy | None = None  # a copy of the promises, made before a turn that dies unwritten
        self._effects_left = NO_END
        self.journal = journal
        if type(machine) is Machine:  # recovered from a journal
            machine.__class__ = WatchedMachine
        self.machine = cast(WatchedMachine, machine)
        self.machine.watcher = self
        fill = partial(publish, machine, now_us=world.steady_us)
        self.tables = SparseTables(folder / "tables", settings.geometry(), machine.boot, fill)
        self.loop = TurnLoop(
            self.machine,
            self.tables,
            world.client_side,
            world.worker_side,
            lambda: entropy.getrandbits(64),
            lambda: world.steady_us,
            TurnLimits(messages_per_turn_max=8, clients_max=16, client_backlog_max=settings.backlog_max),
            self,
            journal,
            cast(Gate, world.ledger.isolation),
            Mirrored(machine, world.router, lambda: world.steady_us),
        )
        self.checker, self._generations = Checker(self.machine, self.tables), Generations(self.machine)
        self._progress = Progress(self.machine, settings)
        self._watch()
        self.snapshots = Snapshots(self.machine)

    def goes_on(self, before: LedgerCopy) -> None:
        """Take over the checks of the previous life; `rise` starts the process."""
        self.up = False
        self._progress.goes_on(before.progress)
        self.checker.goes_on(before.checker)

    def rise(self) -> None:
        """Start the process."""
        now_us = self._world.steady_us
        self.up = True
        self._due_us = self._turned_us = now_us
        self._ledger.due_times.rises(now_us)
        self.loop.restarted(now_us)
        self.wake()

    def stop(self) -> None:
        """Stop the process as SIGSTOP does: nothing is read from the sockets."""
        self._stands, self._turn_planned = True, False

    def go_on(self) -> None:
        """Continue the process; its clock leaves out the time between."""
        self._stands = False
        self._ledger.due_times.rises(self._world.steady_us)  # the stop cancelled a turn that was about to come
        self.loop.stood_still(self._world.steady_us)
        self.wake()

    @property
    def stands(self) -> bool:
        """Return whether the process is stopped."""
        return self._stands

    def _watch(self) -> None:
        """Install hooks between the parts of the core, to observe what no message shows."""
        machine, scheduler, admission = self.machine, self.machine.scheduler, self.machine.admission
        self._plan, self._end, self._make_way = scheduler.plan, machine.finisher.end, scheduler._make_way
        self._start, self._add, self._requeue = admission._start, admission.waiting.add, admission.requeue
        self._asking = NO_SLOT
        put: list[tuple[Any, str, Any]] = [
            (scheduler, "plan", self._planned),
            (scheduler, "_make_way", self._making_way),
            (machine.finisher, "end", self._ended),
            (admission, "_start", self._started),
            (admission, "requeue", self._requeued),
            (admission.waiting, "add", self._added),
        ]
        for part, name, mine in put:
            setattr(part, name, mine)
        self.between = [(machine, "watcher"), *((part, name) for part, name, _ in put)]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """End snapshots of the core here: it refers to its watcher."""
        return (str, ("the watcher",))

    # ---------------------------------------------------------------------------------------------------------- events

    def compares(self, event: Event) -> bool:
        """Return whether to compare the state around the event.

        A comparison costs as much as the event, so only some events are compared.
        """
        return isinstance(event, FromClient) and self._world.events % self._compare_every == 0

    def begins(self, event: Event) -> None:
        """Prepare for an event."""
        self._cause, kind = event, type(event)
        if kind is Turn:
            self._ledger.presence.passes(self._world.steady_us)
        elif kind is Restarted:
            self._ledger.restarts(self._world.steady_us)
        self._ledger.isolation.before(event, self.machine.requests.finished)

    def applied(self, event: Event, now_us: int, applied: Applied, before: Snapshot) -> None:
        """Check the state after an event."""
        world, ledger = self._world, self._ledger
        self._core_due_us = applied.due_us
        if world.recording is not None:
            world.recording.applied(self.machine, event, now_us, applied)
        world.events += 1
        if isinstance(event, Turn):
            ledger.left(now_us)
            self._flushed = True
            ledger.due_times.turn(now_us)
            self.checker.turned(now_us)
        elif isinstance(event, FromClient):
            self._replied(event, applied.effects, before)
        elif isinstance(event, FromWorker):
            pass
        elif isinstance(event, ClientCame):
            ledger.isolation.came(event)
            ledger.came(event.client, event.session)
        elif isinstance(event, ClientGone):
            ledger.connection_ended(event.client, event.goodbye, now_us)
            self._unpublished |= self.published
        elif isinstance(event, ClientFull):
            ledger.streamed(event.client, event.lost, now_us, lost=True)
        elif isinstance(event, WorkerGone):
            self._progress.disturbed()
        elif isinstance(event, Restarted):
            ledger.left(now_us)
            self._progress.disturbed()
        self._check()

    def _replied(self, event: FromClient, effects: list[Effect], before: Snapshot) -> None:
        """Record the reply to a command, decoded from its bytes."""
        answer, ledger, now_us = effects[-1], self._ledger, self._world.steady_us
        assert isinstance(answer, ToClient)
        reply = self._world.client_side.foresee(codec.encode(answer.message))
        if isinstance(reply, Refused) and before is not NOTHING and before != self.snapshots.capture():
            raise Violation(f"a refused command changed the state: {event.message!r} -> {reply.error}")
        if isinstance(reply, Accepted) and not reply.repeated:
            ledger.prompt_sizes[reply.request_id] = self.machine.requests.live[reply.request_id].prompt.size
        continued = event.message.continues if isinstance(event.message, Submit) else 0
        ledger.continued_is_there = continued in self.machine.cache.sequences.slot_of
        if isinstance(event.message, Drain) and isinstance(reply, Done):
            ledger.due_times.drain(event.message.deadline_ms, now_us)
        ledger.replied(event.client, event.message, reply, now_us)
        ledger.isolation.replied(event, reply)

    def _check(self) -> None:
        cache = self.machine.cache
        s = cache.sequences
        mark = (len(s.changed_lengths), (len(s.changed_rows), len(s.changed_cells), len(cache.blocks.changed)))
        if mark != self._mark:  # a changed row or block must be registered, or it would not be published
            (_, before), self._mark = self._mark, mark
            self.checker.lengths()
            if mark[1] != before:  # if only lengths changed, the blocks did not
                self.checker.light()
                self._generations.check()
        if self._world.events % self._world.full_check_every == 0:
            self.checker.full()
            self._ledger.isolation.explained(self.machine.explainer, self.machine.requests.live)
            self._progress.check_shares()
            for worker in self._world.workers.values():
                worker.check_files(self.machine.cache)

    def to_client(self, number: int, message: Message, sent: Sent) -> None:
        """Record a message for a client and the result of sending it."""
        if sent is Sent.GONE:
            self._ledger.stream_checker.gone(number)
        elif sent is Sent.DONE:
            self._world.note(f"c{number}", message)
            self._ledger.isolation.check_message(number, message)
            if isinstance(message, Stream):
                self._ledger.streamed(number, message, self._world.steady_us)

    def to_worker(self, number: int, message: Message, _sent: Sent) -> None:
        """Record a message for a worker."""
        self._world.note(f"w{number}", message)
        if isinstance(message, Step):
            self._within_limits(message)
        elif isinstance(message, PoolRegistered):
            self._ledger.model_known = True
            self.snapshots.renew()

    def _within_limits(self, step: Step) -> None:
        settings = self._world.settings
        tokens = sum(step.counts.tolist())
        if step.slots.size > settings.step_rows_max or tokens > settings.step_tokens_max:
            raise Violation(f"step {step.step_id} exceeds a limit: {step.slots.size} rows, {tokens} tokens")
        if len(set(step.slots.tolist())) != step.slots.size:
            raise Violation(f"step {step.step_id} names a slot twice")

    # ------------------------------------------------------------------------------------------- hooks between the
    # parts

    def _planned(self, group: Group) -> Step | None:
        """Plan a step and check it before anything else happens."""
        step = self._plan(group)
        if step is not None:
            self.checker.planned(group, step)
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
        """End a request and check the reason."""
        early = self._ledger.requests[request.id].early and request.slot == NO_SLOT  # when the model became known
        if event == "fail" and isinstance(error, CapacityExceeded) and not early:
            self._progress.hopeless(request)
            self._ledger.hopeless.add(request.id)
        if error is not None:
            self._ledger.isolation.failed(request, error)
        self._end(request, event, reason, error, keep)
        self._ledger.over(request, self._world.steady_us, self._cause)
        self._progress.over(request)
        self._progress.disturbed()

    def _started(self, request: Request, placement: Placement) -> None:
        """Start a request and check which waiting requests it overtakes."""
        self._progress.starts(request, placement.group)
        self._start(request, placement)
        self._progress.started(request)

    def _making_way(self, group: Group, slot: int, count: int) -> bool:
        """Make room for a row; a request preempted meanwhile is preempted for it."""
        self._asking = slot
        return self._make_way(group, slot, count)

    def _requeued(self, request: Request) -> None:
        """Requeue a running request: its worker is gone, or the scheduler preempted it."""
        if isinstance(self._cause, Turn) and request.worker in self._names():
            self._progress.preempted(request, self._asking)
        self._requeue(request)

    def _names(self) -> set[str]:
        return {worker.name for worker in self.machine.workers.values()}

    def _added(self, request: Request) -> None:
        """Add a request to the queue."""
        queue = self.machine.admission.waiting
        before = float(queue.service[request.tenant])
        self._add(request)
        self._progress.added(queue, request.tenant, before)

    # ------------------------------------------------------------------------------------------------------ processes

    def watch(self, worker: int, pid: int, descriptor: int) -> None:
        """Record a worker's process (kvforge.coordinator.turn.Processes)."""
        self._processes[worker] = pid

    def ended(self, worker: int) -> bool:
        """Return whether the process of this connection is gone."""
        pid = self._processes.get(worker)
        return not any(one.pid == pid and one.alive for one in self._world.workers.values())

    def leave(self, worker: int) -> None:
        """Handle the end of a worker's connection; nothing to do here."""

    def replace(self, worker: int, pid: int, reason: str, now_us: int) -> None:
        """Replace a worker's process, as its supervisor would."""
        self.leaves()
        for one in self._world.workers.values():
            if one.pid == pid:
                one.replaced(1 + self._entropy.randrange(REPLACED_US))

    def act(self, now_us: int) -> int | None:
        """Return the next due time; there is none."""
        return None

    # ---------------------------------------------------------------------------------------------------------- turns

    def begin_drain(self, now_us: int, deadline_us: int) -> None:
        """Deliver a signal to the process."""
        self.loop.begin_drain(now_us, deadline_us)
        self.wake()

    def wake(self) -> None:
        """Schedule a turn soon, because a message arrived."""
        if not self._turn_planned and self.up and not self._stands:
            self._turn_planned = True
            self._clock.after(self._world.settings.turn_us, self._turn)

    def _turn(self) -> None:
        world, now_us = self._world, self._world.steady_us
        if self.dead or self._stands:
            return
        if world.turns % (PROBE_DUE_EVERY if now_us >= self._due_us else PROBE_EVERY) == 0:
            self._probe(max(self._turned_us, min(now_us, self._due_us - 1)))
        self._turn_planned = False
        self._mark = NO_CHANGES
        self._flushed = self._unpublished = self.published = False
        world.turns += 1
        self._ledger.due_times.late(now_us)
        self._ledger.stream_checker.late(now_us - world.settings.turn_us)
        try:
            self._due_us = self._loop_turn(now_us)
        except Crash:
            self._die()
            return
        self._turned_us, before_us = now_us, self._turned_us
        if self._core_due_us is None or self._core_due_us > now_us:  # otherwise the next turn follows at once
            check_due(self.machine, self._core_due_us)
        if self._flushed:
            self._ledger.stream_checker.turn_ends(self.machine.clients)
        if world.turns % WAITS_EVERY == 0:
            self._progress.turned(now_us)
        # An unregistered change shows in the next turn that registers one.
        if self._mark != NO_CHANGES and not self._unpublished:
            self.checker.published()
        if world.trace is not None:
            world.trace.append(f"{now_us:>9} turn {world.turns}: {digest(self.machine)}")
        self._turns_at_once = self._turns_at_once + 1 if now_us == before_us else 0
        if self._turns_at_once > SAME_INSTANT_MAX:
            raise Violation("the loop spins: turn after turn is due at the same time")
        turns = world.turns
        self._clock.at(self._due_us + world.left_out_us, lambda: self._turn() if world.turns == turns else None)
        if world.client_side.waiting or world.worker_side.waiting:
            self.wake()

    # ---------------------------------------------------------------------------------------------------------- death

    def leaves(self) -> None:
        """Count down the effects until the process dies."""
        if self._effects_left == 0 and self.journal is not None and not self.journal.unwritten:
            raise Crash
        self._effects_left -= self._effects_left > 0

    def _loop_turn(self, now_us: int) -> int:
        """Run one turn of the loop; raise Crash if the process dies in it or at its end."""
        if self.death is None or self.journal is None:
            due_us = self.loop.turn(now_us)
            if self.journal is not None:
                self.journal.flush()
            return due_us
        if self.journal.unwritten:  # events of the previous turn: the ledger's copy no longer covers them
            self.death = CrashPlan(AFTER, 0, self.death.back_us, self.death.wall_jump_s)
        death = self.journal.death = self.death
        if death.how == AFTER:
            self._effects_left = death.part
        else:
            world = self._world
            shared = [world, world.settings, self.tables, world.client_side, world.worker_side]
            self._ledger_copy = copied(self._ledger, self._progress, self.checker, self.machine, shared)
        due_us = self.loop.turn(now_us)
        self._ledger_copy = None  # there was nothing to write
        if not self.journal.unwritten:
            raise Crash
        # The next turn writes what the last effect added, and then the process dies.
        self.journal.death, self._effects_left = None, NO_END
        return due_us

    def close(self) -> None:
        """Close the files, except for the tables, which the next process or the world removes."""
        self.snapshots.close()
        if self.journal is not None:
            self.journal.close()

    def _die(self) -> None:
        assert self.death is not None and self.journal is not None
        self.dead = self.journal.dead = True
        self.close()
        now = self._ledger_copy or LedgerCopy(self._ledger, self._progress, self.checker, equality_digest(self.machine))
        self._world.died(now, self.death.back_us, self.death.wall_jump_s)

    def _probe(self, at_us: int) -> None:
        """Check that another turn between the last one and the next due time changes nothing.

        Otherwise the last turn left work undone, or work became due without a wake-up.
        """
        machine, snapshots = self.machine, self.snapshots
        if (self._core_due_us is not None and self._core_due_us <= at_us) or machine.streams.due_us is not None:
            return  # the next turn handles what sending the last turn's messages caused
        before = snapshots.capture()
        self._probes += 1
        in_between = self._probes % ASK_EVERY == 0
        if machine.due_us() != machine.due_us() or (in_between and before != snapshots.capture()):
            raise Violation("asking for the due time changed the state")
        turns, clock_us = machine.turns, machine._clock.now_us
        effects = Machine.apply(machine, Turn(), at_us).effects
        machine.turns, machine._clock.now_us = turns, clock_us
        if effects or before != snapshots.capture():
            raise Violation(f"nothing was due at {at_us} us, but a probe changed the state: {effects}")
