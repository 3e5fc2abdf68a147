"""`kvforge cancel ID`: cancel a request."""

from __future__ import annotations

import argparse
from typing import Any

from . import parsing, printing


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "cancel", run, "Cancel a request and free its blocks.")
    parser.add_argument("request_id", type=int, metavar="ID", help="as listed by `kvforge requests`")


def run(options: argparse.Namespace) -> int:
    """Cancel the request."""
    with parsing.open_client(options) as kv:
        kv.cancel(options.request_id)
    printing.print_note(f"cancelled request {options.request_id}")
    return 0
