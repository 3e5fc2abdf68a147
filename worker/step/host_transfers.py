"""Copies between the KV pool and the host file, as steps order them.

A block is copied whole: the bytes of every tensor of the pool, one behind the other. On a GPU the copies run beside the
steps, through buffers on the device:

- to the host, the blocks are gathered in the steps' queue, behind the step that wrote them and before the one that
  writes them next. A queue of its own brings them from there to the file. The step's result waits for that, because it
  acknowledges the copies; other steps do not.
- from the host, a second queue fills the buffers as soon as the step is launched, while the step before still runs.
  The blocks are scattered in the steps' queue, which waits for them.

A queue waits for another one only to use a buffer again. The host waits for none. It page-locks pieces of the file that
are not locked yet (`LockedPieces`) before it queues their first copy.

Beside a block lie its tag, which names what the coordinator expects in it, and the checksum of its bytes. A block that
is read and has another tag or checksum is reported with the step's result (`LoadedBlocks.settle`). It is a miss: the
coordinator has its rows computed again.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import MISSED_CHECKSUM, MISSED_TAG, NO_INT32, Int32Array, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.quantised import as_bytes
from kvforge.worker.checksums import Sums
from kvforge.worker.device.block_buffers import BlockBuffers, PendingSums
from kvforge.worker.device.copy_batches import CopyBatches, copy_batches_of
from kvforge.worker.device.device import Device
from kvforge.worker.device.host_memory import LockedPieces, registrar_of
from kvforge.worker.device.queue import DeviceEvent
from kvforge.worker.device.side_queue import SideQueue
from kvforge.worker.host_file import HostFile

COPY_NUMBERS = 4  # block, host block, and the halves of the tag
BUFFER_BYTES = 16 << 20  # of one buffer on a GPU: large enough for a copy engine's full rate
CPU_BUFFER_BYTES = 4 << 20
BUFFERS = 6  # in each direction: so much is copied without a step waiting for it
Indices = npt.NDArray[np.int64]
log = logging.getLogger("worker")


def buffer_blocks(device: Device, block_bytes: int) -> int:
    """Return how many blocks a buffer has."""
    return max(1, (BUFFER_BYTES if device.owns_memory else CPU_BUFFER_BYTES) // block_bytes)


def buffer_bytes(device: Device, block_bytes: int) -> int:
    """Return the bytes that all buffers take on a GPU, beside the pool; 0 on a CPU."""
    return 2 * BUFFERS * buffer_blocks(device, block_bytes) * block_bytes if device.owns_memory else 0


@dataclass
class Buffer:
    """Rows on the device, with the event after which they can be used again.

    Attributes:
        rows: [blocks, block_bytes] uint8 on the device.
        bounce: The same in page-locked memory, for a file that the device cannot reach; None where it can.
        free: The work that fills the rows next waits for it.
    """

    rows: torch.Tensor
    bounce: torch.Tensor | None
    free: DeviceEvent | None = None


@dataclass
class CopyTime:
    """The time that copies of one step take: from the first to the last of them in their queue, or on a CPU in all."""

    begin: DeviceEvent
    end: DeviceEvent | None = None

    @classmethod
    def of(cls, begin: DeviceEvent | None) -> CopyTime | None:
        """Return the time of copies that begin with an event; None if it is not known yet."""
        return None if begin is None else cls(begin)

    def us(self) -> int:
        """Wait for the end, and return the time in microseconds, rounded up; 0 if nothing was copied."""
        if self.end is None:
            return 0
        self.end.wait()
        return math.ceil(1000 * self.end.ms_since(self.begin))


@dataclass
class SavedPart:
    """Blocks of one buffer on their way to the file: host blocks [n], the end of their copy, and a detour."""

    hosts: Indices
    end: DeviceEvent
    bounce: torch.Tensor | None


@dataclass
class SavedBlocks:
    """Copies of one step to the host: host blocks and tags, [n] each.

    Attributes:
        sums: The checksums of the blocks; None once they are settled.
        summed: The event behind them.
        time: What they take; None before the first copy.
    """

    file: HostFile
    hosts: Indices
    tags: Sums
    parts: list[SavedPart] = field(default_factory=list)
    sums: PendingSums | None = None
    summed: DeviceEvent | None = None
    time: CopyTime | None = None

    def done(self) -> bool:
        """Return whether `settle` will not wait. Raises RuntimeError if the device failed."""
        # The copies of one queue end in order.
        return (not self.parts or self.parts[-1].end.passed()) and (self.summed is None or self.summed.passed())

    def drain(self) -> None:
        """Wait for the copies. Raises RuntimeError if the device failed."""
        for part in self.parts:
            part.end.wait()
            if part.bounce is not None:
                self.file.data[part.hosts] = part.bounce.numpy()
        self.parts.clear()

    def settle(self) -> None:
        """Wait for the copies, then give each block its checksum and its tag.

        Raises:
            RuntimeError: The device failed.
        """
        self.drain()
        if self.sums is not None and self.summed is not None:
            self.summed.wait()
            self.file.sums[self.hosts] = self.sums.array()
            self.file.tags[self.hosts] = self.tags
            self.sums = None


@dataclass
class LoadedBlocks:
    """Copies of one step from the host.

    Attributes:
        missed: Pairs (host block, reason) of blocks that were not copied.
        time: What the copies take; None before the first.
    """

    missed: list[tuple[int, int]]
    hosts: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    expected: Sums = field(default_factory=lambda: np.zeros(0, np.uint64))
    sums: PendingSums | None = None
    time: CopyTime | None = None

    def settle(self) -> Int32Array:
        """Return the blocks with other content than was saved, as `StepResult.host_missed`.

        The step's end must have passed.
        """
        if self.sums is not None:
            wrong = self.hosts[self.sums.array() != self.expected]
            self.missed += [(block, MISSED_CHECKSUM) for block in wrong.tolist()]
            self.sums = None
        return np.array(self.missed, np.int32).reshape(-1) if self.missed else NO_INT32


class HostTransfers:
    """Copies blocks of one pool to and from one file.

    Args:
        pool: The pool.
        file: The file.
        memory: The file's memory, if a thread locks pieces, which ends before the first copy. It is closed with this
            object.
        batches: Queues the copies of a buffer in one call; default: what the device has.

    Attributes:
        file: The file.
        problem: Why the device cannot reach the file's memory, so that copies go through page-locked buffers; "".
        placement: How the file's memory lies, for `kvforge health`; "" if that was not asked.
    """

    def __init__(
        self,
        pool: KvPool,
        file: HostFile,
        memory: LockedPieces | None = None,
        batches: CopyBatches | None = None,
    ) -> None:
        device = pool.device
        self._device, self.file = device, file
        self._batches = batches or copy_batches_of(device)
        octets = (
            cache.view(torch.uint8) if cache.dtype != torch.uint8 else as_bytes(cache) for cache in pool.tensors()
        )
        self._pool = BlockBuffers(device, list(octets))
        if memory is None:
            memory = LockedPieces(registrar_of(device), file.memory, self._pool.block_bytes)
        self._memory, self.problem, self.placement = memory, "", ""
        self._blocks = torch.from_numpy(file.data)  # [host blocks, bytes] uint8
        self._at_once = buffer_blocks(device, self._pool.block_bytes)
        self._out, self._in = SideQueue(device), SideQueue(device)
        count = BUFFERS if device.owns_memory else 1
        with device.errors("allocating buffers of the host tier"):
            self._out_ring = [self._buffer() for _ in range(count)]
            self._in_ring = [self._buffer() for _ in range(count)]
            device.synchronize()  # the side queues may not overtake earlier work in the same memory
        self._saved: list[SavedBlocks] = []  # not settled yet

    def _buffer(self) -> Buffer:
        size = self._at_once * self._pool.block_bytes
        rows = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        return Buffer(rows.view(self._at_once, -1), None)

    def lock_next(self) -> bool:
        """Page-lock a piece of the file that is not locked yet; return whether there is another one."""
        more = self._memory.lock_next()
        self._note_refusal()
        return more

    def _lock(self, hosts: Indices) -> None:
        """Page-lock what copies from and to host blocks need, [n]. If that is refused, all later ones take a detour."""
        if not self._memory.lock(hosts):
            self._note_refusal()

    def _note_refusal(self) -> None:
        """Let copies take a detour once a piece of the file was refused."""
        if self.problem or not self._memory.problem:
            return
        self.problem = self._memory.problem
        name = self._device.name
        log.warning("host tier: %s refuses the file's memory (%s): copies take a detour", name, self.problem)
        with self._device.errors("allocating buffers of the host tier"):
            for buffer in (*self._out_ring, *self._in_ring):
                octets = self._device.host_buffer(buffer.rows.numel(), torch.uint8)
                buffer.bounce = octets.view(buffer.rows.shape)

    def save(self, copies: Int32Array) -> SavedBlocks:
        """Queue copies of blocks to the host. Each gets its tag when they are settled.

        Args:
            copies: As in `Step.host_writes`, pool-local, checked by `bad_host_copies`.
        """
        sources, hosts, tags = _parts(copies)
        saved = SavedBlocks(self.file, hosts, tags)
        self._saved = [each for each in self._saved if each.sums is not None]
        self._saved.append(saved)
        self.file.tags[hosts] = 0
        saved.time = CopyTime.of(self._out.begin())
        blocks = self._pool.begin(sources)
        for at in range(0, sources.size, self._at_once):
            part = slice(at, at + self._at_once)
            self._lock(hosts[part])
            buffer = self._next(self._out_ring)
            count = len(hosts[part])
            if buffer.free is not None:
                buffer.free.hold_back()
                if buffer.bounce is not None:
                    self._drain()
            blocks.gather(part, buffer.rows[:count])
            self._out.follow(DeviceEvent(self._device))
            saved.time = saved.time or CopyTime(self._out.mark(timed=True))
            with self._out.entered():
                if buffer.bounce is None:
                    self._copy(hosts[part], buffer.rows, into_file=True)
                else:
                    buffer.bounce[:count].copy_(buffer.rows[:count], non_blocking=True)
            buffer.free = self._out.mark()
            bounce = None if buffer.bounce is None else buffer.bounce[:count]
            saved.parts.append(SavedPart(hosts[part], buffer.free, bounce))
        saved.sums, saved.summed = blocks.sums(), DeviceEvent(self._device)
        if saved.time is not None:
            saved.time.end = self._out.mark(timed=True)
        return saved

    def load(self, copies: Int32Array) -> LoadedBlocks:
        """Queue copies of blocks from the host, of those that have their tags.

        Args:
            copies: As in `Step.host_reads`, pool-local, checked by `bad_host_copies`.
        """
        targets, hosts, tags = _parts(copies)
        for saved in self._saved:  # rare: a step reads what was just written
            if saved.sums is not None and np.isin(saved.hosts, hosts).any():
                saved.settle()
        good = self.file.tags[hosts] == tags
        loaded = LoadedBlocks([(block, MISSED_TAG) for block in hosts[~good].tolist()])
        targets, hosts = targets[good], hosts[good]
        loaded.hosts, loaded.expected = hosts, self.file.sums[hosts]
        loaded.time = CopyTime.of(self._in.begin())
        blocks = self._pool.begin(targets)
        for at in range(0, targets.size, self._at_once):
            part = slice(at, at + self._at_once)
            self._lock(hosts[part])
            buffer = self._next(self._in_ring)
            count = len(hosts[part])
            if buffer.free is not None:
                self._in.follow(buffer.free)
                if buffer.bounce is not None:
                    buffer.free.wait()
            if buffer.bounce is not None:
                buffer.bounce[:count] = self._blocks[torch.from_numpy(hosts[part])]
            loaded.time = loaded.time or CopyTime(self._in.mark(timed=True))
            with self._in.entered():
                if buffer.bounce is None:
                    self._copy(hosts[part], buffer.rows, into_file=False)
                else:
                    buffer.rows[:count].copy_(buffer.bounce[:count], non_blocking=True)
            self._in.mark().hold_back()
            blocks.scatter(part, buffer.rows[:count])
            buffer.free = DeviceEvent(self._device)
        loaded.sums = blocks.sums()
        if loaded.time is not None and targets.size:
            loaded.time.end = self._in.mark(timed=True)
        return loaded

    def wipe(self, hosts: Int32Array) -> None:
        """Overwrite host blocks that no copy uses with zeros: [n] int32, checked by `bad_host_copies`."""
        self.file.tags[hosts] = 0
        self.file.sums[hosts] = 0
        self.file.data[hosts] = 0

    def close(self) -> None:
        """Unlock the file. All steps with copies have been finished."""
        self._device.synchronize()
        self._saved.clear()
        self._out_ring, self._in_ring = [], []
        self._blocks = torch.zeros(0, 0, dtype=torch.uint8)
        self._memory.close()
        self.file.close()

    def _drain(self) -> None:
        """Wait for all copies to the host, because their buffers are used up and lie in no file yet."""
        for saved in self._saved:
            saved.drain()

    def _next(self, ring: list[Buffer]) -> Buffer:
        ring.append(ring.pop(0))
        return ring[-1]

    def _copy(self, hosts: Indices, rows: torch.Tensor, into_file: bool) -> None:
        """Queue copies between rows and the file: one for each run of neighbours in a page-locked piece.

        Args:
            hosts: Host blocks, [n].
            rows: On the device, at least n, in the order of the host blocks.
            into_file: Whether to copy to the file.
        """
        apart = np.diff(hosts, prepend=-2) != 1
        if self._memory.piece_blocks:
            apart |= hosts % self._memory.piece_blocks == 0
        begins = np.flatnonzero(apart)
        ends = np.append(begins[1:], len(hosts))
        if self._batches is not None:
            each = self._pool.block_bytes
            sources, targets = rows.data_ptr() + begins * each, self._blocks.data_ptr() + hosts[begins] * each
            if not into_file:
                sources, targets = targets, sources
            self._batches.queue(targets, sources, (ends - begins) * each)
            return
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            host = int(hosts[begin])
            ours, there = rows[begin:end], self._blocks[host : host + end - begin]
            if into_file:
                there.copy_(ours, non_blocking=True)
            else:
                ours.copy_(there, non_blocking=True)


class HostWork:
    """The host copies of one step in flight."""

    def __init__(self, saved: SavedBlocks | None = None) -> None:
        self.saved, self.loaded = saved, LoadedBlocks([])

    def done(self) -> bool:
        """Return whether `settle` will not wait, once the step's end has passed."""
        return self.saved is None or self.saved.done()

    def settle(self) -> Int32Array:
        """Wait for the copies, and return the blocks that were not found, as `StepResult.host_missed`."""
        if self.saved is not None:
            self.saved.settle()
        return self.loaded.settle()

    def took_us(self) -> tuple[int, int]:
        """Return the microseconds of the copies to the host and of those from it, once they are settled."""
        parts = (self.saved, self.loaded)
        write_us, read_us = (part.time.us() if part is not None and part.time is not None else 0 for part in parts)
        return write_us, read_us


def bad_host_copies(step: Step, blocks: int, host_blocks: int) -> InvalidRequest | None:
    """Return the first fault of a step's host copies, or None.

    Args:
        step: The step, with pool-local block ids.
        blocks: Blocks of the pool.
        host_blocks: Blocks of the host file; 0 for none.
    """
    for name, copies, written in (("host_writes", step.host_writes, 1), ("host_reads", step.host_reads, 0)):
        if copies.ndim != 1 or copies.dtype != np.int32 or len(copies) % COPY_NUMBERS:
            return InvalidRequest(name, f"must be int32 in groups of {COPY_NUMBERS}, not {copies.shape} {copies.dtype}")
        if not len(copies):
            continue
        ids = copies.reshape(-1, COPY_NUMBERS)[:, :2]
        if not host_blocks:
            return InvalidRequest(name, "this worker has no host file")
        if ids.min() < 0 or ids[:, 0].max() >= blocks or ids[:, 1].max() >= host_blocks:
            return InvalidRequest(name, f"names a block outside the pool's {blocks} or the file's {host_blocks}")
        if np.unique(ids[:, written]).size < len(ids):
            return InvalidRequest(name, "writes a block twice")
    wipes = step.host_wipes
    if wipes.size and (wipes.min() < 0 or wipes.max() >= host_blocks):
        return InvalidRequest("host_wipes", f"names a block outside the file's {host_blocks}")
    return None


def _parts(copies: Int32Array) -> tuple[Indices, Indices, Sums]:
    """Return blocks, host blocks and tags: [n] each."""
    rows = copies.reshape(-1, COPY_NUMBERS)
    tags = np.ascontiguousarray(rows[:, 2:]).astype("<i4").view("<u8").reshape(-1)
    return rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), tags


def copied_blocks(step: Step) -> Int32Array:
    """Return the host blocks that a step copies or wipes, in the order of `StepResult.host_copied`."""
    copies = np.concatenate([step.host_writes, step.host_reads]).reshape(-1, COPY_NUMBERS)
    return np.concatenate([copies[:, 1], step.host_wipes])


def uses_host(step: Step) -> bool:
    """Return whether a step copies or wipes host blocks."""
    return bool(step.host_writes.size or step.host_reads.size or step.host_wipes.size)
