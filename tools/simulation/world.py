"""One simulated world: a coordinator, with simulated time, network, workers and clients around it.

An event is one `Machine.apply` call or one message that reaches a client or a worker. All random values come from the
seed, with separate streams for the actions, each connection and each worker's life, so a scenario always runs the same
way.

`coordinators` holds what dies with the coordinator's process; this module holds the peers and the promises made to
them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvforge.coordinator import machine_store
from kvforge.coordinator.core.events import Boot
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.host.downtime import Anchor, HostTime
from kvforge.coordinator.journal.identity import Origin
from kvforge.coordinator.journal.unwritten import UnwrittenRecords
from kvforge.coordinator.transport.outbox import Sent
from kvforge.protocol import codec
from kvforge.protocol.messages import CLIENT_REPLIES, WORKER_REPLIES, Message, Welcome, WorkerWelcome
from tools.simulation.actions import Action
from tools.simulation.calm import Calm
from tools.simulation.clients import SimulatedClient
from tools.simulation.coordinators import SimulatedCoordinator, WatchedMachine
from tools.simulation.crashes import CrashingJournal, CrashPlan, LedgerCopy, cut, recover_next_process
from tools.simulation.draws import Draws
from tools.simulation.ledger import Ledger
from tools.simulation.mirroring import Router
from tools.simulation.model import Oracle
from tools.simulation.network import Clock, Delays, SimulatedPeers
from tools.simulation.performing import Performer
from tools.simulation.replay import OutputDigest, Recording
from tools.simulation.settings import Settings
from tools.simulation.workers import SimulatedWorker, Violation

# The light checks run after every event; the core's own checks cost as much as ten events and run now and then.
FULL_CHECK_EVERY = 128
# A coordinator that replayed more records than this writes a snapshot at once, so that the next one need not replay
# them.
REPLAYED_MAX = 16
HOST_BOOT, AWAY_S_MAX = "the only boot of this host", 300.0


class World:
    """Runs one scenario; raises Violation or AssertionError if a promise is broken.

    Attributes:
        events: events so far, over all lives.
        turns: turns so far, over all lives.
    """

    def __init__(self, settings: Settings, seed: str, folder: Path, full_check_every: int = FULL_CHECK_EVERY) -> None:
        self.settings, self.full_check_every = settings, full_check_every
        self.calm = False
        self.events = self.turns = 0
        self.left_out_us = 0  # time that the coordinator's clock leaves out, because its process stood still
        self.trace: list[str] | None = None
        self.recording: Recording | OutputDigest | None = None
        self.clock = Clock()
        self.ledger = Ledger(settings, self._known)
        self.delays = Delays(settings.short_us, settings.long_us, settings.long_share)
        self._numbers = 0
        self._entropy = Draws(f"{seed}/entropy")
        self.client_side, self.worker_side = self._sides()
        self.boot = Boot("b" * 32, hashlib.blake2b(seed.encode()).digest()[:32], settings.limits())
        self._folder = folder
        # pools that the coordinator waits for, and until when by its clock
        self._pools: dict[tuple[str, int], int] = {}
        self._given_up: set[tuple[str, int]] = set()  # pools of workers that disconnected during the standstill
        self.router = Router()
        self._stores = zlib.crc32(seed.encode()) % 2 == 0
        journal = self._first_journal() if settings.crash_gap_us else None
        self.coordinator = SimulatedCoordinator(
            self, WatchedMachine(self.boot, self.clock.now_us), folder, self._entropy, journal
        )
        self.clients = {
            name: SimulatedClient(name, self.client_side, seed, self, lasting=settings.crash_gap_us > 0 and i % 3 < 2)
            for i, name in enumerate(f"c{i}" for i in range(settings.clients))
        }
        self.workers = {
            worker.label: worker
            for i, blocks in enumerate(settings.workers)
            for rank in range(settings.ranks_of(i))
            for worker in [SimulatedWorker(f"w{i}", blocks, self, self.worker_side, seed, rank, settings.ranks_of(i))]
        }
        self._meetings: dict[tuple[str, int], str] = {}
        for client in self.clients.values():
            client.duplicate_share = settings.duplicate_share
        self._performer = Performer(self)

    def close(self) -> None:
        """Close the tables and the coordinator."""
        self.coordinator.tables.close()
        self.coordinator.close()

    # ------------------------------------------------------------------------------------------------- the coordinator

    def _first_journal(self) -> CrashingJournal:
        state = self._folder / "state"
        state.mkdir()
        journal = self._journal(1, Origin.new())
        journal.note(self.boot, self.steady_us)
        journal.commit()
        return journal

    def _journal(self, number: int, origin: Origin) -> CrashingJournal:
        """Return a journal; in every second world, it stores the records of a turn until the turn is over."""
        state = self._folder / "state"
        stored = UnwrittenRecords(state, origin.journal, number) if self._stores else None
        return CrashingJournal(state, number, origin=origin, unwritten=stored)

    def crash(self, how: str, part: int, back_us: int, wall_jump_s: float = 0.0) -> None:
        """Let the coordinator's process die in its next turn, and set the wall clock before the next one starts."""
        if self.coordinator.up and self.coordinator.death is None:
            self.coordinator.death = CrashPlan(how, part, back_us, wall_jump_s)
            self.coordinator.wake()

    @property
    def steady_us(self) -> int:
        """Return the coordinator's time, without its own standstills."""
        return self.clock.now_us - self.left_out_us

    def stand(self, for_us: int, gives_up: tuple[bool, ...]) -> None:
        """Stop the coordinator's process for a while; meanwhile some workers drop their connection.

        Args:
            for_us: duration of the standstill.
            gives_up: which workers hear nothing for so long that they reconnect, repeated as often as needed.
        """
        coordinator = self.coordinator
        if not coordinator.up or coordinator.stands:
            return
        coordinator.stop()
        self.clock.after(for_us // 2, lambda: self._give_up(gives_up))
        self.clock.after(for_us, lambda: self._go_on(for_us))

    def _give_up(self, gives_up: tuple[bool, ...]) -> None:
        for i, worker in enumerate(self.workers.values()):
            if gives_up[i % len(gives_up)] and worker.cut_off():
                self._given_up.add((worker.name, worker.epoch))

    def _go_on(self, for_us: int) -> None:
        self.left_out_us += for_us
        for group in self.coordinator.machine.cache.groups.values():
            pool = (group.name, group.epoch)
            if pool in self._given_up and not group.away:  # a worker that was away before gets no additional time
                self._pools[pool] = self.steady_us + self.settings.reattach_us
        self._given_up.clear()
        self.coordinator.go_on()

    def cut(self) -> None:
        """Write a snapshot of the coordinator's state and start its journal anew."""
        coordinator, journal = self.coordinator, self.coordinator.journal
        if coordinator.up and journal is not None and not journal.unwritten:
            cut(journal, coordinator.machine, coordinator.machine._clock.now_us, self._numbers)

    def died(self, before: LedgerCopy, back_us: int, wall_jump_s: float) -> None:
        """Replace a dead coordinator by a process that recovers.

        Args:
            before: the promises that survive the death.
            back_us: time until the next process starts.
            wall_jump_s: change of the wall clock meanwhile.
        """
        self.ledger = before.ledger
        found = recover_next_process(self._folder / "state", before)
        self._numbers = found.numbers
        self._pools = {(group.name, group.epoch): 0 for group in found.machine.cache.groups.values()}
        self._given_up.clear()
        for side in (self.client_side, self.worker_side):
            side.die()
        journal = self._journal(found.number, found.origin)
        self.coordinator = SimulatedCoordinator(self, found.machine, self._folder, self._entropy, journal)
        self.coordinator.goes_on(before)
        if found.records > REPLAYED_MAX:
            cut(journal, self.coordinator.machine, found.now_us, found.numbers)
        anchor, written_us = Anchor(HOST_BOOT, self.left_out_us), self.clock.now_us
        self.clock.after(back_us, lambda: self._rise(found.now_us, anchor, written_us, wall_jump_s))

    def kept_pool(self, name: str, epoch: int) -> bool:
        """Return whether a dead coordinator knew this pool and the current one still waits for its worker."""
        return self.steady_us < self._pools.get((name, epoch), 0)

    def has_pool(self, epoch: int) -> bool:
        """Return whether the coordinator has the pool of this epoch."""
        return any(group.epoch == epoch for group in self.coordinator.machine.cache.groups.values())

    def others(self, worker: SimulatedWorker) -> list[SimulatedWorker]:
        """Return the live ranks of the worker's rendezvous."""
        return [
            each
            for each in self.workers.values()
            if each is not worker and each.name == worker.name and each.alive and each.meeting == worker.meeting
        ]

    def met(self, name: str, epoch: int, meeting: str) -> None:
        """Record that a rank holds a pool, and check that all its ranks had the same rendezvous."""
        if self._meetings.setdefault((name, epoch), meeting) != meeting:
            raise Violation(f"a rank of {name} is in a pool with ranks of another rendezvous")

    def _rise(self, last_us: int, anchor: Anchor, written_us: int, wall_jump_s: float) -> None:
        """Start the next process; it computes its time like the real one and must not notice the wall clock's jump."""
        wall_s = self.clock.now_us / 1e6 + wall_jump_s
        now = HostTime(HOST_BOOT, self.clock.now_us, wall_s)
        steady_us = last_us + vars(machine_store)["downtime_us"](anchor, last_us, written_us / 1e6, now, AWAY_S_MAX)
        self.left_out_us = self.clock.now_us - steady_us
        self._pools = dict.fromkeys(self._pools, steady_us + self.settings.reattach_us)
        for side in (self.client_side, self.worker_side):
            side.rise()
        self.coordinator.rise()

    # -------------------------------------------------------------------------------------------------------- network

    def _sides(self) -> tuple[SimulatedPeers, SimulatedPeers]:
        """Return the two networks, for clients and for workers; the current coordinator receives what arrives."""

        def side(decoder: codec.Decoder, tap: Callable[[int, Message, Sent], None]) -> SimulatedPeers:
            wake, leaves = lambda: self.coordinator.wake(), lambda: self.coordinator.leaves()
            return SimulatedPeers(self.clock, self.delays, self._number, wake, decoder, leaves, tap)

        return (
            side(codec.Decoder(CLIENT_REPLIES), lambda *message: self.coordinator.to_client(*message)),
            side(codec.Decoder(WORKER_REPLIES), lambda *message: self.coordinator.to_worker(*message)),
        )

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def delivered(self) -> None:
        """Count a message that reached a client or a worker."""
        self.events += 1

    def note(self, receiver: str, message: Message) -> None:
        """Add a sent message to the trace."""
        if self.trace is not None and not isinstance(
            message, Welcome | WorkerWelcome
        ):  # a welcome contains the name of a temporary folder
            body = hashlib.blake2b(b"|".join(bytes(frame) for frame in codec.encode(message)), digest_size=8)
            self.trace.append(
                f"{self.clock.now_us:>9} -> {receiver:<4} {type(message).__name__:<14} {body.hexdigest()}"
            )

    # -----------------------------------------------------------------------------------------------------------
    # queries

    def id_of(self, label: str) -> int | None:
        """Return the id of a label, whichever client got it."""
        for client in self.clients.values():
            if label in client.ids:
                return client.ids[label]
        return None

    def oracle(self, request_id: int) -> Oracle:
        """Return the oracle of a request."""
        return self.ledger.requests[request_id].oracle

    def is_over(self, request_id: int) -> bool:
        """Return whether the core may have evicted an accepted request."""
        booked = self.ledger.requests.get(request_id)
        return booked is not None and bool(booked.reason)

    def counts(self, request_id: int) -> bool:
        """Return whether a row of the request can still count."""
        return request_id in self.coordinator.machine.requests.live

    def _known(self, request_id: int) -> Request | None:
        return self.coordinator.machine.requests.known(request_id)

    # ------------------------------------------------------------------------------------------------------------ run

    def run(self, actions: Iterable[Action], events_max: int) -> list[Action]:
        """Perform actions until none is left or `events_max` events happened, then calm down and end.

        Args:
            actions: the scenario.
            events_max: the number of events after which the calm end begins.

        Returns:
            The actions that were performed.
        """
        performed: list[Action] = []
        self._rest: Iterator[Action] = iter(actions)
        for worker in self.workers.values():
            self.clock.after(1 + self._entropy.randrange(2_000), worker.start)
        self._plan_next(performed, events_max)
        while self._acting:
            if not self.clock.step():
                raise Violation("deadlock: no call is scheduled")
        Calm(self).run()
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
