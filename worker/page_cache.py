"""Reads a model's files into the page cache while the process still imports torch, which takes seconds.

The load then finds its bytes in memory. Segments that are there already are skipped, and no more is read than half of
the memory that is available, so that nothing else is pushed out for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

SEGMENT_BYTES = 16 << 20
THREADS = 8
AVAILABLE_SHARE = 0.5
WEIGHTS = ("*.safetensors", "*.gguf")
log = logging.getLogger("worker")


class PageCacheReader:
    """Reads files into the page cache, in threads that end by themselves or with the process."""

    def __init__(self, model: Path, available_bytes: int | None = None) -> None:
        """Find the files of a model.

        Args:
            model: A file, or a folder with files.
            available_bytes: Memory of the machine that other processes leave; by default as the kernel reports it.
        """
        files = [model] if model.is_file() else [file for kind in WEIGHTS for file in sorted(model.glob(kind))]
        available = memory_available() if available_bytes is None else available_bytes
        self._segments = _segments(files, int(available * AVAILABLE_SHARE))
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.asked_bytes = 0  # segments outside the page cache

    def start(self) -> None:
        """Start the threads; errors end them, because the load reports the same ones."""
        for number in range(THREADS):
            thread = threading.Thread(target=self._run, name=f"page-cache-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Wait until all segments are read."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Read no further segment, and wait for those in progress."""
        with self._lock:
            self._segments = iter(())
        self.wait()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                with self._lock:
                    segment = next(self._segments, None)
                if segment is None:
                    return
                self._read(*segment)

    def _read(self, file: Path, offset: int, size: int) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            if is_cached(descriptor, offset):
                return
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
        with self._lock:
            self.asked_bytes += size


def is_cached(descriptor: int, offset: int) -> bool:
    """Return whether the byte at `offset` of a file is in the page cache; False if the system cannot report it."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # not there, or a file system or kernel without this call
        return False


def memory_available() -> int:
    """Return the bytes of memory that can be used without swapping; 0 if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _segments(files: Sequence[Path], bytes_max: int) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, offset, bytes) until `bytes_max` bytes."""
    left = bytes_max
    for file in files:
        size = file.stat().st_size
        for offset in range(0, size, SEGMENT_BYTES):
            count = min(SEGMENT_BYTES, size - offset)
            if count > left:
                return
            left -= count
            yield file, offset, count
