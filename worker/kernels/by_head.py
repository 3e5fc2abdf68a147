"""Products of each head with a matrix of its own: the absorbed projections of attention over latents.

A tile has few columns and two warps, so that the matrix instruction is the same for any number of tokens: a row's sums
do not depend on others. The matrices of a layer are small (4 MB for DeepSeek-V2-Lite), and there is one for each head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching

COLUMNS, DEPTH = 32, 64  # of a tile: numbers of a result, and of the inner dimension in one step
DEPTH_ODD = 32  # where a dimension is no multiple: each number has an address of its own in registers
FEW_TOKENS, MANY_TOKENS = 16, 64  # tokens of a tile


@triton.jit(do_not_specialize=["tokens"])
def by_head_kernel(
    x,
    weight,
    output,
    tokens,
    n,
    k,
    x_stride,
    x_head_stride,
    weight_head_stride,
    weight_k_stride,
    weight_n_stride,
    output_stride,
    output_head_stride,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [blocks of n, heads, blocks of tokens]. See LayerOperations.by_head; strides: in numbers.

    STEPS: steps of DEPTH in the inner dimension. EVEN: whether COLUMNS divides n, and DEPTH divides k.
    """
    head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    inside_columns, inside_rows = columns < n, rows < tokens
    weight_at = weight + head * weight_head_stride + columns[:, None].to(tl.int64) * weight_n_stride
    x_at = x + head * x_head_stride + rows[None, :].to(tl.int64) * x_stride
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([COLUMNS, TOKENS], tl.float32)
    for step in tl.range(0, STEPS):
        places = step * DEPTH + tl.arange(0, DEPTH)
        inside = inside_rows[None, :]
        if EVEN:
            w = tl.load(weight_at + places[None, :] * weight_k_stride)
        else:
            inside = inside & (places < k)[:, None]
            inside_weight = inside_columns[:, None] & (places < k)[None, :]
            w = tl.load(weight_at + places[None, :] * weight_k_stride, mask=inside_weight, other=0.0)
        numbers = tl.load(x_at + places[:, None], mask=inside, other=0.0)
        total = tl.dot(w, numbers, total, input_precision="ieee")
    place = head * output_head_stride + rows[None, :].to(tl.int64) * output_stride + columns[:, None]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=inside_columns[:, None] & inside_rows[None, :])


def by_head(
    launch: Launching, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Implement `LayerOperations.by_head`."""
    tokens, heads, k = x.shape
    n = weight.shape[2]
    if output is None:
        output = torch.empty((tokens, heads, n), dtype=x.dtype, device=x.device)
    assert x.stride(2) == output.stride(2) == 1, (x.stride(), output.stride())
    even = n % COLUMNS == 0 and k % DEPTH == 0
    depth = DEPTH if even else DEPTH_ODD
    few = tokens <= FEW_TOKENS or launch.target.backend != "cuda"  # elsewhere another tile is another instruction
    block = FEW_TOKENS if few else MANY_TOKENS
    by_head_kernel[(ceil_div(n, COLUMNS), heads, ceil_div(tokens, block))](
        x,
        weight,
        output,
        tokens,
        n,
        k,
        *x.stride()[:2],
        *weight.stride(),
        *output.stride()[:2],
        STEPS=ceil_div(k, depth),
        EVEN=even,
        COLUMNS=COLUMNS,
        DEPTH=depth,
        TOKENS=block,
        num_warps=2,
        **launch_options(launch.overlap),
    )
    return output
