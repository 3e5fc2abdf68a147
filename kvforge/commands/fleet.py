"""`kvforge fleet`: replicas and gateways in an existing Ray cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from kvforge.fleet.messages import READY, Seen, Status
from kvforge.fleet.settings import load_fleet
from kvforge.protocol.errors import DeadlineExceeded
from kvforge.protocol.exits import FAILED, OK
from kvforge.protocol.platforms import check_linux

from . import printing

if TYPE_CHECKING:
    from kvforge.fleet.cluster.fleet_client import FleetClient

WAIT_S, DOWN_WAIT_S = 600.0, 900.0
LOOK_S = 0.3
NAME = "fleet"


def add(subparsers: Any) -> None:
    """Declare the subcommand and its actions."""
    parser = subparsers.add_parser(
        "fleet", help="Replicas and gateways in a Ray cluster.", description="Replicas and gateways in a Ray cluster."
    )
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    up = _add(commands, "up", _up, "Start a fleet, or update a running one to the file.")
    up.add_argument("file", type=Path, metavar="FILE", help="fleet.toml")
    _add_wait(up, WAIT_S, "until the whole fleet serves")
    status = _add(commands, "status", _status, "Show a fleet: exit status 0 if the whole fleet serves, else 1.")
    status.add_argument("--json", action="store_true", help="print one JSON document")
    scale = _add(commands, "scale", _scale, "Set the number of replicas; leaving replicas finish their requests first.")
    scale.add_argument("count", type=int, metavar="N")
    _add_wait(scale, WAIT_S, "until they serve")
    _add_wait(_add(commands, "down", _down, "Drain and remove a fleet."), DOWN_WAIT_S, "until it has ended")


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="address of the cluster's head [RAY_ADDRESS, else this machine's]"
    )
    if name != "up":
        parser.add_argument("--name", default=NAME, help=f"name of the fleet [{NAME}]")
    return parser


def _add_wait(parser: argparse.ArgumentParser, wait_s: float, what: str) -> None:
    parser.add_argument(
        "--wait",
        type=float,
        default=wait_s,
        metavar="SECONDS",
        help=f"wait up to this long {what}; 0: not at all [{wait_s:g}]",
    )


def _in_cluster(options: argparse.Namespace, name: str, use: Callable[[FleetClient], int]) -> int:
    """Join the cluster and call `use`. Ray is imported here only. Raises Unavailable."""
    check_linux("`kvforge fleet`")
    from kvforge.fleet.cluster.joining import joined

    with joined(options.address):
        from kvforge.fleet.cluster.fleet_client import FleetClient

        return use(FleetClient(name))


def _up(options: argparse.Namespace) -> int:
    check_linux("`kvforge fleet`")
    file, text = load_fleet(options.file)

    def use(fleet: FleetClient) -> int:
        fleet.up(file, text)
        status = _wait(fleet, options.wait, lambda status: status.serves)
        _show(status)
        return OK

    return _in_cluster(options, file.name, use)


def _status(options: argparse.Namespace) -> int:
    def use(fleet: FleetClient) -> int:
        status = fleet.status()
        printing.print_json(status) if options.json else _show(status)
        return OK if status.serves else FAILED

    return _in_cluster(options, options.name, use)


def _scale(options: argparse.Namespace) -> int:
    def use(fleet: FleetClient) -> int:
        fleet.scale(options.count)
        _show(_wait(fleet, options.wait, lambda status: status.serves))
        return OK

    return _in_cluster(options, options.name, use)


def _down(options: argparse.Namespace) -> int:
    def use(fleet: FleetClient) -> int:
        fleet.down()
        if options.wait:
            _wait(fleet, options.wait, lambda status: status.ended and not status.replicas and not status.gateways)
            fleet.close()
        return OK

    return _in_cluster(options, options.name, use)


def _wait(fleet: FleetClient, wait_s: float, done: Callable[[Status], bool]) -> Status:
    """Wait until `done`, and report on standard error what is missing. Raises DeadlineExceeded."""
    deadline, last = monotonic() + wait_s, ""
    while True:
        status = fleet.status()
        if done(status) or not wait_s:
            return status
        words = "; ".join(status.sentences)
        if words and words != last:
            last = words
            printing.print_note(words)
        if monotonic() >= deadline:
            raise DeadlineExceeded(
                f"not done after {wait_s:g} s; the fleet goes on: {last or 'see `kvforge fleet status`'}"
            )
        sleep(LOOK_S)


def _show(status: Status) -> None:
    if status.ended:
        print(f"{status.fleet} is shutting down")
    ready = sum(one.status.phase == READY for one in status.replicas)
    print(f"{status.fleet}: {ready} of {status.count} replicas serve")
    rows = [_row(one, one.status.place.endpoint if one.status.place is not None else "") for one in status.replicas]
    if rows:
        printing.print_table(("replica", "revision", "state", "running", "waiting", "queue s", "where"), rows)
    for one in status.gateways:
        reason = f": {one.status.reason}" if one.status.reason else ""
        print(f"gateway {one.name}  {one.status.phase}  {one.status.url}{reason}".rstrip())
    for sentence in status.sentences:
        print(sentence)
    sys.stdout.flush()


def _row(one: Seen, where: str) -> tuple[object, ...]:
    status = one.status
    return one.name, one.revision, status.phase, status.running, status.pending, f"{status.queue_s:.2f}", where
