"""`kvforge status`: whether a request would be served now."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.protocol.errors import DeadlineExceeded
from kvforge.protocol.exits import FAILED, OK
from kvforge.protocol.messages import Health

from . import parsing, printing
from .progress import Progress


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "status", run, "Show whether a request would be served now: exit status 0 or 1.")
    parser.add_argument("--wait", type=parsing.seconds, metavar="SECONDS", help="wait up to this long until it would")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the state of the coordinator and its workers."""
    with parsing.open_client(options) as kv:
        if options.wait is not None:
            progress = Progress()
            try:
                kv.wait_ready(options.wait, progress=progress.health)
            except DeadlineExceeded:
                printing.print_note(f"not ready after {options.wait:g} s")
            finally:
                progress.close()
        health = kv.health()
    if options.json:
        printing.print_json(health)
    else:
        _show(health)
    return OK if health.ready else FAILED


def _show(health: Health) -> None:
    if health.ready:
        print(f"ready: {health.model.name}" if health.model is not None else "ready")
    else:
        print(f"not ready: {health.reason}")
    if health.model is not None:
        printing.print_model(health.model)
    for worker in health.workers:
        doing = f"{worker.phase} {100 * worker.progress:.0f} %" if worker.state == "loading" else ""
        print(f"  {worker.title}  pid {worker.pid}  {worker.state}  {doing}".rstrip())
        printing.print_device_bytes(worker)
