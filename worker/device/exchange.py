"""Memory of one rank that the kernels of all ranks read: direct exchange between two products, without a library.

There are three buffers, each written by its owner and read by all ranks: after attention, after the inner layers, and
for the logits. They are used in turn. When the ranks have synchronised at one buffer (see `kernels.exchange`), each has
read the previous buffer, which may then be overwritten. No buffer may therefore be used twice in a row.

The memory is torch's symmetric memory: allocated by each rank, mapped by all other ranks of the same host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

ATTENTION, INNER, LOGITS = PLACES = range(3)
PROGRAMS_MAX = 1024  # programs of an exchanging kernel; each has its own flags
RANKS_MAX = 16
ALIGNED = 256  # bytes


@dataclass(frozen=True)
class RankBuffers:
    """One buffer of all ranks, as a kernel receives it.

    Attributes:
        rank: This rank.
        count: Number of ranks.
        addresses: [ranks] int64 on the device, addresses of the buffer in each rank's memory.
        flags: [ranks] int64 on the device, addresses of each rank's flags [PROGRAMS_MAX, RANKS_MAX] int32, which the
            other ranks write.
        meetings: [PROGRAMS_MAX] int32 on the device, synchronisations of each program of this rank.
        polls_max: Polls for the other ranks before a program continues without them; 0: no limit (the coordinator ends
            a rank that hangs).
    """

    rank: int
    count: int
    addresses: torch.Tensor
    flags: torch.Tensor
    meetings: torch.Tensor
    polls_max: int = 0


class Sharing(Protocol):
    """Operations of kernels on an `Exchange` (see `kernels.exchange`). bytes: size of each rank's memory."""

    bytes: int

    def place(self, which: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Exchange`."""

    def add_norm(self, which: int, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Add all ranks' parts of a buffer to the residual, and normalise the sum.

        Args:
            which: The buffer.
            residual: [tokens, hidden], changed in place.
            weight: Weight of the norm.
            epsilon: Epsilon of the norm.

        Returns:
            The normalised rows, a new tensor.
        """

    def join(self, which: int, output: torch.Tensor) -> torch.Tensor:
        """Write all ranks' parts of a buffer side by side to output [tokens, ranks x share], and return it."""


class Exchange:
    """This rank's buffers and those of the other ranks."""

    def __init__(self, rank: int, count: int, group: Any, device: torch.device, sizes: Sequence[int]) -> None:
        """Allocate this rank's memory and map that of the others.

        Args:
            rank: This rank.
            count: Number of ranks.
            group: Process group of torch.distributed.
            device: The GPU.
            sizes: Bytes of each of PLACES, the same on all ranks.

        Raises:
            RuntimeError: Symmetric memory is not available on some rank.
        """
        from torch.distributed import _symmetric_memory as symmetric

        assert len(sizes) == len(PLACES) and count <= RANKS_MAX
        flag_bytes = 4 * PROGRAMS_MAX * RANKS_MAX
        starts, end = [], 0
        for size in (flag_bytes, *sizes):
            starts.append(end)
            end += -(-size // ALIGNED) * ALIGNED
        self._memory = symmetric.empty(end, dtype=torch.uint8, device=device)
        self._memory[:flag_bytes].zero_()
        torch.cuda.synchronize(device)
        self._handle = symmetric.rendezvous(self._memory, group=group)
        bases = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64)
        meetings = torch.zeros(PROGRAMS_MAX, dtype=torch.int32, device=device)
        flags = (bases + starts[0]).to(device)
        self._peers = [RankBuffers(rank, count, (bases + start).to(device), flags, meetings) for start in starts[1:]]
        self._places = [self._memory[start : start + size] for start, size in zip(starts[1:], sizes, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of this rank's memory."""
        return self._memory.nbytes

    def place(self, which: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return this rank's part of a buffer with a shape and dtype; None if it does not fit, on any rank."""
        needed = shape[0] * shape[1] * dtype.itemsize
        octets = self._places[which]
        return octets[:needed].view(dtype).view(shape) if needed <= len(octets) else None

    def peers(self, which: int, polls_max: int = 0) -> RankBuffers:
        """Return a buffer of all ranks for a kernel."""
        return replace(self._peers[which], polls_max=polls_max)
