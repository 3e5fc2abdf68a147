"""The choice of a group for a request, or the reason why no group can take it.

Nothing changes here, except that the hashes of a prompt are kept. `Admission` starts requests and records what the
others wait for.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec
import numpy as np

from kvforge.protocol.errors import CapacityExceeded, QuotaExceeded

from .. import sizes
from ..cache.blocks import NO_BLOCKS
from ..cache.groups import Group
from ..cache.hashing import Hashes
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.placement import Placement
from ..cache.sequences import NO_POOL, NO_SLOTS, Tokens, generated
from ..cache.supply import NO_SPARE, Spare, short_of
from ..requests.phases import PREEMPTED
from ..requests.request import NO_SLOT, RUNNING, Request
from ..requests.table import RequestTable
from ..waits import FRONT, HOST, SLOT, TENANT_CEILING, WORKER, Event, Wait, blocks_of, eviction_of, prefix_of, rows_of
from . import swapping
from .rows import BATCH_PRIORITY

ALONE_CRASHES = 2
LEFT_ROWS, LEFT_ROWS_MIN = 16, 4  # batches leave 1 / LEFT_ROWS of the rows, or one of at least LEFT_ROWS_MIN


class Choice:
    """Chooses a group for a request."""

    def __init__(self, cache: KVCacheManager, requests: RequestTable) -> None:
        self._cache, self._requests = cache, requests
        self._rows_max = cache.limits.schedule.step_rows_max

    def prompt_holder(self, request: Request) -> Request | None:
        """Return a running sibling that has the KV of the whole prompt."""
        s = self._cache.sequences
        for other in request.siblings:
            if other is not request and other.slot != NO_SLOT and s.computed[other.slot] >= request.prompt.size:
                return other
        return None

    def choose(self, request: Request, kept: Container[int]) -> Placement | Wait:
        """Choose a group, by the longest cached prefix and then the most free blocks; else return what is missing.

        Args:
            request: The request to place.
            kept: Numbers of groups that are reserved for requests further ahead.
        """
        cache, s = self._cache, self._cache.sequences
        slot = s.slot_of.get(request.sequence_id, NO_SLOT)
        if slot == NO_SLOT and not cache.kept.could_free(1):
            # A kept sequence can be dropped once no step in flight reads it.
            return Wait("sequences_max", (SLOT, *(blocks_of(group.epoch) for group in cache.groups.values())))
        if slot != NO_SLOT and cache.residency.still_read(slot):
            return Wait("step", (blocks_of(cache.groups[int(s.read_pool[slot])].epoch),))
        resident = slot != NO_SLOT and s.pool[slot] != NO_POOL
        if resident and cache.residency.is_settling(slot):
            return Wait("step", (blocks_of(cache.groups[int(s.pool[slot])].epoch),))
        for there in (slot, s.slot_of.get(request.continues, NO_SLOT)):
            if there != NO_SLOT and cache.residency.is_loading(there):  # what comes would be computed otherwise
                return Wait(HOST, (blocks_of(cache.groups[int(s.pool[there])].epoch),))
        best, best_rank = None, (-1, -1)
        lacks: list[Wait] = []
        asking = NO_SLOTS if slot == NO_SLOT else np.array([slot])
        for group in cache.groups.values():
            if (resident and s.pool[slot] != group.number) or not self.could_hold(group, request):
                continue
            if (obstacle := self._obstacle(group, request, kept)) is not None:
                lacks.append(obstacle)
                continue
            placement = Placement(group, NO_BLOCKS, (-1, 0), 0) if resident else self.plan(group, request)
            try:
                placement = cache.residency.with_room(placement, request.tenant, self.spare(group, request), asking)
            except CapacityExceeded as error:
                lacks.append(lack(group, error, placement.needed + placement.ahead, _events(group, request, placement)))
                continue
            cached = placement.cached_tokens(s.block_size)
            rank = (cached, group.pool.available(request.tenant) - group.running)
            if rank > best_rank:
                best, best_rank = placement, rank
        if best is not None:
            return best
        return _nearest(lacks, (eviction_of(request.sequence_id),) if resident else ())

    def _obstacle(self, group: Group, request: Request, kept: Container[int]) -> Wait | None:
        """Return what keeps the request out of the group, apart from blocks; None if nothing does."""
        if group.away:
            return Wait("away", (WORKER,), group.epoch)
        if group.number in kept:
            return Wait("kept", (FRONT,), group.epoch)
        if not self.accepts_rows(group, batch=request.priority == BATCH_PRIORITY):
            return Wait("step_rows_max", (rows_of(group.epoch),), group.epoch)
        if group.running and (self.must_be_alone(request) or self.runs_alone(group)):
            return Wait("alone", (rows_of(group.epoch),), group.epoch, other=group.suspect)
        return None

    def plan(self, group: Group, request: Request) -> Placement:
        """Plan a placement in the group for a request without a resident sequence."""
        cache, s = self._cache, self._cache.sequences
        holder = self.prompt_holder(request) if not request.admitted_order else None
        if holder is not None and s.pool[holder.slot] == group.number and not group.state_blocks:
            fork = cache.planner.plan_fork(group, holder.slot, request.prompt.size)
            if fork is not None:
                fork.otherwise = self._plan_of_tokens(group, request) if group.window_pages else None
                return fork
        return self._plan_of_tokens(group, request)

    def _plan_of_tokens(self, group: Group, request: Request) -> Placement:
        """Plan a placement by the request's tokens."""
        cache, s = self._cache, self._cache.sequences
        tokens, hashes = self.prefix_of(request)
        placement = cache.planner.plan_placement(group, request.salt, tokens, hashes, request.shareable_tokens)
        if placement.reads and request.phases.phase == PREEMPTED:
            if group.pool.mixed:
                prefix = (request.salt, tokens, hashes, request.shareable_tokens)
                without = cache.planner.plan_placement(group, *prefix, host=False)
                placement = swapping.decide_whole(placement, without, s.block_size)
            else:
                placement = swapping.decide(placement, s.block_size)
        if not request.continues or not cache.kept.could_free(1, but=request.continues):
            return placement
        most = self.shareable(request, tokens)
        continued = cache.continuing.placement(group, request.continues, request.salt, tokens, most)
        size = s.block_size
        if continued is None or continued.cached_tokens(size) <= placement.cached_tokens(size):
            return placement
        continued.otherwise = placement
        return continued

    def prefix_of(self, request: Request) -> tuple[Tokens, Hashes]:
        """Return the tokens of a request in the form in which they are indexed, and the hashes of their full blocks."""
        indexing, s = self._cache.indexing, self._cache.sequences
        slot = s.slot_of.get(request.sequence_id, NO_SLOT)
        if slot != NO_SLOT:
            tokens = indexing.contents(s.tokens[slot, : s.length[slot]])
        elif request.tokens.size:
            tokens = indexing.contents(np.concatenate([request.prompt, generated(request.tokens)]))
        else:
            tokens = indexing.contents(request.prompt) if request.continues else request.prompt
        if request.hashes is None:
            request.hashes = indexing.hashes(request.salt, tokens)
        return tokens, request.hashes

    def shareable(self, request: Request, tokens: Tokens) -> int:
        """Return how many of the request's tokens may come from cached blocks."""
        shared_max = request.shareable_tokens
        return tokens.size - 1 if shared_max is None else min(shared_max, tokens.size - 1)

    def accepts_rows(self, group: Group, *, batch: bool = False) -> bool:
        """Return whether the group can take another row. batch: of a batch."""
        return group.running < self.rows_max(batch=batch) and group.begins_bytes < sizes.BEGINS_BYTES_MAX

    def rows_max(self, *, batch: bool) -> int:
        """Return the most rows of a group with which another one starts. Batches leave the last ones to others."""
        left = max(1, self._rows_max // LEFT_ROWS) if batch and self._rows_max >= LEFT_ROWS_MIN else 0
        return self._rows_max - left

    def must_be_alone(self, request: Request) -> bool:
        """Return whether the request must run alone because workers died with it, until it is past that point."""
        return request.crashes >= ALONE_CRASHES and self.length(request) <= request.crash_length

    def runs_alone(self, group: Group) -> bool:
        """Return whether the group runs a request that must be alone."""
        request = self._requests.live.get(group.suspect)
        return request is not None and request.state == RUNNING and self.must_be_alone(request)

    def length(self, request: Request) -> int:
        """Return the tokens of the request so far, including its prompt."""
        if request.slot != NO_SLOT:
            return int(self._cache.sequences.length[request.slot])
        return request.prompt.size + request.tokens.size

    def could_hold(self, group: Group, request: Request) -> bool:
        """Return whether the group's pool could ever hold all that the request may need."""
        tenants = self._cache.tenants
        reserved = tenants.reserved_for_others(tenants.names[request.tenant])
        most = self._with_windows(group, self.most_blocks(request)) + group.state_blocks
        return most <= group.pool.count - reserved

    def most_blocks(self, request: Request) -> int:
        """Return how many blocks of KV the request needs if it runs to its end."""
        return self._cache.sequences.blocks_for(request.prompt.size + request.max_tokens)

    def fits_when_idle(self, group: Group, request: Request) -> bool:
        """Return whether the request would have room after everything that runs in the group has ended."""
        placement = self.plan(group, request)
        supply, held = self._cache.eviction.supply_when_idle(group)
        shared = int(np.count_nonzero(held[placement.hits - group.pool.base]))
        first = self._with_windows(group, self._first_blocks(request)) + group.state_blocks
        needed = max(first, placement.needed + placement.ahead + placement.hits.size) - shared
        return supply.has(request.tenant, needed, NO_SPARE)

    def spare(self, group: Group, request: Request) -> Spare:
        """Return the blocks that admission leaves free, for each running row to grow by one, to avoid preemption.

        Within the tenant's ceiling, only its own rows count. If none of these runs, there must be room for the
        request's first token; otherwise it would hold blocks and wait.
        """
        s, each = self._cache.sequences, 1 + group.window_pages
        pool = (group.running + 1) * each if group.running else 0
        if not self._cache.tenants.has_quotas:
            return Spare(pool)
        mine = int(np.count_nonzero(s.running & (s.pool == group.number) & (s.tenant == request.tenant)))
        if mine:
            return Spare(pool, (mine + 1) * each)
        # Windows stop growing: a block more of KV takes window blocks only where the placement reserves fewer.
        before = self._with_windows(group, s.blocks_for(self.length(request)))
        return Spare(pool, self._with_windows(group, self._first_blocks(request)) - before)

    def _first_blocks(self, request: Request) -> int:
        """Return the blocks of KV that the request has with the next token of its answer."""
        return self._cache.sequences.blocks_for(self.length(request) + min(1, request.max_tokens))

    def _with_windows(self, group: Group, blocks: int) -> int:
        """Return `blocks` and the most that windows take beside them, as validation counts both."""
        return blocks + self._cache.windows.most(group, blocks)


def lack(group: Group, error: CapacityExceeded, needed: int, events: tuple[Event, ...] = ()) -> Wait:
    """Build the wait record of a request without room in the group.

    The error itself is not stored, because its traceback would keep objects alive.
    """
    limit = TENANT_CEILING if isinstance(error, QuotaExceeded) else "blocks"
    return Wait(limit, events, group.epoch, short_of(error), needed, str(error))


def _events(group: Group, request: Request, placement: Placement) -> tuple[Event, ...]:
    """Return the events that may give the request room: freed blocks, the end of a row, and a block to share."""
    hits = int(placement.hits.size)
    shared = request.hashes[hits : hits + 1].tolist() if request.hashes is not None else []
    return (blocks_of(group.epoch), rows_of(group.epoch), *map(prefix_of, shared))


def _nearest(lacks: list[Wait], besides: tuple[Event, ...]) -> Wait:
    """Merge the records of all groups: the description of the group with the smallest shortage, the events of all."""
    if not lacks:
        return Wait("workers", (WORKER, *besides))
    room = [wait for wait in lacks if wait.limit == "blocks"] or [w for w in lacks if w.limit == TENANT_CEILING]
    nearest = min(room, key=lambda wait: wait.short) if room else lacks[0]
    events = dict.fromkeys(event for wait in lacks for event in wait.events)
    return msgspec.structs.replace(nearest, events=(*events, *besides))
