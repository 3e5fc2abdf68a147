"""kvforge loadtest: the load harness, which is a package beside this one, in the place of this process."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from kvforge.launch.supervisor import ENTRY

# None begins an option, so that all that follows the command's name belongs to the harness, `--help` too.
NO_OPTION = "\0"


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    summary = "Put a load on a server and report what its users would have measured."
    parser = subparsers.add_parser(
        "loadtest", help=summary, description=summary, add_help=False, prefix_chars=NO_OPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument("arguments", nargs="*")


def run(options: argparse.Namespace) -> NoReturn:
    """Becomes it: its signals and its exit status are those of the harness."""
    arguments = list(options.arguments)
    for name in ("endpoint", "runtime_dir", "server_key", "key_file"):
        if (value := getattr(options, name)) is not None:  # given before the command's name
            arguments[:0] = [f"--{name.replace('_', '-')}", str(value)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", str(ENTRY), "kvforge.loadtest", *arguments])  # noqa: S606 - no shell
