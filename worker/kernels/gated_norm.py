"""The norm behind a gated delta rule, of each head by itself, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching
from .recurrent import GatedDelta

NUMBERS = 1024  # of a program


@triton.jit(do_not_specialize=["count", "heads", "gate_stride"])
def gated_norm_kernel(
    numbers,
    gate,
    weight,
    count,
    heads,
    value_size,
    gate_stride,
    epsilon,
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    SIGMOID: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [blocks of ROWS heads]. See `gated_norm`.

    count: tokens x heads. VALUES: a power of two that holds a head. SIGMOID: see `GatedDelta.has_sigmoid`.
    """
    let_next_start(OVERLAP)
    index, across = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, VALUES)
    dtype: tl.constexpr = numbers.dtype.element_ty
    in_value = across < value_size
    inside = (index < count)[:, None] & in_value[None, :]
    factor = tl.load(weight + across, mask=in_value, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    place = numbers + index[:, None] * value_size + across[None, :]
    found = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(found * found, axis=1) / value_size + epsilon)
    if SIGMOID:
        normed = found * scale[:, None] * factor[None, :]
    else:
        normed = (found * scale[:, None]).to(dtype).to(tl.float32)
        normed = (normed * factor[None, :]).to(dtype).to(tl.float32)
    gate_at = gate + (index // heads)[:, None] * gate_stride + (index % heads)[:, None] * value_size + across[None, :]
    opened = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        normed *= 1.0 / (1.0 + tl.exp(-opened))
    else:
        normed *= opened / (1.0 + tl.exp(-opened))
    tl.store(place, normed.to(dtype), mask=inside)


def gated_norm(launch: Launching, numbers: torch.Tensor, gate: torch.Tensor, delta: GatedDelta) -> torch.Tensor:
    """Turn each head of `numbers` into weight * norm(head) * silu(gate), or sigmoid(gate), in place.

    Args:
        launch: How to launch.
        numbers: [tokens, value heads x value_size], contiguous.
        gate: The same shape and dtype, the last dimension contiguous.
        delta: Has the weight.

    Returns:
        `numbers`.
    """
    heads, values = delta.value_heads, triton.next_power_of_2(delta.value_size)
    count, block, target = len(numbers) * heads, max(1, NUMBERS // values), launch.target
    gated_norm_kernel[(ceil_div(count, block),)](
        numbers,
        gate,
        delta.weight,
        count,
        heads,
        delta.value_size,
        gate.stride(0),
        delta.epsilon,
        ROWS=block,
        VALUES=values,
        SIGMOID=delta.has_sigmoid,
        num_warps=max(1, NUMBERS // 8 // target.warp_size) if target.backend != "cpu" else 1,
        **launch_options(launch.overlap),
    )
    return numbers
