"""Tests of kernels on an emulated GPU: `KVFORGE_EMULATED=sm_90 pytest tests/worker/kernels/test_stored_hopper.py`.

Kernels are compiled for that GPU, and the compiler's output is interpreted (`tools.ptx`, `tools.amdgcn`). Tests that
need a GPU only for its kernels run then. Sums of matrix products are rounded once, as no GPU does.
"""

from __future__ import annotations

import os
from typing import Any

TARGET = os.environ.get("KVFORGE_EMULATED", "")  # sm_90, gfx942 and others
COPIES = os.environ.get("KVFORGE_COPIES", "late")  # when copies end: see `tools.ptx`
MULTIPROCESSORS = 132


def enter() -> None:
    """Let Triton launch kernels on the interpreter, and `open_device` open the emulated GPU, in this process."""
    from kvforge.worker.device import device
    from tools.amdgcn.driver import Emulated
    from tools.ptx import driver

    gpu = driver.Emulated(TARGET, COPIES) if TARGET.startswith("sm_") else Emulated(TARGET)
    gpu.__enter__()

    def open_emulated(*_: Any, **__: Any) -> device.Device:
        return gpu.device(MULTIPROCESSORS)

    device.open_device = open_emulated
