"""`kvforge deploy`: install, check and remove the service under systemd."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvforge.deploy.check import WRONG, check
from kvforge.deploy.environment import Python, own_python
from kvforge.deploy.install import InstallOptions, install, instances, model_path
from kvforge.deploy.places import CACHE_DIR, STATE_DIR, USER, Places
from kvforge.deploy.uninstall import uninstall
from kvforge.protocol.exits import FAILED, OK
from kvforge.protocol.platforms import check_linux

from . import parsing, printing


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "deploy", run_nothing, "Install, check or remove the service under systemd.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    put = parsing.add(
        actions, "install", run_install, "Install user, folders, environment, configuration and units (as root)."
    )
    put.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="root of a system image [/]")
    put.add_argument("--dry-run", action="store_true", help="print the actions without performing them")
    put.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="DEVICE",
        help="a worker's configuration: gpu0, gpu1, ... or cpu; may be repeated [existing ones, else one per GPU]",
    )
    put.add_argument("--model", metavar="NAME", help="model that workers serve: a path or a known name [unchanged]")
    put.add_argument("--python", type=Path, metavar="PATH", help="interpreter of the environment [this one]")
    put.add_argument(
        "--pip", action="append", default=[], metavar="ARG", help="an argument of `pip install`; may be repeated"
    )
    put.add_argument(
        "--system-site-packages", action="store_true", help="use packages installed for that Python (ROCm's torch)"
    )
    put.add_argument("--no-venv", action="store_true", help="create no environment")
    away = parsing.add(
        actions,
        "uninstall",
        run_uninstall,
        "Stop the service and remove units, environment and system files (as root); keep configuration and state.",
    )
    away.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="root of a system image [/]")
    away.add_argument("--dry-run", action="store_true", help="print the actions without performing them")
    away.add_argument(
        "--purge", action="store_true", help="also remove configuration, state, cached models and the user"
    )
    look = parsing.add(actions, "check", run_check, "List problems of the service; exit status 1 if there are any.")
    look.add_argument("--json", action="store_true", help="print one JSON document")


def run_nothing(_options: argparse.Namespace) -> int:
    """Run without an action, which argparse refuses."""
    raise AssertionError("argparse requires an action")


def run_install(options: argparse.Namespace) -> int:
    """Install the service, and print the next step."""
    check_linux("`kvforge deploy`")
    python = None
    if not options.no_venv:
        python = Python(options.python or own_python(), tuple(options.pip), options.system_site_packages)
    places = Places(options.root.absolute())
    named = instances(places, options.worker)
    chosen = InstallOptions(named, model_path(options.model), python)
    count = install(places, chosen, printing.print_note, dry_run=options.dry_run)
    if not count:
        printing.print_note("everything is installed")
    elif not options.dry_run:
        units = " ".join(f"kvforge-worker@{instance}.service" for instance in named)
        printing.print_note(f"next: kvforge deploy check; systemctl enable --now {units} kvforge.target")
    return OK


def run_uninstall(options: argparse.Namespace) -> int:
    """Remove the service, and list the files that are kept."""
    check_linux("`kvforge deploy`")
    places = Places(options.root.absolute())
    count = uninstall(places, printing.print_note, dry_run=options.dry_run, purge=options.purge)
    if not count:
        printing.print_note("nothing is installed")
    elif not options.dry_run and not options.purge:
        kept = f"{places.configuration}, {places.of(STATE_DIR)} and {places.of(CACHE_DIR)}"
        printing.print_note(f"kept: {kept} and the user {USER}; `kvforge deploy uninstall --purge` removes them")
    return OK


def run_check(options: argparse.Namespace) -> int:
    """Print the findings, problems last."""
    check_linux("`kvforge deploy`")
    findings = check(Places())
    if options.json:
        printing.print_json([finding.document() for finding in findings])
    else:
        for finding in findings:
            print(finding.line())
    wrong = sum(finding.kind == WRONG for finding in findings)
    if wrong:
        printing.print_note(f"kvforge: {wrong} problem{'' if wrong == 1 else 's'} found")
    return FAILED if wrong else OK
