"""Tensor parallelism: the processes that compute one model together, each with a slice of its weights.

They meet at a rendezvous that the coordinator names for each life of the group. From then on all ranks exchange
numbers together, in the order of their ranks. Parts are gathered and never summed on the way. The receiver adds them in
the order of ranks, so that the bits depend neither on the number of rows nor on the order of arrival.
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
from .rank_memory import RankMemory, host

log = logging.getLogger(__name__)
# Timeouts of the rendezvous and of one collective. The coordinator ends a connected group that hangs long before. Ranks
# that wait in a gloo collective while the coordinator restarts cannot reconnect: a watchdog ends them.
MEETING_S, STEP_S = 300, 3600
TEXT_MAX = 1 << 16


class Ranks:
    """This process's membership in its group of ranks. A process that computes alone has none."""

    def __init__(self, rank: int, count: int, device: Device, backend: str = "auto") -> None:
        """Choose the backend; `meet` joins the group.

        Args:
            rank: This rank, from 0.
            count: Number of ranks.
            device: This rank's device.
            backend: gloo (through host memory), nccl (RCCL on AMD), or auto: nccl on GPUs, with the sums of each layer
                through direct access to the other ranks' memory (see `kernels.sharing`).

        Raises:
            InvalidConfiguration: nccl without a GPU.
        """
        assert 0 <= rank < count
        self.rank, self.count, self._device = rank, count, device
        self._backend = backend if backend != "auto" else ("nccl" if device.owns_memory else "gloo")
        if self._backend == "nccl" and not device.owns_memory:
            raise InvalidConfiguration("collectives", "'nccl' is for GPUs; use 'auto'")
        self._group: dist.ProcessGroup | None = None
        self._place: Path | None = None
        self._memory: RankMemory | None = None
        # Direct exchange (see `kernels.sharing`), and the reason if it is not used.
        self.shared: Sharing | None = None
        self.unshared = "" if backend == "auto" and self.capturable else f"collectives = {self._backend!r}"

    def meet(self, place: Path) -> None:
        """Wait for all other ranks.

        Args:
            place: An unused file on a disk that all ranks see.

        Raises:
            WorkerError: A rank did not arrive.
        """
        self._place = place
        log.info("rank %d of %d: rendezvous at %s", self.rank, self.count, place)
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
        how = self._backend
        if self._backend == "gloo":  # gloo no longer reads the file; NCCL does
            self._leave_place()
            if not (problem := self._map_memory(place)):
                how = "memory of their host"
            elif self.count > 1:
                log.info("rank %d of %d: gloo, without memory of the host: %s", self.rank, self.count, problem)
        log.info("rank %d of %d: all ranks connected over %s", self.rank, self.count, how)

    def _map_memory(self, place: Path) -> str:
        """Gather through memory from now on, if all ranks are on one host; return why they do not."""
        if self.count == 1:
            return "it is the only rank"
        if len({*self.texts(host())}) > 1:
            return "ranks are on several hosts"
        memory: RankMemory | None = None
        problem = ""
        try:
            memory = RankMemory(self.rank, self.count, place)
        except OSError as error:
            problem = str(error)
        if not (problem := self._problem(problem)):
            assert memory is not None
            try:
                memory.connect()
            except OSError as error:
                problem = str(error) or type(error).__name__
            problem = self._problem(problem)
        if memory is not None and problem:
            memory.close()
        elif memory is not None:
            memory.set_timeout(STEP_S)
            self._memory = memory
        return problem

    def _problem(self, mine: str) -> str:
        """Return the first rank's problem, for all of them; "": no rank has one."""
        return next(filter(None, self.texts(mine)), "")

    def describe(self) -> str:
        """Describe the transport between ranks, for people."""
        if self.shared is not None:
            how = "through each other's memory"
        elif self._memory is not None:
            how = "through memory of their host"
        else:
            how = f"by {self._backend}: {self.unshared}"
        return f"{self.count}, which exchange {how}"

    @property
    def capturable(self) -> bool:
        """Whether `gather` may be part of a graph."""
        return self._backend == "nccl"

    def exchange(self, sizes: Sequence[int]) -> Exchange:
        """Allocate memory that all ranks can read.

        Args:
            sizes: Bytes of its buffers, the same on all ranks.

        Raises:
            RuntimeError: Such memory is not available.
        """
        assert self._place is not None, "call `meet` first"
        with _sockets_in(self._place.parent):
            return Exchange(self.rank, self.count, self._group, self._device.torch_device, sizes)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather a tensor from all ranks.

        Args:
            part: This rank's part, of one shape and dtype on all ranks.

        Returns:
            [count, *part.shape], a new tensor, in the order of ranks.

        Raises:
            WorkerError: A rank is gone. (A RuntimeError would blame the model while it is tried out.) NCCL waits
                instead, or ends this process.
        """
        part = part.contiguous()
        through_host = self._backend == "gloo" and part.device.type != "cpu"
        sent = part.cpu() if through_host else part
        gathered = torch.empty((self.count, *sent.shape), dtype=sent.dtype, device=sent.device)
        # As bytes: not every library knows every dtype.
        octets = sent.view(-1).view(torch.uint8)
        found = gathered.view(-1).view(torch.uint8).view(self.count, len(octets))
        if self._backend == "nccl":
            dist.all_gather_into_tensor(found, octets, group=self._group)
        else:
            try:
                if self._memory is not None:
                    self._memory.gather(octets, found)
                else:
                    dist.all_gather(list(found.unbind()), octets, group=self._group)
            except (RuntimeError, OSError) as error:
                raise WorkerError(f"rank {self.rank} of {self.count} lost another rank: {error}") from error
        return gathered.to(part.device) if through_host else gathered

    def texts(self, text: str) -> list[str]:
        """Gather a text from all ranks, in the order of ranks.

        Raises:
            WorkerError: A rank is gone.
        """
        octets = text.encode()[:TEXT_MAX]
        line = torch.zeros(TEXT_MAX + 4, dtype=torch.uint8)
        line[:4] = torch.tensor(list(len(octets).to_bytes(4, "little")), dtype=torch.uint8)
        if octets:
            line[4 : 4 + len(octets)] = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        lines = self.gather(line.to(self._device.torch_device)).cpu()
        lengths = [int.from_bytes(bytes(each[:4].tolist()), "little") for each in lines]
        return [
            bytes(each[4 : 4 + n].tolist()).decode(errors="replace") for each, n in zip(lines, lengths, strict=True)
        ]

    def agreed(self, mine: bool) -> bool:
        """Return whether all ranks agree.

        Raises:
            WorkerError: A rank is gone.
        """
        votes = torch.full((1,), int(mine), dtype=torch.int32, device=self._device.torch_device)
        return bool(self.gather(votes).all())

    def close(self) -> None:
        """Leave the group, whatever the other ranks do. Must be the last use of the group: see `must_leave_at_once`."""
        self.shared = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
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
    """Set TMPDIR to a folder that all ranks share.

    torch passes symmetric memory through sockets in the folder for temporary files. systemd gives each rank its own:
    one rank would fail, and the other would wait for ever.
    """
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
    """Return whether this process must exit without the shutdown handlers of libraries (`os._exit`).

    On exit NCCL, RCCL and torch's code around them wait for the other ranks, which may be stopped or still serving: on
    two H100, a rank that was stopped alone was still there a minute later. The driver frees all resources of the
    process, as after a kill.
    """
    return dist.is_available() and dist.is_initialized()
