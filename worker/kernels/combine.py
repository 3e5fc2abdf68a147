"""Norms of every kind, and the sum of a layer's result and the residual with a norm on either side.

One program handles one row. Numbers are rounded where `plain` rounds them. `norm` has the faster case of Llama.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import HEAD_CLASSES, HEAD_UNIT, head_class, in_units

from .launching import Launching
from .layer_weights import Norm
from .norm import PARTS_EXACT, block_of, warps_of

PRESENT, CENTRED, ROUNDED, BIASED = 1, 2, 4, 8  # bits of a kind of norm; 0: none
_UNIT, _PARTS_EXACT = tl.constexpr(HEAD_UNIT), tl.constexpr(PARTS_EXACT)


@triton.jit
def _normalised(x, weight, bias, columns, inside, size, epsilon, offset, kind, dtype: tl.constexpr):
    """Normalise x [BLOCK] float32, which is zero outside. weight: [BLOCK]. bias: [size], by pointer.

    kind: at run time, so that one compilation serves all kinds; the kernel waits for memory anyway.
    """
    if kind & 2 != 0:  # CENTRED
        x = tl.where(inside, x - tl.sum(x, axis=0) / size, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon)
    if kind & 4 != 0:  # ROUNDED
        x = x.to(dtype).to(tl.float32)
    x = x * (weight.to(tl.float32) + offset)
    if kind & 8 != 0:  # BIASED
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return x.to(dtype)


_STRIDES = ["source_stride", "source_head_stride", "target_stride", "target_head_stride"]


@triton.jit(do_not_specialize=["size", "heads", "kind", *_STRIDES])
def norm_kernel(
    source,
    target,
    weight,
    bias,
    key_weight,
    heads,
    source_stride,
    source_head_stride,
    target_stride,
    target_head_stride,
    size,
    epsilon,
    offset,
    kind,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise rows. Grid: [tokens, heads of both weights]. size and strides: in units.

    The first `heads` heads have `weight`, the others `key_weight`.
    """
    let_next_start(OVERLAP)
    size = size * _UNIT
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head >= heads:
        weight = key_weight
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    w = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    place = (token * source_stride + head * source_head_stride) * _UNIT + columns
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    y = _normalised(x, w, bias, columns, inside, size, epsilon, offset, kind, target.dtype.element_ty)
    place = (token * target_stride + head * target_head_stride) * _UNIT + columns
    tl.store(target + place, y, mask=inside)


@triton.jit(do_not_specialize=["hidden", "parts", "past_kind", "next_kind"])
def combine_kernel(
    addend,
    residual,
    output,
    past_weight,
    past_bias,
    next_weight,
    next_bias,
    hidden,
    parts,
    scale,
    past_epsilon,
    past_offset,
    past_kind,
    next_epsilon,
    next_offset,
    next_kind,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [tokens]. See LayerOperations.combine; addend: [parts, tokens, hidden], contiguous. hidden: in units.

    PARTS: `parts`, or where those are many a power of two that is not less. past_, next_: the norms of the sum of parts
    and of the new residual.
    """
    let_next_start(OVERLAP)
    hidden = hidden * _UNIT
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    past = tl.load(past_weight + columns, mask=inside & (past_kind != 0), other=0.0)
    following = tl.load(next_weight + columns, mask=inside & (next_kind != 0), other=0.0)
    wait_for_inputs(OVERLAP)
    place = row * hidden + columns
    before = tl.load(residual + place, mask=inside, other=0.0)
    dtype: tl.constexpr = residual.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    part_stride = tl.num_programs(0) * hidden
    for part in tl.static_range(PARTS):
        mask = inside if PARTS <= _PARTS_EXACT else inside & (part < parts)
        total += tl.load(addend + part * part_stride + place, mask=mask, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if past_kind != 0:
        normed = _normalised(
            total, past, past_bias, columns, inside, hidden, past_epsilon, past_offset, past_kind, dtype
        )
        total = normed.to(tl.float32)
    total = (total * scale).to(dtype).to(tl.float32)  # exact for 1
    after = (total + before.to(tl.float32)).to(dtype)
    tl.store(residual + place, after, mask=inside)
    if next_kind != 0:
        wide = after.to(tl.float32)
        normed = _normalised(
            wide, following, next_bias, columns, inside, hidden, next_epsilon, next_offset, next_kind, dtype
        )
        tl.store(output + place, normed, mask=inside)


def kind_of(norm: Norm | None) -> int:
    """Return the kernel's kind of a norm."""
    if norm is None:
        return 0
    return PRESENT + CENTRED * norm.centred + ROUNDED * norm.rounds_first + BIASED * (norm.bias is not None)


def normed(launch: Launching, x: torch.Tensor, norm: Norm, output: torch.Tensor | None = None) -> torch.Tensor:
    """Implement `LayerOperations.norm`."""
    if output is None:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, target = (each if each.dim() == 3 else each[:, None] for each in (x, output))
    _normalise(launch, rows, target, norm, norm.weight, rows.shape[1])
    return output


def normed_heads(launch: Launching, projected: torch.Tensor, query: Norm, key: Norm, heads: int, kv_heads: int) -> None:
    """Implement `LayerOperations.norm_heads`."""
    size = len(query.weight)
    rows = projected[:, : (heads + kv_heads) * size].unflatten(1, (-1, size))
    _normalise(launch, rows, rows, query, key.weight, heads)


def _normalise(
    launch: Launching,
    source: torch.Tensor,
    target: torch.Tensor,
    norm: Norm,
    key_weight: torch.Tensor,
    heads: int,
) -> None:
    """Normalise [tokens, heads, n]. key_weight: the weight of the heads from `heads` on."""
    size = source.shape[2]
    assert source.stride(2) == target.stride(2) == 1, (source.stride(), target.stride())
    block = head_class(size) if size <= HEAD_CLASSES[-1] else block_of(size)
    norm_kernel[source.shape[:2]](
        source,
        target,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        key_weight,
        heads,
        *in_units(*source.stride()[:2], *target.stride()[:2], size),
        norm.epsilon,
        norm.offset,
        kind_of(norm),
        BLOCK=block,
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )


def combined(
    launch: Launching,
    addend: torch.Tensor,
    residual: torch.Tensor,
    after: Norm | None,
    scale: float,
    following: Norm | None,
) -> torch.Tensor:
    """Implement `LayerOperations.combine`."""
    parts, count, hidden = addend.shape
    assert addend.is_contiguous(), addend.stride()
    output = residual if following is None else torch.empty_like(residual)
    block = block_of(hidden)
    combine_kernel[(count,)](
        addend,
        residual,
        output,
        *_tensors(after, residual),
        *_tensors(following, residual),
        *in_units(hidden),
        parts,
        scale,
        *_numbers(after),
        *_numbers(following),
        PARTS=parts if parts <= PARTS_EXACT else 1 << (parts - 1).bit_length(),
        BLOCK=block,
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return output


def _tensors(norm: Norm | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if norm is None:
        return unused, unused
    return norm.weight, norm.weight if norm.bias is None else norm.bias


def _numbers(norm: Norm | None) -> tuple[float, float, int]:
    return (0.0, 0.0, 0) if norm is None else (norm.epsilon, norm.offset, kind_of(norm))
