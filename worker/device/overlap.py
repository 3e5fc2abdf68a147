"""Kernels that start while the previous one still runs: programmatic dependent launch, on NVIDIA from Hopper on.

A kernel that is launched this way (OVERLAP) calls `wait_for_inputs` before it reads the output of another kernel and
before its first store. Earlier work (index arithmetic, fetching weights) hides the gap between two launches. The wait
ends when the previous kernel has ended, which itself waited for the one before it, so the order is kept throughout.

`let_next_start` admits the next kernel's blocks once all blocks of this one have called it. Small kernels call it
first. A kernel that fills the device calls it after its loop: blocks that come early settle on the few processors with
room, and the next kernel is as slow as those (H200: 5 % of a decode step). On other devices both calls do nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Allow the next kernel to start."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until the previous kernel has ended."""
    if OVERLAP:
        gdc_wait()


def launch_options(overlap: bool) -> dict[str, Any]:
    """Return launch keywords for a kernel that may overlap the previous one. Other backends reject `launch_pdl`."""
    return {"OVERLAP": overlap} | ({"launch_pdl": True} if overlap else {})
