"""`kvforge replay`: show the state in a coordinator's journal at any event, in a separate process."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvforge.launch.supervisor import ENTRY
from kvforge.protocol.platforms import check_linux
from kvforge.protocol.transport import default_state_dir

from . import parsing


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    replay = parsing.add(subparsers, "replay", run, "Show the state at any point of a coordinator's journal.")
    replay.add_argument(
        "journal",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="state_dir of a coordinator, running or not [the default one]",
    )
    replay.add_argument(
        "--until",
        type=int,
        metavar="EVENT",
        help="stop before this event, counted from 1 after the last snapshot [the end]",
    )
    replay.add_argument("--events", type=int, default=5, metavar="N", help="show this many events before it [5]")
    replay.add_argument(
        "--explain",
        action="append",
        default=[],
        metavar="SUBJECT=ID",
        help="explain a request, sequence, block or tenant at that point; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Print the state. Return the exit status of the separate process."""
    check_linux("`kvforge replay`")
    journal = options.journal if options.journal is not None else default_state_dir(parsing.runtime_dir(options))
    arguments = [str(journal), "--events", str(options.events)]
    if options.until is not None:
        arguments += ["--until", str(options.until)]
    for subject in options.explain:
        arguments += ["--explain", subject]
    command = [sys.executable, "-P", str(ENTRY), "kvforge.coordinator.replay", *arguments]
    return subprocess.run(command, check=False).returncode
