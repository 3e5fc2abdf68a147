"""What attention over latents reads of new tokens, in one kernel: the norm of the latent, and the rotations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .combine import _normalised, kind_of
from .launching import Launching
from .layer_weights import Norm
from .norm import block_of, warps_of


@triton.jit
def _rotate(source, target, cosines, sines, half, HALF: tl.constexpr):
    """Rotate source [2 x half] into target. cosines, sines: [2 x half]."""
    columns = tl.arange(0, HALF)
    inside = columns < half
    first = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + columns, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + columns, mask=inside, other=0.0).to(tl.float32)
    far_cosine = tl.load(cosines + half + columns, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + columns, mask=inside, other=0.0).to(tl.float32)
    far_sine = tl.load(sines + half + columns, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target + columns, (first * cosine - second * sine).to(dtype), mask=inside)
    tl.store(target + half + columns, (second * far_cosine + first * far_sine).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["heads", "kind"])
def latent_inputs_kernel(
    own,
    queries,
    weight,
    bias,
    cosines,
    sines,
    stored,
    absorbed,
    heads,
    size,
    half,
    own_stride,
    query_stride,
    query_head_stride,
    absorbed_stride,
    absorbed_head_stride,
    epsilon,
    offset,
    kind,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [tokens, heads + 1]; the last program of a token has its latent. See LayerOperations.latent_inputs.

    queries, absorbed: begin at the numbers that are rotated. size: numbers of a latent. half: half of the rotary key.
    BLOCK, HALF: powers of two that hold these. kind: of the norm; 0: none.
    """
    let_next_start(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = token * 2 * half
    wait_for_inputs(OVERLAP)
    if head < heads:
        source = queries + token * query_stride + head * query_head_stride
        target = absorbed + token * absorbed_stride + head * absorbed_head_stride
        _rotate(source, target, cosines + angles, sines + angles, half, HALF)
    else:
        source, target = own + token * own_stride, stored + token * (size + 2 * half)
        columns = tl.arange(0, BLOCK)
        inside = columns < size
        x = tl.load(source + columns, mask=inside, other=0.0)
        if kind != 0:
            w = tl.load(weight + columns, mask=inside, other=0.0)
            wide = x.to(tl.float32)
            x = _normalised(wide, w, bias, columns, inside, size, epsilon, offset, kind, stored.dtype.element_ty)
        tl.store(target + columns, x, mask=inside)
        _rotate(source + size, target + size, cosines + angles, sines + angles, half, HALF)


def latent_inputs(
    launch: Launching,
    own: torch.Tensor,
    queries: torch.Tensor,
    norm: Norm | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    absorbed: torch.Tensor,
) -> torch.Tensor:
    """Implement `LayerOperations.latent_inputs`."""
    tokens, heads, rotated = queries.shape
    width = own.shape[1]
    size, half = width - rotated, rotated // 2
    stored = torch.empty((tokens, width), dtype=own.dtype, device=own.device)
    weight = own if norm is None else norm.weight
    block = block_of(size)
    latent_inputs_kernel[(tokens, heads + 1)](
        own,
        queries,
        weight,
        weight if norm is None or norm.bias is None else norm.bias,
        cos,
        sin,
        stored,
        absorbed,
        heads,
        size,
        half,
        own.stride(0),
        *queries.stride()[:2],
        *absorbed.stride()[:2],
        0.0 if norm is None else norm.epsilon,
        0.0 if norm is None else norm.offset,
        kind_of(norm),
        BLOCK=block,
        HALF=triton.next_power_of_2(half),
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return stored
