"""The gateway's own counters, summed over all processes that serve one port.

A scrape reaches any one process and must show the sum. Each process owns one row of a small memory-mapped file, which
only it writes. It holds a lock on the row while it lives; a process that replaces it continues the row, so a sum never
decreases.

prometheus_client's multiprocess mode does not fit: it keeps a file for each process id, so every restart adds one, and
an environment variable must enable it before the module is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import CapacityExceeded

ROWS = 64
STATUSES = (200, 201, 204, 304, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 499, 500, 503, 504)
OTHER_STATUS, OTHER_PATH = 0, "other"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
OPEN, RECEIVED, SENT, LINES_ANSWERED, LINES_FAILED, LINES_RUNNING, PINS, PINS_REFUSED = range(8)
_HEAD = 8
_BUCKETS = len(SECONDS) + 1


class Counts:
    """The row of this process, and the sum of all rows.

    Each path has cells for its statuses, the buckets of its durations, the sum of its durations in microseconds, and
    its ignored fields.

    Args:
        paths: The paths that are counted separately.
        path: The file, which is created if missing; None for a single process. A process has one object for each file.

    Raises:
        CapacityExceeded: ROWS processes already have a row.
    """

    def __init__(self, paths: Sequence[str], path: Path | None = None) -> None:
        self.paths = (*paths, OTHER_PATH)
        self._at = {name: _HEAD + i * self._width for i, name in enumerate(self.paths)}
        cells = _HEAD + len(self.paths) * self._width
        self._file = -1
        if path is None:
            self._rows: npt.NDArray[np.int64] = np.zeros((1, cells), np.int64)
            self._row = self._rows[0]
            return
        # The digest of the layout in the file name keeps gateways with different columns apart.
        layout = repr((self.paths, STATUSES, SECONDS, self._width, _HEAD)).encode()
        mark = hashlib.blake2b(layout, digest_size=6).hexdigest()
        self._file = os.open(f"{path}-{mark}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, ROWS * cells * 8)
        self._map = mmap.mmap(self._file, ROWS * cells * 8)
        self._rows = np.frombuffer(self._map, np.int64).reshape(ROWS, cells)
        self._row = self._rows[self._lock_row()]
        self._row[OPEN] = self._row[LINES_RUNNING] = 0

    _width = len(STATUSES) + 1 + _BUCKETS + 1 + 1

    def _lock_row(self) -> int:
        for row in range(ROWS):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except OSError:
                continue
            return row
        raise CapacityExceeded("gateway processes", 1, 0, f"at most {ROWS} processes can share a port")

    def close(self) -> None:
        """Release the row to the next process."""
        if self._file >= 0:
            self._row[OPEN] = self._row[LINES_RUNNING] = 0
            os.close(self._file)
            self._file = -1

    def began(self) -> None:
        """Count a request that begins."""
        self._row[OPEN] += 1

    def ended(self, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Count a request that ends.

        Args:
            path: Its path.
            status: The status of its response.
            seconds: Its duration.
            received: Bytes of its body.
            sent: Bytes of the response's body.
        """
        row, at = self._row, self._at.get(path) or self._at[OTHER_PATH]
        row[OPEN] -= 1
        row[RECEIVED] += received
        row[SENT] += sent
        row[at + (STATUSES.index(status) + 1 if status in STATUSES else 0)] += 1
        at += len(STATUSES) + 1
        row[at + bisect_left(SECONDS, seconds)] += 1
        row[at + _BUCKETS] += round(seconds * 1e6)

    def ignored(self, path: str, fields: int) -> None:
        """Count ignored fields and tools of a request."""
        if fields:
            self._row[(self._at.get(path) or self._at[OTHER_PATH]) + self._width - 1] += fields

    def pinned(self, outcomes: tuple[int, int]) -> None:
        """Count prefixes that a request pinned, and those that it could not."""
        if any(outcomes):
            self._row[PINS : PINS_REFUSED + 1] += outcomes

    def line(self, *, answered: bool) -> None:
        """Count a request of a batch that has an outcome."""
        self._row[LINES_ANSWERED if answered else LINES_FAILED] += 1

    def lines_running(self, here: int) -> int:
        """Note how many lines of batches run in this process. Return those of all processes."""
        self._row[LINES_RUNNING] = here
        return int(self._rows[:, LINES_RUNNING].sum())

    def total(self) -> npt.NDArray[np.int64]:
        """Return [cells] int64, summed over all processes."""
        total: npt.NDArray[np.int64] = self._rows.sum(axis=0)
        return total

    def by_status(self, total: npt.NDArray[np.int64], path: str) -> dict[int, int]:
        """Return the requests of a path by status; OTHER_STATUS stands for unlisted ones."""
        at = self._at[path]
        counts = total[at : at + len(STATUSES) + 1].tolist()
        return {status: count for status, count in zip((OTHER_STATUS, *STATUSES), counts, strict=True) if count}

    def ignored_fields(self, total: npt.NDArray[np.int64], path: str) -> int:
        """Return the ignored fields and tools of a path's requests."""
        return int(total[self._at[path] + self._width - 1])

    def seconds(self, total: npt.NDArray[np.int64], path: str) -> tuple[list[int], float]:
        """Return the cumulative bucket counts of a path and the sum of its durations in seconds."""
        at = self._at[path] + len(STATUSES) + 1
        return np.cumsum(total[at : at + _BUCKETS]).tolist(), int(total[at + _BUCKETS]) / 1e6
