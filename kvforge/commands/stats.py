"""`kvforge stats`: the cache and the requests in numbers."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.protocol.messages import RequestStats, Stats

from . import parsing, printing

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
            (tenant.tenant, tenant.weight, tenant.pending, tenant.blocks, hit_rate([tenant]))
            for tenant in stats.tenants
        ]
        printing.print_table(("tenant", "weight", "pending", "blocks", "prefix hits"), tenants)
    print(f"\nup {stats.uptime_us / 1e6:.0f} s, {stats.clients} clients, {stats.sequences} sequences")


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
