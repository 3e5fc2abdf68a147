"""The command of a process of ours: of this package, whatever module of the same name the user's folder has."""

from __future__ import annotations

import sys

from kvforge.launch.supervisor import ENTRY
from kvforge.process.leash import leashed


def own(module: str, *arguments: str) -> list[str]:
    """The command line; on Linux the process ends when this one does, however that ends."""
    command = [sys.executable, "-P", str(ENTRY), module, *arguments]
    return leashed(command) if sys.platform == "linux" else command
