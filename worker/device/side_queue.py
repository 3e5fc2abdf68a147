"""A second queue of a device, for copies that run beside the work of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .device import Device
from .queue import DeviceEvent


class SideQueue:
    """A queue of its own. On a CPU all work is done when a call returns, and nothing waits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device.torch_device) if device.queues else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queue what torch is asked for inside here, instead of in the main queue."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def follow(self, event: DeviceEvent) -> None:
        """Make all later work of this queue wait for an event of another one."""
        event.hold_back(self._stream)

    def begin(self) -> DeviceEvent | None:
        """Return a timed event if work that is asked for now begins now; None if it begins in its queue, later."""
        return DeviceEvent(self._device, timed=True) if self._stream is None else None

    def mark(self, timed: bool = False) -> DeviceEvent:
        """Record an event at the end of this queue. timed: as of `DeviceEvent`."""
        return DeviceEvent(self._device, timed, self._stream)
