"""A small copy between a GPU and pinned host memory, as a kernel.

A copy engine exchanges signals with the queue before and after its work, which takes longer than copying a few thousand
numbers (see benchmarks/NOTES.md on the gap between two decode steps).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .grids import ceil_div

BLOCK, WARPS = 1024, 8


@triton.jit
def copy_kernel(target, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy int32 numbers. Grid: [cdiv(count, BLOCK)]. target, source: [count] int32."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


def copy_numbers(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue target = source.

    Args:
        target: [n] int32, contiguous, on the device or pinned; it must live until the copy is done.
        source: Likewise.
    """
    count = source.numel()
    copy_kernel[(ceil_div(count, BLOCK),)](target, source, count, BLOCK=BLOCK, num_warps=WARPS)
