"""Statistics: one snapshot in which every number was true at the same instant."""

from __future__ import annotations

import numpy as np

from protocol.messages import PoolStats, RequestRow, RequestStats, Stats, TenantStats

from .cache import Cache
from .groups import Group
from .pool import REFERENCED
from .queue import WaitingQueue
from .requests import CANCELLED, EXPIRED, FAILED, FINISHED, RUNNING, Request, RequestTable
from .tenants import NO_CEILING


def live_tokens(cache: Cache, group: Group, tenant: int = 0) -> int:
    """Token slots of the pool's held blocks that hold a live token, each counted once however many share it.

    tenant: only blocks charged to it; 0 means all.
    """
    s, pool, size = cache.sequences, group.pool, cache.limits.block_size
    filled = np.zeros(pool.count, np.int64)
    for slot in np.flatnonzero(s.pool == group.number).tolist():
        ids = s.blocks_of(slot) - pool.base
        in_block = np.clip(s.length[slot] - np.arange(ids.size) * size, 0, size)
        filled[ids] = np.maximum(filled[ids], in_block)
    for block in cache.blocks.external:  # an indexed block is full, whoever holds it
        if pool.base <= block < pool.base + pool.count and cache.blocks.indexed[block]:
            filled[block - pool.base] = size
    if tenant:
        filled[cache.blocks.owner[pool.base : pool.base + pool.count] != tenant] = 0
    return int(filled.sum())


def pool_stats(cache: Cache, group: Group) -> PoolStats:
    """One pool, counted."""
    pool = group.pool
    states = cache.blocks.state[pool.base : pool.base + pool.count]
    assert int(np.count_nonzero(states == REFERENCED)) == pool.referenced
    return PoolStats(
        worker=group.name,
        state="ready",
        blocks=pool.count,
        free=pool.free,
        cached=pool.cached,
        referenced=pool.referenced,
        quarantined=pool.quarantined,
        referenced_peak=pool.referenced_peak,
        block_size=cache.limits.block_size,
        bytes_per_block=group.bytes_per_block,
        kv_dtype=group.kv_dtype,
        allocated_total=pool.allocated_total,
        freed_total=pool.freed_total,
        live_tokens=live_tokens(cache, group),
        sequences=int(np.count_nonzero(cache.sequences.pool == group.number)),
        steps=group.steps_total,
    )


def request_stats(requests: RequestTable) -> RequestStats:
    """Counts of requests, now and since start."""
    running = sum(request.state == RUNNING for request in requests.live.values())
    return RequestStats(
        pending=len(requests.live) - running,
        running=running,
        accepted_total=requests.accepted_total,
        finished_total=requests.ended_total[FINISHED],
        failed_total=requests.ended_total[FAILED],
        cancelled_total=requests.ended_total[CANCELLED],
        expired_total=requests.ended_total[EXPIRED],
        refused_total=requests.refused_total,
        prompt_tokens_total=requests.prompt_tokens_total,
        cached_tokens_total=requests.cached_tokens_total,
        generated_tokens_total=requests.generated_tokens_total,
        computed_tokens_total=requests.computed_tokens_total,
        recomputed_tokens_total=requests.recomputed_tokens_total,
        preemptions_total=requests.preemptions_total,
        streams_paused_total=requests.streams_paused_total,
    )


def tenant_stats(cache: Cache, waiting: WaitingQueue, now_us: int) -> tuple[TenantStats, ...]:
    """Every tenant that was ever seen."""
    tenants, groups = cache.tenants, cache.groups.values()
    usage = sum((group.pool.usage for group in groups), np.zeros(tenants.floor.size, np.int64))
    return tuple(
        TenantStats(
            tenant=name,
            blocks=int(usage[i]),
            prefix_queried_tokens_total=int(tenants.prefix_queried_tokens[i]),
            prefix_hit_tokens_total=int(tenants.prefix_hit_tokens[i]),
            bytes=sum(int(group.pool.usage[i]) * group.bytes_per_block for group in groups),
            byte_seconds=float(tenants.past_byte_seconds[i])
            + sum(group.pool.block_us(i, now_us) * group.bytes_per_block / 1e6 for group in groups),
            floor=int(tenants.floor[i]),
            ceiling=0 if tenants.ceiling[i] == NO_CEILING else int(tenants.ceiling[i]),
            weight=float(tenants.weight[i]),
            pending=waiting.of_tenant(i),
        )
        for i, name in enumerate(tenants.names)
        if i
    )


def stats(
    cache: Cache,
    requests: RequestTable,
    waiting: WaitingQueue,
    rid: int,
    boot: str,
    start_us: int,
    now_us: int,
    clients: int,
) -> Stats:
    """The whole snapshot."""
    return Stats(
        rid=rid,
        boot=boot,
        uptime_us=now_us - start_us,
        clients=clients,
        sequences=len(cache.sequences),
        requests=request_stats(requests),
        pools=tuple(pool_stats(cache, cache.groups[number]) for number in sorted(cache.groups)),
        tenants=tenant_stats(cache, waiting, now_us),
    )


def gauges(cache: Cache, requests: RequestTable, running: int, turns: int, uptime_us: int) -> list[int]:
    """The published gauges, in the order of protocol.layout.GAUGES."""
    blocks = free = cached = quarantined = 0
    steps = cache.past_steps_total
    for group in cache.groups.values():
        pool = group.pool
        blocks += pool.count
        free += pool.free
        cached += pool.cached
        quarantined += pool.quarantined
        steps += group.steps_total
    return [
        turns,
        uptime_us,
        len(cache.sequences),
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
    ]


def row(request: Request, generated: int, tenant: str, now_us: int) -> RequestRow:
    """One line of the list of requests."""
    return RequestRow(
        request_id=request.id,
        state=request.state,
        tenant=tenant,
        prompt_tokens=request.prompt.size,
        max_tokens=request.max_tokens,
        generated_tokens=generated,
        age_us=now_us - request.submitted_us,
        reason=request.reason,
        worker=request.worker,
    )
