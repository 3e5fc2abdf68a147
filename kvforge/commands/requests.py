"""`kvforge requests`: list running, waiting and recently ended requests."""

from __future__ import annotations

import argparse
from typing import Any

from . import parsing, printing


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "requests", run, "List requests, the newest first.")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="at most this many [100]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print a table, or one JSON document."""
    with parsing.open_client(options) as kv:
        listed = kv.requests(options.count)
    if options.json:
        printing.print_json(listed)
        return 0
    head = ("id", "state", "reason", "tenant", "worker", "prompt", "generated", "max", "age s")
    rows = [
        (
            row.request_id,
            row.state,
            row.reason,
            row.tenant,
            row.worker,
            row.prompt_tokens,
            row.generated_tokens,
            row.max_tokens,
            round(row.age_us / 1e6, 1),
        )
        for row in listed.requests
    ]
    if rows:
        printing.print_table(head, rows)
    if listed.total > len(rows):
        printing.print_note(f"{listed.total - len(rows)} more; raise --count to show them")
    elif not rows:
        printing.print_note("no requests")
    return 0
