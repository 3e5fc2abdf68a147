"""Conversion from a machine to the declared format: `saved` returns its struct, and collects its arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvforge.protocol import codec
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Message, SamplingParams

from ..core.cache.block_pool import BlockPool
from ..core.cache.disk_copies import DiskCopies
from ..core.cache.groups import Group, SentStep
from ..core.cache.host_tier import HostTier
from ..core.cache.prefix_cache import PrefixCache
from ..core.machine import Machine
from ..core.requests.idempotency import IdempotencyKey
from ..core.requests.prompt_logprobs import PromptLogprobs
from ..core.requests.request import Request
from ..core.requests.streams import StreamRows
from ..core.workers.teams import Team
from ..core.workers.worker import Worker
from . import declared as d
from . import declared_cache as c
from .field_markers import Saved
from .fields import save
from .memory import ArrayWriter

_Saved = TypeVar("_Saved", bound=Saved)


def saved(machine: Machine, arrays: ArrayWriter) -> d.SavedMachine:
    """Return the state of a machine between two turns, and add its arrays to `arrays`."""
    return _Saving(machine, arrays).machine()


class _Saving:
    """Saves objects that several others refer to once, in tables, with references by index."""

    def __init__(self, machine: Machine, arrays: ArrayWriter) -> None:
        self._machine, self._arrays = machine, arrays
        self._requests: list[Request] = []
        self._request_places: dict[int, int] = {}
        self._samplings: list[SamplingParams] = []
        self._sampling_places: dict[int, int] = {}
        self._families: list[list[Request]] = []
        self._family_places: dict[int, int] = {}
        self._keys: list[IdempotencyKey] = []
        self._key_places: dict[int, int] = {}
        self._workers: list[Worker] = []
        self._worker_places: dict[int, int] = {}
        self._groups = list(machine.cache.groups.values())

    def _of(self, cls: type[_Saved], part: object, **given: Any) -> _Saved:
        return save(cls, part, self._arrays, **given)

    def machine(self) -> d.SavedMachine:
        machine = self._machine
        assert not machine._effects, "a snapshot is made between two turns"
        cache, table, request_commands = machine.cache, machine.requests, machine._request_commands
        keys = [_place(self._key_places, self._keys, key) for key in table.keys._entries.values()]
        commands = d.SavedCommands(
            heap=machine._clock.deadlines.heap,
            draining=request_commands.draining,
            drain_deadline_us=request_commands.drain_deadline_us,
            request_ids=request_commands._request_ids,
            gone=machine.cache.kept.removals.entries,
            again=self._arrays.add(machine.sequences._again),
            alive=machine._guard._alive,
            paid_us=machine._guard._spending._paid_us,
            reserved=machine._guard._spending._reserved,
        )
        parts = {
            "cache": self._cache(),
            "waits": self._waits(),
            "admission": self._admission(),
            "streams": self._streams(),
            "sessions": self._sessions(),
            "reports": self._reports(),
            "requests": self._request_table(len(keys)),  # last, because other parts add to its tables
        }
        return self._of(
            d.SavedMachine,
            machine,
            **parts,
            hash_key=cache.hasher._key,
            limits=msgspec.to_builtins(machine.limits),
            first_id=table.first_id,
            now_us=machine._clock.now_us,
            commands=commands,
        )

    # --------------------------------------------------------------------------------------------------------- cache

    def _cache(self) -> c.SavedCache:
        cache = self._machine.cache
        return self._of(
            c.SavedCache,
            cache,
            tenants=self._of(c.SavedTenants, cache.tenants),
            meters=self._of(c.SavedMeters, cache.tenants.meters),
            blocks=self._of(c.SavedBlocks, cache.blocks),
            store=self._of(c.SavedStore, cache.store),
            pins=self._of(c.SavedPins, cache.pins),
            sequences=self._of(c.SavedSequences, cache.sequences),
            groups=[self._group(group) for group in self._groups],
            kinds=cache.indexing.kinds,
            idle_times=self._of(c.SavedIdleTimes, cache.idle.times),
            evicted_sequences_total=cache.residency.evicted_total,
            wipes=self._of(c.SavedWipes, cache.wipes),
            host_tiers=[self._host_tier(tier) for tier in cache.host_tiers.tiers.values()],
        )

    def _group(self, group: Group) -> c.SavedGroup:
        model = group.model_drafts
        return self._of(
            c.SavedGroup,
            group,
            pool=self._pool(group.pool),
            index=self._index(group.index),
            sent=[self._sent(sent) for sent in group.sent],
            steady=self._of(c.SavedSteady, group.steady) if group.steady is not None else None,
            costs=self._of(c.SavedCosts, group.costs),
            pauses=self._of(c.SavedPauses, group.pauses),
            model_drafts=self._of(c.SavedModelDrafts, model, gains=self._of(c.SavedDraftGains, model.gains)),
            row_costs=self._of(c.SavedRowCosts, group.row_costs, line=self._of(c.SavedCosts, group.row_costs.line)),
            host=self._host(group),
        )

    def _host_tier(self, tier: HostTier) -> c.SavedHostTier:
        skipped = tier.yields.skipped
        yields = self._of(c.SavedHostYield, tier.yields, skipped=list(skipped), skipped_of=list(skipped.values()))
        return self._of(c.SavedHostTier, tier, yields=yields, **_books(tier))

    def _host(self, group: Group) -> c.SavedHostCopies | None:
        host = group.host
        if host is None or group.pool.writeback is None:
            return None
        return self._of(
            c.SavedHostCopies,
            host,
            identity=host.tier.identity,
            backlog=list(group.pool.writeback.backlog),
            write_costs=self._of(c.SavedCosts, host.write_costs),
            read_costs=self._of(c.SavedCosts, host.read_costs),
            paced=(host.paced.slot, host.paced.waiting),
            disk=self._disk(host.disk) if host.disk is not None else None,
        )

    def _disk(self, disk: DiskCopies) -> c.SavedDiskCopies:
        tier = self._of(c.SavedDiskTier, disk.tier, **_books(disk.tier))
        ranks = self._of(c.SavedRankDisks, disk.ranks) if disk.ranks is not None else None
        costs = self._of(c.SavedDiskCosts, disk.costs, line=self._of(c.SavedCosts, disk.costs.line))
        return self._of(c.SavedDiskCopies, disk, tier=tier, wanted=list(disk.wanted), ranks=ranks, costs=costs)

    def _sent(self, sent: SentStep) -> c.SavedStep:
        return self._of(c.SavedStep, sent, message=_frames(sent.message))

    def _pool(self, pool: BlockPool) -> c.SavedPool:
        zeroing = pool.zeroing
        recent = ((tenant, pool.recent.items(tenant)) for tenant in pool.recent.counts)
        lru = {tenant: (self._arrays.add(ids), self._arrays.add(stamps)) for tenant, (ids, stamps) in recent}
        return self._of(
            c.SavedPool,
            pool,
            lru=lru,
            _stamp=pool.recent.stamp,
            quarantine=[self._arrays.add(ids) for ids in pool.quarantine],
            checkpoints=pool.parts.checkpoints,
            windows=pool.parts.windows,
            zeroing=self._of(c.SavedZeroing, zeroing, _owed=list(zeroing._owed)) if zeroing is not None else None,
        )

    def _index(self, index: PrefixCache) -> c.SavedIndex:
        """Save an index as arrays, because it has an entry for each block."""
        children = index._children.values()
        return c.SavedIndex(
            blocks=self._numbers(index._by_hash.values()),
            parents=self._numbers(index._children),
            only=self._numbers([-1 if isinstance(own, dict) else own for own in children]),
            several=[list(own) for own in children if isinstance(own, dict)],
        )

    def _numbers(self, values: Iterable[int]) -> int:
        return self._arrays.add(np.fromiter(values, np.int64, len(values)))  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------------ requests

    def _request(self, request: object) -> int:
        """Return the index of a request, adding it and its siblings if needed."""
        assert isinstance(request, Request)
        place = self._request_places.get(id(request))
        if place is None:
            place = _place(self._request_places, self._requests, request)
            if request.siblings:
                _place(self._family_places, self._families, request.siblings)
                for other in request.siblings:
                    self._request(other)
        return place

    def _request_table(self, keys_kept: int) -> d.SavedRequests:
        table = self._machine.requests
        live = [self._request(request) for request in table.live.values()]
        finished = [self._request(request) for request in table.finished.values()]
        known = [self._one(request) for request in self._requests]
        return self._of(
            d.SavedRequests,
            table,
            known=known,
            samplings=self._samplings,
            families=[[self._request(request) for request in family] for family in self._families],
            keys=[self._of(d.SavedKey, key) for key in self._keys],
            keys_kept=keys_kept,
            live=live,
            finished=finished,
        )

    def _one(self, request: Request) -> d.SavedRequest:
        error, tops, key = request.error, request.tops, request.key
        return self._of(
            d.SavedRequest,
            request,
            sampling=_place(self._sampling_places, self._samplings, request.sampling),
            siblings=self._family_places[id(request.siblings)] if request.siblings else -1,
            key=_place(self._key_places, self._keys, key) if key is not None else -1,
            tops=self._of(d.SavedTopRecord, tops) if tops is not None else None,
            prompt_logprobs=self._prompt_logprobs(request.prompt_logprobs),
            phases=self._of(d.SavedPhases, request.phases),
            error=_error(error) if error is not None else None,
        )

    def _prompt_logprobs(self, record: PromptLogprobs | None) -> d.SavedPromptLogprobs | None:
        if record is None:
            return None
        return self._of(d.SavedPromptLogprobs, record, _tops=self._of(d.SavedTopRecord, record._tops))

    def _waits(self) -> d.SavedWaits:
        waits = self._machine.cache.waits
        by_event = [
            (event, [self._request(request) for request in waiting.values()])
            for event, waiting in waits._by_event.items()
        ]
        return self._of(d.SavedWaits, waits, by_event=by_event)

    def _admission(self) -> d.SavedAdmission:
        admission = self._machine.admission
        queue = admission.waiting
        fresh = {
            tenant: [(key, order, self._request(request)) for key, order, request in entries]
            for tenant, entries in queue._fresh.items()
        }
        waiting = self._of(
            d.SavedQueue,
            queue,
            returned=[(order, self._request(request)) for order, request in queue._returned],
            fresh=fresh,
            parked=[self._request(request) for request in queue._parked.values()],
            departures=list(queue._departures),
        )
        return self._of(d.SavedAdmission, admission, waiting=waiting, rows=self._of(d.SavedRows, admission.rows))

    def _streams(self) -> d.SavedStreams:
        streams = self._machine.streams
        rows = {client: [self._stream_rows(each) for each in parts] for client, parts in streams._rows.items()}
        return self._of(d.SavedStreams, streams, rows=rows)

    def _stream_rows(self, rows: StreamRows) -> d.SavedStreamRows:
        tops = self._of(d.SavedTops, rows.tops) if rows.tops is not None else None
        return self._of(d.SavedStreamRows, rows, tops=tops)

    def _sessions(self) -> d.SavedSessions:
        sessions = self._machine.sessions
        answers = {
            client: {rid: _frames(reply) for rid, reply in replies.items()}
            for client, replies in sessions._answers.items()
        }
        return self._of(d.SavedSessions, sessions, answers=answers)

    # ------------------------------------------------------------------------------------------------------- workers

    def _reports(self) -> d.SavedReports:
        reports = self._machine._reports
        workers = [_place(self._worker_places, self._workers, worker) for worker in reports.workers.values()]
        teams = [self._team(team) for team in reports._teams.values()]
        processes = [self._worker(worker) for worker in self._workers]
        return self._of(d.SavedReports, reports, processes=processes, workers=workers, teams=teams)

    def _team(self, team: Team) -> d.SavedTeam:
        return self._of(
            d.SavedTeam,
            team,
            members={rank: _place(self._worker_places, self._workers, w) for rank, w in team.members.items()},
            ready={rank: _frames(ready) for rank, ready in team.ready.items()},
            results=[[_frames(result) for result in results] for results in team.results],
        )

    def _worker(self, worker: Worker) -> d.SavedWorker:
        group = worker.group
        place = next(i for i, other in enumerate(self._groups) if other is group) if group is not None else -1
        return self._of(d.SavedWorker, worker, group=place)


def _place(places: dict[int, int], table: list[Any], value: Any) -> int:
    """Return the index of an object in a table, adding it if needed."""
    place = places.get(id(value))
    if place is None:
        place = places[id(value)] = len(table)
        table.append(value)
    return place


def _frames(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in codec.encode(message)]


def _error(error: KvforgeError) -> d.SavedError:
    return d.SavedError(code=error.code, message=error.message, fields=error.fields)


def _books(tier: HostTier) -> dict[str, Any]:
    """Return the free blocks of a tier, and the entries that no copy uses with the stamps of their last use."""
    own = {owner: (list(nodes), list(nodes.values())) for owner, nodes in tier._lru.by_owner.items()}
    return {"_free": list(tier._free), "lru": [], "own": own, "stamp": tier._lru.stamp}
