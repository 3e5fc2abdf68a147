"""Faults to plant in the core: each is a plausible mistake, as a patch of one method.

`plant` installs one inside a `with` block. The simulator must find every fault (test_bites.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from kvforge.coordinator import publish as publishing
from kvforge.coordinator import turn as turns
from kvforge.coordinator.core import deadlines
from kvforge.coordinator.core.cache import changes, continuing
from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.block_tables import BlockTables
from kvforge.coordinator.core.cache.changes import IndexChanges
from kvforge.coordinator.core.cache.continuing import Continuing
from kvforge.coordinator.core.cache.entry_eviction import EntryEviction
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.hashing import BlockHasher
from kvforge.coordinator.core.cache.holders import largest_holders
from kvforge.coordinator.core.cache.indexing import Indexing
from kvforge.coordinator.core.cache.kv_cache_manager import KVCacheManager
from kvforge.coordinator.core.cache.pins import Pins
from kvforge.coordinator.core.cache.prefix_cache import PrefixCache
from kvforge.coordinator.core.cache.prefix_pins import PrefixPins
from kvforge.coordinator.core.cache.residency import Residency
from kvforge.coordinator.core.cache.sequences import NO_SLOTS, Sequences, unmarked
from kvforge.coordinator.core.cache.supply import Supply
from kvforge.coordinator.core.commands import guard as guards
from kvforge.coordinator.core.commands.blocks import BlockCommands
from kvforge.coordinator.core.commands.guard import Guard
from kvforge.coordinator.core.commands.requests import RequestCommands
from kvforge.coordinator.core.commands.sequences import SequenceCommands
from kvforge.coordinator.core.deadlines import Deadlines, Parts
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.reporting.explain import Explainer
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.core.requests.streams import Streams
from kvforge.coordinator.core.requests.table import RequestTable
from kvforge.coordinator.core.requests.top_logprobs import TopLogprobs, TopLogprobsRecord
from kvforge.coordinator.core.scheduling import admission, finisher, preemption, stalled
from kvforge.coordinator.core.scheduling.admission import Admission
from kvforge.coordinator.core.scheduling.choice import Choice
from kvforge.coordinator.core.scheduling.finisher import RequestFinisher
from kvforge.coordinator.core.scheduling.queue import WaitingQueue
from kvforge.coordinator.core.scheduling.scheduler import Scheduler
from kvforge.coordinator.core.scheduling.step_builder import StepBuilder
from kvforge.coordinator.core.waits import Waits
from kvforge.coordinator.core.workers import teams
from kvforge.coordinator.core.workers.reports import WorkerReports
from kvforge.coordinator.core.workers.results import StepResults
from kvforge.coordinator.core.workers.teams import Team

Patch = tuple[Any, str, Any]
FAULTS: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS[make.__name__] = make
    return make


@contextmanager
def plant(name: str, faults: Mapping[str, Callable[[], list[Patch]]] = FAULTS) -> Iterator[None]:
    """Install a fault inside the block."""
    with ExitStack() as stack:
        for owner, attribute, replacement in faults[name]():
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


@fault
def lost_unref() -> list[Patch]:
    """A sequence that ends does not release its last block."""
    real = BlockPool.release

    def release(self: BlockPool, ids: Any, last_step: int) -> int:
        return real(self, ids[:-1] if ids.size > 2 else ids, last_step)

    return [(BlockPool, "release", release)]


@fault
def double_free() -> list[Patch]:
    """A freed block is pushed to the free list twice."""
    real = BlockPool._to_free

    def to_free(self: BlockPool, ids: Any) -> None:
        real(self, ids)
        if ids.size > 1 and self.free < self.count:
            self._stack[self.free] = ids[0]
            self.free += 1

    return [(BlockPool, "_to_free", to_free)]


@fault
def prefix_registered_early() -> list[Patch]:
    """Blocks are indexed when their step is sent, not when a worker has acknowledged it."""
    real = StepBuilder.build

    def build(self: StepBuilder, group: Group, slots: Any, *plan: Any) -> Any:
        step = real(self, group, slots, *plan)
        s = self._cache.sequences
        before = s.computed[slots].copy()
        s.computed[slots] = np.minimum(s.scheduled[slots], s.length[slots])
        self._cache.indexing.filled(group)
        s.computed[slots] = before
        return step

    return [(StepBuilder, "build", build)]


@fault
def stale_result_accepted() -> list[Patch]:
    """A duplicate of a step's result is accepted as the result of the next step."""
    real = WorkerReports._step_result

    def step_result(self: WorkerReports, worker: Any, message: Any) -> None:
        if worker.group is not None and worker.group.sent:
            message = type(message)(
                step_id=worker.group.sent[0].step_id,
                epoch=worker.group.epoch,
                errors=message.errors,
                slots=message.slots,
                tokens=message.tokens,
                logprobs=message.logprobs,
            )
        real(self, worker, message)

    return [(WorkerReports, "_step_result", step_result)]


@fault
def copy_on_write_skipped() -> list[Patch]:
    """A shared or indexed block is written in place."""

    def unwritable(self: BlockTables, slots: Any, start: Any, end: Any = None) -> Any:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    return [(BlockTables, "unwritable", unwritable)]


@fault
def copy_not_sent() -> list[Patch]:
    """The table has a block as copied, but the step does not carry the copy."""
    real = Group.flush_copies

    def flush_copies(self: Group) -> Any:
        return real(self)[:0]

    return [(Group, "flush_copies", flush_copies)]


@fault
def copy_one_token_short() -> list[Patch]:
    """A copied block lacks its last token."""
    real = Group.copy_block

    def copy_block(self: Group, source: int, target: int, tokens: int) -> int:
        return real(self, source, target, max(1, tokens - 1))

    return [(Group, "copy_block", copy_block)]


@fault
def quarantine_skipped() -> list[Patch]:
    """Blocks are free at once, though a step in flight may still write them."""
    real = BlockPool.release

    def release(self: BlockPool, ids: Any, last_step: int) -> int:
        self.blocks.touch[ids] = 0
        return real(self, ids, 0)

    return [(BlockPool, "release", release)]


@fault
def slot_reused_early() -> list[Patch]:
    """A row of the table is reused while a step in flight may read it."""
    real = Sequences.end

    def give(self: Sequences, slot: int, pool: int, quarantine_step: int) -> None:
        real(self, slot, pool, 0)

    return [(Sequences, "end", give)]


@fault
def appended_token_lost() -> list[Patch]:
    """A bulk append loses the last token of its last sequence."""
    real = BlockTables.append

    def append(self: BlockTables, slots: Any, tokens: Any, counts: Any) -> None:
        real(self, slots, tokens, counts)
        if counts[-1] > 1:
            s, slot = self._sequences, int(slots[-1])
            s.tokens[slot, s.length[slot] - 1] = s.tokens[slot, s.length[slot] - 2]

    return [(BlockTables, "append", append)]


@fault
def stream_repeated_after_preemption() -> list[Patch]:
    """Tokens that were streamed before a preemption are streamed again after it."""
    real = Admission._start
    streams_of: dict[int, Streams] = {}

    def start(self: Admission, request: Any, placement: Any) -> None:
        again = request.tokens.size > 0 and request.stream
        real(self, request, placement)
        if again:
            streams_of[id(self)].add_tokens(request.client, request.id, 0, request.tokens, request.logprobs)

    real_init = RequestFinisher.__init__

    def init(self: RequestFinisher, cache: Any, requests: Any, admission: Any, streams: Streams, effects: Any) -> None:
        real_init(self, cache, requests, admission, streams, effects)
        streams_of[id(admission)] = streams

    return [(Admission, "_start", start), (RequestFinisher, "__init__", init)]


@fault
def generation_not_bumped() -> list[Patch]:
    """A freed block keeps its generation, so a stale reference names its new content."""
    real = BlockPool._to_free

    def to_free(self: BlockPool, ids: Any) -> None:
        real(self, ids)
        self.blocks.generation[ids] -= 1

    return [(BlockPool, "_to_free", to_free)]


@fault
def prefix_hit_by_weak_hash() -> list[Patch]:
    """A prefix hit trusts a hash of two bits per block and does not compare tokens."""
    real = BlockHasher.blocks

    def blocks(self: BlockHasher, tokens: Any) -> Any:
        return real(self, tokens) & np.uint64(3)

    def verified(self: PrefixCache, salt: int, tokens: Any, ids: Any) -> int:
        return int(ids.size)

    return [(BlockHasher, "blocks", blocks), (PrefixCache, "_verified", verified)]


@fault
def ceiling_ignored() -> list[Patch]:
    """A tenant's ceiling is not enforced."""

    def room(self: Supply, tenant: int) -> int:
        return 1 << 40

    return [(Supply, "room", room)]


@fault
def row_published_late() -> list[Patch]:
    """A changed row of the block table is published one turn late."""
    real = publishing.publish_rows

    def publish_rows(machine: Machine, tables: Any) -> None:
        s = machine.cache.sequences
        late, s.changed_cells = s.changed_cells, getattr(machine, "late_cells", [])
        real(machine, tables)
        machine.late_cells = late  # type: ignore[attr-defined]

    return [(turns, "publish_rows", publish_rows)]


@fault
def holder_dropped_without_decrement() -> list[Patch]:
    """A named holder is removed without decrementing the reference count."""

    def drop(self: Pins, group: Group, block: int, generation: int, holder: str) -> None:
        self.check_generation(block, generation)
        self._forget(block, holder)

    return [(Pins, "drop", drop), (BlockCommands, "client_gone", lambda self, client: None)]


@fault
def pin_charged_to_who_computed() -> list[Patch]:
    """A pinned block stays charged to the tenant that computed it."""
    return [(BlockPool, "recharge", lambda self, block, tenant: None)]


@fault
def refusal_after_the_change() -> list[Patch]:
    """A refused submit has already interned its tenant and taken a request id."""
    real = RequestCommands.submit

    def submit(self: RequestCommands, event: Any, message: Any) -> Any:
        self._request_ids += 1
        return real(self, event, message)

    return [(RequestCommands, "submit", submit)]


@fault
def evicted_while_cached_entry_lives() -> list[Patch]:
    """An evicted block stays in the prefix index."""

    def evict(self: EntryEviction, tenant: int, count: int, gone: list[int]) -> None:
        gone += self._recent.pop(tenant, count)

    return [(EntryEviction, "evict", evict)]


@fault
def settled_a_step_early() -> list[Patch]:
    """The result of step N also settles step N + 1."""
    real = BlockPool.step_done

    def step_done(self: BlockPool, step: int) -> None:
        real(self, step + 1)

    return [(BlockPool, "step_done", step_done)]


@fault
def row_of_an_earlier_run_accepted() -> list[Patch]:
    """A step's row is applied to the current user of its slot, a preempted or another request."""
    real = StepResults.apply

    def apply(self: StepResults, group: Group, result: Any) -> None:
        sent = group.sent[0]
        sent.runs[:] = self._admission.rows.run[sent.slots]
        real(self, group, result)

    return [(StepResults, "apply", apply)]


@fault
def sequence_settles_while_its_row_is_read() -> list[Patch]:
    """A preempted sequence gets new blocks while a step of its earlier run still reads its row."""
    return [(Residency, "still_read", lambda self, slot: False)]


@fault
def preempted_sequence_not_busy() -> list[Patch]:
    """A client's sequence can be changed while a preempted request waits to resume on it."""
    real = Admission.requeue

    def requeue(self: Admission, request: Any) -> None:
        slot = request.slot
        real(self, request)
        if request.sequence_id:
            self._cache.sequences.request[slot] = 0

    return [(Admission, "requeue", requeue)]


@fault
def preempted_request_forgotten() -> list[Patch]:
    """A preempted request is dropped instead of requeued."""
    real = Admission.requeue

    def requeue(self: Admission, request: Any) -> None:
        real(self, request)
        if len(self.waiting) > 1:
            self.waiting.remove(request)

    return [(Admission, "requeue", requeue)]


@fault
def salt_ignored() -> list[Patch]:
    """One tenant's cached blocks are hits for another tenant."""
    return [(BlockHasher, "salt", lambda self, text: 7)]


# ---------------------------------------------------------------------------------------------- timers and leases


def _without_timer(lost: int) -> list[Patch]:
    real = Deadlines.set

    def set_timer(self: Deadlines, due_us: int, request_id: int, kind: int) -> None:
        if kind != lost:
            real(self, due_us, request_id, kind)

    return [(Deadlines, "set", set_timer)]


@fault
def deadline_timer_lost() -> list[Patch]:
    """A request's deadline is not checked."""
    return _without_timer(deadlines.DEADLINE)


@fault
def first_token_timer_lost() -> list[Patch]:
    """A request's first-token deadline is not checked."""
    return _without_timer(deadlines.FIRST_TOKEN)


@fault
def lease_never_ends() -> list[Patch]:
    """A request of a disconnected client runs forever."""
    return _without_timer(deadlines.LEASE)


@fault
def lease_survives_an_attach() -> list[Patch]:
    """A request is cancelled at the end of its lease, though its client has attached again."""
    real = RequestCommands._give

    def give(self: RequestCommands, request: Any, client: int, offset: int) -> None:
        orphan_us = request.orphan_us
        real(self, request, client, offset)
        request.orphan_us = orphan_us

    return [(RequestCommands, "_give", give)]


@fault
def time_slept_through() -> list[Patch]:
    """The core reports no due time."""
    return [(Deadlines, "next_us", lambda self, now_us, live, parts: None)]


@fault
def loop_keeps_the_time_to_itself() -> list[Patch]:
    """The turn loop does not pass the core's due time to its caller."""
    real = turns.TurnLoop.turn

    def turn(self: turns.TurnLoop, now_us: int) -> int:
        real(self, now_us)
        return now_us + turns.BEAT_US

    return [(turns.TurnLoop, "turn", turn)]


def _not_due(part: int, timers: bool = True) -> list[Patch]:
    """Let the deadlines of a part, and without `timers` those of requests, make no turn due."""
    real = Deadlines.next_us

    def next_us(self: Deadlines, now_us: int, live: Container[int], parts: Parts) -> int | None:
        bound_us, heap = self.bounds_us[part], self.heap
        self.bounds_us[part] = deadlines.NEVER
        if not timers:
            self.heap = []
        found = real(self, now_us, live, parts)
        self.bounds_us[part], self.heap = bound_us, heap
        return found

    return [(Deadlines, "next_us", next_us)]


@fault
def deadlines_not_due() -> list[Patch]:
    """Deadlines, leases and the end of a drain make no turn due."""
    return _not_due(deadlines.DRAIN, timers=False)


@fault
def end_of_a_drain_not_due() -> list[Patch]:
    """The end of a drain makes no turn due."""
    return _not_due(deadlines.DRAIN)


@fault
def hung_worker_not_due() -> list[Patch]:
    """The timeout of a hung worker makes no turn due."""
    return _not_due(deadlines.WORKERS)


@fault
def next_step_of_a_batch_not_due() -> list[Patch]:
    """A step that is to be sent shortly before the end of the one in flight makes no turn due."""
    return _not_due(deadlines.STEPS)


@fault
def forgetting_not_due() -> list[Patch]:
    """The eviction of finished requests makes no turn due."""
    return _not_due(deadlines.OLD_REQUESTS)


@fault
def time_to_live_not_due() -> list[Patch]:
    """The removal of idle sequences makes no turn due."""
    return _not_due(deadlines.SEQUENCES)


@fault
def time_to_live_forgotten_while_a_request_runs() -> list[Patch]:
    """A sequence that expires while a request runs on it outlives the request."""
    return [(Sequences, "is_idle", lambda self, slot: None), (Sequences, "keep_idle", _keep_idle)]


def _keep_idle(self: Sequences, slot: int, ttl_us: int) -> None:
    self.idle_ttl_us[slot] = ttl_us
    end_us = int(self.accessed_us[slot]) + ttl_us
    if ttl_us:
        self.expiry_us = end_us if self.expiry_us is None else min(self.expiry_us, end_us)


@fault
def paused_stream_not_due() -> list[Patch]:
    """The retry of a paused stream makes no turn due."""
    return [(Streams, "due_us", property(lambda self: None))]


@fault
def asking_takes_the_timer_away() -> list[Patch]:
    """Asking for the next due time removes the timer."""

    def next_us(self: Deadlines, now_us: int, live: Container[int], parts: Parts) -> int | None:
        return self.heap.pop(0)[0] if self.heap else None

    return [(Deadlines, "next_us", next_us)]


@fault
def sent_step_not_armed() -> list[Patch]:
    """A step that is sent makes no turn due at its timeout."""
    real = Deadlines.arm

    def arm(self: Deadlines, part: int, due_us: int) -> None:
        if part != deadlines.WORKERS:
            real(self, part, due_us)

    return [(Deadlines, "arm", arm)]


@fault
def later_deadline_hides_an_earlier_one() -> list[Patch]:
    """A part's new deadline takes the place of its earlier one."""

    def arm(self: Deadlines, part: int, due_us: int) -> None:
        self.bounds_us[part] = due_us
        self.first_us = min(self.first_us, due_us)

    return [(Deadlines, "arm", arm)]


@fault
def bound_taken_for_a_deadline() -> list[Patch]:
    """A turn is due when the bound of a part comes, though its deadline has moved."""

    def next_us(self: Deadlines, now_us: int, live: Container[int], parts: Parts) -> int | None:
        timers = (due_us for due_us, request_id, _ in self.heap if request_id in live)
        self.first_us = min(*self.bounds_us, min(timers, default=deadlines.NEVER))
        return self.first_us if self.first_us < deadlines.NEVER else None

    return [(Deadlines, "next_us", next_us)]


@fault
def one_round_a_turn() -> list[Patch]:
    """A request that planning has made possible waits for the next turn."""
    return [(Admission, "due", property(lambda self: False))]


@fault
def drain_without_end() -> list[Patch]:
    """The requests left at the end of a drain are not handed back."""
    real = RequestCommands.begin_drain
    return [(RequestCommands, "begin_drain", lambda self, deadline_us: real(self, 0))]


@fault
def key_forgotten_early() -> list[Patch]:
    """An idempotency key is dropped when its request ends, not when the request is evicted."""
    real = RequestTable.retire

    def retire(self: RequestTable, request: Any) -> None:
        real(self, request)
        if request.key is not None:
            self.keys.release(request.key)
            request.key = None

    return [(RequestTable, "retire", retire)]


@fault
def forgotten_answer_not_told() -> list[Patch]:
    """A repeated key of an evicted request gets no error, and its client waits forever."""

    def add_end(self: Streams, client: int, end: Any) -> None:
        if client and not (end.error is not None and end.error.code == "request_not_found"):
            self._ended.setdefault(client, []).append(end)

    return [(Streams, "add_end", add_end)]


# --------------------------------------------------------------------------------------------------------- streams


@fault
def attach_replays_from_the_next() -> list[Patch]:
    """An attach omits the token at the offset itself."""
    real = RequestFinisher.stream_from

    def stream_from(self: RequestFinisher, request: Any, offset: int) -> None:
        real(self, request, offset + 1 if offset else 0)

    return [(RequestFinisher, "stream_from", stream_from)]


@fault
def paused_stream_goes_on() -> list[Patch]:
    """Tokens that a client did not accept are lost, and its stream continues after them."""

    def client_full(self: RequestCommands, client: int, lost: Any) -> None:
        self._streams.lost(client, lost)

    return [(RequestCommands, "client_full", client_full)]


@fault
def end_told_while_paused() -> list[Patch]:
    """A paused stream ends before the client's missing tokens are sent."""
    real = RequestFinisher.end

    def end(self: RequestFinisher, request: Any, *arguments: Any, **named: Any) -> None:
        paused, request.paused = request.paused, False
        real(self, request, *arguments, **named)
        request.paused = paused

    return [(RequestFinisher, "end", end)]


@fault
def pause_not_told() -> list[Patch]:
    """A client gets no notice that its stream was paused."""
    real = Streams.lost

    def lost(self: Streams, client: int, stream: Any) -> list[int]:
        ids = real(self, client, stream)
        self._paused.pop(client)
        return ids

    return [(Streams, "lost", lost)]


@fault
def taken_not_told() -> list[Patch]:
    """A client gets no notice that another client took its stream."""
    return [(Streams, "hand_over", lambda self, client, request_id: self._resumed(client, request_id))]


@fault
def taken_told_to_who_has_it_back() -> list[Patch]:
    """A client that took its stream back in the same turn gets a notice that it lost it."""
    return [(Streams, "restart", lambda self, client, request_id: self._resumed(client, request_id))]


# ------------------------------------------------------------------------------------------------------ scheduling


@fault
def oldest_may_be_the_victim() -> list[Patch]:
    """The cheapest request is preempted, even the oldest, and recomputed tokens do not count."""

    def choose(cache: Any, requests: Any, order: Any, candidates: Any, short: int) -> int | None:
        if candidates.size < 2:
            return None
        gain, cost = preemption._gain_and_cost(cache, candidates)
        enough = np.flatnonzero(gain >= min(short, int(gain.max())))
        return int(candidates[enough[np.argmin(cost[enough])]])

    return [(preemption, "choose", choose)]


@fault
def blocks_that_came_back_not_told() -> list[Patch]:
    """Requests that wait for blocks are not woken when blocks are freed."""
    real = Waits.wake
    return [(Waits, "wake", lambda self, event: [] if event[0] == "blocks" else real(self, event))]


@fault
def end_of_a_row_not_told() -> list[Patch]:
    """Requests that wait for a row are not woken when a row ends."""
    real = Waits.wake
    return [(Waits, "wake", lambda self, event: [] if event[0] == "rows" else real(self, event))]


@fault
def suspect_alone_beyond_its_crash_point() -> list[Patch]:
    """A suspect of worker crashes keeps the others out even after its crash point."""
    return [(Admission, "look_at_suspect", lambda self, group: None)]


@fault
def row_that_cannot_go_on_kept() -> list[Patch]:
    """A row that finds no room holds its blocks until its deadline, and nothing else runs."""
    return [(stalled, "give_up", lambda *parts: False)]


@fault
def floor_spares_nobody() -> list[Patch]:
    """A row is preempted for another tenant's, though its own tenant is within its floor."""
    real = preemption.choose

    def choose(cache: Any, requests: Any, order: Any, candidates: Any, short: int) -> int | None:
        s = cache.sequences
        asked = candidates[:1]
        return real(cache, requests, order, np.flatnonzero(s.running & (s.pool == s.pool[asked])), short)

    return [(preemption, "choose", choose)]


@fault
def passed_never_counted() -> list[Patch]:
    """A request that does not fit is overtaken by smaller ones forever."""
    return [(Admission, "_passes", lambda self, request, blocked: None)]


@fault
def sibling_never_released() -> list[Patch]:
    """When the first of several answers is cancelled, the others wait for its prompt forever."""
    real = RequestTable.retire

    def retire(self: RequestTable, request: Any) -> None:
        siblings = request.siblings
        real(self, request)
        if siblings:
            siblings.insert(0, request)

    return [(RequestTable, "retire", retire)]


@fault
def cut_not_told() -> list[Patch]:
    """The end of a cut request does not report how many tokens were cut."""
    real = finisher.ended
    return [(finisher, "ended", lambda request, cut, now_us: real(request, 0, now_us))]


@fault
def cut_not_made() -> list[Patch]:
    """FinishAt does not cut the tokens that were generated meanwhile."""
    real = RequestFinisher.end

    def end(self: RequestFinisher, request: Any, event: str, reason: str, error: Any, keep: int | None = None) -> None:
        real(self, request, event, reason, error)

    return [(RequestFinisher, "end", end)]


@fault
def tops_of_another_row() -> list[Patch]:
    """The top log-probabilities of a row come from the previous row."""
    real = TopLogprobs.pick
    return [(TopLogprobs, "pick", lambda self, rows: real(self, np.roll(rows, 1)))]


@fault
def tops_lost_in_a_replay() -> list[Patch]:
    """A replayed stream has no top log-probabilities."""
    return [(TopLogprobsRecord, "top_logprobs", lambda self, first=0: TopLogprobs.none(self.size - first))]


@fault
def prompt_scored_one_position_late() -> list[Patch]:
    """In a chunk after the first, the log-probability is that of the next token but one."""
    real = StepBuilder._scored

    def scored(self: StepBuilder, slots: Any, starts: Any, counts: Any) -> Any:
        places, following = real(self, slots, starts, counts)
        ends = np.cumsum(counts)
        rows = np.searchsorted(ends, places, "right")
        positions = places - (ends - counts)[rows] + starts[rows]
        s = self._cache.sequences
        next_but_one = unmarked(s.tokens[slots[rows], np.minimum(positions + 2, s.length[slots[rows]] - 1)])
        return places, np.where(starts[rows] > 0, next_but_one, following).astype(np.int32)

    return [(StepBuilder, "_scored", scored)]


@fault
def cached_prompt_not_scored() -> list[Patch]:
    """A request shares all cached blocks of its prompt, though these positions have no log-probability yet."""
    return [(Request, "shareable_tokens", None)]


@fault
def prompt_read_from_behind() -> list[Patch]:
    """A client that attaches behind the prompt gets the rest of the prompt's log-probabilities all the same."""
    real = RequestCommands._give

    def give(self: RequestCommands, request: Any, client: int, offset: int) -> None:
        real(self, request, client, offset)
        request.reads_prompt = True

    return [(RequestCommands, "_give", give)]


@fault
def tenant_charge_lost() -> list[Patch]:
    """Generated tokens are not charged to their tenants."""
    return [(WaitingQueue, "charge_each", lambda self, tenants: None)]


# ------------------------------------------------------------------------------------------------------- several ranks


@fault
def settled_by_the_first_rank() -> list[Patch]:
    """A step is settled by rank 0's result: other ranks may still read blocks that are freed then."""

    def settled(self: Team) -> Any:
        for waiting in self.results[1:]:
            waiting.clear()
        return self.results[0].popleft() if self.results[0] else None

    return [(Team, "settled", settled)]


@fault
def ranks_that_disagree_believed() -> list[Patch]:
    """Rank 0's tokens are streamed even if other ranks sampled differently."""
    return [(teams, "_difference", lambda _one, _other: "")]


@fault
def group_outlives_a_rank() -> list[Patch]:
    """When a rank dies, the other ranks keep the pool and wait for it."""

    def end_others(self: WorkerReports, worker: Any, team: Team, _goodbye: bool, _why: str) -> None:
        worker.group = None
        team.members.pop(worker.rank, None)

    return [(WorkerReports, "_end_others", end_others)]


@fault
def steps_for_the_first_rank_alone() -> list[Patch]:
    """Only rank 0 receives steps."""
    real = WorkerReports._register_ranks

    def register_ranks(self: WorkerReports, team: Team, group: Group) -> None:
        real(self, team, group)
        group.others = ()

    return [(WorkerReports, "_register_ranks", register_ranks)]


# ------------------------------------------------------------------------------------------------- failing workers


@fault
def crash_never_counted() -> list[Patch]:
    """A request that crashes every worker is retried forever."""
    return [(WorkerReports, "_count_crash", lambda self, request, worker: None)]


@fault
def suspect_runs_among_others() -> list[Patch]:
    """Other requests fail along with one that crashes worker after worker."""
    return [(Choice, "must_be_alone", lambda self, request: False)]


@fault
def hung_worker_kept() -> list[Patch]:
    """A worker that never answers is never replaced."""
    return [(WorkerReports, "pass_time", lambda self: deadlines.NEVER)]


# ------------------------------------------------------------------------------------------------ tenant isolation


def _seeing_all(name: str) -> list[Patch]:
    """Run a command of RequestCommands as if its client could see all tenants."""
    original = getattr(RequestCommands, name)
    return [(RequestCommands, name, lambda self, tenant, message: original(self, "", message))]


@fault
def requests_of_others_found() -> list[Patch]:
    """A client can read and end any request by its id."""
    return [(Guard, "_check_request", lambda self, tenant, request_id: None)]


@fault
def sequences_of_others_found() -> list[Patch]:
    """A client can use any sequence by its id."""
    original = SequenceCommands.find
    return [(SequenceCommands, "find", lambda self, sequence_id, tenant="": original(self, sequence_id))]


@fault
def blocks_of_others_found() -> list[Patch]:
    """Any client can query the holders of a block."""
    return [(Guard, "_check_block", lambda self, tenant, block: None)]


@fault
def list_of_all_tenants() -> list[Patch]:
    """The list of requests includes those of other tenants."""
    return _seeing_all("list")


@fault
def purge_of_all_tenants() -> list[Patch]:
    """A purge includes the requests of other tenants."""
    return _seeing_all("purge")


@fault
def tenant_taken_from_the_message() -> list[Patch]:
    """A client acts for the tenant that its message names."""
    return [(Guard, "_for_its_tenant", lambda self, access, message: message)]


@fault
def anybody_drains() -> list[Patch]:
    """Rights are not checked."""
    return [(guards, "RIGHT_FOR", {})]


@fault
def explanation_names_others() -> list[Patch]:
    """The explanation of a wait names other tenants' requests and sequences."""
    original = Explainer._request
    return [(Explainer, "_request", lambda self, _seen, request: original(self, 0, request))]


@fault
def error_names_others() -> list[Patch]:
    """The error of a request that cannot continue names other tenants' sequences."""

    def holders(cache: KVCacheManager, group: Group, _seen: int, *more: Any, **named: Any) -> list[str]:
        return largest_holders(cache, group, 0, *more, **named)

    return [(stalled, "largest_holders", holders)]


@fault
def kinds_not_told_apart_in_hits() -> list[Patch]:
    """Generated tokens are hits for a prompt, though their KV was rounded differently."""
    return [(Indexing, "contents", lambda self, tokens: unmarked(tokens))]


@fault
def computed_again_as_a_prompt() -> list[Patch]:
    """The generated tokens of a preempted request are recomputed as prompt tokens."""
    return [(admission, "generated", lambda tokens: tokens)]


@fault
def kept_sequence_without_its_kinds() -> list[Patch]:
    """A prompt that continues a kept sequence counts its generated tokens as a prompt's."""
    return [(Continuing, "marked", lambda self, sequence_id, tenant, salt, prompt: prompt)]


@fault
def continued_beyond_what_is_equal() -> list[Patch]:
    """A prompt shares the KV of a kept sequence beyond the tokens that they have in common."""
    return [(continuing, "_common", lambda one, other: one.size)]


@fault
def tail_of_a_sequence_that_was_cut_off() -> list[Patch]:
    """The step behind an answer counts although the sequence was cut off meanwhile."""
    return [(StepResults, "_idle_tails", lambda self, sent, idle: idle)]


@fault
def tail_written_into_a_shared_block() -> list[Patch]:
    """The step behind an answer writes into a block that a fork shares."""
    real = Scheduler._idle_tails

    def idle_tails(self: Scheduler, group: Group, most: int) -> Any:
        tables = self._cache.tables
        unwritable, tables.unwritable = tables.unwritable, lambda *_: (NO_SLOTS, NO_SLOTS)  # type: ignore[method-assign]
        try:
            return real(self, group, most)
        finally:
            tables.unwritable = unwritable  # type: ignore[method-assign]

    return [(Scheduler, "_idle_tails", idle_tails)]


@fault
def pins_beyond_their_share() -> list[Patch]:
    """A prompt is pinned whole, whatever share of the pool its tenant has."""
    return [(PrefixPins, "_fitting", lambda self, slot, group, full: full)]


@fault
def ahead_beside_others() -> list[Patch]:
    """What is computed ahead goes on when another request comes."""
    return [(RequestCommands, "_end_ahead", lambda self: None)]


@fault
def rewound_while_it_runs() -> list[Patch]:
    """A sequence is cut off although a request runs on it."""
    real = SequenceCommands.rewind

    def rewind(self: SequenceCommands, message: Any) -> Any:
        s = self._cache.sequences
        slot = self.find(message.sequence_id)
        request, s.request[slot] = int(s.request[slot]), 0
        try:
            return real(self, message)
        finally:
            s.request[slot] = request

    return [(SequenceCommands, "rewind", rewind)]


@fault
def marks_not_sent() -> list[Patch]:
    """Workers that compute generated tokens differently do not get the marks."""
    return [(Group, "as_fed", lambda self, tokens: unmarked(tokens))]


@fault
def what_follows_stays_in_mirrors() -> list[Patch]:
    """Mirrors see an entry leave the prefix index, but not that its successors became unreachable."""
    original = IndexChanges.removed
    return [(IndexChanges, "removed", lambda self, keys: original(self, keys[:1]))]


@fault
def generated_tokens_told_as_a_prompts() -> list[Patch]:
    """Mirrors see blocks that no prompt can hit, because their tokens are of the other kind."""
    return [(changes, "GENERATED", 1 << 31)]


@fault
def lost_pool_stays_in_mirrors() -> list[Patch]:
    """Mirrors keep the blocks of a lost worker."""
    original = IndexChanges._report_pool
    return [
        (IndexChanges, "_report_pool", lambda self, pool, came: original(self, pool, came if not pool.gone else []))
    ]


@fault
def cut_off_while_it_stood_is_gone() -> list[Patch]:
    """A worker that disconnected during a standstill of the coordinator loses its pool."""
    return [(WorkerReports, "cut_off", lambda self, number: self.end_worker(number, False))]


@fault
def ranks_cut_off_are_not_waited_for() -> list[Patch]:
    """After one of several ranks disconnected, steps are still planned for the others."""
    original = WorkerReports.cut_off

    def cut_off(self: WorkerReports, number: int) -> None:
        worker = self.workers.get(number)
        original(self, number)
        if worker is not None and worker.group is not None and worker.ranks > 1:
            worker.group.away = False

    return [(WorkerReports, "cut_off", cut_off)]
