"""Compile kernels for devices that are not present."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Speeds up the compiler without changing its code: glibc caches freed memory. (Dropping line information would be
# faster still, but changes the registers of ptxas now and then.)
QUICKER = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535:glibc.malloc.tcache_max=4096"}


def compiler_environment(cache: Path) -> dict[str, str]:
    """Return the environment of a compiling process: no interpreter, and a separate cache."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | QUICKER | {"TRITON_CACHE_DIR": str(cache)}


def run_module(module: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a module in a compiling process."""
    command, environment = [sys.executable, "-m", module, *arguments], compiler_environment(cache)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def check_suite(module: str, name: str, count: int, *arguments: str, cache: Path) -> None:
    """Run a suite of interpreted kernels on a target, and compare its checks, `count` in number, with `agrees`."""
    found = run_module(module, "--quick", "--target", name, *arguments, cache=cache)
    lines = found.stdout.splitlines()
    assert found.returncode == 0, found.stdout + found.stderr
    assert len(lines) == count
    assert all(" agrees " in line for line in lines), found.stdout
