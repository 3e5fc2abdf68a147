"""Rates of keys, counted together by all processes that serve one port.

Token buckets of one minute in a small file that they all map; a lock on the file for a few microseconds makes each
update one. Whoever is killed within it frees the lock, and has changed at most one bucket.
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
_SLOT = struct.Struct("<Qdd")  # the key's number, what is left, when that was, on CLOCK_MONOTONIC
FILE_BYTES = SLOTS * _SLOT.size
MINUTE_S = 60.0


class Rates(Protocol):
    """Buckets by name."""

    def take(self, name: str, amount: float, per_minute: int, *, must: bool = False) -> float:
        """Takes `amount`, and returns 0; or takes nothing, and returns the seconds to wait. must: takes it in any
        case: then less than nothing is left. 0 is given only while something is left."""


class _NoRates:
    def take(self, name: str, amount: float, per_minute: int, *, must: bool = False) -> float:  # noqa: ARG002
        return 0.0


NO_RATES: Rates = _NoRates()


class SharedRates:
    """In a file, which is made where it is not there."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, FILE_BYTES)
        self._map = mmap.mmap(self._file, FILE_BYTES)

    def close(self) -> None:
        """Frees the file."""
        self._map.close()
        os.close(self._file)

    def take(self, name: str, amount: float, per_minute: int, *, must: bool = False) -> float:
        """See `Rates`."""
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
        """Where a bucket is, what was left in it, and when. One that is new is full; where all places are taken, the
        longest unused of eight gives way."""
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
