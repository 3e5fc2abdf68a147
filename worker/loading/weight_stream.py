"""Reads the tensors of safetensors files in parallel, straight into their place on the device.

Several threads read pieces of a few MiB into fixed host buffers, from which the device copies them. A tensor therefore
exists nowhere in host memory as a whole, and host memory is bounded by the buffers. Reading runs ahead of the code that
builds the model by a bounded number of bytes. Projections that are computed as one product are placed one after the
other in one allocation, in the order in which `fusion` joins them, so that joining them copies nothing.

On a CPU, mapped files need no copy at all, and transformers reads those.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from kvforge.models.safetensors_header import StoredTensor, read_header
from kvforge.worker.device.device import Device
from kvforge.worker.device.staged_copies import StagedCopies

from .rehearsal import TYPES

READERS_MIN, READERS_MAX = 4, 16
PIECE_BYTES = 8 << 20
AHEAD_BYTES_MAX, AHEAD_SHARE = 4 << 30, 1 / 16  # share of the device's memory; experts are stacked beside it
# Weights that are computed as one product, in the order of the product.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
WEIGHT = ".weight"
log = logging.getLogger("worker")


@dataclass(frozen=True)
class Rows:
    """Rows of a stored tensor: all, or ranges of its first dimension, joined. extents: (offset, bytes) in its file."""

    shape: tuple[int, ...]
    extents: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(size for _, size in self.extents)


@dataclass
class _Reading:
    """Rows that are being read. left: pieces that are not on the device's queue yet."""

    target: torch.Tensor
    size: int
    left: int = 0


@dataclass(frozen=True)
class _Piece:
    name: str
    reading: _Reading
    descriptor: int
    offset: int
    target: torch.Tensor


@dataclass
class _Place:
    """Tensors that are placed together.

    Attributes:
        members: Their names, in order.
        missing: Members without a place.
        shared: Their allocation, from the first to the last of them that gets its place.
    """

    members: tuple[str, ...]
    missing: set[str]
    shared: torch.Tensor | None = None


class WeightStream:
    """Reads tensors of files by name. Use as a context manager: its end stops the threads and closes the files."""

    def __init__(
        self,
        files: Sequence[Path],
        device: Device,
        ahead: Iterable[str] = (),
        *,
        readers: int = 0,
        piece_bytes: int = PIECE_BYTES,
        ahead_bytes: int = 0,
    ) -> None:
        """Open the files and read their headers.

        Args:
            files: The safetensors files.
            device: Where the tensors go.
            ahead: Names that will be taken, in about that order; they are read ahead of `take`.
            readers: Threads; 0: as many as there are cores, within bounds.
            piece_bytes: Most bytes of one read.
            ahead_bytes: Most bytes that are read or being read, and not taken; 0: a share of the device's memory.

        Raises:
            UnsupportedModel: A file is damaged.
            OSError: A file cannot be read.
        """
        self._device, self._piece_bytes = device, piece_bytes
        self._ahead_bytes = ahead_bytes or min(AHEAD_BYTES_MAX, int(device.total_bytes() * AHEAD_SHARE))
        self._readers = readers or min(max(os.cpu_count() or 1, READERS_MIN), READERS_MAX)
        self.stored: dict[str, StoredTensor] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            for tensor in read_header(file):
                self.stored[tensor.name], self._file_of[tensor.name] = tensor, file
        self._descriptors = {file: os.open(file, os.O_RDONLY) for file in files}
        self._ahead = dict.fromkeys(name for name in ahead if name in self.stored)
        self.bytes_total = sum(self.stored[name].size for name in self._ahead)
        self.bytes_read = 0
        self._places = _places(self.stored)
        self._changed = threading.Condition()
        self._pieces: deque[_Piece] = deque()
        self._readings: dict[str, _Reading] = {}
        self._untaken = 0  # bytes of `_readings`
        self._failure: BaseException | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._began = self._last_read = 0.0

    def __enter__(self) -> Self:
        self._began = self._last_read = time.monotonic()
        for number in range(self._readers):
            thread = threading.Thread(target=self._read_all, name=f"weights-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._readings.clear()
        self._pieces.clear()
        self._places.clear()
        self._device.release_host_buffers()

    @property
    def names(self) -> Mapping[Path, list[str]]:
        """The names of the tensors of each file."""
        found: dict[Path, list[str]] = {file: [] for file in self._descriptors}
        for name, file in self._file_of.items():
            found[file].append(name)
        return found

    @property
    def share(self) -> float:
        """Share of the bytes named in `ahead` that are read, 0 to 1."""
        return min(1.0, self.bytes_read / self.bytes_total) if self.bytes_total else 0.0

    def line(self) -> str:
        """Return a line for the log: bytes, seconds and rate of the reading."""
        seconds = max(self._last_read - self._began, 1e-9)
        gigabytes = self.bytes_read / 1e9
        return f"read {gigabytes:.2f} GB of weights in {seconds:.2f} s ({gigabytes / seconds:.1f} GB/s)"

    def take(self, name: str, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """Return a tensor on the device, once its copies are queued.

        Args:
            name: Its stored name.
            ranges: Ranges of its first dimension, joined; None: all. Only their bytes are read.

        Raises:
            OSError: The file cannot be read, or has become shorter.
            RuntimeError: There is not enough memory, or the device failed.
        """
        stored = self.stored[name]
        with self._changed:
            reading = self._readings.get(name) if ranges is None else None
            if reading is None:
                self._ahead.pop(name, None)
                reading = self._start(name, _rows(stored, ranges), whole=ranges is None, first=True)
                self._changed.notify_all()
            while reading.left and self._failure is None and not self._closed:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            if reading.left:
                raise OSError("the reading of weights was stopped")
            if self._readings.get(name) is reading:
                del self._readings[name]
                self._untaken -= reading.size
                self._changed.notify_all()
        return reading.target

    # -------------------------------------------------------------------------------------------------------- inside

    def _start(self, name: str, rows: Rows, *, whole: bool, first: bool = False) -> _Reading:
        """Allocate the rows' place and queue their pieces, before all others if `first`. The lock is held."""
        target = self._allocate(name, rows, whole)
        reading = _Reading(target, rows.size)
        flat = target.view(-1).view(torch.uint8) if rows.size else target
        pieces, at = [], 0
        for offset, size in rows.extents:
            for begin in range(0, size, self._piece_bytes):
                count = min(self._piece_bytes, size - begin)
                part = flat[at + begin : at + begin + count]
                pieces.append(_Piece(name, reading, self._descriptors[self._file_of[name]], offset + begin, part))
            at += size
        reading.left = len(pieces)
        if first:
            self._pieces.extendleft(reversed(pieces))
        else:
            self._pieces.extend(pieces)
        if whole:
            self._readings[name] = reading
            self._untaken += rows.size
        return reading

    def _allocate(self, name: str, rows: Rows, whole: bool) -> torch.Tensor:
        dtype = TYPES[self.stored[name].type_name]
        place = self._places.pop(name, None) if whole else None
        if not rows.size:
            return torch.empty(rows.shape, dtype=dtype, device=self._device.torch_device)
        if place is None:
            return self._device.allocate(rows.shape, dtype)
        heights = [self.stored[each].shape[0] for each in place.members]
        if place.shared is None:
            place.shared = self._device.allocate((sum(heights), *rows.shape[1:]), dtype)
        first = sum(heights[: place.members.index(name)])
        mine = place.shared[first : first + rows.shape[0]]
        place.missing.discard(name)
        if not place.missing:
            place.shared = None  # the memory belongs to the tensors alone
        return mine

    def _read_all(self) -> None:
        """Read pieces until there are no more or the stream ends: one thread."""
        try:
            copies = StagedCopies(self._device, self._piece_bytes)
            while (piece := self._next_piece()) is not None:
                count = len(piece.target)
                self._read(piece, copies.buffer()[:count])
                copies.send(piece.target)
                with self._changed:
                    piece.reading.left -= 1
                    self.bytes_read += count
                    self._last_read = time.monotonic()
                    if not piece.reading.left:
                        self._changed.notify_all()
                    del piece  # before `take` returns: no thread keeps a tensor alive
            copies.wait()
        except BaseException as error:  # noqa: BLE001 - `take` raises it in the thread that builds the model
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _next_piece(self) -> _Piece | None:
        with self._changed:
            while True:
                if self._closed or self._failure is not None:
                    return None
                if self._pieces:
                    return self._pieces.popleft()
                if self._ahead and self._untaken < self._ahead_bytes:
                    name = next(iter(self._ahead))
                    del self._ahead[name]
                    self._start(name, _rows(self.stored[name], None), whole=True)
                    self._changed.notify_all()
                    continue
                self._changed.wait()

    def _read(self, piece: _Piece, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(piece.descriptor, [buffer[done:]], piece.offset + done)
            if not count:
                file = self._file_of[piece.name].name
                problem = f"{file} ends at byte {piece.offset + done}, within its tensor {piece.name}"
                raise OSError(f"{problem}: it has become shorter since its header was read; fetch it again")
            done += count


def _rows(stored: StoredTensor, ranges: Sequence[tuple[int, int]] | None) -> Rows:
    if ranges is None:
        return Rows(stored.shape, ((stored.offset, stored.size),))
    row = stored.size // stored.shape[0] if stored.shape[0] else 0
    extents = tuple((stored.offset + start * row, (stop - start) * row) for start, stop in ranges)
    return Rows((sum(stop - start for start, stop in ranges), *stored.shape[1:]), extents)


def _places(stored: Mapping[str, StoredTensor]) -> dict[str, _Place]:
    """Return the tensors that are placed together, by name."""
    found: dict[str, _Place] = {}
    for name in stored:
        owner, _, last = name.removesuffix(WEIGHT).rpartition(".")
        for group in TOGETHER:
            if not name.endswith(WEIGHT) or last != group[0]:
                continue
            members = tuple(f"{owner}.{each}{WEIGHT}" for each in group)
            if all(each in stored and _joinable(stored[each], stored[name]) for each in members):
                found |= dict.fromkeys(members, _Place(members, set(members)))
    return found


def _joinable(one: StoredTensor, other: StoredTensor) -> bool:
    alike = one.type_name == other.type_name and one.shape[1:] == other.shape[1:]
    return alike and len(one.shape) == 2 and one.size > 0


def tensors_together(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the rows of all tensors as one tensor if they lie one after the other in one allocation, else None."""
    first = tensors[0]
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for each in tensors:
        alike = each.dtype == first.dtype and each.shape[1:] == first.shape[1:] and each.is_contiguous()
        if not alike or each.data_ptr() != at or each.untyped_storage().data_ptr() != storage:
            return None
        at += each.nbytes
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
