"""The processes that compute one model together, each with a slice of its weights (tensor parallel).

They meet under a name that the coordinator gives to one life of their group, and exchange numbers from then on: always
all of them, always in the order of their ranks. What is exchanged is gathered and never summed on the way: whoever adds
it up does so in the order of ranks, so that the bits depend neither on how many rows there are nor on who was first.
"""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kvforge.protocol.errors import InvalidConfiguration, WorkerError

from .device import Device

log = logging.getLogger(__name__)
# For all to have come, and for each to have done its part of a step. A coordinator ends a group that hangs long before.
MEETING_S, STEP_S = 300, 3600
TEXT_MAX = 1 << 16


class Ranks:
    """One process's place among them. A process that computes alone has no such object."""

    def __init__(self, rank: int, count: int, device: Device, backend: str = "auto") -> None:
        """rank: from 0. count: of processes. backend: gloo (through the host's memory), nccl (RCCL on AMD), or auto."""
        assert 0 <= rank < count
        self.rank, self.count, self._device = rank, count, device
        self._backend = backend if backend != "auto" else ("nccl" if device.owns_memory else "gloo")
        if self._backend == "nccl" and not device.owns_memory:
            raise InvalidConfiguration("collectives", "'nccl' is for GPUs; use 'auto'")
        self._group: dist.ProcessGroup | None = None
        self._place: Path | None = None

    def meet(self, place: Path) -> None:
        """Waits for all the others. place: a file that nobody has met at before, on a disk that all of them see.

        Raises WorkerError where one does not come.
        """
        self._place = place
        log.info("rank %d of %d: meeting the others at %s", self.rank, self.count, place)
        try:
            store = dist.FileStore(str(place), self.count)  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=MEETING_S))
            dist.init_process_group(
                self._backend, store=store, rank=self.rank, world_size=self.count, timeout=timedelta(seconds=STEP_S)
            )
        except (RuntimeError, ValueError) as error:
            raise WorkerError(f"rank {self.rank} of {self.count} could not meet the others: {error}") from error
        self._group = dist.group.WORLD
        self.gather(torch.zeros(1, device=self._device.torch_device))
        if self._backend == "gloo":  # nobody looks there any more; NCCL does
            self._leave_place()
        log.info("rank %d of %d: all are here, over %s", self.rank, self.count, self._backend)

    @property
    def capturable(self) -> bool:
        """Whether `gather` may be part of a graph."""
        return self._backend == "nccl"

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[count, *part.shape], new: what each has given, in order. part: of one shape and dtype everywhere.

        Raises RuntimeError where one of them is gone.
        """
        part = part.contiguous()
        through_host = self._backend == "gloo" and part.device.type != "cpu"
        sent = part.cpu() if through_host else part
        # As octets: not every library knows every dtype.
        octets = sent.view(torch.uint8) if sent.dim() else sent.view(1).view(torch.uint8)
        found = torch.empty((self.count, *octets.shape), dtype=torch.uint8, device=octets.device)
        dist.all_gather(list(found.unbind()), octets, group=self._group)
        gathered = found.view(part.dtype).view(self.count, *part.shape)
        return gathered.to(part.device) if through_host else gathered

    def texts(self, text: str) -> list[str]:
        """What each has said, in order. Raises RuntimeError where one of them is gone."""
        octets = text.encode()[:TEXT_MAX]
        line = torch.zeros(TEXT_MAX + 4, dtype=torch.uint8)
        line[:4] = torch.tensor(list(len(octets).to_bytes(4, "little")), dtype=torch.uint8)
        if octets:
            line[4 : 4 + len(octets)] = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        said = self.gather(line.to(self._device.torch_device)).cpu()
        lengths = [int.from_bytes(bytes(each[:4].tolist()), "little") for each in said]
        return [bytes(each[4 : 4 + n].tolist()).decode(errors="replace") for each, n in zip(said, lengths, strict=True)]

    def close(self) -> None:
        """Leaves. The last thing that a process does here."""
        if self._group is not None:
            self._group = None
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._leave_place()

    def _leave_place(self) -> None:
        if self._place is not None and self.rank == 0:
            self._place.unlink(missing_ok=True)
