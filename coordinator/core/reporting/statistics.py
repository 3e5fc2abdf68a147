"""Statistics: a snapshot with all numbers from the same instant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvforge.protocol.layout import BLOCK_KINDS
from kvforge.protocol.messages import PoolStats, RequestStats, Stats, TenantStats
from kvforge.protocol.meters import NAME_LENGTH_MAX, OTHERS, POOL_COUNTS, TENANT_ROWS, ServiceInfo, WorkerInfo

from ..cache.blocks import CHECKPOINT, KV, RECURRENT, REFERENCED, WINDOW
from ..cache.disk_tier import DiskTier
from ..cache.groups import Group
from ..cache.host_tier import HostTier
from ..cache.host_yield import permille
from ..cache.kv_cache_manager import KVCacheManager
from ..requests.request import CANCELLED, EXPIRED, FAILED, FINISHED, PENDING, PREEMPTED, RUNNING
from ..requests.table import RequestTable
from ..scheduling.admission import Admission
from ..scheduling.queue import WaitingQueue

NO_USAGE = np.zeros(TENANT_ROWS + 1, np.int64)
NO_HOST_ROW = (0,) * sum(name.startswith("host_") for name in POOL_COUNTS)
NO_DISK_ROW = (0,) * sum(name.startswith("disk_") for name in POOL_COUNTS)


def live_tokens(cache: KVCacheManager, group: Group, tenant: int = 0) -> int:
    """Return how many tokens the pool's held blocks contain. Shared blocks count once.

    Every held block is full except the last ones of sequences, so only these are examined.

    Args:
        cache: The cache.
        group: The group with the pool.
        tenant: Count only blocks charged to this tenant; 0 counts all.
    """
    s, pool, blocks, size = cache.sequences, group.pool, cache.blocks, cache.blocks.block_size
    owner, state = (column[pool.base : pool.base + pool.count] for column in (blocks.owner, blocks.state))
    referenced = pool.referenced
    if tenant or pool.mixed:
        counted_blocks = (state == REFERENCED) & (blocks.kind[pool.base : pool.base + pool.count] == KV)
        referenced = int(np.count_nonzero(counted_blocks & (owner == tenant) if tenant else counted_blocks))
    slots = np.flatnonzero(s.pool == group.number)
    first = s.length[slots] // size
    count = s.used[slots] - first
    rows = np.repeat(slots, count)
    columns = np.arange(rows.size) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    filled = np.maximum(s.length[rows] - columns * size, 0)
    last, which, holders = np.unique(s.table[rows, columns], return_inverse=True, return_counts=True)
    most = np.zeros(last.size, np.int64)
    np.maximum.at(most, which, filled)
    named = [block for block in blocks.external if pool.base <= block < pool.base + pool.count]
    for block in named:
        place = int(np.searchsorted(last, block))
        if place < last.size and last[place] == block:
            holders[place] += len(blocks.external[block])
            if blocks.indexed[block]:  # an indexed block is full
                most[place] = size
    most[blocks.refcount[last] > holders] = size  # another holder has it as a full block
    counted = (blocks.owner[last] == tenant) if tenant else np.ones(last.size, np.bool_)
    # The content of unindexed blocks with only named holders is unknown.
    unknown = [b for b in named if not blocks.indexed[b] and blocks.refcount[b] == len(blocks.external[b])]
    empty = sum(not tenant or int(blocks.owner[block]) == tenant for block in unknown)
    return (referenced - empty) * size - int((size - most[counted]).sum())


def pool_stats(cache: KVCacheManager, group: Group) -> PoolStats:
    """Return the statistics of one pool."""
    pool = group.pool
    states = cache.blocks.state[pool.base : pool.base + pool.count]
    assert int(np.count_nonzero(states == REFERENCED)) == pool.referenced
    kinds = _kinds(cache, group)
    tier = group.host.tier if group.host is not None else None
    return PoolStats(
        worker=group.name,
        state="ready",
        blocks=pool.count,
        free=pool.free,
        cached=pool.cached,
        referenced=pool.referenced,
        quarantined=pool.quarantined,
        referenced_peak=pool.referenced_peak,
        block_size=cache.blocks.block_size,
        bytes_per_block=group.bytes_per_block,
        kv_dtype=group.kv_dtype,
        allocated_total=pool.allocated_total,
        freed_total=pool.freed_total,
        live_tokens=live_tokens(cache, group),
        sequences=int(np.count_nonzero(cache.sequences.pool == group.number)),
        steps=group.steps_total,
        base=pool.base,
        state_blocks=kinds[RECURRENT],
        checkpoint_blocks=kinds[CHECKPOINT],
        window_blocks=kinds[WINDOW],
        **_host_stats(tier),
        disk=group.disk.stats() if group.disk is not None else None,
        device_idle_us_total=group.pauses.total_us,
    )


def _host_stats(tier: HostTier | None) -> dict[str, int]:
    """Return the fields of PoolStats about a worker's host file; none without one."""
    if tier is None:
        return {}
    return {
        "host_blocks": tier.total,
        "host_free": tier.free,
        "host_cached": tier.cached,
        "host_quarantined": tier.quarantined,
        "host_saved_total": tier.saved_total,
        "host_loaded_total": tier.loaded_total,
        "host_evicted_total": tier.evicted_total,
        "host_unsaved_total": tier.unsaved_total,
        "host_skipped_total": tier.yields.skipped_total,
        "host_recomputed_total": tier.yields.recomputed_total,
        "host_wanted_permille": permille(tier.yields.overall),
        "host_swapped_total": tier.swapped_total,
        "host_unswapped_total": tier.unswapped_total,
        "host_swapped_blocks_total": tier.swapped_blocks_total,
        "host_swap_saved_us_total": tier.swap_saved_us_total,
        "host_returns_total": tier.returns_total,
        "host_returns_used_total": tier.returns_used_total,
        "host_returns_wasted_total": tier.returns_wasted_total,
        "host_missed_tags_total": tier.missed_tags_total,
        "host_missed_checksums_total": tier.missed_checksums_total,
    }


def _kinds(cache: KVCacheManager, group: Group) -> list[int]:
    """Return the blocks of each kind in a pool; zeros if it has a single kind."""
    pool = group.pool
    if not pool.mixed:
        return [0] * len(BLOCK_KINDS)
    kinds = cache.blocks.kind[pool.base : pool.base + pool.count]
    # `bincount` makes numbers of 64 bits of every block first: 327 us for 250,000 blocks, and this takes 45.
    others = [int(np.count_nonzero(kinds == np.int8(kind))) for kind in range(1, len(BLOCK_KINDS))]
    return [pool.count - sum(others), *others]


def request_stats(requests: RequestTable, running: int) -> RequestStats:
    """Return the request counts, now and since the first start. `running` is the number of running requests."""
    return RequestStats(
        pending=len(requests.live) - running,
        running=running,
        accepted_total=requests.accepted_total,
        **{f"{state}_total": count for state, count in requests.ended_total.items()},
        refused_total=requests.refused_total,
        prompt_tokens_total=requests.prompt_tokens_total,
        cached_tokens_total=requests.cached_tokens_total,
        generated_tokens_total=requests.generated_tokens_total,
        computed_tokens_total=requests.computed_tokens_total,
        recomputed_tokens_total=requests.recomputed_tokens_total,
        preemptions_total=requests.preemptions_total,
        streams_paused_total=requests.streams_paused_total,
    )


def tenant_stats(cache: KVCacheManager, waiting: WaitingQueue) -> tuple[TenantStats, ...]:
    """Return the statistics of every known tenant."""
    tenants, count = cache.tenants, len(cache.tenants.names)
    usage, used_bytes = np.zeros(count, np.int64), np.zeros(count, np.int64)
    byte_seconds = tenants.past_byte_seconds[:count].copy()
    for group in cache.groups.values():
        usage += group.pool.usage[:count]
        used_bytes += group.pool.usage[:count] * group.bytes_per_block
        byte_seconds += group.pool.block_us_each()[:count] * (group.bytes_per_block / 1e6)
    pending = waiting.by_tenant()
    disks = [group.disk for group in cache.groups.values() if group.disk is not None]
    return tuple(
        TenantStats(
            tenant=tenants.names[index],
            blocks=int(usage[index]),
            prefix_queried_tokens_total=int(tenants.prefix_queried_tokens[index]),
            prefix_hit_tokens_total=int(tenants.prefix_hit_tokens[index]),
            bytes=int(used_bytes[index]),
            byte_seconds=float(byte_seconds[index]),
            floor=int(tenants.floor[index]),
            ceiling=tenants.ceiling_blocks(index),
            weight=float(tenants.weight[index]),
            pending=pending[index],
            host_blocks=sum(tier.usage.get(index, 0) for tier in cache.host_tiers.tiers.values()),
            host_floor=int(tenants.host_floor[index]),
            host_ceiling=tenants.host_ceiling_blocks(index),
            disk_blocks=sum(disk.tier.usage.get(index, 0) for disk in disks),
            disk_floor=int(tenants.disk_floor[index]),
            disk_ceiling=tenants.disk_ceiling_blocks(index),
        )
        for index in range(1, count)
    )


def stats(
    cache: KVCacheManager,
    requests: RequestTable,
    admission: Admission,
    rid: int,
    boot: str,
    uptime_us: int,
    clients: int,
) -> Stats:
    """Return the whole snapshot."""
    return Stats(
        rid=rid,
        boot=boot,
        uptime_us=uptime_us,
        clients=clients,
        sequences=len(cache.sequences),
        requests=request_stats(requests, admission.running_total),
        pools=tuple(pool_stats(cache, cache.groups[number]) for number in sorted(cache.groups)),
        tenants=tenant_stats(cache, admission.waiting),
    )


def stats_of(
    tenant: str, cache: KVCacheManager, requests: RequestTable, admission: Admission, rid: int, boot: str
) -> Stats:
    """Return the statistics that one tenant may see: its own requests, without pools or other tenants.

    Totals cover the requests that are still known. Computed tokens are not counted by tenant.
    """
    known = [r for table in (requests.live, requests.finished) for r in table.values() if r.tenant_name == tenant]
    states = Counter(request.state for request in known)
    s, index = cache.sequences, cache.tenants.peek(tenant)
    return Stats(
        rid=rid,
        boot=boot,
        uptime_us=0,
        clients=0,
        sequences=int(np.count_nonzero((s.id != 0) & (s.tenant == index))) if index else 0,
        requests=RequestStats(
            pending=states[PENDING] + states[PREEMPTED],
            running=states[RUNNING],
            accepted_total=len(known),
            finished_total=states[FINISHED],
            failed_total=states[FAILED],
            cancelled_total=states[CANCELLED],
            expired_total=states[EXPIRED],
            refused_total=0,
            prompt_tokens_total=sum(request.prompt_tokens for request in known),
            cached_tokens_total=sum(request.cached_tokens for request in known),
            generated_tokens_total=sum(admission.generated(request) for request in known),
            computed_tokens_total=0,
            preemptions_total=sum(request.preemptions for request in known),
        ),
        pools=(),
        tenants=tuple(row for row in tenant_stats(cache, admission.waiting) if row.tenant == tenant),
    )


def pool_row(cache: KVCacheManager, group: Group) -> list[int]:
    """Return the counts of a pool in the order of protocol.meters.POOL_COUNTS."""
    pool, kinds = group.pool, _kinds(cache, group)
    return [
        pool.count,
        pool.free,
        pool.cached,
        pool.referenced,
        pool.quarantined,
        group.running,
        len(group.sent),
        group.steps_total,
        pool.allocated_total,
        pool.freed_total,
        kinds[RECURRENT],
        kinds[CHECKPOINT],
        kinds[WINDOW],
        *_host_row(group.host.tier if group.host is not None else None, cache.blocks.block_size),
        *_disk_row(group.host.disk.tier if group.host is not None and group.host.disk is not None else None),
        group.pauses.total_us,
    ]


def _host_row(tier: HostTier | None, block_size: int) -> tuple[int, ...]:
    """Return the counts of a worker's host file, from `host_blocks` on."""
    if tier is None:
        return NO_HOST_ROW
    return (
        tier.total,
        tier.free,
        tier.cached,
        tier.quarantined,
        tier.saved_total,
        tier.loaded_total,
        tier.evicted_total,
        tier.unsaved_total,
        tier.missed_tags_total,
        tier.missed_checksums_total,
        tier.loaded_total * block_size,
        tier.swapped_total,
        tier.unswapped_total,
        tier.swapped_blocks_total,
        tier.swap_saved_us_total,
        tier.yields.skipped_total,
        tier.yields.recomputed_total,
        tier.returns_total,
        tier.returns_used_total,
        tier.returns_wasted_total,
    )


def _disk_row(tier: DiskTier | None) -> tuple[int, ...]:
    """Return the counts of a worker's disk tier, from `disk_blocks` on."""
    if tier is None:
        return NO_DISK_ROW
    return (
        tier.total,
        tier.free,
        tier.cached,
        tier.quarantined,
        tier.recovered_total,
        tier.saved_total,
        tier.loaded_total,
        tier.evicted_total,
        tier.unsaved_total,
        tier.failed_total,
        tier.late_total,
        tier.declined_total,
        tier.missed_tags_total,
        tier.missed_checksums_total,
    )


def tenant_blocks(cache: KVCacheManager) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the blocks charged to each tenant, for each of `TENANT_TIERS`.

    Each is [rows of protocol.meters] int64, fewer if fewer tenants can exist, and none if no worker has such blocks.
    """
    usages = [group.pool.usage for group in cache.groups.values()]
    device = NO_USAGE
    if usages:
        device = _rows(cache, usages[0] if len(usages) == 1 else np.add.reduce(usages))
    if not cache.host_tiers.tiers:
        return device, NO_USAGE, NO_USAGE
    disks = [group.disk.tier for group in cache.groups.values() if group.disk is not None]
    return device, _tier_usage(cache, cache.host_tiers.tiers.values()), _tier_usage(cache, disks)


def _tier_usage(cache: KVCacheManager, tiers: Iterable[HostTier]) -> npt.NDArray[np.int64]:
    usage = np.zeros(cache.tenants.floor.size, np.int64)
    for tier in tiers:
        for tenant, blocks in tier.usage.items():
            usage[tenant] += blocks
    return _rows(cache, usage)


def _rows(cache: KVCacheManager, usage: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the usage of tenants with rows of their own, behind that of all others."""
    if usage.size <= TENANT_ROWS + 1 or len(cache.tenants.names) <= TENANT_ROWS + 1:
        return usage[: TENANT_ROWS + 1]
    rows = usage[: TENANT_ROWS + 1].copy()
    rows[OTHERS] += int(np.add.reduce(usage[TENANT_ROWS + 1 :]))
    return rows


def facts(cache: KVCacheManager, workers: Iterable[WorkerInfo]) -> ServiceInfo:
    """Return the facts that monitors need besides numbers."""
    model = cache.model.name[:NAME_LENGTH_MAX] if cache.model is not None else ""
    return ServiceInfo(model=model, tenants=tuple(cache.tenants.names[1 : TENANT_ROWS + 1]), workers=tuple(workers))
