"""A timer with a precision of about ten microseconds; the event loop's own timers have milliseconds.

A kernel timer (timerfd) wakes the loop like a socket does. Due functions are called in the order of their times and
measure their own lateness.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from time import monotonic

CLOCK_MONOTONIC = 1
ONCE = os.O_NONBLOCK | os.O_CLOEXEC  # the same values as TFD_NONBLOCK and TFD_CLOEXEC
SOON_NS = 1  # zero would disarm it


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Clock:
    """The timer. All times are time.monotonic's. Close it after use."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()
        self._armed = float("inf")
        self._handle: asyncio.TimerHandle | None = None
        self._file = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._file = self._libc.timerfd_create(CLOCK_MONOTONIC, ONCE)
            if self._file < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
            self._loop.add_reader(self._file, self._ring)
            self._when = _Itimerspec()
            self._at = ctypes.byref(self._when)

    def at(self, when: float, function: Callable[[], None]) -> None:
        """Call `function` at `when`, or soon if that has passed; never from within this call."""
        heappush(self._heap, (when, next(self._count), function))
        if when < self._armed:
            self._arm(when)

    @property
    def next_at(self) -> float:
        """When the next function is due; infinity for none."""
        return self._heap[0][0] if self._heap else float("inf")

    def close(self) -> None:
        """Cancel all calls."""
        self._heap.clear()
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _arm(self, when: float) -> None:
        self._armed = when
        if self._file < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, when - monotonic()), self._due)
            return
        left_ns = max(SOON_NS, int((when - monotonic()) * 1e9))
        self._when.value.sec, self._when.value.nsec = divmod(left_ns, 1_000_000_000)
        self._libc.timerfd_settime(self._file, 0, self._at, None)

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # rearmed in the meantime
            return
        self._due()

    def _due(self) -> None:
        heap, self._armed = self._heap, -1.0  # additions by the called functions are handled below
        end = monotonic()
        while heap and heap[0][0] <= end:
            heappop(heap)[2]()
        self._armed = float("inf")
        if heap:
            self._arm(heap[0][0])
