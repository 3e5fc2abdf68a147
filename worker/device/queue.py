"""A device as a queue: points in it, the way in and the way out.

A GPU is a queue: what is called is queued, in order, and done later. `Mark` is a point in that queue, `Staging` the way
in and `Fetched` the way out, neither of which waits. On a CPU everything is done when the call returns, and the same
calls copy, or do nothing.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .device import Device

# Two steps are under way at most, and a third is being packed.
STAGING_RING = 3


class Mark:
    """A point in the device's queue. On a CPU it has always been passed."""

    def __init__(self, device: Device, timed: bool = False) -> None:
        """Puts the mark at the end of the queue. timed: `ms_since` will be asked."""
        self._event: torch.cuda.Event | None = None
        self._at_ns = 0 if device.queues else time.perf_counter_ns()
        if device.queues:
            self._event = torch.cuda.Event(enable_timing=timed)
            self._event.record()

    def passed(self) -> bool:
        """True once everything queued before the mark is done. Errors: what the device raises for that work."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Waits until it is passed. Errors: what the device raises for the work before it."""
        if self._event is not None:
            self._event.synchronize()

    def ms_since(self, earlier: Mark) -> float:
        """Milliseconds of device time between two timed marks that are passed."""
        if self._event is None or earlier._event is None:
            return (self._at_ns - earlier._at_ns) / 1e6
        return float(earlier._event.elapsed_time(self._event))


class Staging:
    """A fixed place on the device that is filled once a step, in one copy that nobody waits for.

    on_device: [size] int32 device; its address never changes, so captured graphs may read it. What is queued before a
    `send` reads the old contents, what is queued after it the new ones.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device.torch_device)
        self._device = device
        self._ring = [device.host_buffer(size, torch.int32) for _ in range(STAGING_RING)]
        self._sent: list[Mark | None] = [None] * STAGING_RING
        self._next = 0

    def host(self) -> npt.NDArray[np.int32]:
        """The host's side of the next `send`: [size] int32 with old contents. Waits for the last copy out of it."""
        sent = self._sent[self._next]
        if sent is not None:
            sent.wait()
        array: npt.NDArray[np.int32] = self._ring[self._next].numpy()
        return array

    def send(self, count: int) -> None:
        """Queues the copy of the first `count` numbers of what `host` gave."""
        self._device.refuse_capture("filling a staging buffer")
        self._device.copy_numbers(self.on_device[:count], self._ring[self._next][:count])
        self._sent[self._next] = Mark(self._device)
        self._next = (self._next + 1) % STAGING_RING


class Fetched:
    """A device tensor on its way to the host."""

    def __init__(self, device: Device, tensor: torch.Tensor, host: torch.Tensor | None = None) -> None:
        """Queues the copy; what is queued later may overwrite the tensor. host: [n] int32 of a Landing."""
        if host is not None:
            self._host = host
            device.copy_numbers(host, tensor)
        else:
            self._host = device.host_buffer(tensor.numel(), tensor.dtype).view(tensor.shape)
            self._host.copy_(tensor, non_blocking=True)

    def array(self) -> npt.NDArray[Any]:
        """The contents, same shape and dtype. A mark that was made after this object must have been passed."""
        array: npt.NDArray[Any] = self._host.numpy()
        return array


class Landing:
    """Fixed places on the host, taken in turn, for what is fetched once a step."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._ring = [device.host_buffer(size, torch.int32) for _ in range(STAGING_RING)]
        self._next = 0

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """tensor: [n] int32 device. What comes of it is to be read before STAGING_RING more are fetched."""
        host = self._ring[self._next][: tensor.numel()]
        self._next = (self._next + 1) % STAGING_RING
        return Fetched(self._device, tensor, host)
