"""A device as a queue: events, and copies to and from the device.

A GPU runs queued calls in order, later. `DeviceEvent` is an event in that queue, `Staging` copies to the device and
`AsyncCopy` copies from it, both without waiting. On a CPU all work is done when a call returns, and the same calls copy
or do nothing.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .device import Device

# At most two steps are in flight, while a third is being packed.
STAGING_RING = 3


class DeviceEvent:
    """An event in the device's queue. On a CPU it has always passed."""

    def __init__(self, device: Device, timed: bool = False, queue: torch.cuda.Stream | None = None) -> None:
        """Record the event at the end of a queue.

        Args:
            device: The device.
            timed: Whether `ms_since` will be called.
            queue: The queue; None: the one that torch uses now.
        """
        self._event: torch.cuda.Event | None = None
        self._at_ns = 0 if device.queues else time.perf_counter_ns()
        if device.queues:
            self._event = torch.cuda.Event(enable_timing=timed)
            # torch finds the current device again, at twice the cost, where it is given no queue.
            self._event.record(torch.cuda.current_stream(device.torch_device.index) if queue is None else queue)

    def passed(self) -> bool:
        """Return True once everything queued before the event is done.

        Raises:
            RuntimeError: That work failed on the device.
        """
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the event has passed.

        Raises:
            RuntimeError: The work before it failed on the device.
        """
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self, queue: torch.cuda.Stream | None = None) -> None:
        """Make work that is queued from now on wait for the event: in `queue`, or in the one that torch uses now."""
        if self._event is not None:
            self._event.wait(queue)

    def ms_since(self, earlier: DeviceEvent) -> float:
        """Return the milliseconds of device time between two timed events that have passed."""
        if self._event is None or earlier._event is None:
            return (self._at_ns - earlier._at_ns) / 1e6
        return float(earlier._event.elapsed_time(self._event))


class Staging:
    """A fixed buffer on the device that one asynchronous copy fills in each step.

    Attributes:
        on_device: [size] int32 on the device. Its address never changes, so captured graphs may read it. Work queued
            before a `send` reads the old contents, work queued after it the new ones.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device.torch_device)
        self._device = device
        self._ring = [device.host_buffer(size, torch.int32) for _ in range(STAGING_RING)]
        self._sent: list[DeviceEvent | None] = [None] * STAGING_RING
        self._next = 0

    def host(self) -> npt.NDArray[np.int32]:
        """Return the host buffer of the next `send`, [size] int32 with old contents, once its last copy is done."""
        sent = self._sent[self._next]
        if sent is not None:
            sent.wait()
        array: npt.NDArray[np.int32] = self._ring[self._next].numpy()
        return array

    def send(self, count: int) -> None:
        """Queue the copy of the first `count` numbers of the array that `host` returned."""
        self._device.refuse_capture("filling a staging buffer")
        self._device.copy_numbers(self.on_device[:count], self._ring[self._next][:count])
        self._sent[self._next] = DeviceEvent(self._device)
        self._next = (self._next + 1) % STAGING_RING


class AsyncCopy:
    """A device tensor on its way to the host."""

    def __init__(self, device: Device, tensor: torch.Tensor, host: torch.Tensor | None = None) -> None:
        """Queue the copy; work queued later may overwrite the tensor. host: [n] int32 of a HostBuffer, or None."""
        if host is not None:
            self._host = host
            device.copy_numbers(host, tensor)
        else:
            self._host = device.host_buffer(tensor.numel(), tensor.dtype).view(tensor.shape)
            self._host.copy_(tensor, non_blocking=True)

    def array(self) -> npt.NDArray[Any]:
        """Return the contents, with the same shape and dtype. An event recorded after this object must have passed."""
        array: npt.NDArray[Any] = self._host.numpy()
        return array


class HostBuffer:
    """Fixed host buffers, used in turn, for results that are fetched once per step."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._ring = [device.host_buffer(size, torch.int32) for _ in range(STAGING_RING)]
        self._next = 0

    def fetch(self, tensor: torch.Tensor) -> AsyncCopy:
        """Queue the copy of tensor [n] int32. Read the result before STAGING_RING more are fetched."""
        host = self._ring[self._next][: tensor.numel()]
        self._next = (self._next + 1) % STAGING_RING
        return AsyncCopy(self._device, tensor, host)
