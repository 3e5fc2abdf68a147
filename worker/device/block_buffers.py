"""Blocks of several tensors as rows of bytes, with checksums.

A row has the bytes of a block in every tensor, one behind the other. `kvforge.worker.checksums`
defines its checksum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvforge.worker.checksums import WORD, Sums, checksums, weights_of

from .device import Device
from .queue import AsyncCopy


class PendingSums:
    """Checksums of rows, on their way to the host where a device computes them."""

    def __init__(self, parts: AsyncCopy | Sums) -> None:
        self._parts = parts

    def array(self) -> Sums:
        """Return the checksums, [n] uint64. An event recorded after this object must have passed."""
        if isinstance(self._parts, AsyncCopy):
            return self._parts.array().view(np.uint64).sum(1, dtype=np.uint64)
        return self._parts


class BlockBuffers:
    """Copies blocks between tensors and rows on a device, or overwrites them with zeros.

    Args:
        device: The device.
        tensors: [blocks, ...] uint8 each, contiguous, on the device. They must outlive this object.

    Attributes:
        block_bytes: Bytes of a row.
    """

    def __init__(self, device: Device, tensors: Sequence[torch.Tensor]) -> None:
        self._device, self._tensors = device, tensors
        sizes = [octets[0].numel() for octets in self._tensors]
        places = np.concatenate([[0], np.cumsum(sizes)])
        self.block_bytes = int(places[-1])
        self._places = [slice(int(at), int(at) + size) for at, size in zip(places, sizes, strict=False)]
        self._table: torch.Tensor | None = None
        # torch copies words several times as fast as bytes.
        self._unit = torch.int64 if all(size % WORD == 0 for size in sizes) else torch.uint8
        self._parts = [octets.view(len(octets), -1).view(self._unit) for octets in self._tensors]
        self._weights: Sums | None = None
        if device.runs_kernels and self._unit == torch.int64:
            addresses = [octets.data_ptr() for octets in self._tensors]
            table = np.array([addresses, sizes, places[:-1]], np.int64)
            table[1:] //= WORD
            self._table = device.upload(table)
        self._zeros: tuple[torch.Tensor, torch.Tensor] | None = None  # a table without places, and a part of zeros

    def zero(self, blocks: npt.NDArray[np.int64]) -> None:
        """Queue zeros into every byte of blocks, [n] distinct: on a GPU one launch, however many tensors there are."""
        ids = self._device.upload(blocks)
        if self._table is None:
            for tensor in self._parts:
                tensor.index_fill_(0, ids, 0)
            return
        from .block_copies import zero_blocks  # imports triton

        if self._zeros is None:
            table, words = self._table.clone(), max(part.shape[1] for part in self._parts)
            table[2] = 0
            self._zeros = table, torch.zeros(words, dtype=torch.int64, device=table.device)
        zero_blocks(self._zeros[0], ids, self._zeros[1])

    def begin(self, blocks: npt.NDArray[np.int64]) -> BlockCopies:
        """Begin to copy blocks, [n] distinct, which follow part by part."""
        if self._table is None and self._weights is None:
            self._weights = weights_of(self.block_bytes)
        return BlockCopies(self._device, self._tensors, self._parts, self._places, self._table, self._weights, blocks)


class BlockCopies:
    """Copies of some blocks of a `BlockBuffers`, in parts, with one upload of their ids and one fetch of their sums."""

    def __init__(
        self,
        device: Device,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        places: Sequence[slice],
        table: torch.Tensor | None,
        weights: Sums | None,
        blocks: npt.NDArray[np.int64],
    ) -> None:
        self._device, self._parts, self._places, self._table, self._weights = device, parts, places, table, weights
        self._blocks = device.upload(blocks)
        self._summed: list[Sums] = []
        shape = (len(blocks), len(tensors))
        self._sums = None if table is None else torch.empty(shape, dtype=torch.int64, device=device.torch_device)

    def gather(self, part: slice, rows: torch.Tensor) -> None:
        """Queue the copy of some of the blocks to rows, [n, block_bytes] uint8 on the device."""
        self._copy(part, rows, False)

    def scatter(self, part: slice, rows: torch.Tensor) -> None:
        """Queue the copy of rows to some of the blocks."""
        self._copy(part, rows, True)

    def sums(self) -> PendingSums:
        """Return the checksums of all rows, in the order of the parts, which came one behind the other."""
        if self._sums is not None:
            return PendingSums(AsyncCopy(self._device, self._sums))
        return PendingSums(np.concatenate(self._summed) if self._summed else np.zeros(0, np.uint64))

    def _copy(self, part: slice, rows: torch.Tensor, into_pool: bool) -> None:
        if self._table is not None and self._sums is not None:
            from .block_copies import copy_blocks  # imports triton

            copy_blocks(self._table, self._blocks, rows.view(torch.int64), self._sums, part.start, into_pool=into_pool)
            return
        blocks = self._blocks[part]
        for tensor, place in zip(self._parts, self._places, strict=True):
            ours = rows[:, place].view(tensor.dtype)
            if into_pool:
                tensor.index_copy_(0, blocks, ours)
            else:
                ours.copy_(tensor.index_select(0, blocks))
        assert self._weights is not None, "without a kernel"
        self._summed.append(checksums(rows.cpu().numpy(), self._weights))
