"""cos and sin of rotary position embeddings (Su et al., "RoFormer", arXiv 2104.09864), once per step for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import head_class

from .launching import Launching


@triton.jit(do_not_specialize_on_alignment=["positions"])  # each program loads one position, at any alignment
def rotary_kernel(positions, frequencies, cosines, sines, scaling, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid: [tokens]. See LayerOperations.rotary; size: number of frequencies."""
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    frequency = tl.load(frequencies + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    angles = tl.load(positions + row).to(tl.float32) * frequency
    cosine = (tl.cos(angles) * scaling).to(cosines.dtype.element_ty)
    sine = (tl.sin(angles) * scaling).to(sines.dtype.element_ty)
    place = row * 2 * size + columns
    tl.store(cosines + place, cosine, mask=inside)
    tl.store(cosines + place + size, cosine, mask=inside)
    tl.store(sines + place, sine, mask=inside)
    tl.store(sines + place + size, sine, mask=inside)


def rotary(
    launch: Launching, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `LayerOperations.rotary`."""
    size = len(frequencies)
    cosines = torch.empty((len(positions), 2 * size), dtype=dtype, device=positions.device)
    sines = torch.empty_like(cosines)
    rotary_kernel[(len(positions),)](
        positions,
        frequencies,
        cosines,
        sines,
        scaling,
        size,
        BLOCK=head_class(2 * size) // 2,
        num_warps=1,
        **launch_options(launch.overlap),
    )
    return cosines, sines
