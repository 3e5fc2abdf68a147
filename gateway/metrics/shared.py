"""What the gateway counts of itself, by all processes that serve one port together.

A scrape reaches any one of them and must show the sum. Each process has a row of numbers in a small file that all map,
which it alone writes, and holds a lock on it as long as it lives: one that takes the place of another goes on with its
row, so a sum never falls. (prometheus_client's mode for several processes keeps files by process number, which grow in
number with every restart, and must be chosen by the environment before the module is imported.)
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
OPEN, RECEIVED, SENT = range(3)
_BUCKETS = len(SECONDS) + 1


class Counts:
    """A row for this process, and the sum of all.

    paths: the paths that are counted separately. A path has cells for its statuses, its buckets of seconds, the sum of
    its seconds in microseconds, and the fields that were ignored. path: the file, which is created if missing; a
    process has one object for each file. None: this process is alone.
    Raises CapacityExceeded where ROWS processes have one.
    """

    def __init__(self, paths: Sequence[str], path: Path | None = None) -> None:
        self.paths = (*paths, OTHER_PATH)
        self._at = {name: 3 + i * self._width for i, name in enumerate(self.paths)}
        cells = 3 + len(self.paths) * self._width
        self._file = -1
        if path is None:
            self._rows: npt.NDArray[np.int64] = np.zeros((1, cells), np.int64)
            self._row = self._rows[0]
            return
        # Of another gateway's file nothing means the same.
        mark = hashlib.blake2b(repr((self.paths, STATUSES, SECONDS, self._width)).encode(), digest_size=6).hexdigest()
        self._file = os.open(f"{path}-{mark}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, ROWS * cells * 8)
        self._map = mmap.mmap(self._file, ROWS * cells * 8)
        self._rows = np.frombuffer(self._map, np.int64).reshape(ROWS, cells)
        self._row = self._rows[self._take_row()]
        self._row[OPEN] = 0

    _width = len(STATUSES) + 1 + _BUCKETS + 1 + 1

    def _take_row(self) -> int:
        for row in range(ROWS):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except OSError:
                continue
            return row
        raise CapacityExceeded("gateway processes", 1, 0, f"at most {ROWS} may count together")

    def close(self) -> None:
        """Gives the row to whoever comes next."""
        if self._file >= 0:
            self._row[OPEN] = 0
            os.close(self._file)
            self._file = -1

    def began(self) -> None:
        """A request came."""
        self._row[OPEN] += 1

    def ended(self, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        """It is over, with so many bytes of bodies."""
        row, at = self._row, self._at.get(path) or self._at[OTHER_PATH]
        row[OPEN] -= 1
        row[RECEIVED] += received
        row[SENT] += sent
        row[at + (STATUSES.index(status) + 1 if status in STATUSES else 0)] += 1
        at += len(STATUSES) + 1
        row[at + bisect_left(SECONDS, seconds)] += 1
        row[at + _BUCKETS] += round(seconds * 1e6)

    def ignored(self, path: str, fields: int) -> None:
        """A request of this path named so many fields and tools that are not read."""
        if fields:
            self._row[(self._at.get(path) or self._at[OTHER_PATH]) + self._width - 1] += fields

    def total(self) -> npt.NDArray[np.int64]:
        """[cells] int64, of all processes together."""
        total: npt.NDArray[np.int64] = self._rows.sum(axis=0)
        return total

    def by_status(self, total: npt.NDArray[np.int64], path: str) -> dict[int, int]:
        """Requests of a path by their status; OTHER_STATUS: any other."""
        at = self._at[path]
        counts = total[at : at + len(STATUSES) + 1].tolist()
        return {status: count for status, count in zip((OTHER_STATUS, *STATUSES), counts, strict=True) if count}

    def ignored_fields(self, total: npt.NDArray[np.int64], path: str) -> int:
        """Fields and tools that requests of a path named and that are not read."""
        return int(total[self._at[path] + self._width - 1])

    def seconds(self, total: npt.NDArray[np.int64], path: str) -> tuple[list[int], float]:
        """Requests of a path by bucket, those below included, and the seconds of all."""
        at = self._at[path] + len(STATUSES) + 1
        return np.cumsum(total[at : at + _BUCKETS]).tolist(), int(total[at + _BUCKETS]) / 1e6
