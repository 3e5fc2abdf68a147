"""Exchanges between ranks: each rank reads the parts of a sum from the memory of all others (see `device.exchange`).

The kernel that uses a sum reads the parts and adds them in the order of ranks: one launch, and each number crosses the
link once. (One-shot all-reduce; fused as in FlashInfer and vLLM, but in a fixed order.) Every program announces itself
in the flags of all ranks, and waits for the announcements of the others. The kernel before it wrote its rank's part, so
that part is complete. Numbers are rounded where `norm` rounds them.

Many tokens of more than two ranks take two launches: each rank sums the parts of its share of the tokens in its own
buffer, where no other rank reads these, and then all ranks read all sums. A number then crosses the links
2 (RANKS - 1) / RANKS times for each rank in place of RANKS - 1 times (a two-shot all-reduce). The sums have the same
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.exchange import PROGRAMS_MAX, RANKS_MAX, Exchange, RankBuffers
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import HEAD_UNIT, in_units

from .launching import Launching
from .norm import _normed, block_of, warps_of

_UNIT, _RANKS_MAX = tl.constexpr(HEAD_UNIT), tl.constexpr(RANKS_MAX)
PROGRAMS_A_PROCESSOR = 2
COPY_BLOCK = 4096  # numbers of the logits that a program copies at once
TWO_LAUNCHES_BYTES = 1 << 20  # parts of at least so many bytes are summed in two launches


@triton.jit
def _meet(flags, meetings, rank, polls_max, RANKS: tl.constexpr, PEERS: tl.constexpr):
    """Wait for the programs of this index on all ranks, and so for everything that their ranks wrote before.

    PEERS: RANKS rounded up to a power of two.
    """
    program = tl.program_id(0)
    peers = tl.arange(0, PEERS)
    there = peers < RANKS
    meeting = tl.load(meetings + program) + 1
    of_all = tl.load(flags + peers, mask=there, other=0).to(tl.pointer_type(tl.int32))
    told = tl.zeros([PEERS], tl.int32) + meeting
    tl.atomic_xchg(of_all + program * _RANKS_MAX + rank, told, mask=there, sem="release", scope="sys")
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * _RANKS_MAX
    nothing = tl.zeros([PEERS], tl.int32)
    missing, polls = 1, 0
    while missing > 0:
        seen = tl.atomic_add(mine + peers, nothing, mask=there, sem="acquire", scope="sys")
        # The counts wrap around after the largest int32.
        missing = tl.sum(tl.where(there & (seen - meeting < 0), 1, 0), axis=0)
        polls += 1
        if polls == polls_max:
            missing = 0
    tl.store(meetings + program, meeting)


@triton.jit(do_not_specialize=["hidden", "rank", "tokens", "polls_max"])
def add_norm_of_ranks_kernel(
    addresses,
    flags,
    meetings,
    residual,
    weight,
    output,
    rank,
    polls_max,
    tokens,
    hidden,
    epsilon,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `add_norm_of_ranks`. Grid: [programs], each with a strided set of tokens. hidden: in units."""
    let_next_start(OVERLAP)
    hidden = hidden * _UNIT
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    w = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    first = tl.program_id(0)
    before = tl.load(residual + tl.cast(first, tl.int64) * hidden + columns, mask=inside, other=0.0)
    _meet(flags, meetings, rank, polls_max, RANKS, PEERS)
    for row in range(first, tokens, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * hidden + columns
        if row != first:
            before = tl.load(residual + place, mask=inside, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(RANKS):
            part = tl.load(addresses + peer).to(tl.pointer_type(residual.dtype.element_ty))
            part = tl.multiple_of(part, 16)
            # Bypass this processor's L1 cache, which does not see writes of other ranks.
            total += tl.load(part + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = total.to(before.dtype).to(tl.float32) + before.to(tl.float32)
        after = total.to(before.dtype)
        tl.store(residual + place, after, mask=inside)
        normed = _normed(after.to(tl.float32), w, hidden, epsilon)
        tl.store(output + place, normed.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["hidden", "rank", "tokens", "polls_max"])
def sum_share_kernel(
    addresses,
    flags,
    meetings,
    own,
    residual,
    rank,
    polls_max,
    tokens,
    hidden,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `sum_share`. Grid: [programs], each with a strided set of the rank's tokens. hidden: in units."""
    let_next_start(OVERLAP)
    hidden = hidden * _UNIT
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    wait_for_inputs(OVERLAP)
    _meet(flags, meetings, rank, polls_max, RANKS, PEERS)
    for row in range(tl.program_id(0) * RANKS + rank, tokens, tl.num_programs(0) * RANKS):
        place = tl.cast(row, tl.int64) * hidden + columns
        before = tl.load(residual + place, mask=inside, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(RANKS):
            part = tl.load(addresses + peer).to(tl.pointer_type(residual.dtype.element_ty))
            part = tl.multiple_of(part, 16)
            total += tl.load(part + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = total.to(before.dtype).to(tl.float32) + before.to(tl.float32)
        tl.store(own + place, total.to(before.dtype), mask=inside)


@triton.jit(do_not_specialize=["hidden", "rank", "tokens", "polls_max"])
def norm_of_shares_kernel(
    addresses,
    flags,
    meetings,
    residual,
    weight,
    output,
    rank,
    polls_max,
    tokens,
    hidden,
    epsilon,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `norm_of_shares`. Grid: [programs], each with a strided set of tokens. hidden: in units."""
    let_next_start(OVERLAP)
    hidden = hidden * _UNIT
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    w = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    _meet(flags, meetings, rank, polls_max, RANKS, PEERS)
    for row in range(tl.program_id(0), tokens, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * hidden + columns
        owner = tl.load(addresses + row % RANKS).to(tl.pointer_type(residual.dtype.element_ty))
        owner = tl.multiple_of(owner, 16)
        after = tl.load(owner + place, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(residual + place, after, mask=inside)
        normed = _normed(after.to(tl.float32), w, hidden, epsilon)
        tl.store(output + place, normed.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank", "tokens", "polls_max"])
def join_of_ranks_kernel(
    addresses,
    flags,
    meetings,
    output,
    rank,
    polls_max,
    tokens,
    share,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `join_of_ranks`. Grid: [programs], each with a strided set of blocks of tokens' shares."""
    _meet(flags, meetings, rank, polls_max, RANKS, PEERS)
    blocks = tl.cdiv(share, BLOCK)
    for index in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        row = tl.cast(index // blocks, tl.int64)
        columns = (index % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < share
        for peer in tl.static_range(RANKS):
            part = tl.load(addresses + peer).to(tl.pointer_type(output.dtype.element_ty))
            part = tl.multiple_of(part, 16)
            numbers = tl.load(part + row * share + columns, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(output + (row * RANKS + peer) * share + columns, numbers, mask=inside)


def add_norm_of_ranks(
    launch: Launching, peers: RankBuffers, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add all ranks' parts to the residual in the order of ranks, and normalise the sum.

    Args:
        launch: How to launch it.
        peers: The buffer of all ranks, each with a part of the residual's shape and dtype.
        residual: [tokens, hidden], contiguous; changed.
        weight: [hidden], weight of the norm.
        epsilon: Epsilon of the norm.

    Returns:
        The normalised rows, a new tensor.
    """
    count, hidden = residual.shape
    output = torch.empty_like(residual)
    block = block_of(hidden)
    add_norm_of_ranks_kernel[(_programs(count, launch.target.multiprocessors),)](
        peers.addresses,
        peers.flags,
        peers.meetings,
        residual,
        weight,
        output,
        peers.rank,
        peers.polls_max,
        count,
        *in_units(hidden),
        epsilon,
        RANKS=peers.count,
        PEERS=triton.next_power_of_2(peers.count),
        BLOCK=block,
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return output


def sum_share(launch: Launching, peers: RankBuffers, own: torch.Tensor, residual: torch.Tensor) -> None:
    """Add all ranks' parts of this rank's share of the tokens to the residual, and write the sums in its own part.

    Token t is in the share of rank t % ranks. The residual is not changed (see `norm_of_shares`).

    Args:
        launch: How to launch it.
        peers: The buffer of all ranks, each with a part of the residual's shape and dtype.
        own: This rank's part; the rows of its share are changed.
        residual: [tokens, hidden], contiguous.
    """
    count, hidden = residual.shape
    block = block_of(hidden)
    sum_share_kernel[(_programs(-(-count // peers.count), launch.target.multiprocessors),)](
        peers.addresses,
        peers.flags,
        peers.meetings,
        own,
        residual,
        peers.rank,
        peers.polls_max,
        count,
        *in_units(hidden),
        RANKS=peers.count,
        PEERS=triton.next_power_of_2(peers.count),
        BLOCK=block,
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )


def norm_of_shares(
    launch: Launching, peers: RankBuffers, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Read the sums of all ranks' shares of the tokens (see `sum_share`) into the residual, and normalise them.

    Args:
        launch: How to launch it.
        peers: The buffer of all ranks, each with the sums of its share.
        residual: [tokens, hidden], contiguous; overwritten.
        weight: [hidden], weight of the norm.
        epsilon: Epsilon of the norm.

    Returns:
        The normalised rows, a new tensor.
    """
    count, hidden = residual.shape
    output = torch.empty_like(residual)
    block = block_of(hidden)
    norm_of_shares_kernel[(_programs(count, launch.target.multiprocessors),)](
        peers.addresses,
        peers.flags,
        peers.meetings,
        residual,
        weight,
        output,
        peers.rank,
        peers.polls_max,
        count,
        *in_units(hidden),
        epsilon,
        RANKS=peers.count,
        PEERS=triton.next_power_of_2(peers.count),
        BLOCK=block,
        num_warps=warps_of(block, launch.target.warp_size),
        **launch_options(launch.overlap),
    )
    return output


def join_of_ranks(launch: Launching, peers: RankBuffers, output: torch.Tensor) -> torch.Tensor:
    """Write all ranks' parts [tokens, share] side by side to output [tokens, ranks x share], contiguous; return it."""
    count, width = output.shape
    share = width // peers.count
    blocks = count * ceil_div(share, COPY_BLOCK)
    join_of_ranks_kernel[(_programs(blocks, launch.target.multiprocessors),)](
        peers.addresses,
        peers.flags,
        peers.meetings,
        output,
        peers.rank,
        peers.polls_max,
        count,
        share,
        RANKS=peers.count,
        PEERS=triton.next_power_of_2(peers.count),
        BLOCK=COPY_BLOCK,
        num_warps=8,
    )
    return output


def _programs(work: int, multiprocessors: int) -> int:
    """Return the number of programs. All must run at once, because each waits for its counterparts."""
    return min(work, PROGRAMS_A_PROCESSOR * multiprocessors, PROGRAMS_MAX)


class DirectExchange:
    """Exchange between the ranks of one model through the buffers of an `Exchange`."""

    def __init__(self, exchange: Exchange, launch: Launching) -> None:
        self._exchange, self._launch = exchange, launch
        self.bytes = exchange.bytes

    def place(self, which: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return this rank's buffer for a part with a shape and dtype; None if it does not fit, on any rank."""
        return self._exchange.place(which, shape, dtype)

    def add_norm(
        self, which: int, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, polls_max: int = 0
    ) -> torch.Tensor:
        """Add and normalise as `LayerOperations.add_norm`, with the parts of all ranks in the buffer."""
        peers = self._exchange.peers(which, polls_max)
        if peers.count > 2 and residual.nbytes >= TWO_LAUNCHES_BYTES:
            own = self._exchange.place(which, (len(residual), residual.shape[1]), residual.dtype)
            assert own is not None, "the parts are in the buffer"
            sum_share(self._launch, peers, own, residual)
            return norm_of_shares(self._launch, peers, residual, weight, epsilon)
        return add_norm_of_ranks(self._launch, peers, residual, weight, epsilon)

    def join(self, which: int, output: torch.Tensor, polls_max: int = 0) -> torch.Tensor:
        """Write all ranks' parts [tokens, share] of a buffer to output [tokens, ranks x share], and return it."""
        return join_of_ranks(self._launch, self._exchange.peers(which, polls_max), output)
