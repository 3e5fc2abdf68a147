"""`kvforge drain`: stop admission, and optionally wait for running requests."""

from __future__ import annotations

import argparse
import time
from typing import Any

from kvforge.client.blocking import Client
from kvforge.protocol.errors import DeadlineExceeded

from . import parsing, printing

POLL_S = 0.1


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    drain = parsing.add(subparsers, "drain", run, "Stop admission; running requests go on.")
    drain.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait up to this long for the last request to end"
    )
    drain.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="hand requests that have not ended by then back to their clients",
    )


def run(options: argparse.Namespace) -> int:
    """Drain the coordinator.

    Raises:
        DeadlineExceeded: Requests still run after the wait.
    """
    with parsing.open_client(options) as kv:
        kv.drain(options.deadline)
        left = wait(kv, options.wait)
    if left and options.wait:
        until = "" if options.deadline is None else f", at most until {options.deadline:g} s after the command"
        raise DeadlineExceeded(f"{left} requests still run after {options.wait:g} s; they go on{until}")
    return 0


def wait(kv: Client, wait_s: float) -> int:
    """Wait up to `wait_s` for the last request to end, and report each change.

    Returns:
        The number of requests left.
    """
    deadline, printed = time.monotonic() + wait_s, -1
    while True:
        requests = kv.stats().requests
        left = requests.pending + requests.running
        if left != printed:
            printing.print_note(f"draining: no new requests; {requests.running} running, {requests.pending} waiting")
        printed = left
        if left == 0 or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)
