"""A small copy between a GPU and memory of the host that it reaches (pinned), as a kernel.

A copy engine is told of its work by the queue and tells the queue when it is done, which takes longer than to copy a
few thousand numbers: see benchmarks/NOTES.md, where it says what lies between two decode steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 8


@triton.jit
def copy_kernel(target, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Grid: [cdiv(count, BLOCK)]. target, source: [count] int32."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


def copy_numbers(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queues target = source. Both: [n] int32, contiguous, on the device or pinned, and there until it is done."""
    count = source.numel()
    copy_kernel[(triton.cdiv(count, BLOCK),)](target, source, count, BLOCK=BLOCK, num_warps=WARPS)
