"""Root mean square norms, fused with the operation before: the embedding, or the sum of a layer's output and input.

One program handles one token (or HEAD_TILE heads of one token). Numbers are rounded where `plain` rounds them. Widths
are in units of HEAD_UNIT numbers, so that the compiler knows that rows are aligned for wide loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import HEAD_UNIT, head_class, in_units

from .launching import Launching

BLOCK_MIN = 1024
THREADS_MAX = 1024  # limit of a program on every GPU
HEAD_TILE = 8  # heads of a program: with one, 256 tokens are thousands of programs of one warp
PARTS_EXACT = 4  # up to this many parts, each number is a compilation; beyond, each power of two
_UNIT, _PARTS_EXACT = tl.constexpr(HEAD_UNIT), tl.constexpr(PARTS_EXACT)


@triton.jit
def _normed(x, weight, hidden, epsilon):
    """Normalise x [BLOCK] float32, which is zero beyond `hidden` and rounded to the dtype of `weight`."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + epsilon)
    return (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


# Each program loads one of `tokens`, at any alignment.
@triton.jit(do_not_specialize_on_alignment=["tokens"], do_not_specialize=["hidden"])
def embed_norm_kernel(
    tokens, table, weight, residual, output, hidden, epsilon, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Grid: [tokens]. See LayerOperations.embed. hidden: in units."""
    let_next_start(OVERLAP)
    hidden = hidden * _UNIT
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    w = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(table + token * hidden + columns, mask=inside, other=0.0)
    tl.store(residual + row * hidden + columns, x, mask=inside)
    normed = _normed(x.to(tl.float32), w, hidden, epsilon)
    tl.store(output + row * hidden + columns, normed.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["hidden", "parts"])
def add_norm_kernel(
    addend,
    residual,
    weight,
    output,
    hidden,
    parts,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [tokens]. See LayerOperations.add_norm; addend: [parts, tokens, hidden], contiguous. hidden: in units.

    PARTS: `parts`, or where those are many a power of two that is not less.
    """
    let_next_start(OVERLAP)
    hidden = hidden * _UNIT
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    w = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    place = row * hidden + columns
    before = tl.load(residual + place, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    part_stride = tl.num_programs(0) * hidden
    for part in tl.static_range(PARTS):
        mask = inside if PARTS <= _PARTS_EXACT else inside & (part < parts)
        total += tl.load(addend + part * part_stride + place, mask=mask, other=0.0).to(tl.float32)
    total = total.to(before.dtype).to(tl.float32) + before.to(tl.float32)
    after = total.to(before.dtype)
    tl.store(residual + place, after, mask=inside)
    normed = _normed(after.to(tl.float32), w, hidden, epsilon)
    tl.store(output + place, normed.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["kv_heads"])
def head_norm_kernel(
    projected,
    query_weight,
    key_weight,
    token_stride,
    kv_heads,
    head_size,
    epsilon,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [tokens, tiles of TILE heads]. See LayerOperations.head_norm."""
    let_next_start(OVERLAP)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    inside = columns < head_size
    of_query = tl.load(query_weight + columns, mask=inside, other=0.0)
    of_key = tl.load(key_weight + columns, mask=inside, other=0.0)
    w = tl.where((head < HEADS)[:, None], of_query[None, :], of_key[None, :])
    mask = (head < HEADS + kv_heads)[:, None] & inside[None, :]
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0).to(tl.int64) * token_stride + (head[:, None] * head_size + columns[None, :])
    x = tl.load(projected + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / head_size + epsilon)
    normed = (x * scale[:, None]).to(w.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(projected + place, normed.to(projected.dtype.element_ty), mask=mask)


def embed_norm(
    launch: Launching, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `LayerOperations.embed`."""
    hidden = table.shape[1]
    residual = torch.empty((len(tokens), hidden), dtype=table.dtype, device=table.device)
    output = torch.empty_like(residual)
    block = block_of(hidden)
    embed_norm_kernel[(len(tokens),)](
        tokens,
        table,
        weight,
        residual,
        output,
        *in_units(hidden),
        epsilon,
        BLOCK=block,
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return residual, output


def add_norm(
    launch: Launching, addend: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Implement `LayerOperations.add_norm`."""
    parts, count, hidden = addend.shape
    assert addend.is_contiguous(), addend.stride()
    output = torch.empty_like(residual)
    block = block_of(hidden)
    add_norm_kernel[(count,)](
        addend,
        residual,
        weight,
        output,
        *in_units(hidden),
        parts,
        epsilon,
        PARTS=parts if parts <= PARTS_EXACT else 1 << (parts - 1).bit_length(),
        BLOCK=block,
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return output


def head_norm(
    launch: Launching,
    projected: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
) -> None:
    """Implement `LayerOperations.head_norm`."""
    head_size = len(query_weight)
    head_norm_kernel[(len(projected), ceil_div(heads + kv_heads, HEAD_TILE))](
        projected,
        query_weight,
        key_weight,
        projected.stride(0),
        kv_heads,
        head_size,
        epsilon,
        HEADS=heads,
        TILE=HEAD_TILE,
        BLOCK=head_class(head_size),
        num_warps=warps_of(HEAD_TILE * head_class(head_size), launch.target.warp_size),
        **launch_options(launch.overlap),
    )


def block_of(hidden: int) -> int:
    """Return the power of two that holds a row, at least BLOCK_MIN, so that tests can compile the few choices."""
    return max(BLOCK_MIN, 1 << (hidden - 1).bit_length())


def warps_of(block: int, warp_size: int) -> int:
    """Return the warps of a program: four numbers per thread within the thread limit; the program is memory-bound."""
    return max(1, min(THREADS_MAX, block // 4) // warp_size)
