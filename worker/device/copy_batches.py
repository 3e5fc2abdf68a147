"""Many copies between a GPU and page-locked memory as one call of the driver.

With a call for each block the host spends 5 to 16 us on a block, and the copy engine pauses for 3 us between two: on an
H200, blocks of 1 MiB came to 0.85 to 0.88 of a plain copy's rate, and in batches of eight to 0.98. CUDA 12.8 and later
have `cudaMemcpyBatchAsync`. It is called through cuda-bindings, which torch's CUDA builds bring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .device import Device

FIRST_RUNTIME = 12080  # CUDA 12.8
PROBE_BYTES = 8
Addresses = npt.NDArray[np.int64]
log = logging.getLogger("worker")


class CopyBatches:
    """Queues copies by their addresses, in the queue that torch uses now.

    Args:
        runtime: `cuda.bindings.runtime`.
        queue: Returns the handle of that queue, which may not be the default one.
    """

    def __init__(self, runtime: Any, queue: Callable[[], int]) -> None:
        self._runtime, self._queue = runtime, queue
        attributes = runtime.cudaMemcpyAttributes()
        # The source is read in the order of the queue, as by a plain copy.
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]

    def queue(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Queue copies, which run in any order among themselves.

        Args:
            targets: [n] Addresses on the device or in page-locked memory.
            sources: [n] The same.
            sizes: [n] Bytes. No two copies overlap.

        Raises:
            RuntimeError: The driver refuses.
        """
        count = len(sizes)
        result, *_ = self._runtime.cudaMemcpyBatchAsync(
            targets.tolist(), sources.tolist(), sizes.tolist(), count, self._attributes, [0], 1, self._queue()
        )
        if int(result):
            raise RuntimeError(f"cudaMemcpyBatchAsync of {count} copies failed: {result!r}")


def copy_batches_of(device: Device) -> CopyBatches | None:
    """Return what queues batches of copies; None where the device, its driver or torch's build lacks them."""
    if device.kind != "cuda":
        return None
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    for version in (runtime.cudaRuntimeGetVersion, runtime.cudaDriverGetVersion):
        result, found = version()
        if int(result) or found < FIRST_RUNTIME:
            return None
    problem, batches = "", None
    try:
        batches = CopyBatches(runtime, lambda: torch.cuda.current_stream(device.torch_device).cuda_stream)
        problem = _problem_of(device, batches)
    except (AttributeError, RuntimeError, TypeError) as error:  # bindings of another version, or a driver that refuses
        problem = str(error)
    if problem:
        log.warning("host tier: %s: %s; each block is copied by a call of its own", device.name, problem)
    return None if problem else batches


def _problem_of(device: Device, batches: CopyBatches) -> str:
    """Copy two numbers to the device and back; return what is wrong with them, or "". Raises what `queue` does."""
    ours = device.host_buffer(4 * PROBE_BYTES, torch.uint8)
    ours.copy_(torch.arange(4 * PROBE_BYTES, dtype=torch.uint8))
    there = torch.zeros(2 * PROBE_BYTES, dtype=torch.uint8, device=device.torch_device)
    sizes, places = np.full(2, PROBE_BYTES), np.arange(2) * PROBE_BYTES
    device.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device.torch_device)):
        batches.queue(there.data_ptr() + places[::-1], ours.data_ptr() + places, sizes)
        batches.queue(ours.data_ptr() + 2 * PROBE_BYTES + places, there.data_ptr() + places, sizes)
    device.synchronize()
    halves = ours.view(4, PROBE_BYTES)
    right = torch.equal(halves[2], halves[1]) and torch.equal(halves[3], halves[0])
    return "" if right else "a batch of copies gave other bytes"
