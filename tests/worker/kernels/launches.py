"""Compiling kernels for devices that are not here."""

from __future__ import annotations

import os
from pathlib import Path

# Less to do for the compiler, whose code stays the same: glibc keeps what it frees at hand. (Without the lines that
# instructions come from it would be quicker still, but ptxas then takes other registers now and then.)
QUICKER = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535:glibc.malloc.tcache_max=4096"}


def compiler_environment(cache: Path) -> dict[str, str]:
    """The environment of a process that compiles: not interpreting, and with a cache of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | QUICKER | {"TRITON_CACHE_DIR": str(cache)}
