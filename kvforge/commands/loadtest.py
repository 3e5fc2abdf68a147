"""`kvforge loadtest`: run the load harness, a separate package, in place of this process."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from kvforge.launch.supervisor import ENTRY
from kvforge.protocol.platforms import check_linux

# No option starts with it, so that all arguments after the command's name reach the harness, `--help` too.
NO_OPTION = "\0"


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Put a load on a server and report the latencies that its users would see."
    parser = subparsers.add_parser(
        "loadtest", help=summary, description=summary, add_help=False, prefix_chars=NO_OPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument("arguments", nargs="*")


def run(options: argparse.Namespace) -> NoReturn:
    """Replace this process by the harness."""
    check_linux("`kvforge loadtest`")
    arguments = list(options.arguments)
    for name in ("endpoint", "runtime_dir", "server_key", "key_file"):
        if (value := getattr(options, name)) is not None:  # options before the command's name
            arguments[:0] = [f"--{name.replace('_', '-')}", str(value)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", str(ENTRY), "kvforge.loadtest", *arguments])  # noqa: S606 - no shell
