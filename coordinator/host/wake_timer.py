"""A timer that ends a wait to the microsecond: epoll itself waits whole milliseconds."""

from __future__ import annotations

import ctypes
import os
import time

CLOEXEC, NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK


class _Times(ctypes.Structure):
    """`struct itimerspec`: an interval, 0 here, and the time until the end."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "seconds", "nanoseconds")]


class WakeTimer:
    """A timer in a descriptor that becomes readable when it ends.

    Attributes:
        descriptor: The descriptor; -1 where the system has no such timers, and `arm` does nothing.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        create, self._set = getattr(library, "timerfd_create", None), getattr(library, "timerfd_settime", None)
        self.descriptor = create(time.CLOCK_MONOTONIC, CLOEXEC | NONBLOCK) if create is not None else -1

    def arm(self, after_us: int) -> None:
        """End the next wait after so many microseconds, at least one."""
        if self.descriptor < 0 or self._set is None:
            return
        seconds, us = divmod(max(1, after_us), 1_000_000)
        times = _Times(0, 0, seconds, 1000 * us)
        self._set(self.descriptor, 0, ctypes.byref(times), None)  # unread ends of before are forgotten

    def ended(self) -> None:
        """Read the end, so that the descriptor is not readable any more."""
        try:
            os.read(self.descriptor, 8)
        except BlockingIOError:
            return  # armed again meanwhile

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
