"""Host memory that was not allocated for the device, registered so that the device copies from and to it directly."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .device import Device


class RegisteredMemory:
    """The memory of an array, page-locked and mapped for the device until `close`.

    Args:
        device: The device.
        array: [n] uint8, contiguous. It must outlive this object.

    Attributes:
        problem: Why the device cannot copy from and to the array directly; "": it can.
    """

    def __init__(self, device: Device, array: npt.NDArray[np.uint8]) -> None:
        self._address = 0
        self.problem = self._register(device, array) if device.queues else ""

    def _register(self, device: Device, array: npt.NDArray[np.uint8]) -> str:
        """Register the memory; return why that was refused, or ""."""
        runtime: Any = torch.cuda.cudart()
        result = int(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
        if not result:
            self._address = array.ctypes.data
            return ""
        with contextlib.suppress(RuntimeError):  # the next launch reports the refusal once more, and clears it
            torch.zeros(1, device=device.torch_device)
        return f"cudaHostRegister of {array.nbytes} bytes failed with error {result}"

    def close(self) -> None:
        """Unregister the memory. No copy may be under way. Closing twice is harmless."""
        if self._address:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._address)
            self._address = 0
