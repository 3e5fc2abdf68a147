"""`kvforge wipe TENANT`: remove what the cache has of a tenant, on all tiers."""

from __future__ import annotations

import argparse
import time
from typing import Any

from kvforge.client.blocking import Client
from kvforge.protocol.errors import DeadlineExceeded
from kvforge.protocol.messages import TenantWiped

from . import parsing, printing

POLL_S = 0.1


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    wipe = parsing.add(
        subparsers, "wipe", run, "Remove a tenant's idle sequences and cached blocks, on the device, hosts and disks."
    )
    wipe.add_argument("tenant", metavar="TENANT")
    wipe.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait up to this long until nothing of it is in use, and its bytes are overwritten",
    )


def run(options: argparse.Namespace) -> int:
    """Wipe the tenant.

    Raises:
        DeadlineExceeded: Blocks are left after the wait.
    """
    with parsing.open_client(options) as kv:
        left = wipe(kv, options.tenant, options.wait)
    if options.wait and (left.held_blocks or left.pending_blocks):
        problem = f"{left.held_blocks} blocks in use and {left.pending_blocks} not overwritten"
        raise DeadlineExceeded(f"tenant {options.tenant!r} has {problem} after {options.wait:g} s: wipe it again")
    return 0


def wipe(kv: Client, tenant: str, wait_s: float) -> TenantWiped:
    """Wipe a tenant until nothing is left, for up to `wait_s`, and report what was removed.

    Returns:
        The last reply.
    """
    deadline = time.monotonic() + wait_s
    while True:
        reply = kv.wipe_tenant(tenant)
        removed = (reply.sequences, reply.device_blocks, reply.host_blocks, reply.disk_blocks)
        if any(removed) or not wait_s:
            printing.print_note(
                "removed {} sequences, and blocks: {} on devices, {} in host memory, {} on disks".format(*removed)
            )
        if not (reply.held_blocks or reply.pending_blocks):
            return reply
        if time.monotonic() >= deadline:
            printing.print_note(
                f"left: {reply.held_blocks} blocks in use by requests or holders, "
                f"{reply.pending_blocks} not overwritten yet"
            )
            return reply
        time.sleep(POLL_S)
