"""kvforge version: what is installed."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.protocol.messages import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN

from . import parsing


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parsing.add(subparsers, "version", run, "Print the version.")


def run(_options: argparse.Namespace) -> int:
    """Prints one line."""
    from kvforge import __version__

    print(f"kvforge {__version__} (protocol {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION})")
    return 0
