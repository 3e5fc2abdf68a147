"""The command line of a child process that runs a module of this package, even if the working directory has its own."""

from __future__ import annotations

import sys

from kvforge.launch.supervisor import ENTRY
from kvforge.process.leash import leashed


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line. On Linux the child is killed when this process ends in any way."""
    command = [sys.executable, "-P", str(ENTRY), module, *arguments]
    return leashed(command) if sys.platform == "linux" else command
