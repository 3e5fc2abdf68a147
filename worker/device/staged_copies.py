"""Bytes on their way to the device through a few fixed host buffers: one fills while the copies of others run."""

from __future__ import annotations

import torch

from .device import Device
from .queue import DeviceEvent

BUFFERS = 2


class StagedCopies:
    """The host buffers of one thread. Not thread-safe.

    Work that any thread queues after `send` returns reads the new bytes.
    """

    def __init__(self, device: Device, buffer_bytes: int) -> None:
        """Allocate the buffers, in the thread that uses them.

        Args:
            device: The device.
            buffer_bytes: Size of each of the `BUFFERS` buffers.

        Raises:
            RuntimeError: There is no memory that the device can copy from.
        """
        device.enter_thread()
        self._device = device
        self._ring = [device.host_buffer(buffer_bytes, torch.uint8) for _ in range(BUFFERS)]
        self._sent: list[DeviceEvent | None] = [None] * BUFFERS
        self._next = 0

    def buffer(self) -> memoryview:
        """Return the buffer of the next `send`, with old contents, once its last copy is done.

        Raises:
            RuntimeError: The device failed.
        """
        sent = self._sent[self._next]
        if sent is not None:
            sent.wait()
        return self._ring[self._next].numpy().data

    def send(self, target: torch.Tensor) -> None:
        """Queue the copy of the first bytes of the buffer. target: [n] uint8 on the device, contiguous."""
        target.copy_(self._ring[self._next][: len(target)], non_blocking=True)
        self._sent[self._next] = DeviceEvent(self._device)
        self._next = (self._next + 1) % BUFFERS

    def wait(self) -> None:
        """Wait until all copies are done. Raises RuntimeError if the device failed."""
        for sent in self._sent:
            if sent is not None:
                sent.wait()
