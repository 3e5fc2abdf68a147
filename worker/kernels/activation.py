"""Activations inside kernels, and a kernel for those behind a product of torch's library."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .activations import Activation
from .launching import Launching

BLOCK = 1024
WARPS = 4
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def _rounded(x, NARROW: tl.constexpr):
    return x.to(NARROW).to(tl.float32)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply an activation to float32 numbers; see Activation."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif KIND == "gelu_tanh":  # 0.5 (1 + tanh y) is the sigmoid of 2 y
        return x / (1.0 + tl.exp(-SQRT_8_OVER_PI * (x + CUBIC * x * x * x)))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        positive = tl.where(x < 0, 0.0, x)  # keeps NaN
        if KIND == "relu2":
            positive = positive * positive
        return positive


@triton.jit
def activated(gate, up, alpha, limit, KIND: tl.constexpr, NARROW: tl.constexpr):
    """Return activation(gate) x up in float32, to be rounded to NARROW. gate, up: rounded to NARROW, as float32."""
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        inner = _rounded(gate * alpha, NARROW)
        swish = _rounded(gate * _rounded(1.0 / (1.0 + tl.exp(-inner)), NARROW), NARROW)
        return _rounded(up + 1.0, NARROW) * swish
    else:
        return _rounded(activate(gate, KIND), NARROW) * up


@triton.jit
def activation_kernel(
    x,
    output,
    size,
    alpha,
    limit,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Apply an activation. Grid: [blocks of `size`, tokens]. x: [tokens, size], or [tokens, 2 x size] if GATED."""
    let_next_start(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    narrow = output.dtype.element_ty
    wait_for_inputs(OVERLAP)
    place = x + row * (2 if GATED else 1) * size + columns
    numbers = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(place + size, mask=inside, other=0.0).to(tl.float32)
        found = activated(numbers, up, alpha, limit, KIND, narrow)
    else:
        found = activate(numbers, KIND)
    tl.store(output + row * size + columns, found.to(narrow), mask=inside)


def apply_activation(launch: Launching, x: torch.Tensor, activation: Activation, gated: bool) -> torch.Tensor:
    """Apply an activation to x [tokens, n], or to a gate and `up` [tokens, 2n]; contiguous. Returns [tokens, n]."""
    count, width = x.shape
    size = width // 2 if gated else width
    output = torch.empty((count, size), dtype=x.dtype, device=x.device)
    activation_kernel[(ceil_div(size, BLOCK), count)](
        x,
        output,
        size,
        activation.alpha,
        activation.limit,
        KIND=activation.kind,
        GATED=gated,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **launch_options(launch.overlap),
    )
    return output
