"""The activation xIELU (arXiv 2411.13010) as a kernel behind a product: its factors are weights of each layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .activations import XIELU_BETA, XIELU_LEAST, Activation
from .launching import Launching

BLOCK = 1024
WARPS = 4
SERIES_MAX = tl.constexpr(0.05)  # below it, exp(x) - 1 - x loses digits that its series keeps
_BETA, _LEAST = tl.constexpr(XIELU_BETA), tl.constexpr(XIELU_LEAST)


@triton.jit(do_not_specialize=["size"])
def xielu_kernel(x, size, alpha, negative, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Apply the activation in place. Grid: [blocks of `size`, tokens]. x: [tokens, size]."""
    let_next_start(OVERLAP)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    place = x + tl.program_id(1).to(tl.int64) * size + columns
    wait_for_inputs(OVERLAP)
    numbers = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    least = tl.where(numbers > _LEAST, _LEAST, numbers)
    series = 0.5 * least * least * (1.0 + least / 3.0 * (1.0 + 0.25 * least))
    grown = tl.where(least > -SERIES_MAX, series + (least - numbers), tl.exp(least) - 1.0 - numbers)
    found = tl.where(numbers > 0, alpha * numbers * numbers, negative * grown) + _BETA * numbers
    tl.store(place, found.to(x.dtype.element_ty), mask=inside)


def apply_xielu(launch: Launching, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply xIELU to x [tokens, n], contiguous, in place; return x."""
    count, size = x.shape
    xielu_kernel[(ceil_div(size, BLOCK), count)](
        x,
        size,
        activation.alpha,
        activation.negative,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **launch_options(launch.overlap),
    )
    return x
