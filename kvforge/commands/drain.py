"""kvforge drain: no new requests; what runs goes on."""

from __future__ import annotations

import argparse
from typing import Any

from . import common


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    common.add(subparsers, "drain", run, "Stop admission; what runs goes on.")


def run(options: argparse.Namespace) -> int:
    """Drains."""
    with common.open_client(options) as kv:
        kv.drain()
        left = kv.stats().requests
    common.say(f"draining: no new requests; {left.running} running, {left.pending} waiting")
    return 0
