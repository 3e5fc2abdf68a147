"""Pages of libraries that were needed while a model was loaded, and are not any more: 150 MB of a worker on a CPU.

A page of a mapped file that was read once counts as resident until the kernel is short of memory; then it is unmapped,
and read from the file where it is needed again. This does the same at a known time. What is in the kernel's cache stays
there: what is used again, an eighth of it, comes back without the disk.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)$")
READ_ONLY = frozenset({"r--p", "r-xp"})
DELETED = " (deleted)"  # what the kernel puts behind the path of a file that is gone


@dataclass
class Mapping:
    """A part of this process's address space, from /proc/self/smaps. All sizes in bytes.

    permissions: as `r-xp`. path: of the file, or a name in brackets, or "". resident: what is in memory of it, of which
    own: is no file's, but this process's. swapped: what was its own and is not in memory.
    """

    start: int
    size: int
    permissions: str
    inode: int
    path: str
    resident: int = 0
    own: int = 0
    swapped: int = 0


FIELDS = {"Rss": "resident", "Anonymous": "own", "Swap": "swapped"}


def mappings() -> Iterator[Mapping]:
    """All of this process. Errors: OSError where the system has no such file."""
    mapping = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        if match := HEADER.match(line):
            if mapping is not None:
                yield mapping
            start, end = int(match[1], 16), int(match[2], 16)
            mapping = Mapping(start, end - start, match[3], int(match[4]), match[5])
            continue
        name, _, rest = line.partition(":")
        if mapping is not None and name in FIELDS:
            setattr(mapping, FIELDS[name], int(rest.split()[0]) * 1024)
    if mapping is not None:
        yield mapping


def release_library_pages() -> int:
    """Returns how many bytes of libraries were resident and are not any more. 0 where there is no such thing.

    Of what is mapped only what cannot be lost: it is read-only, no page of it was ever written (a library's addresses
    are, before they become read-only), and its file still has a name. Files of which nothing can be executed are left
    alone: a model's weights may be among them.
    """
    try:
        found = [mapping for mapping in mappings() if mapping.inode and mapping.resident]
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return 0
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libraries = {mapping.path for mapping in found if "x" in mapping.permissions}
    released = 0
    for mapping in found:
        clean = mapping.permissions in READ_ONLY and mapping.own == mapping.swapped == 0
        if not clean or mapping.path not in libraries or mapping.path.endswith(DELETED):
            continue
        if advise(mapping.start, mapping.size, mmap.MADV_DONTNEED) == 0:  # not 0 where somebody locked it in memory
            released += mapping.resident
    return released
