"""Memory of one rank that the kernels of all others read: what is exchanged between two products, without a library.

Three places, each written by its owner and read by all: behind attention, behind the inner layers, and of the logits.
They take turns, and that is all that keeps them apart: whoever meets the others at one place (see
`kernels.exchange`) knows that they have read what stood at the place before, which may be written again then. So no
place may be used twice in a row.

The memory is torch's symmetric memory: allocated by each rank, mapped by every other of the same host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

ATTENTION, INNER, LOGITS = PLACES = range(3)
PROGRAMS_MAX = 1024  # of a kernel that exchanges: each has flags of its own
RANKS_MAX = 16
ALIGNED = 256  # bytes


@dataclass(frozen=True)
class Peers:
    """What a kernel is given of one place.

    addresses: [ranks] int64 device, of the place in each rank's memory. flags: [ranks] int64 device, of each rank's
    flags [PROGRAMS_MAX, RANKS_MAX] int32, which the others write. meetings: [PROGRAMS_MAX] int32 device, how often each
    program of this rank has met the others. polls_max: so often it looks for them before it goes on without; 0: as long
    as it takes, which a coordinator ends.
    """

    rank: int
    count: int
    addresses: torch.Tensor
    flags: torch.Tensor
    meetings: torch.Tensor
    polls_max: int = 0


class Sharing(Protocol):
    """What kernels do with an `Exchange` (see `kernels.exchange`). bytes: of each rank's memory."""

    bytes: int

    def place(self, which: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """See `Exchange`."""

    def add_norm(self, which: int, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """residual [tokens, hidden] += what all ranks have written at that place; returns the norm of that, new."""

    def join(self, which: int, output: torch.Tensor) -> torch.Tensor:
        """output [tokens, ranks x share], returned: what all ranks have written at that place, side by side."""


class Exchange:
    """This rank's places and those of the others. Errors of the constructor: RuntimeError where peers' memory cannot be
    had, on any rank."""

    def __init__(self, rank: int, count: int, group: Any, device: torch.device, sizes: Sequence[int]) -> None:
        """group: the ranks, by torch.distributed. sizes: bytes of each of PLACES, the same on all ranks."""
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
        self._peers = [Peers(rank, count, (bases + start).to(device), flags, meetings) for start in starts[1:]]
        self._places = [self._memory[start : start + size] for start, size in zip(starts[1:], sizes, strict=True)]

    @property
    def bytes(self) -> int:
        """Of this rank's memory."""
        return self._memory.nbytes

    def place(self, which: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """Where this rank's part goes: `shape` dtype. None: it has no room there, on no rank."""
        needed = shape[0] * shape[1] * dtype.itemsize
        octets = self._places[which]
        return octets[:needed].view(dtype).view(shape) if needed <= len(octets) else None

    def peers(self, which: int, polls_max: int = 0) -> Peers:
        """For a kernel that reads a place of all ranks."""
        return replace(self._peers[which], polls_max=polls_max)
