"""Tests of kernels on an emulated GPU: `KVFORGE_EMULATED=sm_90 pytest tests/worker/kernels/test_stored_hopper.py`.

Kernels are compiled for that GPU, and the compiler's output is interpreted (`tools.ptx`, `tools.amdgcn`). Tests that
need a GPU only for its kernels run then. Sums of matrix products are rounded once, as no GPU does.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

TARGET = os.environ.get("KVFORGE_EMULATED", "")  # sm_90, gfx942 and others
COPIES = os.environ.get("KVFORGE_COPIES", "late")  # when copies end: see `tools.ptx`
MULTIPROCESSORS = 132


def enter() -> None:
    """Let Triton launch kernels on the interpreter, and `open_device` open the emulated GPU, in this process."""
    from kvforge.worker.device import device
    from kvforge.worker.device.targets import TARGETS
    from tools.amdgcn.driver import Emulated
    from tools.ptx import driver
    from tools.ptx.machine import ORDERS

    known = [name for name, target in TARGETS.items() if target.backend in ("cuda", "hip")]
    for name, value, values in (("KVFORGE_EMULATED", TARGET, known), ("KVFORGE_COPIES", COPIES, [*ORDERS])):
        if value not in values:
            raise pytest.UsageError(f"{name}: {value!r} is not one of {', '.join(values)}")
    gpu = driver.Emulated(TARGET, COPIES) if TARGET.startswith("sm_") else Emulated(TARGET)
    gpu.__enter__()

    def open_emulated(*_: Any, **__: Any) -> device.Device:
        return gpu.device(MULTIPROCESSORS)

    device.open_device = open_emulated
