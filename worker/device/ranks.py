"""The processes that compute one model together, each with a slice of its weights (tensor parallel).

They meet under a name that the coordinator gives to one life of their group, and exchange numbers from then on: always
all of them, always in the order of their ranks. What is exchanged is gathered and never summed on the way: whoever adds
it up does so in the order of ranks, so that the bits depend neither on how many rows there are nor on who was first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kvforge.protocol.errors import InvalidConfiguration, WorkerError

from .device import Device
from .exchange import Exchange, Sharing

log = logging.getLogger(__name__)
# For all to have come, and for each to have done its part of a step. A coordinator ends a group that hangs long before.
MEETING_S, STEP_S = 300, 3600
TEXT_MAX = 1 << 16


class Ranks:
    """One process's place among them. A process that computes alone has no such object."""

    def __init__(self, rank: int, count: int, device: Device, backend: str = "auto") -> None:
        """rank: from 0. count: of processes. backend: gloo (through the host's memory), nccl (RCCL on AMD), or auto: on
        GPUs nccl, and what is added up in each layer through each other's memory (see `kernels.sharing`)."""
        assert 0 <= rank < count
        self.rank, self.count, self._device = rank, count, device
        self._backend = backend if backend != "auto" else ("nccl" if device.owns_memory else "gloo")
        if self._backend == "nccl" and not device.owns_memory:
            raise InvalidConfiguration("collectives", "'nccl' is for GPUs; use 'auto'")
        self._group: dist.ProcessGroup | None = None
        self._place: Path | None = None
        # See `kernels.sharing`; and why there is none.
        self.shared: Sharing | None = None
        self.unshared = "" if backend == "auto" and self.capturable else f"collectives = {self._backend!r}"

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

    def describe(self) -> str:
        """How they exchange, for people."""
        how = "through each other's memory" if self.shared is not None else f"by {self._backend}: {self.unshared}"
        return f"{self.count}, which exchange {how}"

    @property
    def capturable(self) -> bool:
        """Whether `gather` may be part of a graph."""
        return self._backend == "nccl"

    def exchange(self, sizes: Sequence[int]) -> Exchange:
        """Memory of all ranks that each can read. sizes: bytes of its places, the same on all ranks.

        Raises RuntimeError where there is no such memory.
        """
        assert self._place is not None, "they have met"
        with _sockets_in(self._place.parent):
            return Exchange(self.rank, self.count, self._group, self._device.torch_device, sizes)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[count, *part.shape], new: what each has given, in order. part: of one shape and dtype everywhere.

        Raises WorkerError where one of them is gone: while a model is tried out, RuntimeError would be its fault.
        NCCL waits then, or ends this process.
        """
        part = part.contiguous()
        through_host = self._backend == "gloo" and part.device.type != "cpu"
        sent = part.cpu() if through_host else part
        # As octets: not every library knows every dtype.
        octets = sent.view(torch.uint8) if sent.dim() else sent.view(1).view(torch.uint8)
        found = torch.empty((self.count, *octets.shape), dtype=torch.uint8, device=octets.device)
        if self._backend == "nccl":
            dist.all_gather_into_tensor(found, octets, group=self._group)
        else:
            try:
                dist.all_gather(list(found.unbind()), octets, group=self._group)
            except RuntimeError as error:
                raise WorkerError(f"rank {self.rank} of {self.count} has lost another one: {error}") from error
        gathered = found.view(part.dtype).view(self.count, *part.shape)
        return gathered.to(part.device) if through_host else gathered

    def texts(self, text: str) -> list[str]:
        """What each has said, in order. Raises WorkerError where one of them is gone."""
        octets = text.encode()[:TEXT_MAX]
        line = torch.zeros(TEXT_MAX + 4, dtype=torch.uint8)
        line[:4] = torch.tensor(list(len(octets).to_bytes(4, "little")), dtype=torch.uint8)
        if octets:
            line[4 : 4 + len(octets)] = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        said = self.gather(line.to(self._device.torch_device)).cpu()
        lengths = [int.from_bytes(bytes(each[:4].tolist()), "little") for each in said]
        return [bytes(each[4 : 4 + n].tolist()).decode(errors="replace") for each, n in zip(said, lengths, strict=True)]

    def agreed(self, mine: bool) -> bool:
        """Whether all of them say yes. Raises WorkerError where one of them is gone."""
        said = torch.full((1,), int(mine), dtype=torch.int32, device=self._device.torch_device)
        return bool(self.gather(said).all())

    def close(self) -> None:
        """Leaves, whatever the others do. The last thing that a process does here: see `must_leave_at_once`."""
        self.shared = None
        if self._group is not None and self._backend != "nccl":
            self._group = None
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._leave_place()

    def _leave_place(self) -> None:
        if self._place is not None and self.rank == 0:
            self._place.unlink(missing_ok=True)


@contextlib.contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """torch's symmetric memory is handed over through sockets in the folder for temporary files, which under systemd is
    another one for each rank: then one would fail, and the other wait for ever."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def must_leave_at_once() -> bool:
    """Whether this process is to end without the farewells of libraries (`os._exit`).

    NCCL, RCCL and what torch has around them wait for the other ranks there, of which one may be stopped, or just serve
    on: seen on two H100, a rank that was told to stop alone was still there a minute later. The driver takes back all
    that a process had, as it does where one is killed.
    """
    return dist.is_available() and dist.is_initialized()
