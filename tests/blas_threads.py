"""The number of threads of numpy's products in this process, which numpy itself cannot set once it is imported."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401 - it loads the library

MAPS = Path("/proc/self/maps")
# Numpy's wheels prefix the names of OpenBLAS and append the size of its integers; builds of systems do neither.
NAMES = tuple(f"{prefix}openblas_{{}}_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", ""))


def set_count(threads: int) -> None:
    """Set the number of threads of numpy's OpenBLAS. Child processes that are not forked keep their default."""
    for library, name in _libraries():
        getattr(library, name.format("set"))(threads)


def counts() -> list[int]:
    """Return the number of threads of numpy's OpenBLAS; none where numpy multiplies with another library."""
    return [getattr(library, name.format("get"))() for library, name in _libraries()]


@cache
def _libraries() -> list[tuple[Any, str]]:
    """Return each library that is loaded at the first call, and the pattern of its names. Linux only.

    Later scipy may bring another one, which it uses alone.
    """
    found: list[tuple[Any, str]] = []
    lines = MAPS.read_text(encoding="utf-8").splitlines() if MAPS.exists() else []
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "openblas" in line.rpartition("/")[2]}):
        library = ctypes.CDLL(path)
        name = next((name for name in NAMES if hasattr(library, name.format("set"))), None)
        if name is not None:
            found.append((library, name))
    return found
