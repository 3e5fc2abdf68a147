"""Conversion from the declared format to a machine: a new machine is constructed, then its state is set.

No name in a file selects a class or a function: the declared structs alone determine what is created.
"""

from __future__ import annotations

import typing
from collections import OrderedDict, deque
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from kvforge.protocol import codec
from kvforge.protocol.errors import restore as restore_error
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    WORKER_MESSAGES,
    WORKER_REPLIES,
    Message,
    Step,
    StepResult,
    WorkerReady,
)

from ..core.cache.block_pool import BlockPool
from ..core.cache.disk_copies import DiskCopies
from ..core.cache.groups import Group, SentStep, SteadyDecodeBatch
from ..core.cache.host_copies import HostCopies
from ..core.cache.host_free import FreeBlocks
from ..core.cache.host_tier import HostTier
from ..core.cache.host_writeback import HostWriteback
from ..core.cache.prefix_cache import PrefixCache
from ..core.cache.zeroing import Zeroing
from ..core.events import Boot
from ..core.limits import Limits, Section
from ..core.machine import Machine
from ..core.requests.idempotency import IdempotencyKey
from ..core.requests.phases import Phases
from ..core.requests.prompt_logprobs import PromptLogprobs
from ..core.requests.request import Request
from ..core.requests.streams import StreamRows
from ..core.requests.top_logprobs import TopLogprobs, TopLogprobsRecord
from ..core.scheduling.rows import BATCH_PRIORITY
from ..core.workers.teams import RANKS_MAX, Team
from ..core.workers.worker import Worker
from . import declared as d
from . import declared_cache as c
from .field_markers import I64, Array
from .fields import Restorer, fields_of
from .memory import AnyArray

_Kind = TypeVar("_Kind", bound=Message)
_replies = codec.Decoder(CLIENT_REPLIES, body_bytes_max=codec.FRAME_BYTES_MAX)
_from_workers = codec.Decoder(WORKER_MESSAGES, body_bytes_max=codec.FRAME_BYTES_MAX)
_to_workers = codec.Decoder(WORKER_REPLIES, body_bytes_max=codec.FRAME_BYTES_MAX)


def limits_of(saved: dict[str, Any]) -> Limits:
    """Return the limits, without settings that this version does not know.

    Raises:
        msgspec.ValidationError: A field has a wrong type.
        InvalidConfiguration: A value is out of range.
    """
    return msgspec.convert(_known(saved, Limits), Limits)


def _known(saved: Any, cls: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    known = {name: value for name, value in saved.items() if name in cls.__struct_fields__}
    for name, section in _sections(cls):
        if name in known:
            known[name] = _known(known[name], section)
    return known


@cache
def _sections(cls: Any) -> tuple[tuple[str, type[Section]], ...]:
    """Return the fields that are sections."""
    hints = typing.get_type_hints(cls).items()
    return tuple((name, hint) for name, hint in hints if isinstance(hint, type) and issubclass(hint, Section))


def restored(saved: d.SavedMachine, limits: Limits, arrays: list[AnyArray]) -> Machine:
    """Restore the machine that was saved.

    Args:
        saved: The machine's struct.
        limits: The limits in it.
        arrays: The table of arrays.

    Raises:
        Exception: The struct is inconsistent; the type depends on the inconsistency.
    """
    return _Restoring(saved, limits, arrays).machine()


class _Restoring:
    def __init__(self, saved: d.SavedMachine, limits: Limits, arrays: list[AnyArray]) -> None:
        self._saved = saved
        self._fields = Restorer(arrays)
        boot = Boot(saved.boot, saved.hash_key, limits, saved.first_id)
        self._machine = Machine(boot, saved.start_us)
        self._requests: list[Request] = []
        self._groups: list[Group] = []

    def _array(self, cls: Any, name: str, index: int) -> AnyArray:
        mark = next(mark for field, mark in fields_of(cls) if field == name)
        assert isinstance(mark, Array)
        return self._fields.array(index, mark)

    def machine(self) -> Machine:
        saved, machine = self._saved, self._machine
        parts = ("cache", "waits", "requests", "admission", "streams", "sessions", "commands", "reports")
        before = ("boot", "hash_key", "limits", "first_id", "start_us", "now_us", *parts)
        self._fields.restore(machine, saved, *before)
        machine._clock.now_us = saved.now_us
        self._request_tables(saved.requests)
        self._cache(saved.cache)
        self._waits(saved.waits)
        self._admission(saved.admission)
        self._streams(saved.streams)
        self._sessions(saved.sessions)
        self._commands(saved.commands)
        self._reports(saved.reports)
        return machine

    # ------------------------------------------------------------------------------------------------------ requests

    def _request_tables(self, saved: d.SavedRequests) -> None:
        keys = [IdempotencyKey(**msgspec.structs.asdict(key)) for key in saved.keys]
        self._requests = [self._request(request, saved.samplings, keys) for request in saved.known]
        families = [[self._requests[place] for place in family] for family in saved.families]
        for request, each in zip(self._requests, saved.known, strict=True):
            request.siblings = families[each.siblings] if each.siblings >= 0 else []
        table = self._machine.requests
        self._fields.restore(
            table, saved, "known", "samplings", "families", "keys", "keys_kept", "live", "finished", "ended_total"
        )
        table.live.update((request.id, request) for request in map(self._requests.__getitem__, saved.live))
        table.finished.update((request.id, request) for request in map(self._requests.__getitem__, saved.finished))
        table.keys._entries.update(((key.tenant, key.key), key) for key in keys[: saved.keys_kept])
        table.ended_total.update(saved.ended_total)

    def _request(self, saved: d.SavedRequest, samplings: list[Any], keys: list[IdempotencyKey]) -> Request:
        request = Request.__new__(Request)
        special = ("sampling", "siblings", "key", "tops", "prompt_logprobs", "phases", "error")
        self._fields.restore(request, saved, *special)
        request.sampling = samplings[saved.sampling]
        request.key = keys[saved.key] if saved.key >= 0 else None
        tops = saved.tops
        request.tops = (
            self._fields.restore(TopLogprobsRecord.__new__(TopLogprobsRecord), tops) if tops is not None else None
        )
        request.prompt_logprobs = self._prompt_logprobs(saved.prompt_logprobs)
        request.phases = self._fields.restore(Phases.__new__(Phases), saved.phases)
        error = saved.error
        request.error = restore_error(error.code, error.message, error.fields) if error is not None else None
        return request

    def _prompt_logprobs(self, saved: d.SavedPromptLogprobs | None) -> PromptLogprobs | None:
        if saved is None:
            return None
        record: PromptLogprobs = self._fields.restore(PromptLogprobs.__new__(PromptLogprobs), saved, "_tops")
        record._tops = self._fields.restore(TopLogprobsRecord.__new__(TopLogprobsRecord), saved._tops)
        return record

    def _waits(self, saved: d.SavedWaits) -> None:
        waits = self._fields.restore(self._machine.cache.waits, saved, "by_event")
        for event, places in saved.by_event:
            waits._by_event[event] = {request.id: request for request in map(self._requests.__getitem__, places)}

    def _admission(self, saved: d.SavedAdmission) -> None:
        admission, requests = self._machine.admission, self._requests
        self._fields.restore(admission, saved, "waiting", "rows")
        self._fields.restore(admission.rows, saved.rows)
        queue, waiting = admission.waiting, saved.waiting
        self._fields.restore(queue, waiting, "returned", "fresh", "parked", "departures")
        queue.service = self._machine.cache.tenants.service  # shared, because both charge it
        queue._returned = [(order, requests[place]) for order, place in waiting.returned]
        queue._fresh = {
            tenant: [(key, order, requests[place]) for key, order, place in entries]
            for tenant, entries in waiting.fresh.items()
        }
        queue._parked = {requests[place].id: requests[place] for place in waiting.parked}
        queue._departures.extend(waiting.departures)
        queue.batches = sum(request.priority == BATCH_PRIORITY for request in queue)

    def _streams(self, saved: d.SavedStreams) -> None:
        streams = self._fields.restore(self._machine.streams, saved, "rows")
        streams._rows = {client: [self._stream_rows(each) for each in parts] for client, parts in saved.rows.items()}

    def _stream_rows(self, saved: d.SavedStreamRows) -> StreamRows:
        names = ("requests", "offsets", "tokens", "logprobs")
        requests, offsets, tokens, logprobs = (
            self._array(d.SavedStreamRows, name, getattr(saved, name)) for name in names
        )
        tops = None
        if saved.tops is not None:
            columns = ("counts", "tokens", "logprobs")
            tops = TopLogprobs(*(self._array(d.SavedTops, name, getattr(saved.tops, name)) for name in columns))
        ranks = self._array(d.SavedStreamRows, "ranks", saved.ranks) if saved.ranks is not None else None
        return StreamRows(requests, offsets, tokens, logprobs, tops, ranks)

    def _sessions(self, saved: d.SavedSessions) -> None:
        sessions = self._fields.restore(self._machine.sessions, saved, "answers")
        sessions._answers = {
            client: {rid: _replies.decode(frames) for rid, frames in replies.items()}
            for client, replies in saved.answers.items()
        }

    def _commands(self, saved: d.SavedCommands) -> None:
        machine = self._machine
        request_commands, guard, sequences = machine._request_commands, machine._guard, machine.sequences
        machine._clock.deadlines.heap = saved.heap
        machine._clock.deadlines.arm_all(machine._clock.now_us)
        request_commands.draining, request_commands.drain_deadline_us = saved.draining, saved.drain_deadline_us
        request_commands._request_ids = saved.request_ids
        machine.cache.kept.removals.entries = OrderedDict(saved.gone)
        sequences._again = self._array(d.SavedCommands, "again", saved.again)
        guard._alive, guard._spending._paid_us = saved.alive, saved.paid_us
        guard._spending._reserved = saved.reserved

    # --------------------------------------------------------------------------------------------------------- cache

    def _cache(self, saved: c.SavedCache) -> None:
        """Restore the cache. Pools precede the arrays of blocks, because a new pool requires a free range."""
        cache, fields = self._machine.cache, self._fields
        parts = ("tenants", "meters", "blocks", "store", "pins", "sequences", "groups", "host_tiers", "wipes")
        fields.restore(cache, saved, *parts, "kinds", "evicted_sequences_total", "idle_times")
        fields.restore(cache.tenants, saved.tenants)
        fields.restore(cache.tenants.meters, saved.meters)
        fields.restore(cache.store, saved.store)
        cache.store._show()
        fields.restore(cache.wipes, saved.wipes)
        for tier in saved.host_tiers:
            cache.host_tiers.tiers[tier.identity] = self._host_tier(tier)
        self._groups = [self._group(group) for group in saved.groups]
        cache.groups.update((group.number, group) for group in self._groups)
        fields.restore(cache.blocks, saved.blocks)
        for pool in (group.pool for group in self._groups):
            pool.touched = int(cache.blocks.touch[pool.base : pool.base + pool.count].max(initial=0))
        fields.restore(cache.pins, saved.pins)
        fields.restore(cache.sequences, saved.sequences)
        columns = [name for name, mark in fields_of(c.SavedSequences) if isinstance(mark, Array) and mark.axes == 1]
        cache.sequences._columns = [getattr(cache.sequences, name) for name in columns]
        cache.indexing.kinds = saved.kinds
        if saved.idle_times is not None:
            fields.restore(cache.idle.times, saved.idle_times)
        cache.residency.evicted_total = saved.evicted_sequences_total

    def _group(self, saved: c.SavedGroup) -> Group:
        pool = self._pool(
            saved.pool, self._index(saved.index), saved.epoch, saved.state_blocks + saved.window_pages > 0
        )
        ready = WorkerReady(
            rid=0,
            model=saved.model,
            blocks=pool.count,
            bytes_per_block=saved.bytes_per_block,
            kv_dtype=saved.kv_dtype,
            device="",
            wants_kinds=saved.wants_kinds,
            state_blocks=saved.state_blocks,
            prompt_chunk=saved.prompt_chunk,
            window=saved.window,
            window_pages=saved.window_pages,
            window_blocks=saved.window_blocks,
            drafts=saved.drafts,
        )
        group = Group(saved.number, saved.worker, saved.name, saved.epoch, pool, ready)
        parts = ("pool", "index", "sent", "steady", "costs", "row_costs", "model_drafts", "pauses", "host")
        self._fields.restore(group, saved, *parts)
        if saved.host is not None:
            cache = self._machine.cache
            tier = cache.host_tiers.tiers[saved.host.identity]
            sight = -(-group.window // cache.blocks.block_size)
            copies = HostCopies(tier, group.index, cache.blocks, pool.base, pool.count, sight)
            copies.compute_costs = group.costs
            apart = ("identity", "backlog", "write_costs", "read_costs", "disk", "paced")
            group.host = pool.eviction.host = self._fields.restore(copies, saved.host, *apart)
            copies.paced.slot, copies.paced.waiting = saved.host.paced[0], dict(saved.host.paced[1])
            for costs, line in (
                (copies.write_costs, saved.host.write_costs),
                (copies.read_costs, saved.host.read_costs),
            ):
                if line is not None:
                    self._fields.restore(costs, line)
            pool.writeback = HostWriteback(copies, self._machine.limits.cache.host_writeback_blocks)
            pool.writeback.backlog.extend(saved.host.backlog)
            if saved.host.disk is not None:
                copies.disk = self._disk(saved.host.disk, copies)
        group.sent.extend(self._sent(sent) for sent in saved.sent)
        group.steady = self._steady(saved.steady) if saved.steady is not None else None
        self._fields.restore(group.costs, saved.costs)
        if saved.row_costs is not None:
            self._fields.restore(group.row_costs, saved.row_costs, "line")
            self._fields.restore(group.row_costs.line, saved.row_costs.line)
        if saved.model_drafts is not None:
            self._fields.restore(group.model_drafts, saved.model_drafts, "gains")
            self._fields.restore(group.model_drafts.gains, saved.model_drafts.gains)
        if saved.pauses is not None:
            self._fields.restore(group.pauses, saved.pauses)
        return group

    def _disk(self, saved: c.SavedDiskCopies, host: HostCopies) -> DiskCopies:
        ranks = saved.ranks.count if saved.ranks is not None else 1
        disk = self._machine.cache.disk_copies(saved.tier.total, host, ranks)
        self._fields.restore(disk, saved, "tier", "wanted", "ranks", "costs")
        if saved.costs is not None:
            self._fields.restore(disk.costs, saved.costs, "line")
            self._fields.restore(disk.costs.line, saved.costs.line)
        if saved.ranks is not None and disk.ranks is not None:
            self._fields.restore(disk.ranks, saved.ranks)
        disk.wanted.update(dict.fromkeys(saved.wanted))
        self._fields.restore(disk.tier, saved.tier, "_free", "lru", "own", "stamp")
        _restore_books(disk.tier, saved.tier)
        disk.tier._by_value.update((node.value, node_id) for node_id, node in disk.tier.nodes.items())
        return disk

    def _host_tier(self, saved: c.SavedHostTier) -> HostTier:
        tier = self._machine.cache.host_tiers.new(saved.identity, saved.total)
        self._fields.restore(tier, saved, "_free", "lru", "own", "stamp", "yields")
        _restore_books(tier, saved)
        if saved.yields is not None:
            self._fields.restore(tier.yields, saved.yields, "skipped", "skipped_of")
            tier.yields.skipped.update(zip(saved.yields.skipped, saved.yields.skipped_of, strict=True))
        tier._by_value.update((node.value, node_id) for node_id, node in tier.nodes.items())
        return tier

    def _steady(self, saved: c.SavedSteady) -> SteadyDecodeBatch:
        names = ("slots", "runs", "starts", "room")
        slots, runs, starts, room = (self._array(c.SavedSteady, name, getattr(saved, name)) for name in names)
        return SteadyDecodeBatch(slots, runs, starts, room, saved.left, saved.tenant)

    def _sent(self, saved: c.SavedStep) -> SentStep:
        message = _message(_to_workers, saved.message, Step)
        names = ("slots", "runs", "counts", "samples", "sampled")
        values: dict[str, Any] = {name: self._array(c.SavedStep, name, getattr(saved, name)) for name in names}
        plain = ("step_id", "sent_us", "decodes", "prefill_tokens", "tenant", "in_time")
        values |= {name: getattr(saved, name) for name in plain}
        return SentStep(**values, message=message)

    def _pool(self, saved: c.SavedPool, index: PrefixCache, epoch: int, mixed: bool) -> BlockPool:
        cache, fields = self._machine.cache, self._fields
        if not 0 <= saved.base <= saved.base + saved.count <= cache.blocks.state.size:
            raise ValueError(f"a pool of blocks {saved.base} to {saved.base + saved.count}")
        zeroing = None
        if saved.zeroing is not None:
            zeroing = fields.restore(Zeroing(saved.base, saved.count), saved.zeroing, "_owed")
            zeroing._owed.update(dict.fromkeys(saved.zeroing._owed))
        made_of = (cache.clock, cache.blocks, cache.tenants, cache.waits, index)
        pool = BlockPool(*made_of, epoch, saved.base, saved.count, zeroing, mixed)
        fields.restore(pool, saved, "lru", "_stamp", "quarantine", "zeroing", "checkpoints", "windows")
        number: Array = get_args(I64)[1]
        pool.recent.stamp = saved._stamp
        for tenant, (ids, stamps) in saved.lru.items():
            pool.recent.restore(tenant, fields.array(ids, number), fields.array(stamps, number))
        pool.parts.restore(saved.checkpoints, saved.windows)
        pool.quarantine.extend(fields.array(ids, number) for ids in saved.quarantine)
        return pool

    def _index(self, saved: c.SavedIndex) -> PrefixCache:
        cache = self._machine.cache
        index = PrefixCache(cache.store, cache.blocks, cache.waits, cache.hasher)
        blocks, parents, only = (
            self._array(c.SavedIndex, name, getattr(saved, name)) for name in ("blocks", "parents", "only")
        )
        index._by_hash = dict(zip(cache.store.hash[blocks].tolist(), blocks.tolist(), strict=True))
        index._children = dict(zip(parents.tolist(), only.tolist(), strict=True))
        for parent, own in zip(parents[only < 0].tolist(), saved.several, strict=True):
            index._children[parent] = dict.fromkeys(own)
        return index

    # ------------------------------------------------------------------------------------------------------- workers

    def _reports(self, saved: d.SavedReports) -> None:
        reports = self._machine._reports
        self._fields.restore(reports, saved, "processes", "workers", "teams")
        processes = [self._worker(worker) for worker in saved.processes]
        reports.workers.update((worker.number, worker) for worker in map(processes.__getitem__, saved.workers))
        reports._teams.update((team.name, self._team(team, processes)) for team in saved.teams)

    def _worker(self, saved: d.SavedWorker) -> Worker:
        worker = Worker(saved.number, saved.name, saved.pid, saved.rank, saved.ranks)
        self._fields.restore(worker, saved, "group")
        worker.group = self._groups[saved.group] if saved.group >= 0 else None
        return worker

    def _team(self, saved: d.SavedTeam, processes: list[Worker]) -> Team:
        if not 1 <= saved.count <= RANKS_MAX:
            raise ValueError(f"a team of {saved.count} ranks")
        team = Team(saved.name, saved.count)
        self._fields.restore(team, saved, "members", "ready", "results")
        team.members = {rank: processes[place] for rank, place in saved.members.items()}
        team.ready = {rank: _message(_from_workers, frames, WorkerReady) for rank, frames in saved.ready.items()}
        team.results = [
            deque(_message(_from_workers, frames, StepResult) for frames in results) for results in saved.results
        ]
        return team


def _message(decoder: codec.Decoder, frames: list[bytes], cls: type[_Kind]) -> _Kind:
    """Decode a message of the given class. Raise ProtocolError or ValueError."""
    message = decoder.decode(frames)
    if not isinstance(message, cls):
        raise ValueError(f"a {type(message).__name__} in place of a {cls.__name__}")
    return message


def _restore_books(tier: HostTier, saved: c.SavedHostTier | c.SavedDiskTier) -> None:
    """Restore which blocks of a tier are free, which entries no copy uses, and the order of their last use.

    Raises:
        ValueError: A free block is named twice, or is none of the tier.
    """
    tier._free = FreeBlocks.of(saved._free, saved.total)
    for node_id in saved.lru:
        tier._lru.add(node_id, 0)
    for owner, (nodes, stamps) in saved.own.items():
        tier._lru.by_owner[owner] = OrderedDict(zip(nodes, stamps, strict=True))
    tier._lru.stamp = max(tier._lru.stamp, saved.stamp)
    for owner, cached in tier._lru.by_owner.items():
        for node_id in cached:
            tier._lru.set_leaf(node_id, owner, not tier.nodes[node_id].children)
