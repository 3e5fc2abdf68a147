"""Compile kernels for devices that are not present."""

from __future__ import annotations

import os
from pathlib import Path

# Speeds up the compiler without changing its code: glibc caches freed memory. (Dropping line information would be
# faster still, but changes the registers of ptxas now and then.)
QUICKER = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535:glibc.malloc.tcache_max=4096"}


def compiler_environment(cache: Path) -> dict[str, str]:
    """Return the environment of a compiling process: no interpreter, and a separate cache."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | QUICKER | {"TRITON_CACHE_DIR": str(cache)}
