"""The worker's self-tests and further checks, with its kernels interpreted for NVIDIA GPUs.

    python -m tools.ptx.suite [--target sm_90 ...] [--only "decode bf16"] [--order mixed --seed 1] [--quick]

The checks are those of `tools.amdgcn.suite`. The whole suite (`make nvidia`) takes one core a few minutes per
target; `make test-all` runs `--quick`.
"""

from __future__ import annotations

import sys

from kvforge.worker.device.targets import TARGETS
from tools.amdgcn import suite

from .driver import Emulated
from .machine import ORDERS

NAMES = [name for name, target in TARGETS.items() if target.backend == "cuda"]
NVIDIA = suite.Interpreter("tools.ptx.suite", NAMES, ORDERS, Emulated)


if __name__ == "__main__":
    sys.exit(suite.main(NVIDIA))
