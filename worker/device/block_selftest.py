"""Self-test of the kernel that copies and zeroes whole blocks, against plain torch, at a worker's start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from .block_buffers import BlockBuffers
from .check import require_right
from .device import WAY_OUT, Device
from .queue import DeviceEvent

BLOCKS, SIZES = 5, (8, 8200, 64)  # bytes of a block in each tensor: a word, more than a program copies at once, few
COPIED, ZEROED = (3, 0, 4), (2,)


def block_copies_test(device: Device) -> None:
    """Copy blocks out of a pool and into another one, and zero one of those that are left.

    Raises:
        KernelError: The kernel is wrong.
        GpuError: The device failed.
    """
    require_right(device, "block copies", f"blocks of {sum(SIZES)} bytes", _copying(device), WAY_OUT)


def _copying(device: Device) -> Callable[[], str]:
    def run() -> str:
        rng = np.random.default_rng(0)
        held = [device.upload(rng.integers(0, 256, (BLOCKS, size), np.uint8)) for size in SIZES]
        blocks, found = np.array(COPIED), []
        for each in (device, replace(device, kernels=False)):
            other = [torch.zeros_like(tensor) for tensor in held]
            source, target = BlockBuffers(each, held), BlockBuffers(each, other)
            rows = torch.zeros((len(blocks), source.block_bytes), dtype=torch.uint8, device=device.torch_device)
            out, back = source.begin(blocks), target.begin(blocks)
            out.gather(slice(0, 2), rows[:2])
            out.gather(slice(2, 3), rows[2:])
            back.scatter(slice(0, 3), rows)
            sums = out.sums(), back.sums()
            zeroed = [tensor.clone() for tensor in held]
            BlockBuffers(each, zeroed).zero(np.array(ZEROED))
            DeviceEvent(device).wait()
            copied = torch.cat([rows.flatten(), *(tensor.flatten() for tensor in other)])
            left = torch.cat([tensor.flatten() for tensor in zeroed])
            octets = (part.cpu().numpy().tobytes() for part in (copied, left))
            found.append((*octets, *(part.array().tobytes() for part in sums)))
        checksums = ("another checksum out of the pool", "another checksum into the pool")
        names = ("other bytes", "other bytes where blocks are zeroed", *checksums)
        return "; ".join(name for name, ours, plain in zip(names, *found, strict=True) if ours != plain)

    return run
