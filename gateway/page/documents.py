"""The page's documents. Each is bounded, whatever the size of the service."""

from __future__ import annotations

from typing import Any

import msgspec

from kvforge.protocol.messages import Health, RequestList, RequestRow, Stats, TenantStats

from .disconnected_workers import DisconnectedWorker

ROWS_MAX = 100
TENANTS_MAX = 64
WORKERS_MAX = 64
TEXT_MAX = 300
USUAL_CACHE = "K and V"  # not shown
WAITING = ("pending", "preempted")
ORDER = {"preempted": 0, "pending": 0, "running": 1}
ENDED = 2
SHARES = (50, 40, 10)  # rows for waiting, running and ended requests; unused rows go to the others
POOL = (
    "worker", "base", "blocks", "free", "cached", "referenced", "quarantined", "referenced_peak", "block_size",
    "bytes_per_block", "kv_dtype", "live_tokens", "sequences", "state_blocks", "checkpoint_blocks", "window_blocks",
    "host_blocks", "host_cached", "host_saved_total", "host_loaded_total", "host_missed_tags_total",
    "host_missed_checksums_total", "host_swapped_total", "host_swapped_blocks_total", "host_swap_saved_us_total",
)  # fmt: skip
Document = dict[str, Any]


def pools(stats: Stats) -> list[Document]:
    """Return the pools, ordered by the names of their workers."""
    ordered = sorted(stats.pools, key=lambda pool: by_name(pool.worker))[:WORKERS_MAX]
    return [{name: getattr(pool, name) for name in POOL} | {"disk": msgspec.to_builtins(pool.disk)} for pool in ordered]


def by_name(name: str) -> tuple[int, str]:
    """Return a sort key that puts worker-10 after worker-9."""
    return len(name), name


def tenants(stats: Stats) -> Document:
    """Return the tenants with the most blocks, in the order of their numbers so that rows keep their places."""
    most = sorted(enumerate(stats.tenants, 1), key=lambda item: (-item[1].blocks, -item[1].pending, item[0]))
    return {
        "total": len(most),
        "rows": [_tenant(number, row) for number, row in sorted(most[:TENANTS_MAX], key=_number)],
    }


def _number(item: tuple[int, TenantStats]) -> int:
    return item[0]


def _tenant(number: int, row: TenantStats) -> Document:
    queried, hit = row.prefix_queried_tokens_total, row.prefix_hit_tokens_total
    names = (
        *("tenant", "blocks", "bytes", "floor", "ceiling", "weight", "pending"),
        *("host_blocks", "host_floor", "host_ceiling", "disk_blocks", "disk_floor", "disk_ceiling"),
    )
    hits = round(hit / queried, 3) if queried else None
    return {"number": number, **{name: getattr(row, name) for name in names}, "hits": hits}


def workers(health: Health, absent: tuple[DisconnectedWorker, ...] = ()) -> Document:
    """Return the connected workers and the lost ones."""
    rows = [
        {
            "name": worker.title,
            "pid": worker.pid,
            "state": worker.state,
            "phase": worker.phase,
            "progress": round(worker.progress, 2),
            "busy_s": round(worker.since_step_us / 1e6) if worker.since_step_us >= 1_000_000 else 0,
            "memory": worker.device_bytes,
            "drafts": [worker.drafts, worker.drafted_total, worker.accepted_total] if worker.drafts else None,
            "kernels": {what: kernel[:TEXT_MAX] for what, kernel in worker.kernels.items()},
        }
        for worker in sorted(health.workers, key=lambda worker: by_name(worker.title))[:WORKERS_MAX]
    ]
    lost = [{"name": one.name, "state": one.state, "how": one.how[:TEXT_MAX]} for one in absent[:WORKERS_MAX]]
    return {"rows": rows, "absent": lost}


def about(stats: Stats, health: Health, started_ms: int) -> Document:
    """Return the facts that rarely change."""
    model = health.model
    shown: Document | None = None
    if model is not None:
        shown = {
            "name": model.name,
            "dtype": model.weight_dtype or model.dtype,
            "cache": "" if model.kv_layout == USUAL_CACHE else model.kv_layout,
            "context": model.context_tokens_max,
        }
    return {"boot": stats.boot, "started_ms": started_ms, "model": shown, "draining": health.draining}


def totals(stats: Stats) -> Document:
    """Return the counts since the start."""
    requests = stats.requests
    names = ("accepted", "finished", "failed", "cancelled", "expired", "refused", "preemptions")
    tokens = ("prompt_tokens", "cached_tokens", "generated_tokens", "computed_tokens", "recomputed_tokens")
    return {name: getattr(requests, f"{name}_total") for name in (*names, *tokens)} | {"clients": stats.clients}


def requests(listed: RequestList, came_ms: dict[int, int]) -> Document:
    """Return waiting requests (oldest first), running ones, and ended ones (newest first).

    Args:
        listed: The coordinator's list.
        came_ms: When each was submitted, by request id, in ms since 1970.
    """
    groups: tuple[list[RequestRow], ...] = ([], [], [])
    for row in sorted(listed.requests, key=_place):
        groups[ORDER.get(row.state, ENDED)].append(row)
    chosen = [row for group, share in zip(groups, SHARES, strict=True) for row in group[:share]]
    others = [row for group, share in zip(groups, SHARES, strict=True) for row in group[share:]]
    shown = sorted(chosen + others[: ROWS_MAX - len(chosen)], key=_place)
    return {"total": listed.total, "rows": [_row(row, came_ms[row.request_id]) for row in shown]}


def _place(row: RequestRow) -> tuple[int, int]:
    place = ORDER.get(row.state, ENDED)
    return place, -row.request_id if place == ENDED else row.request_id


def _row(row: RequestRow, came_ms: int) -> list[Any]:
    ended_ms = came_ms + row.ended_us // 1000 if row.ended_us >= 0 else None
    first_ms = round(row.first_token_us / 1e3, 1) if row.first_token_us >= 0 else None
    tokens = (row.prompt_tokens, row.generated_tokens, row.max_tokens)
    return [row.request_id, row.state, row.reason, row.tenant, row.worker, *tokens, came_ms, first_ms, ended_ms]
