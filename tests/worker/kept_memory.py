"""Memory that test processes keep: the C library trims its heap at one in many calls.

Each load of a model trims it three times or more. With hundreds of small loads that took 3 % of the tests' time, and
pages that were given back are faulted in again by the next load.
"""

from __future__ import annotations

from itertools import count

from kvforge.worker.device.device import Device

CALLS_PER_TRIM = 50


def trim_rarely() -> None:
    """Let one in CALLS_PER_TRIM calls of `Device.release_cached` trim the heap of this process, the first one too."""
    release, calls = Device.release_cached, count()

    def released(self: Device) -> None:
        if self.queues or next(calls) % CALLS_PER_TRIM == 0:
            release(self)

    Device.release_cached = released  # type: ignore[method-assign]
