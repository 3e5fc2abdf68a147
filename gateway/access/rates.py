"""Rate limits of API keys, shared by all processes that serve one port.

The token buckets hold one minute each. They live in a small memory-mapped file; a file lock held for a few microseconds
makes each update atomic. The kernel releases the lock of a process that dies within an update, which damages at most
one bucket.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Protocol

SLOTS = 4096
_SLOT = struct.Struct("<Qdd")  # hash of the key, tokens left, time of the last update (CLOCK_MONOTONIC)
FILE_BYTES = SLOTS * _SLOT.size
MINUTE_S = 60.0


class Rates(Protocol):
    """Token buckets by name."""

    def consume(self, name: str, amount: float, per_minute: int, *, must: bool = False) -> float:
        """Take tokens from a bucket.

        Args:
            name: The bucket.
            amount: How many to take; 0 checks that the bucket is not empty.
            per_minute: The capacity of the bucket, which is also its refill per minute.
            must: Take them even if the bucket becomes negative.

        Returns:
            0 if they were taken, else the seconds until they can be.
        """


class _NoRates:
    def consume(self, name: str, amount: float, per_minute: int, *, must: bool = False) -> float:  # noqa: ARG002
        return 0.0


NO_RATES: Rates = _NoRates()


class SharedRates:
    """Token buckets in a memory-mapped file, which is created if missing."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, FILE_BYTES)
        self._map = mmap.mmap(self._file, FILE_BYTES)

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        os.close(self._file)

    def consume(self, name: str, amount: float, per_minute: int, *, must: bool = False) -> float:
        """Take tokens from a bucket; see `Rates`."""
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            now = time.monotonic()
            at, left, since = self._find(number, per_minute, now)
            left = min(float(per_minute), left + (now - since) * per_minute / MINUTE_S)
            allowed = must or (left >= amount if amount else left > 0)
            _SLOT.pack_into(self._map, at, number, left - amount if allowed else left, now)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return 0.0 if allowed else max((amount - left) * MINUTE_S / per_minute, 1e-3)

    def _find(self, number: int, per_minute: int, now: float) -> tuple[int, float, float]:
        """Return the offset of a bucket, its tokens and its last update.

        A new bucket is full. It takes a free one of eight slots, or evicts the least recently used.
        """
        places = [(number + step) % SLOTS * _SLOT.size for step in range(8)]
        oldest, oldest_at = places[0], float("inf")
        for at in places:
            held, left, since = _SLOT.unpack_from(self._map, at)
            if held == number:
                return at, left, since
            if held == 0:
                return at, float(per_minute), now
            if since < oldest_at:
                oldest, oldest_at = at, since
        return oldest, float(per_minute), now
