"""Recurrent states in pages of the KV pool: their layout, and their way in and out.

A layer with a recurrent state (a short convolution, a gated delta rule, Mamba) keeps a few tensors of fixed size for
each sequence, whatever its length. They are packed in order into `StateLayout.pages` pages, each the size of a block of
the pool. The pages of a sequence are scattered over the pool and listed in order. A tensor consists of equal units (a
head's matrix, a channel's tail of a convolution), and none crosses a page.

A state cannot go back behind a drafted token. Each drafted token therefore writes its state into pages of its own
behind those of the pool, and the state of the last accepted one is copied to the sequence's pages once it is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from kvforge.protocol.errors import InvalidConfiguration

ALIGNMENT = 16  # bytes: tensors begin at multiples of this within a page


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state.

    Attributes:
        layer: Index of the layer among the layers with a state.
        name: Its name within the layer.
        shape: Its shape for one sequence, with a leading 1.
        dtype: Its dtype in the layer.
        kept: Its dtype in the pages, if it is another one: numbers are rounded to it behind each chunk.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype | None = None

    @property
    def stored(self) -> torch.dtype:
        """The dtype in the pages."""
        return self.kept or self.dtype

    @property
    def nbytes(self) -> int:
        """Size in the pages, in bytes."""
        return math.prod(self.shape) * self.stored.itemsize

    def unit_bytes(self, page_bytes: int) -> int:
        """Return the bytes that stay together: all dimensions behind the second, or fewer if a page is smaller."""
        for first in range(2, len(self.shape)):
            size = math.prod(self.shape[first:]) * self.stored.itemsize
            if size <= page_bytes:
                return size
        return self.stored.itemsize


def kept_as(states: tuple[StateTensor, ...], dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """Return states with their float32 tensors kept in another dtype in the pages."""
    wide = torch.float32
    return tuple(replace(each, kept=dtype) if each.dtype == wide != dtype else each for each in states)


@dataclass(frozen=True)
class Span:
    """Bytes of a tensor that lie together: `size` bytes at `offset` in the page of index `page`."""

    page: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.size


@dataclass(frozen=True)
class StateLayout:
    """Where each tensor of a sequence's state lies in its pages.

    Attributes:
        tensors: The tensors of all layers, in the order of the pages.
        page_bytes: Bytes of a page.

    Raises:
        InvalidConfiguration: Names `bytes_per_block`: pages are no multiple of ALIGNMENT.
    """

    tensors: tuple[StateTensor, ...]
    page_bytes: int

    def __post_init__(self) -> None:
        if self.page_bytes % ALIGNMENT:
            problem = (
                f"{self.page_bytes} bytes cannot hold recurrent states: expected a multiple of {ALIGNMENT}; "
                "choose a larger block_size"
            )
            raise InvalidConfiguration("bytes_per_block", problem)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """The places of each tensor, in order."""
        page, offset, found = 0, 0, []
        for tensor in self.tensors:
            unit, left, places = tensor.unit_bytes(self.page_bytes), tensor.nbytes, list[Span]()
            offset += -offset % ALIGNMENT
            while left:
                size = min(left, (self.page_bytes - offset) // unit * unit)
                if size:
                    places.append(Span(page, offset, size))
                    offset, left = offset + size, left - size
                if left:
                    page, offset = page + 1, 0
            found.append(tuple(places))
        return tuple(found)

    @property
    def pages(self) -> int:
        """Pages that a sequence's state takes."""
        return 1 + max((span.page for places in self.spans for span in places), default=-1)

    def of_layer(self, layer: int) -> list[tuple[StateTensor, tuple[Span, ...]]]:
        """Return a layer's tensors with their places."""
        return [each for each in zip(self.tensors, self.spans, strict=True) if each[0].layer == layer]


def _parts_of(spans: list[Span]) -> list[tuple[slice, slice]]:
    """Return pages that follow each other, with the bytes between the first and the last of these spans in each."""
    held: dict[int, slice] = {}
    for span in spans:
        other = held.get(span.page, slice(span.offset, span.end))
        held[span.page] = slice(min(other.start, span.offset), max(other.stop, span.end))
    found: list[tuple[slice, slice]] = []
    for page in sorted(held):
        if found and found[-1] == (slice(found[-1][0].start, page), held[page]):
            found[-1] = slice(found[-1][0].start, page + 1), held[page]
        else:
            found.append((slice(page, page + 1), held[page]))
    return found


def lines_of(tensor: StateTensor, spans: tuple[Span, ...]) -> torch.Tensor | None:
    """Return the page and the offset of each line of a tensor, [lines, 2] int32 on the host; None: pages cut lines."""
    size = tensor.shape[-1] * tensor.stored.itemsize
    if any(span.size % size for span in spans):
        return None
    parts = [np.stack(np.broadcast_arrays(span.page, np.arange(span.offset, span.end, size)), axis=1) for span in spans]
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


@dataclass(frozen=True)
class StateRows:
    """One tensor of a layer's state, of several sequences, in the pages of a pool.

    A line is the numbers along the tensor's last dimension. Kernels find them by `lines`, plain torch by `spans`.

    Attributes:
        memory: [blocks, page bytes] uint8 on the device, contiguous: all pages of the pool.
        pages: [rows, pages of a state] int32 on the device, contiguous: each row's pages in order.
        tensor: The tensor.
        spans: Where it lies.
        lines: [lines, 2] int32 on the device: the page of each line and its offset in bytes. None: pages cut lines.
    """

    memory: torch.Tensor
    pages: torch.Tensor
    tensor: StateTensor
    spans: tuple[Span, ...]
    lines: torch.Tensor | None

    def read(self) -> torch.Tensor:
        """Return copies of the rows' states, [rows, ...] in the tensor's dtype."""
        parts = [self.memory[self.pages[:, span.page].long(), span.offset : span.end] for span in self.spans]
        return torch.cat(parts, 1).view(self.tensor.stored).to(self.tensor.dtype).view(-1, *self.tensor.shape[1:])

    def write(self, state: torch.Tensor) -> None:
        """Write the rows' states, [rows, ...]."""
        flat, begin = state.to(self.tensor.stored).contiguous().view(len(state), -1).view(torch.uint8), 0
        for span in self.spans:
            part = flat[:, begin : begin + span.size]
            self.memory[self.pages[:, span.page].long(), span.offset : span.end] = part
            begin += span.size


class StatePages:
    """Reads and writes states in the memory of a pool.

    Args:
        layout: The layout of a state.
        memory: [blocks, page bytes] uint8 on the device, contiguous: all pages of the pool.
    """

    def __init__(self, layout: StateLayout, memory: torch.Tensor) -> None:
        self._memory = memory
        self._rounds = any(tensor.stored != tensor.dtype for tensor in layout.tensors)
        self._layers: dict[int, list[tuple[StateTensor, tuple[Span, ...]]]] = {}
        for tensor, spans in zip(layout.tensors, layout.spans, strict=True):
            self._layers.setdefault(tensor.layer, []).append((tensor, spans))
        self._lines: dict[tuple[int, str], torch.Tensor | None] = {}
        self._parts: dict[int, list[tuple[slice, slice]]] = {}

    def rows(self, layer: int, name: str, pages: torch.Tensor) -> StateRows:
        """Return a tensor of a layer's state for several sequences, to be read and written in place.

        Args:
            layer: Index among the layers with a state.
            name: The tensor's name.
            pages: [rows, pages of a state] int32 on the device: each sequence's pages in order.
        """
        tensor, spans = next(each for each in self._layers[layer] if each[0].name == name)
        if (layer, name) not in self._lines:
            found = lines_of(tensor, spans)
            self._lines[layer, name] = None if found is None else found.to(self._memory.device)
        return StateRows(self._memory, pages, tensor, spans, self._lines[layer, name])

    def copy(self, layer: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy a layer's state of several sequences to other pages.

        Args:
            layer: Index among the layers with a state.
            sources: [rows, pages of a state] int64 on the device: the pages to read.
            targets: [rows, pages of a state] int64 on the device: the pages to write, none of which is read.
        """
        if layer not in self._parts:
            self._parts[layer] = _parts_of([span for _, spans in self._layers[layer] for span in spans])
        for pages, part in self._parts[layer]:
            self._memory[targets[:, pages].reshape(-1), part] = self._memory[sources[:, pages].reshape(-1), part]

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole pages: [n] int64 on the device each, and no page is read that another copy writes."""
        self._memory[targets] = self._memory[sources]

    def load(self, layer: int, pages: list[int]) -> dict[str, torch.Tensor]:
        """Read a layer's state of one sequence.

        Args:
            layer: Index among the layers with a state.
            pages: The sequence's pages in order, pool-local block ids.

        Returns:
            Copies of its tensors by name, in the shapes of the layout.
        """
        return {
            tensor.name: torch.cat([self._part(pages, span) for span in spans])
            .view(tensor.stored)
            .to(tensor.dtype)
            .view(tensor.shape)
            for tensor, spans in self._layers[layer]
        }

    def rounded(self, layer: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a layer's state as `load` would return it once it was stored."""
        if not self._rounds:
            return state
        return {tensor.name: state[tensor.name].to(tensor.stored).to(tensor.dtype) for tensor, _ in self._layers[layer]}

    def store(self, layer: int, pages: list[int], state: dict[str, torch.Tensor]) -> None:
        """Write a layer's state of one sequence.

        Args:
            layer: Index among the layers with a state.
            pages: The sequence's pages in order, pool-local block ids.
            state: Its tensors by name, in the shapes of the layout.
        """
        for tensor, spans in self._layers[layer]:
            given = state[tensor.name]
            assert given.shape == tensor.shape, f"{tensor.name} is {tuple(given.shape)}, not {tensor.shape}"
            flat = given.to(tensor.stored).contiguous().view(-1).view(torch.uint8)
            begin = 0
            for span in spans:
                self._part(pages, span).copy_(flat[begin : begin + span.size])
                begin += span.size

    def _part(self, pages: list[int], span: Span) -> torch.Tensor:
        return self._memory[pages[span.page], span.offset : span.offset + span.size]
