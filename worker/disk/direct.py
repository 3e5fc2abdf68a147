"""Blocks of segments past the page cache (O_DIRECT), where the file system allows it.

The host tier is the cache of these blocks, so a copy of them in the kernel's page cache would only take memory. Direct
transfers need memory, places and sizes in whole pages: blocks go through a buffer of their own, as wide as the distance
of two blocks in a segment. Records stay in the page cache, and so do blocks where direct transfers are refused.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from .store import Damaged

PAGE = 4096
DIRECT = getattr(os, "O_DIRECT", 0)
FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class BlockIo:
    """Reads and writes blocks of files, each with a second descriptor for direct transfers.

    Args:
        width: Bytes from one block to the next: whole pages.
        folder: Where the files are.
        direct: False: through the page cache.

    Attributes:
        problem: Why blocks go through the page cache; "" where they go past it.
    """

    def __init__(self, width: int, folder: Path, *, direct: bool = True) -> None:
        # Shared memory, the default, would be one buffer for all processes that are forked.
        self._width, self._buffer = width, mmap.mmap(-1, width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._whole = memoryview(self._buffer)
        self._direct: dict[int, int] = {}  # by the other descriptor of a file
        self.problem = _refusal(folder) if direct else "it is turned off"

    def add(self, file: int, path: Path) -> None:
        """Add a file, which is open for other transfers.

        Raises:
            OSError: It cannot be opened a second time.
        """
        if not self.problem:
            self._direct[file] = os.open(path, FLAGS | DIRECT)

    def read(self, file: int, into: memoryview, at: int) -> None:
        """Read a block.

        Raises:
            Damaged: The file is shorter than it was.
            OSError: The disk failed.
        """
        direct = self._direct.get(file)
        if direct is None:
            while into:
                done = os.preadv(file, [into], at)
                if not done:
                    raise Damaged("the segment is shorter than it was")
                into, at = into[done:], at + done
            return
        if os.preadv(direct, [self._whole], at) != self._width:
            raise Damaged("the segment is shorter than it was")
        into[:] = self._whole[: len(into)]

    def write(self, file: int, data: bytes | memoryview, at: int) -> None:
        """Write a block.

        Raises:
            OSError: The disk failed.
        """
        direct = self._direct.get(file)
        if direct is None:
            _write(file, data, at)
            return
        self._whole[: len(data)] = data
        done = os.pwritev(direct, [self._whole], at)
        if done != self._width:
            raise OSError(f"{done} of {self._width} bytes were written")

    def close(self) -> None:
        """Close the second descriptors."""
        files, self._direct = self._direct, {}
        for file in files.values():
            os.close(file)


def write(file: int, data: bytes | memoryview, at: int) -> None:
    """Write bytes through the page cache.

    Raises:
        OSError: The disk failed.
    """
    _write(file, data, at)


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(file, rest, at)
        rest, at = rest[done:], at + done


def _refusal(folder: Path) -> str:
    """Return why files in a folder take no direct transfers of whole pages; "" if they do."""
    if not DIRECT:
        return "this system has no O_DIRECT"
    path = folder / f"direct-{os.getpid()}"
    buffer = mmap.mmap(-1, PAGE)
    try:
        file = os.open(path, FLAGS | DIRECT | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"opening a file: {error.strerror}"
    try:
        if os.pwritev(file, [buffer], 0) != PAGE or os.preadv(file, [buffer], 0) != PAGE:
            return "a page was copied in part"
    except OSError as error:
        return f"copying a page: {error.strerror}"
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
    return ""
