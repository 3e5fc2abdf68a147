"""`kvforge stats`: the cache and the requests in numbers."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.protocol.messages import DiskStats, RequestStats, Stats

from . import parsing, printing

HOST_STATES = ("blocks", "free", "cached", "quarantined")
HOST_HEAD = (
    "host tier",
    *HOST_STATES,
    "saved",
    "loaded",
    "evicted",
    "unsaved",
    "skipped",
    "recomputed",
    "missed",
    "swapped",
    "s saved",
    "back early, used",
)
DISK_HEAD = (
    "disk tier",
    *HOST_STATES,
    "recovered",
    "saved",
    "loaded",
    "evicted",
    "unsaved",
    "missed",
    "failed",
    "late",
    "declined",
)
HEAD = ("pool", "state", "blocks", "free", "cached", "used", "peak", "quarantined", "freed", "tokens", "size", "kv")


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "stats", run, "Show the cache and the requests in numbers.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print tables, or one JSON document."""
    with parsing.open_client(options) as kv:
        stats = kv.stats()
    if options.json:
        printing.print_json(stats)
    else:
        show(stats)
    return 0


def show(stats: Stats) -> None:
    """Print tables for people: pools (in blocks), requests, tenants."""
    rows: list[tuple[object, ...]] = [
        (
            pool.worker,
            pool.state,
            pool.blocks,
            pool.free,
            pool.cached,
            pool.referenced,
            pool.referenced_peak,
            pool.quarantined,
            pool.freed_total,
            pool.live_tokens,
            printing.size(pool.blocks * pool.bytes_per_block),
            pool.kv_dtype,
        )
        for pool in stats.pools
    ]
    kinds = [(pool.state_blocks, pool.checkpoint_blocks, pool.window_blocks) for pool in stats.pools]
    head: tuple[str, ...] = HEAD
    if any(map(any, kinds)):
        head = (*HEAD, "states", "checkpoints", "windows")
        rows = [(*row, *more) for row, more in zip(rows, kinds, strict=True)]
    printing.print_table(head, rows) if rows else print("no pools: no worker is ready")
    hosts = [
        (
            pool.worker,
            pool.host_blocks,
            pool.host_free,
            pool.host_cached,
            pool.host_quarantined,
            pool.host_saved_total,
            pool.host_loaded_total,
            pool.host_evicted_total,
            pool.host_unsaved_total,
            pool.host_skipped_total,
            pool.host_recomputed_total,
            pool.host_missed_tags_total + pool.host_missed_checksums_total,
            f"{pool.host_swapped_total} of {pool.host_swapped_total + pool.host_unswapped_total}",
            f"{pool.host_swap_saved_us_total / 1e6:.1f}",
            f"{pool.host_returns_used_total} of {pool.host_returns_total}",
        )
        for pool in stats.pools
        if pool.host_blocks
    ]
    if hosts:
        print()
        printing.print_table(HOST_HEAD, hosts)
    disks = [(pool.worker, pool.disk) for pool in stats.pools if pool.disk is not None]
    if disks:
        print()
        printing.print_table(DISK_HEAD, [_disk_row(worker, disk) for worker, disk in disks])
    print()
    requests = stats.requests
    names = ("pending", "running", "accepted", "finished", "failed", "cancelled", "expired", "refused")
    counts = [getattr(requests, name, None) for name in names[:2]]
    counts += [getattr(requests, f"{name}_total") for name in names[2:]]
    printing.print_table(("requests", *names), [("", *counts)])
    print()
    printing.print_table(
        ("tokens", "prompt", "cached", "computed", "recomputed", "generated"),
        [
            (
                "",
                requests.prompt_tokens_total,
                requests.cached_tokens_total,
                requests.computed_tokens_total,
                requests.recomputed_tokens_total,
                requests.generated_tokens_total,
            )
        ],
    )
    print(f"\n{preempted(requests)}")
    if stats.tenants:
        print()
        tenants = [
            (
                *(tenant.tenant, tenant.weight, tenant.pending),
                bounded(tenant.blocks, tenant.floor, tenant.ceiling),
                bounded(tenant.host_blocks, tenant.host_floor, tenant.host_ceiling),
                bounded(tenant.disk_blocks, tenant.disk_floor, tenant.disk_ceiling),
                hit_rate([tenant]),
            )
            for tenant in stats.tenants
        ]
        columns = ("tenant", "weight", "pending", "blocks", "host blocks", "disk blocks", "prefix hits")
        printing.print_table(columns, tenants)
    print(f"\nup {stats.uptime_us / 1e6:.0f} s, {stats.clients} clients, {stats.sequences} sequences")


def bounded(blocks: int, floor: int, ceiling: int) -> str:
    """Return a number of blocks with the floor and the ceiling of its quota, if there are any."""
    return f"{blocks} ({floor} to {ceiling or 'any'})" if floor or ceiling else str(blocks)


def preempted(requests: RequestStats) -> str:
    """Return the number of preemptions and the cost of recomputing their tokens."""
    share = 100 * requests.recomputed_tokens_total / max(1, requests.computed_tokens_total)
    paused = requests.streams_paused_total
    return (
        f"{requests.preemptions_total} preemptions; recomputed {share:.1f} % of computed tokens; "
        f"{paused} streams paused for slow readers"
    )


def hit_rate(tenants: Any) -> str:
    """Return the prefix hits over the queried prefix tokens."""
    hits = sum(tenant.prefix_hit_tokens_total for tenant in tenants)
    queried = sum(tenant.prefix_queried_tokens_total for tenant in tenants)
    return f"{hits} of {queried} tokens" + (f" ({100 * hits / queried:.0f} %)" if queried else "")


def _disk_row(worker: str, disk: DiskStats) -> tuple[object, ...]:
    """Return the columns of DISK_HEAD."""
    return (
        worker,
        disk.blocks,
        disk.free,
        disk.cached,
        disk.quarantined,
        disk.recovered_total,
        disk.saved_total,
        disk.loaded_total,
        disk.evicted_total,
        disk.unsaved_total,
        disk.missed_tags_total + disk.missed_checksums_total,
        disk.failed_total,
        disk.late_total,
        disk.declined_total,
    )
