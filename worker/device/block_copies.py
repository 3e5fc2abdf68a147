"""Whole blocks between the tensors of a pool and one buffer, with their checksums, in one launch.

A block lies in every tensor of a pool. In the buffer its parts lie one behind the other, so that a copy engine moves it
at once. `block_buffers` says what a checksum is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS, WARPS = 1024, 4  # words of 8 bytes that a program copies at once


@triton.jit(do_not_specialize=["words", "first"])
def block_kernel(  # type: ignore[no-untyped-def]
    table,
    blocks,
    buffer,
    sums,
    words,
    first,
    INTO_POOL: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
):
    """Copy one part of one block, and sum it up. Grid: [blocks, tensors].

    table: [3, tensors] int64: address, words of a block, and place in the buffer of each tensor. blocks: [all] int64.
    buffer: [n, words] int64, the rows of blocks [first, first + n); with `words` 0, all have the first row. sums: [all,
    tensors] int64, the checksum of each part.
    """
    row, tensor, tensors = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    size = tl.load(table + tensors + tensor)
    place = tl.load(table + 2 * tensors + tensor)
    pool = tl.load(table + tensor).to(tl.pointer_type(tl.int64)) + tl.load(blocks + first + row) * size
    staged = buffer + row.to(tl.int64) * words + place
    total = tl.zeros([WORDS], tl.int64)
    for at in range(0, size, WORDS):
        offsets = at + tl.arange(0, WORDS)
        inside = offsets < size
        if INTO_POOL:
            values = tl.load(staged + offsets, mask=inside, other=0)
            tl.store(pool + offsets, values, mask=inside)
        else:
            values = tl.load(pool + offsets, mask=inside, other=0)
            tl.store(staged + offsets, values, mask=inside)
        total += values * (2 * (place + offsets) + 1)
    tl.store(sums + (first + row) * tensors + tensor, tl.sum(total, axis=0))


def copy_blocks(
    table: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, sums: torch.Tensor, first: int, *, into_pool: bool
) -> None:
    """Queue the copy of blocks from a pool to a buffer, or back.

    Args:
        table: [3, tensors] int64 on the device: address, words of a block and place in the buffer of each tensor.
        blocks: [all] int64 on the device, distinct.
        buffer: [n, words of a block] int64 on the device, contiguous.
        sums: [all, tensors] int64 on the device, which gets the checksum of each part of each block that is copied.
        first: Blocks [first, first + n) are copied.
        into_pool: Whether to copy from the buffer to the pool.
    """
    rows, words = buffer.shape
    _launch(rows, table, blocks, buffer, sums, words, first, into_pool)


def zero_blocks(table: torch.Tensor, blocks: torch.Tensor, zeros: torch.Tensor) -> None:
    """Queue zeros into every byte of blocks of a pool.

    Args:
        table: As for `copy_blocks`, with each tensor at place 0.
        blocks: [n] int64 on the device, distinct.
        zeros: [words] int64 on the device, as many zeros as a block has words in any tensor, or more.
    """
    rows = len(blocks)
    sums = torch.empty((rows, table.shape[1]), dtype=torch.int64, device=table.device)
    _launch(rows, table, blocks, zeros, sums, 0, 0, True)


def _launch(
    rows: int,
    table: torch.Tensor,
    blocks: torch.Tensor,
    buffer: torch.Tensor,
    sums: torch.Tensor,
    words: int,
    first: int,
    into_pool: bool,
) -> None:
    block_kernel[(rows, sums.shape[1])](
        table, blocks, buffer, sums, words, first, INTO_POOL=into_pool, WORDS=WORDS, num_warps=WARPS
    )
