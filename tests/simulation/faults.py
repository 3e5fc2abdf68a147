"""Faults to plant in the core: each is a mistake someone could make, as a patch of one method.

`plant` installs one for the duration of a `with` block. The simulator must find every one of them (test_bites.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from coordinator import publish as publishing
from coordinator import turn as turns
from coordinator.core.block_commands import BlockCommands
from coordinator.core.cache import Cache
from coordinator.core.groups import Group
from coordinator.core.hashing import BlockHasher
from coordinator.core.machine import Machine
from coordinator.core.outcomes import Outcomes
from coordinator.core.pool import Pool, Supply
from coordinator.core.prefix import PrefixIndex
from coordinator.core.refs import Refs
from coordinator.core.scheduler import Scheduler
from coordinator.core.sequences import Sequences
from coordinator.core.streams import Streams
from coordinator.core.worker_reports import WorkerReports

Patch = tuple[Any, str, Callable[..., Any]]
FAULTS: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Registers a fault under its function's name."""
    FAULTS[make.__name__] = make
    return make


@contextmanager
def plant(name: str) -> Iterator[None]:
    """The core has the fault inside the block."""
    with ExitStack() as stack:
        for owner, attribute, replacement in FAULTS[name]():
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


@fault
def lost_unref() -> list[Patch]:
    """A sequence that ends forgets to give back its last block."""
    real = Pool.release

    def release(self: Pool, ids: Any, last_step: int, now_us: int) -> int:
        return real(self, ids[:-1] if ids.size > 2 else ids, last_step, now_us)

    return [(Pool, "release", release)]


@fault
def double_free() -> list[Patch]:
    """A freed block is pushed to the free list twice."""
    real = Pool._to_free

    def to_free(self: Pool, ids: Any, now_us: int) -> None:
        real(self, ids, now_us)
        if ids.size > 1 and self.free < self.count:
            self._stack[self.free] = ids[0]
            self.free += 1

    return [(Pool, "_to_free", to_free)]


@fault
def prefix_registered_early() -> list[Patch]:
    """Blocks are indexed when their step is sent, not when a worker acknowledged it."""
    real = Scheduler._send

    def send(self: Scheduler, group: Group, slots: Any, counts: Any, now_us: int) -> Any:
        step = real(self, group, slots, counts, now_us)
        s = self._cache.sequences
        before = s.computed[slots].copy()
        s.computed[slots] = np.minimum(s.scheduled[slots], s.length[slots])
        self._cache.index_filled(slots, now_us)
        s.computed[slots] = before
        return step

    return [(Scheduler, "_send", send)]


@fault
def stale_result_accepted() -> list[Patch]:
    """A duplicate of a step's result is taken for the result of the next step."""
    real = WorkerReports._step_result

    def step_result(self: WorkerReports, worker: Any, message: Any, now_us: int) -> None:
        if worker.group is not None and worker.group.sent:
            message = type(message)(
                step_id=worker.group.sent[0].step_id,
                epoch=worker.group.epoch,
                errors=message.errors,
                slots=message.slots,
                tokens=message.tokens,
                logprobs=message.logprobs,
            )
        real(self, worker, message, now_us)

    return [(WorkerReports, "_step_result", step_result)]


@fault
def copy_on_write_skipped() -> list[Patch]:
    """A shared or indexed block is written in place."""

    def unwritable(self: Cache, slots: Any, start: Any, end: Any) -> Any:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    return [(Cache, "unwritable", unwritable)]


@fault
def copy_not_sent() -> list[Patch]:
    """The table says that a block was copied, but the step does not carry the copy."""
    real = Group.take_copies

    def take_copies(self: Group) -> Any:
        return real(self)[:0]

    return [(Group, "take_copies", take_copies)]


@fault
def copy_one_token_short() -> list[Patch]:
    """A copied block lacks its last token."""
    real = Group.copy_block

    def copy_block(self: Group, source: int, target: int, tokens: int) -> int:
        return real(self, source, target, max(1, tokens - 1))

    return [(Group, "copy_block", copy_block)]


@fault
def quarantine_skipped() -> list[Patch]:
    """Blocks are free at once, though a step under way may still write them."""
    real = Pool.release

    def release(self: Pool, ids: Any, last_step: int, now_us: int) -> int:
        self.blocks.touch[ids] = 0
        return real(self, ids, 0, now_us)

    return [(Pool, "release", release)]


@fault
def slot_reused_early() -> list[Patch]:
    """A row of the table is given out again while a step under way may read it."""
    real = Sequences.give

    def give(self: Sequences, slot: int, pool: int, quarantine_step: int) -> None:
        real(self, slot, pool, 0)

    return [(Sequences, "give", give)]


@fault
def appended_token_lost() -> list[Patch]:
    """A bulk append loses the last token of its last sequence's text."""
    real = Cache.append

    def append(self: Cache, slots: Any, tokens: Any, counts: Any, now_us: int) -> None:
        real(self, slots, tokens, counts, now_us)
        if counts[-1] > 1:
            s, slot = self.sequences, int(slots[-1])
            s.tokens[slot, s.length[slot] - 1] = s.tokens[slot, s.length[slot] - 2]

    return [(Cache, "append", append)]


@fault
def stream_repeated_after_preemption() -> list[Patch]:
    """What was streamed before a preemption is streamed again after it."""
    real = Scheduler._start
    streams_of: dict[int, Streams] = {}

    def start(self: Scheduler, request: Any, residence: Any, now_us: int) -> None:
        again = request.tokens.size > 0 and request.stream
        real(self, request, residence, now_us)
        if again:
            streams_of[id(self)].add_tokens(request.client, request.id, 0, request.tokens, request.logprobs)

    real_init = Outcomes.__init__

    def init(self: Outcomes, cache: Any, requests: Any, scheduler: Any, streams: Streams) -> None:
        real_init(self, cache, requests, scheduler, streams)
        streams_of[id(scheduler)] = streams

    return [(Scheduler, "_start", start), (Outcomes, "__init__", init)]


@fault
def generation_not_bumped() -> list[Patch]:
    """A freed block keeps its generation: an old name for it names its new content."""
    real = Pool._to_free

    def to_free(self: Pool, ids: Any, now_us: int) -> None:
        real(self, ids, now_us)
        self.blocks.generation[ids] -= 1

    return [(Pool, "_to_free", to_free)]


@fault
def prefix_hit_by_weak_hash() -> list[Patch]:
    """A hit trusts a hash of two bits a block and does not compare tokens."""
    real = BlockHasher.blocks

    def blocks(self: BlockHasher, tokens: Any) -> Any:
        return real(self, tokens) & np.uint64(3)

    def verified(self: PrefixIndex, salt: int, tokens: Any, ids: Any) -> int:
        return int(ids.size)

    return [(BlockHasher, "blocks", blocks), (PrefixIndex, "_verified", verified)]


@fault
def ceiling_ignored() -> list[Patch]:
    """A tenant's ceiling does not hold it back."""

    def room(self: Supply, tenant: int) -> int:
        return 1 << 40

    return [(Supply, "room", room)]


@fault
def row_published_late() -> list[Patch]:
    """A changed row of the block table is published one turn after it changed."""
    real = publishing.publish

    def publish(machine: Machine, tables: Any, now_us: int) -> None:
        s = machine.cache.sequences
        late, s.changed_cells = s.changed_cells, getattr(machine, "late_cells", [])
        real(machine, tables, now_us)
        machine.late_cells = late  # type: ignore[attr-defined]

    return [(turns, "publish", publish)]


@fault
def holder_dropped_without_decrement() -> list[Patch]:
    """A named holder goes away and the count does not."""

    def drop(self: Refs, group: Group, block: int, generation: int, holder: str, now_us: int) -> None:
        self.check_generation(block, generation)
        self._forget(block, holder)

    return [(Refs, "drop", drop), (BlockCommands, "client_gone", lambda self, client, now_us: None)]


@fault
def refusal_after_the_change() -> list[Patch]:
    """A refused submit has already interned its tenant and taken a request id."""
    real = Machine._submit

    def submit(self: Machine, event: Any, message: Any, now_us: int) -> Any:
        self._request_ids += 1
        return real(self, event, message, now_us)

    return [(Machine, "_submit", submit)]


@fault
def evicted_while_cached_entry_lives() -> list[Patch]:
    """An evicted block stays in the prefix index."""

    def evict_one(self: Pool, tenant: int, now_us: int) -> None:
        block, _ = self._lru[tenant].popitem(last=False)
        self.cached -= 1
        self._to_free(np.array([block], np.int64), now_us)

    return [(Pool, "_evict_one", evict_one)]


@fault
def settled_a_step_early() -> list[Patch]:
    """The result of step N is taken to settle step N + 1 too."""
    real = Pool.settle

    def settle(self: Pool, step: int, now_us: int) -> None:
        real(self, step + 1, now_us)

    return [(Pool, "settle", settle)]


@fault
def row_of_an_earlier_run_accepted() -> list[Patch]:
    """A step's row counts for whatever is in its slot now, a preempted or another request."""
    real = Outcomes.settle

    def settle(self: Outcomes, group: Group, result: Any, now_us: int) -> None:
        sent = group.sent[0]
        sent.serials[:] = self._scheduler.runs.serial[sent.slots]
        real(self, group, result, now_us)

    return [(Outcomes, "settle", settle)]


@fault
def sequence_settles_while_its_row_is_read() -> list[Patch]:
    """A preempted sequence gets new blocks while a step of its earlier run still reads its row."""
    return [(Cache, "still_read", lambda self, slot: False)]


@fault
def preempted_sequence_not_busy() -> list[Patch]:
    """A client's sequence can be changed while a preempted request waits to go on with it."""
    real = Scheduler.requeue

    def requeue(self: Scheduler, request: Any, now_us: int) -> None:
        slot = request.slot
        real(self, request, now_us)
        if request.sequence_id:
            self._cache.sequences.request[slot] = 0

    return [(Scheduler, "requeue", requeue)]


@fault
def preempted_request_forgotten() -> list[Patch]:
    """A preempted request is forgotten instead of waiting again."""
    real = Scheduler.requeue

    def requeue(self: Scheduler, request: Any, now_us: int) -> None:
        real(self, request, now_us)
        if len(self.waiting) > 1:
            self.waiting.remove(request)

    return [(Scheduler, "requeue", requeue)]


@fault
def salt_ignored() -> list[Patch]:
    """One tenant's cached blocks are hits for another."""
    return [(Cache, "salt", lambda self, text: 7)]
