"""Files in memory for tests of their pages, and the figures of the kernel."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvforge.worker.huge_pages import HUGE_BYTES, AlignedMap

MEMORY = "/dev/shm"


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a new folder in tmpfs."""
    with tempfile.TemporaryDirectory(prefix="kvforge-test-", dir=MEMORY) as folder:
        yield Path(folder)


@contextmanager
def memory_file(pieces: int, extra: int = 0) -> Iterator[tuple[int, AlignedMap]]:
    """Yield an empty file in tmpfs of so many huge pages and further bytes, and its mapping."""
    with memory_folder() as folder:
        fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
        try:
            size = pieces * HUGE_BYTES + extra
            os.ftruncate(fd, size)
            mapped = AlignedMap(fd, size)
            yield fd, mapped
            mapped.close()
        finally:
            os.close(fd)


def kernel_huge_bytes(address: int) -> int:
    """Return the bytes in huge pages that /proc/self/smaps counts for the mapping at an address."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            inside = int(name.split("-")[0], 16) == address
        elif inside and name in ("ShmemPmdMapped:", "Private_Hugetlb:"):
            found += int(words[0]) << 10
    return found


def numa_maps_line(address: int) -> str:
    """Return the line of /proc/self/numa_maps about the mapping that begins at an address."""
    lines = Path("/proc/self/numa_maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return next(line for line in lines if int(line.split()[0], 16) == address)
