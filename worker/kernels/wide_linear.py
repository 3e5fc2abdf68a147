"""Products of few results in float32: the routers of experts, with weights that stay in float32.

A program holds a few rows of the weight in registers, and multiplies some tokens with them one after another. A sum has
the same order whatever the number of tokens, without padding them to slabs for torch's library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching

NUMBERS = 8192  # of the weight in one program: 64 registers of each thread
FEW_TOKENS, MANY_TOKENS = 1, 8  # tokens of a program
FEW_MAX = 64  # tokens of a step up to which there are enough programs of one token only
WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def wide_linear_kernel(
    x,
    weight,
    bias,
    output,
    tokens,
    n,
    k,
    x_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [blocks of n, blocks of tokens]. See LayerOperations.wide_linear; BLOCK: a power of two that holds k."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside_rows, inside = rows < n, columns < k
    let_next_start(OVERLAP)
    places = rows[:, None].to(tl.int64) * k + columns[None, :]
    w = tl.load(weight + places, mask=inside_rows[:, None] & inside[None, :], other=0.0)
    added = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=inside_rows, other=0.0)
    wait_for_inputs(OVERLAP)
    for each in tl.range(0, TOKENS):
        token = (tl.program_id(1) * TOKENS + each).to(tl.int64)
        is_there = token < tokens
        numbers = tl.load(x + token * x_stride + columns, mask=inside & is_there, other=0.0).to(tl.float32)
        total = tl.sum(w * numbers[None, :], axis=1) + added
        tl.store(output + token * n + rows, total, mask=inside_rows & is_there)


def can_widen(weight: torch.Tensor) -> bool:
    """Return whether the kernel takes a weight [n, k]."""
    return weight.dtype == torch.float32 and weight.is_contiguous() and 1 < weight.shape[1] <= NUMBERS


def wide_linear(launch: Launching, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `LayerOperations.wide_linear`, for weights that `can_widen` accepts."""
    tokens, (n, k) = len(x), weight.shape
    output = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
    if not tokens:
        return output
    block = triton.next_power_of_2(k)
    rows, count = max(1, min(4, NUMBERS // block)), FEW_TOKENS if tokens <= FEW_MAX else MANY_TOKENS
    wide_linear_kernel[(ceil_div(n, rows), ceil_div(tokens, count))](
        x,
        weight,
        weight if bias is None else bias,
        output,
        tokens,
        n,
        k,
        x.stride(0),
        HAS_BIAS=bias is not None,
        ROWS=rows,
        BLOCK=block,
        TOKENS=count,
        num_warps=WARPS,
        **launch_options(launch.overlap),
    )
    return output
