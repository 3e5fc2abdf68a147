"""`kvforge health`: probes for supervisors of the service."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.protocol.exits import FAILED, OK
from kvforge.protocol.messages import Health, WorkerHealth

from . import parsing, printing


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers, "health", run, "Probe the service: exit status 0, or 1 if it is not ready (or not live)."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--live", action="store_true", help="check only that the coordinator's loop answers")
    what.add_argument("--ready", action="store_true", help="check only that a request submitted now would be served")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the probe's result; problems go to standard error.

    Raises:
        CoordinatorUnavailable: The coordinator does not answer.
    """
    with parsing.open_client(options) as kv:
        health = kv.health()
    if options.json:
        printing.print_json(health)
    elif not options.live and not options.ready:
        _show(health)
    if options.live:
        return _verdict(health.live, "live", "the coordinator's loop is not live", options)
    return _verdict(health.ready, "ready" if options.ready else "", f"not ready: {health.reason}", options)


def _verdict(good: bool, word: str, problem: str, options: argparse.Namespace) -> int:
    if not good:
        printing.print_note(f"kvforge: {problem}")
        return FAILED
    if word and not options.json:
        print(word)
    return OK


def _show(health: Health) -> None:
    print(f"live: {_yes(health.live)}")
    model = f" ({health.model.name})" if health.ready and health.model is not None else ""
    print(f"ready: {_yes(health.ready)}{model}")
    if health.draining:
        print("draining: yes")
    if health.model is not None:
        printing.print_model(health.model)
    for worker in health.workers:
        print(f"  {worker.title}  pid {worker.pid}  {worker.state}  {_doing(worker)}".rstrip())
        printing.print_device_bytes(worker)
        printing.print_kernels(worker)
        printing.print_drafts(worker)
        printing.print_host_tier(worker)
        printing.print_disk_tier(worker)
    for name, how in health.gone.items():
        print(f"  {name}  {how}")


def _doing(worker: WorkerHealth) -> str:
    if worker.state == "loading":
        return f"{worker.phase} {100 * worker.progress:.0f} %"
    busy = f", {worker.since_step_us / 1e6:.1f} s on the current one" if worker.since_step_us else ""
    return f"{worker.steps} steps{busy}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
