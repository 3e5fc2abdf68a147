"""Pairs of a token and one of its experts, sorted by expert on the device, and divided into blocks for products.

A pair is numbered token x (experts per token) + place. A block holds pairs of one expert, and a product gives each
block its own programs. No count is read by the host: shapes follow from the numbers of tokens and experts alone, and
blocks that are not needed hold no pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching

RANKED_MAX = 8192  # more pairs are sorted by torch: ranking takes time in proportion to their square
RANKED = 16  # pairs that one program ranks
FEW = 512  # up to so many pairs, the smaller of these sizes is faster (benchmarks/NOTES.md)
COMPARED = 128, 512  # pairs that those of a program are compared with at a time
COUNTED = 512, 1024  # pairs that are counted at a time
FIELDS = tl.constexpr(4)  # of a block: expert (-1: empty), begin, end, unused
EMPTIED = tl.constexpr(128)  # blocks of shared experts, or without pairs, that are written at a time
NO_EXPERT = tl.constexpr(0x7FFFFFFF)  # larger than the number of any expert


@dataclass(frozen=True)
class Blocks:
    """Blocks of pairs.

    Attributes:
        order: [pairs] int32, the pairs by expert. For one token: the experts in order of the router.
        blocks: [count, FIELDS] int32: expert, and the range of the block in `order`. For one token: as `order`.
        count: Number of blocks; the last ones may be empty.
        alone: Whether each block holds one pair, with its own number: the case of one token.
    """

    order: torch.Tensor
    blocks: torch.Tensor
    count: int
    alone: bool


@triton.jit
def _write_blocks(blocks, count, begin, sizes, expert, TOKENS: tl.constexpr):
    """Write the blocks of all experts. begin, sizes: each expert's first place in the order, and its pairs."""
    needed = (sizes + (TOKENS - 1)) // TOKENS
    until = tl.cumsum(needed, 0)
    first = until - needed
    for index in range(tl.max(needed, 0)):
        mask = index < needed
        at = blocks + (first + index) * FIELDS
        start = begin + index * TOKENS
        tl.store(at, expert, mask=mask)
        tl.store(at + 1, start, mask=mask)
        tl.store(at + 2, tl.minimum(start + TOKENS, begin + sizes), mask=mask)
    used = tl.max(until, 0)
    for start in range(used, count, EMPTIED):
        places = start + tl.arange(0, EMPTIED)
        tl.store(blocks + places * FIELDS, -1, mask=places < count)


@triton.jit
def _write_shared(blocks, tokens, experts, shared, begin, TOKENS: tl.constexpr):
    """Write the blocks of shared experts, which all tokens chose, and return their number. begin: their first pair."""
    each = (tokens + (TOKENS - 1)) // TOKENS
    for start in range(0, shared * each, EMPTIED):
        places = start + tl.arange(0, EMPTIED)
        mask = places < shared * each
        number = places // each
        first = begin + number * tokens + (places % each) * TOKENS
        at = blocks + places * FIELDS
        tl.store(at, experts + number, mask=mask)
        tl.store(at + 1, first, mask=mask)
        tl.store(at + 2, tl.minimum(first + TOKENS, begin + (number + 1) * tokens), mask=mask)
    return shared * each


@triton.jit(do_not_specialize=["pairs", "count", "tokens", "experts", "shared"])
def rank_kernel(
    chosen,
    order,
    blocks,
    pairs,
    count,
    tokens,
    experts,
    shared,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKED: tl.constexpr,
    COMPARED: tl.constexpr,
    COUNTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sort pairs by expert, then by number, and write the blocks. Grid: [1 + blocks of RANKED pairs].

    The first program writes the blocks. chosen: [pairs] int32, the pairs' experts. order: [pairs] int32. blocks:
    [count, 4] int32. experts: without the shared ones. TOKENS: pairs of a block. EXPERTS: a power of two that holds
    `experts`. RANKED, COMPARED, COUNTED: pairs of a program, and of its steps.
    """
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    if tl.program_id(0) == 0:
        # As many bins again, for what is none of these experts.
        expert = tl.arange(0, 2 * EXPERTS)
        sizes = tl.zeros([2 * EXPERTS], tl.int32)
        away = tl.zeros([COUNTED], tl.int32)
        for start in range(0, pairs, COUNTED):
            places = start + tl.arange(0, COUNTED)
            found = tl.load(chosen + places, mask=places < pairs, other=NO_EXPERT)
            away += (found < 0).to(tl.int32)
            sizes += tl.histogram(tl.where((found >= 0) & (found < experts), found, EXPERTS), 2 * EXPERTS)
        sizes = tl.where(expert < experts, sizes, 0)
        begin = tl.sum(away, 0) + tl.cumsum(sizes, 0) - sizes
        first = _write_shared(blocks, tokens, experts, shared, pairs - shared * tokens, TOKENS)
        _write_blocks(blocks + first * FIELDS, count - first, begin, sizes, expert, TOKENS)
    else:
        mine = (tl.program_id(0) - 1) * RANKED + tl.arange(0, RANKED)
        wanted = tl.load(chosen + mine, mask=mine < pairs, other=0)
        # Summed over the compared pairs at the end: a sum across threads each time would take longer.
        before = tl.zeros([RANKED, COMPARED], tl.int32)
        for start in range(0, pairs, COMPARED):
            places = start + tl.arange(0, COMPARED)
            others = tl.load(chosen + places, mask=places < pairs, other=NO_EXPERT)
            less = others[None, :] < wanted[:, None]
            earlier = (others[None, :] == wanted[:, None]) & (places[None, :] < mine[:, None])
            before += (less | earlier).to(tl.int32)
        tl.store(order + tl.sum(before, 1), mine, mask=mine < pairs)


@triton.jit(do_not_specialize=["count", "tokens", "experts", "shared"])
def divide_kernel(
    bounds,
    blocks,
    count,
    tokens,
    experts,
    shared,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the blocks of pairs that are sorted already. Grid: [1]. bounds: [experts + 1] int32, ends of experts."""
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    begin = tl.load(bounds + expert, mask=inside, other=0)
    end = tl.load(bounds + expert + 1, mask=inside, other=0)
    first = _write_shared(blocks, tokens, experts, shared, tl.load(bounds + experts), TOKENS)
    _write_blocks(blocks + first * FIELDS, count - first, begin, end - begin, expert, TOKENS)


def sort_by_expert(
    launch: Launching, chosen: torch.Tensor, experts: int, tokens_per_block: int, shared: int = 0
) -> Blocks:
    """Sort pairs by expert, and divide them into blocks.

    Args:
        launch: How to launch it.
        chosen: [tokens, experts per token] int32, contiguous, each expert at most once per token. Pairs with AWAY come
            first in the order, and no block holds them.
        experts: Number of experts.
        tokens_per_block: Most pairs of a block.
        shared: Further experts, which each token chose. Their pairs come last, and their blocks first, because these
            are known without a count and take longest.

    Returns:
        The blocks.
    """
    pairs = chosen.numel()
    if len(chosen) == 1:
        return Blocks(chosen, chosen, pairs, alone=True)
    tokens = len(chosen)
    count = shared * ceil_div(tokens, tokens_per_block)
    count += blocks_max(pairs - shared * tokens, experts, tokens_per_block)
    blocks = torch.empty((count, FIELDS.value), dtype=torch.int32, device=chosen.device)
    sizes = {"TOKENS": tokens_per_block, "EXPERTS": triton.next_power_of_2(experts)}
    if pairs > RANKED_MAX:
        by_expert, places = chosen.flatten().sort(stable=True)
        bounds = torch.searchsorted(
            by_expert, torch.arange(experts + 1, dtype=torch.int32, device=chosen.device), out_int32=True
        )
        divide_kernel[(1,)](
            bounds, blocks, count, tokens, experts, shared, **sizes, num_warps=4, **launch_options(launch.overlap)
        )
        return Blocks(places.int(), blocks, count, alone=False)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    rank_kernel[(1 + ceil_div(pairs, RANKED),)](
        chosen,
        order,
        blocks,
        pairs,
        count,
        tokens,
        experts,
        shared,
        **sizes,
        RANKED=RANKED,
        COMPARED=COMPARED[pairs > FEW],
        COUNTED=COUNTED[pairs > FEW],
        num_warps=4,
        **launch_options(launch.overlap),
    )
    return Blocks(order, blocks, count, alone=False)


def blocks_max(pairs: int, experts: int, tokens_per_block: int) -> int:
    """Return the largest number of blocks that pairs can need, whichever experts are chosen."""
    used = min(pairs, experts)
    return min(pairs, (pairs + used * (tokens_per_block - 1)) // tokens_per_block)
