"""The coordinator's state machine: `apply(event, now_us)` returns effects, and when a Turn is due.

It is deterministic: the same events at the same times give the same state and effects. A refused command raises a
typed error inside `apply`, changes nothing, and is answered with Refused. The shell applies every event that has
arrived, then a Turn, and only then publishes tables and sends.

Nothing here waits for an unrelated event. A Turn runs until nothing more follows from it, and `apply` returns when
the next one is due: an absolute time that stays the same until it comes or an event changes it. Any work that time
alone makes necessary must have a timer in `Deadlines`, or belong to a part in `_timed` that arms its bound there. Any
work that a later part of a turn makes possible for an earlier part must show in `Admission.due`. The simulator runs
turns only when they are due, and compares the time with a scan of all deadlines; so it detects omissions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.protocol.messages import (
    Append,
    Attach,
    Cancel,
    CreateSequence,
    Done,
    Drain,
    ErrorInfo,
    Explain,
    FindPrefix,
    FinishAt,
    Fork,
    GetBlock,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Health,
    KeepSequence,
    ListRequests,
    Message,
    PurgeFinished,
    RefBlock,
    Refused,
    RemoveSequences,
    Rewind,
    Submit,
    UnrefBlock,
    WipeTenant,
)
from kvforge.protocol.meters import ServiceInfo

from .cache.invariants import check_cache
from .cache.kv_cache_manager import KVCacheManager
from .clock import Clock
from .commands.blocks import BlockCommands
from .commands.finding import Finding
from .commands.guard import Guard
from .commands.requests import RequestCommands
from .commands.sequences import SequenceCommands
from .commands.sessions import Sessions
from .commands.spending import Spending
from .commands.wiping import WipeCommand
from .events import (
    Applied,
    BeginDrain,
    Boot,
    ClientCame,
    ClientFull,
    ClientGone,
    CommandRefused,
    Effect,
    Event,
    FromClient,
    FromWorker,
    Restarted,
    ToClient,
    ToWorker,
    Turn,
    WorkerGone,
)
from .reporting import statistics
from .reporting.explain import Explainer
from .requests.streams import Streams
from .requests.table import RequestTable
from .rights import Access
from .scheduling.admission import Admission
from .scheduling.finisher import RequestFinisher
from .scheduling.invariants import check_pending, check_proposals, check_sampled_rows
from .scheduling.scheduler import Scheduler
from .workers.reports import WorkerReports
from .workers.results import StepResults

ROUNDS_MAX = 16  # rounds in one turn; the next turn continues, after the events that have arrived meanwhile
# Read-only commands need no turn.
READING = (Explain, FindPrefix, GetBlock, GetHealth, GetRequest, GetSequence, GetStats, GetTokens, ListRequests)
DRAIN_MS_MAX = 7 * 24 * 3600 * 1000


class Machine:
    """The whole state of the coordinator, created by a Boot event at time `now_us`."""

    def __init__(self, event: Boot, now_us: int) -> None:
        limits = self.limits = event.limits
        clock = self._clock = Clock(now_us)
        self.boot, self.start_us = event.boot, now_us
        self._effects: list[Effect] = []  # shared: every part appends its effects here
        self.cache = KVCacheManager(clock, limits, event.hash_key, event.first_id, event.first_generation)
        self.requests = RequestTable(clock, limits.bounds, self.cache.tenants, event.first_id)
        self.admission = Admission(self.cache, self.requests)
        self.streams = Streams(clock)
        parts = (self.cache, self.requests, self.admission)
        self.finisher = RequestFinisher(*parts, self.streams, self._effects)
        self.scheduler = Scheduler(*parts, self.finisher, self._effects)
        self.sequences = SequenceCommands(self.cache, self.requests, self.finisher)
        self.blocks = BlockCommands(self.cache)
        self.explainer = Explainer(self.cache, self.requests, self.admission, self.sequences, self.blocks)
        commands = self._request_commands = RequestCommands(*parts, self.finisher, self.streams, self.sequences)
        results = StepResults(*parts, self.streams, self.finisher)
        self._reports = WorkerReports(*parts, self.finisher, results, commands, self._effects, event.boot)
        self.sessions = Sessions(clock, limits.bounds)
        # Requests come before the sequences that they kept.
        acting = (self.requests, commands, self.sequences, self._reports, self.sessions, self.scheduler)
        self._timed = tuple(part.pass_time for part in (*acting, self.admission.returning))
        self.workers = self._reports.workers
        spending = Spending(clock, self.requests)
        self._guard = Guard(self.requests, self.admission, self.sequences, self.blocks, spending)
        self.clients: dict[int, Access | None] = {}  # None: unrestricted access
        self.turns = self.restarts_total = 0
        self._turn_due = False  # an event has occurred that a Turn must follow
        # Commands that do not depend on the client.
        self._commands: dict[type[Message], Callable[[Any], Message]] = {
            Cancel: commands.cancel,
            FinishAt: commands.finish_at,
            GetRequest: commands.info,
            GetHealth: self._get_health,
            FindPrefix: self._find_prefix,
            Append: self.sequences.append,
            Rewind: self.sequences.rewind,
            KeepSequence: self.sequences.keep,
            GetSequence: self.sequences.info,
            GetTokens: self.sequences.read,
            RemoveSequences: self.sequences.remove,
            Drain: self._drain,
            WipeTenant: WipeCommand(self.cache, self.sequences).wipe,
        }
        # Commands that depend on the tenant that the client sees, or "" for all.
        self._commands_for: dict[type[Message], Callable[[str, Any], Message]] = {
            ListRequests: commands.list,
            PurgeFinished: commands.purge,
            GetStats: self._get_stats,
            GetBlock: self.blocks.info,
            UnrefBlock: self.blocks.unref,
            Explain: self.explainer.explain,
        }
        self._commands_of: dict[type[Message], Callable[[FromClient, Any], Message]] = {
            Submit: commands.submit,
            Attach: commands.attach,
            CreateSequence: self.sequences.create,
            Fork: self.sequences.fork,
        }

    # ---------------------------------------------------------------------------------------------------------- apply

    def apply(self, event: Event, now_us: int) -> Applied:
        """Apply one event.

        Args:
            event: The event.
            now_us: Its time in microseconds, monotonic.

        Returns:
            The effects, in order, and when a Turn is due: immediately after any event that may unblock work.
        """
        before_us, self._clock.now_us = self._clock.now_us, now_us
        due_us = None
        if isinstance(event, Turn):
            due_us = self._turn()
        elif isinstance(event, FromClient):
            self._from_client(event)
        elif isinstance(event, FromWorker):
            self._turn_due = True
            self._reports.apply(event)
        elif isinstance(event, CommandRefused):
            self.requests.refused_total += event.submit
        elif isinstance(event, ClientFull):
            self._request_commands.client_full(event.client, event.lost)
        else:
            self._turn_due = True
            if isinstance(event, ClientGone):
                if not event.goodbye and self.sessions.left(event.client):
                    self._request_commands.client_away(event.client)
                else:
                    self._client_gone(event)
            elif isinstance(event, WorkerGone):
                if event.away:
                    self._reports.cut_off(event.worker)
                else:
                    self._reports.end_worker(event.worker, event.goodbye)
            elif isinstance(event, ClientCame):
                self.clients[event.client] = None if event.access.unlimited else event.access
                if self.sessions.connected(event.client, event.session):
                    self._request_commands.client_away(event.client)
            elif isinstance(event, BeginDrain):
                self._request_commands.begin_drain(event.deadline_us)
            else:
                assert isinstance(event, Restarted)
                self._restarted(before_us)
        effects = self._effects.copy()
        self._effects.clear()
        if self._turn_due:
            due_us = now_us
        elif not isinstance(event, Turn):
            due_us = self.due_us()
        return Applied(effects, due_us)

    def _turn(self) -> int | None:
        """Let time pass and plan steps until nothing more follows. Return when time alone makes the next turn due."""
        self.turns += 1
        now_us, live, deadlines = self._clock.now_us, self.requests.live, self._clock.deadlines
        for _ in range(ROUNDS_MAX):
            if deadlines.first_us <= now_us:
                deadlines.pass_time(self._timed)
            while self.sessions.over:
                self._client_gone(self.sessions.over.pop())
            if self.admission.waiting.size:
                self.admission.admit()
            for number in sorted(self.cache.groups):
                group = self.cache.groups[number]
                self.scheduler.fill(group)
                if group.host is not None and group.host.disk is not None and not group.away:
                    places = (group.worker, *group.others)
                    for rank, message in group.host.disk.flush(group.epoch):
                        self._effects.append(ToWorker(places[rank], message))
            if deadlines.heap and deadlines.heap[0][1] not in live:  # planning ends rows that can never continue
                deadlines.drop_ended(live)
            due_us = deadlines.next_us(now_us, live, self._timed)
            self._turn_due = due_us is not None and due_us <= now_us
            if self.admission.waiting.size and self.admission.due:
                self._turn_due = True
            if not self._turn_due:
                break
        if self.streams.flush(self._effects):
            self._turn_due = True
        return due_us

    # -------------------------------------------------------------------------------------------------------- clients

    def _from_client(self, event: FromClient) -> None:
        message: Any = event.message
        access = self.clients[event.client]
        try:
            if (answer := self.sessions.answer(event.client, message.rid)) is not None:
                reply = self._request_commands.again(event, message, answer) if isinstance(message, Submit) else answer
            else:
                if access is not None:
                    message = self._guard.check(access, message)
                reply = self._answer(event, message, access.sees if access is not None else "")
                if access is not None:
                    self._guard.done(access, message, reply)
            if not isinstance(message, READING):
                self._turn_due = True
                self.sessions.keep(event.client, message.rid, reply, message)
        except KvforgeError as error:
            if isinstance(message, Submit):
                self.requests.refused_total += 1
            reply = Refused(rid=message.rid, error=ErrorInfo.of(error))
        self._effects.append(ToClient(event.client, reply))

    def _answer(self, event: FromClient, message: Any, seen: str) -> Message:
        """Carry out a command. `seen` is the one tenant that the client sees, or "" for all."""
        kind = type(message)
        if (command := self._commands.get(kind)) is not None:
            return command(message)
        if (command_for := self._commands_for.get(kind)) is not None:
            return command_for(seen, message)
        if kind is RefBlock:
            return self.blocks.ref(event, seen, message)
        return self._commands_of[kind](event, message)

    def _get_stats(self, tenant: str, message: GetStats) -> Message:
        if tenant:
            return statistics.stats_of(tenant, self.cache, self.requests, self.admission, message.rid, self.boot)
        return statistics.stats(
            self.cache,
            self.requests,
            self.admission,
            message.rid,
            self.boot,
            self._clock.now_us - self.start_us,
            len(self.clients) - len(self.sessions.away),
        )

    def _get_health(self, message: GetHealth) -> Message:
        ready = bool(self.cache.groups) and not self.draining
        reason = "" if ready else self._why_not_ready()
        workers = tuple(worker.health(self._clock.now_us) for worker in self.workers.values())
        return Health(
            rid=message.rid,
            live=True,
            ready=ready,
            reason=reason,
            workers=workers,
            model=self.cache.model,
            draining=self.draining,
            gone=self._reports.ended.copy(),
            kinds=self.cache.indexing.kinds,
        )

    def _find_prefix(self, message: FindPrefix) -> Message:
        return Finding(self.cache, self.requests, self.admission).find(message, draining=self.draining)

    def _why_not_ready(self) -> str:
        if self.draining:
            return "draining: no new requests are admitted"
        if not self.workers and self._reports.ended:
            name, how = list(self._reports.ended.items())[-1]
            return (
                f"no worker is connected any more; the last one, {name}, {how}: `kvforge up` and systemd "
                "start the next, otherwise run `python -m kvforge.worker --config FILE`"
            )
        if not self.workers:
            return (
                "no worker has connected yet: start one with `python -m kvforge.worker --config FILE` or `kvforge up`"
            )
        loading = ", ".join(f"{w.name} ({w.phase}, {w.progress:.0%})" for w in self.workers.values())
        return f"workers are loading: {loading}"

    def _drain(self, message: Drain) -> Message:
        if not 0 <= message.deadline_ms <= DRAIN_MS_MAX:
            raise InvalidRequest("deadline_ms", f"must be 0 (none) to {DRAIN_MS_MAX}, not {message.deadline_ms}")
        self._request_commands.begin_drain(
            self._clock.now_us + message.deadline_ms * 1000 if message.deadline_ms else 0
        )
        return Done(rid=message.rid)

    @property
    def draining(self) -> bool:
        """Whether admission has stopped."""
        return self._request_commands.draining

    def _restarted(self, gone_us: int) -> None:
        """Put clients that may return on a lease and drop the others. `gone_us` is the time of the previous event."""
        for client in self.sessions.restarted(set(self.clients)):
            self._client_gone(ClientGone(client))
        for client in sorted(self.clients):
            self._request_commands.client_away(client)
        self.restarts_total += 1
        self._reports.restarted(gone_us)
        self._request_commands.end_drain()

    def _client_gone(self, event: ClientGone) -> None:
        self.clients.pop(event.client, None)
        self.sessions.ended(event.client)
        self._request_commands.client_gone(event.client, event.goodbye)
        self.sequences.client_gone(event.client)
        self.blocks.client_gone(event.client)

    def due_us(self) -> int | None:
        """Return the absolute time when a Turn is due without a further event, or None.

        The time stays the same until it comes or an event changes it; the call changes nothing.
        """
        clock, stream_us = self._clock, self.streams.due_us
        due_us = clock.deadlines.next_us(clock.now_us, self.requests.live, self._timed)
        return stream_us if due_us is None or (stream_us is not None and stream_us < due_us) else due_us

    # ---------------------------------------------------------------------------------------------------------- other

    @property
    def kept(self) -> int:
        """How many objects clients may still ask for without connections or running requests.

        These are finished detached requests, and sequences with a time to live of their own.
        """
        s = self.cache.sequences
        detached = sum(request.detached for request in self.requests.finished.values())
        return detached + int((s.owned & (s.idle_ttl_us > 0)).sum())

    def gauges(self, now_us: int, journal: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the gauges in the order of protocol.layout.GAUGES. `journal` is its size in bytes and in records."""
        cache, requests, reports = self.cache, self.requests, self._reports
        blocks = free = cached = quarantined = running = 0
        steps = cache.past_steps_total
        for group in cache.groups.values():
            pool = group.pool
            running += group.running
            blocks += pool.count
            free += pool.free
            cached += pool.cached
            quarantined += pool.quarantined
            steps += group.steps_total
        return [
            self.turns,
            now_us - self.start_us,
            len(cache.sequences.slot_of),
            len(requests.live) - running,
            running,
            blocks,
            free,
            cached,
            blocks - free - cached - quarantined,
            quarantined,
            int(np.add.reduce(cache.sequences.length)),  # half the time of its `sum`, once a turn
            requests.generated_tokens_total,
            steps,
            requests.accepted_total,
            requests.refused_total,
            requests.computed_tokens_total,
            requests.streams_paused_total,
            cache.residency.evicted_total,
            cache.tenants.forgotten_total,
            len(self.clients) - len(self.sessions.away),
            self._request_commands.draining,
            self.restarts_total,
            reports.registered_total,
            reports.returned_total,
            reports.left_total,
            reports.lost_total,
            requests.drafts_total,
            requests.drafted_tokens_total,
            requests.accepted_drafts_total,
            *journal,
        ]

    def news(self) -> ServiceInfo | None:
        """Return the facts that monitors need besides numbers, if they changed since the last call."""
        workers, tenants = self._reports, self.cache.tenants
        if not (workers.changed or tenants.changed):
            return None
        workers.changed.clear()
        tenants.changed.clear()
        return statistics.facts(self.cache, workers.facts())

    def all_is_news(self) -> None:
        """Mark every fact for publication."""
        self._reports.changed.update(self.workers)
        self.cache.tenants.changed.update(range(len(self.cache.tenants.names)))
        self.cache.tenants.meters.all_changed()

    @property
    def busy(self) -> bool:
        """Whether a Turn could have work without a new event."""
        return bool(self.requests.live) or any(
            g.sent or g.has_copies or g.owes_writeback or g.idle_tails for g in self.cache.groups.values()
        )

    def check_invariants(self) -> None:
        """Check the invariants of the whole core: for tests, simulation and idle times."""
        check_cache(self.cache)
        self.requests.check_invariants()
        self.admission.check_invariants()
        for group in self.cache.groups.values():
            check_pending(group, self.cache.sequences, self.admission.rows)
            check_proposals(group, self.cache.sequences)
            check_sampled_rows(group, self.cache.sequences, self.admission.rows)
