"""SiLU of the gate times the up projection (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

BLOCK = 1024
WARPS = 4


@triton.jit
def silu_mul_kernel(gate_up, output, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Compute silu(gate) x up. Grid: [blocks of `size`, tokens]. gate_up: [tokens, 2 x size], the gate first."""
    let_next_start(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_inputs(OVERLAP)
    place = gate_up + row * 2 * size + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=inside, other=0.0).to(tl.float32)
    narrow = output.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32)
    tl.store(output + row * size + columns, (silu * up).to(narrow), mask=inside)


def silu_mul(gate_up: torch.Tensor, overlap: bool) -> torch.Tensor:
    """Compute silu(gate) x up. gate_up: [tokens, 2n], contiguous, the gate first. Returns [tokens, n]."""
    count, width = gate_up.shape
    size = width // 2
    output = torch.empty((count, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (triton.cdiv(size, BLOCK), count)
    silu_mul_kernel[grid](gate_up, output, size, BLOCK=BLOCK, num_warps=WARPS, **launch_options(overlap))
    return output
