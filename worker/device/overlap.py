"""A kernel that starts while the one before it still runs: programmatic dependent launch, on NVIDIA from Hopper on.

Every kernel that is launched so (OVERLAP) calls `wait_for_inputs` before it reads what another kernel wrote and before
its first store; what it does before that (index arithmetic, fetching weights) hides the gap between two launches. The
wait ends when the kernel before has ended, which itself waited for the one before it, so order is kept throughout.

`let_next_start` lets the next kernel's blocks come when all blocks of this one have called it. Small kernels call it
first. One that fills the device calls it when its loop is done: blocks that come early settle on the few processors
with room, and the next kernel is as slow as those (H200: 5 % of a decode step). Elsewhere both are nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


def launch_options(overlap: bool) -> dict[str, Any]:
    """Keywords of a launch that may overlap the one before it. Other backends do not know `launch_pdl`."""
    return {"OVERLAP": overlap} | ({"launch_pdl": True} if overlap else {})
