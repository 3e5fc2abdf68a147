"""kvforge deploy: the service under systemd, put in place and looked at."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvforge.deploy.check import WRONG, check
from kvforge.deploy.environment import Python, own_python
from kvforge.deploy.install import Wishes, install, instances, model_path
from kvforge.deploy.places import CACHE_DIR, STATE_DIR, USER, Places
from kvforge.deploy.uninstall import uninstall
from kvforge.protocol.exits import FAILED, OK

from . import parsing, printing


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = parsing.add(subparsers, "deploy", run_nothing, "Put the service under systemd in place, or look at it.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    put = parsing.add(
        actions, "install", run_install, "Put user, folders, environment, configuration and units in place (as root)."
    )
    put.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="of a system that is being made [/]")
    put.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    put.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="DEVICE",
        help="a worker's configuration: gpu0, gpu1, ... or cpu; may be repeated [those that are there, else each GPU]",
    )
    put.add_argument("--model", metavar="NAME", help="that workers serve: a path or a known name [as before]")
    put.add_argument("--python", type=Path, metavar="PATH", help="the environment is made of it [this one]")
    put.add_argument(
        "--pip", action="append", default=[], metavar="ARG", help="an argument of `pip install`; may be repeated"
    )
    put.add_argument(
        "--system-site-packages", action="store_true", help="use what is installed beside that Python (ROCm's torch)"
    )
    put.add_argument("--no-venv", action="store_true", help="make no environment")
    away = parsing.add(
        actions,
        "uninstall",
        run_uninstall,
        "Stop the service, and remove units, environment and system files (as root); configuration and state stay.",
    )
    away.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="of a system that is being made [/]")
    away.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    away.add_argument(
        "--purge", action="store_true", help="remove configuration, state, cached models and the user, too"
    )
    look = parsing.add(actions, "check", run_check, "Say what is wrong with the service; exit status 1 if anything is.")
    look.add_argument("--json", action="store_true", help="print one JSON document")


def run_nothing(_options: argparse.Namespace) -> int:
    """An action is required."""
    raise AssertionError("argparse asks for an action")


def run_install(options: argparse.Namespace) -> int:
    """Does it, and says what is next."""
    python = None
    if not options.no_venv:
        python = Python(options.python or own_python(), tuple(options.pip), options.system_site_packages)
    places = Places(options.root.absolute())
    named = instances(places, options.worker)
    wishes = Wishes(named, model_path(options.model), python)
    count = install(places, wishes, printing.say, dry_run=options.dry_run)
    if not count:
        printing.say("everything is in place")
    elif not options.dry_run:
        units = " ".join(f"kvforge-worker@{instance}.service" for instance in named)
        printing.say(f"next: kvforge deploy check; systemctl enable --now {units} kvforge.target")
    return OK


def run_uninstall(options: argparse.Namespace) -> int:
    """Remove the service, and list what stays."""
    places = Places(options.root.absolute())
    count = uninstall(places, printing.say, dry_run=options.dry_run, purge=options.purge)
    if not count:
        printing.say("nothing is installed")
    elif not options.dry_run and not options.purge:
        kept = f"{places.configuration}, {places.of(STATE_DIR)} and {places.of(CACHE_DIR)}"
        printing.say(f"{kept} stay, and the user {USER}: `kvforge deploy uninstall --purge` removes them")
    return OK


def run_check(options: argparse.Namespace) -> int:
    """Prints the findings, the bad ones last."""
    findings = check(Places())
    if options.json:
        printing.print_json([finding.document() for finding in findings])
    else:
        for finding in findings:
            print(finding.line())
    wrong = sum(finding.kind == WRONG for finding in findings)
    if wrong:
        printing.say(f"kvforge: {wrong} {'thing is' if wrong == 1 else 'things are'} wrong")
    return FAILED if wrong else OK
