"""kvforge cancel ID: ends a request."""

from __future__ import annotations

import argparse
from typing import Any

from . import parsing, printing


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = parsing.add(subparsers, "cancel", run, "Cancel a request; its blocks are free again.")
    parser.add_argument("request_id", type=int, metavar="ID", help="as `kvforge requests` shows it")


def run(options: argparse.Namespace) -> int:
    """Cancels."""
    with parsing.open_client(options) as kv:
        kv.cancel(options.request_id)
    printing.say(f"cancelled request {options.request_id}")
    return 0
