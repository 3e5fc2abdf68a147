"""Self-test of the kernels that read the memory of all ranks, against plain torch, before other ranks exist.

All buffers and flags are memory of this rank: the test checks the kernels. `sharing` checks access to the memory of
real peers.
"""

from __future__ import annotations

from functools import partial

import torch

from kvforge.worker.device.check import require_right
from kvforge.worker.device.device import WAY_OUT, Device
from kvforge.worker.device.exchange import PROGRAMS_MAX, RANKS_MAX, RankBuffers
from kvforge.worker.device.targets import current_target

from .decoder import FusedDecoder
from .exchange import add_norm_of_ranks, join_of_ranks, norm_of_shares, sum_share
from .launching import LaunchSettings
from .plain import PlainOperations
from .selftest import TOLERANCE

TOKENS = (1, 21)
SHARE = 5000  # more than a program joins at once


class SimulatedRanks:
    """Buffers and flags of all ranks in one rank's memory. Every other rank has already announced itself."""

    def __init__(self, parts: list[torch.Tensor], rank: int, meeting: int = 1) -> None:
        """Wrap the ranks' contiguous parts as their buffers. meeting: number of the next synchronisation."""
        device, count, self._parts = parts[0].device, len(parts), parts
        self.flags = torch.zeros((count, PROGRAMS_MAX, RANKS_MAX), dtype=torch.int32, device=device)
        self.flags[rank, :, :count] = meeting
        self.flags[rank, :, rank] = meeting - 1
        addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)
        flags = torch.tensor([each.data_ptr() for each in self.flags], dtype=torch.int64, device=device)
        meetings = torch.full((PROGRAMS_MAX,), meeting - 1, dtype=torch.int32, device=device)
        self.peers = RankBuffers(rank, count, addresses, flags, meetings, polls_max=1000)


@torch.inference_mode()
def exchange_test(fused: FusedDecoder, device: Device, ranks: int) -> None:
    """Test the exchange kernels.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    count = min(ranks, RANKS_MAX)
    for tokens in TOKENS:
        shape = f"{tokens} tokens of {count} ranks, {str(fused.table.dtype).removeprefix('torch.')}"
        require_right(device, "exchange", shape, partial(_compare_sum, fused, device, count, tokens), WAY_OUT)
        require_right(
            device, "two-launch exchange", shape, partial(_compare_shares, fused, device, count, tokens), WAY_OUT
        )
        require_right(device, "join", shape, partial(_compare_joined, fused, device, count, tokens), WAY_OUT)


def _compare_sum(fused: FusedDecoder, device: Device, count: int, tokens: int) -> str:
    table, weight, epsilon = fused.table, fused.final_norm.weight, fused.final_norm.epsilon
    hidden, plain = table.shape[1], PlainOperations()
    generator = torch.Generator(table.device).manual_seed(0)
    parts = [_random((tokens, hidden), table, generator) for _ in range(count)]
    residual = _random((tokens, hidden), table, generator)
    expected = residual.clone()
    want = plain.add_norm(torch.stack(parts), expected, weight, epsilon)
    pretended = SimulatedRanks(parts, count - 1)
    got = add_norm_of_ranks(LaunchSettings(current_target(device)), pretended.peers, residual, weight, epsilon)
    return _difference(((got, want), (residual, expected)))


def _compare_shares(fused: FusedDecoder, device: Device, count: int, tokens: int) -> str:
    table, weight, epsilon = fused.table, fused.final_norm.weight, fused.final_norm.epsilon
    launch, plain = LaunchSettings(current_target(device)), PlainOperations()
    generator = torch.Generator(table.device).manual_seed(2)
    parts = [_random((tokens, table.shape[1]), table, generator) for _ in range(count)]
    residual = _random((tokens, table.shape[1]), table, generator)
    expected = residual.clone()
    want = plain.add_norm(torch.stack(parts), expected, weight, epsilon)
    pretended = [SimulatedRanks(parts, rank) for rank in range(count)]
    for each in pretended:
        sum_share(launch, each.peers, parts[each.peers.rank], residual)
    last = SimulatedRanks(parts, count - 1)
    got = norm_of_shares(launch, last.peers, residual, weight, epsilon)
    return _difference(((got, want), (residual, expected)))


def _difference(pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> str:
    """Return the first difference beyond rounding between (result, reference)."""
    for ours, theirs in pairs:
        difference = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6))
        if not difference <= TOLERANCE[theirs.dtype]:
            return f"it differs from the reference by {difference:.1e} of the largest number"
    return ""


def _compare_joined(fused: FusedDecoder, device: Device, count: int, tokens: int) -> str:
    generator = torch.Generator(fused.table.device).manual_seed(1)
    parts = [_random((tokens, SHARE), fused.table, generator).float() for _ in range(count)]
    output = torch.full((tokens, count * SHARE), float("nan"), device=fused.table.device)
    pretended = SimulatedRanks(parts, 0)
    join_of_ranks(LaunchSettings(current_target(device)), pretended.peers, output)
    return "" if torch.equal(output, torch.cat(parts, 1)) else "it differs from the ranks' parts"


def _random(shape: tuple[int, int], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers followed by NaN in memory."""
    numbers = torch.full((shape[0] + 3, shape[1]), float("nan"), dtype=like.dtype, device=like.device)
    numbers[: shape[0]].normal_(generator=generator)
    return numbers[: shape[0]]
