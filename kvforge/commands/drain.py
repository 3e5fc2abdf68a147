"""kvforge drain: no new requests; what runs goes on, and is waited for if that is wanted."""

from __future__ import annotations

import argparse
import time
from typing import Any

from kvforge.client.blocking import Client
from kvforge.protocol.errors import DeadlineExceeded

from . import parsing, printing

POLL_S = 0.1


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    drain = parsing.add(subparsers, "drain", run, "Stop admission; what runs goes on.")
    drain.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for the last request to end"
    )
    drain.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="what has not ended by then is handed back to its client"
    )


def run(options: argparse.Namespace) -> int:
    """Drains. Raises DeadlineExceeded where something still runs after the wait."""
    with parsing.open_client(options) as kv:
        kv.drain(options.deadline)
        left = wait(kv, options.wait)
    if left and options.wait:
        until = "" if options.deadline is None else f", at most until {options.deadline:g} s after the command"
        raise DeadlineExceeded(f"{left} requests still run after {options.wait:g} s; they go on{until}")
    return 0


def wait(kv: Client, wait_s: float) -> int:
    """Waits up to `wait_s` for the last request to end, telling whenever fewer are left. Returns how many are."""
    deadline, told = time.monotonic() + wait_s, -1
    while True:
        requests = kv.stats().requests
        left = requests.pending + requests.running
        if left != told:
            printing.say(f"draining: no new requests; {requests.running} running, {requests.pending} waiting")
        told = left
        if left == 0 or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)
