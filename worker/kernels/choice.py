"""The choice of the implementation that serves a model's layers on a device."""

from __future__ import annotations

import torch

from kvforge.worker.device.device import Device

from .interface import SLAB, LayerOperations
from .packed import PackedOperations, packing_problem
from .plain import PlainOperations


def choose_operations(device: Device, dtype: torch.dtype) -> LayerOperations:
    """Return the fastest implementation for a model of `dtype` on `device`."""
    if not device.runs_kernels:
        if packing_problem(device, dtype):
            return PlainOperations()
        if device.cpu_kernels_problem:
            return PackedOperations(device)
        from .cpu_operations import CpuOperations  # imports numba

        return CpuOperations(device)
    from .fused import FusedOperations  # imports triton

    # torch computes all float32 products, with other bits for each number of rows.
    return FusedOperations(device, slab=SLAB if device.steady and dtype == torch.float32 else 0)
