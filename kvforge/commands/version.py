"""`kvforge version`: print the installed version."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from kvforge.protocol.messages import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN

from . import parsing


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parsing.add(subparsers, "version", run, "Print the version.")


def run(_options: argparse.Namespace) -> int:
    """Print one line."""
    from kvforge import __version__

    print(f"kvforge {__version__} (protocol {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION})")
    return 0


class Version(argparse.Action):
    """The option --version: prints the version and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the version and exit."""
        run(argparse.Namespace())
        parser.exit()
