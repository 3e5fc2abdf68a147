"""The KV pool: the tensors of a geometry.

In page-major memory (see `geometry`), K and V of a layer are views in which page b is entry b x `entries_per_block`,
and block tables are scaled by that factor once per step (`KvPool.batch`). Scales of quantised dtypes lie in page-major
memory of their own, in the same order. Attention is the same for both kinds of memory.

Invariants: every byte count is checked before memory is allocated. No unwritten slot is read: new memory is
uninitialised, and attention gathers only slots below a row's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.device.block_buffers import BlockBuffers
from kvforge.worker.device.device import Device

from .batch import PagedBatch
from .draft_backlog import DraftBacklog
from .geometry import KV_DTYPES, KvDtype, KvGeometry, LayerShape, require_positive
from .interface import KvLayer
from .mixed_batch import MixedBatch, MixedPlaces, MixedSize
from .quantised import as_bytes
from .states import StatePages
from .windows import WindowTables, base_of, lowered_tables, lowered_width

SLICED_COPIES_MAX = 16  # beyond, the host takes longer to cut slices than to copy by indices
SLOTS_MAX = 2**31 - 1  # kernels take slots of 32 bits
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes

__all__ = ["KV_DTYPES", "KvDtype", "KvGeometry", "KvPool", "LayerShape", "require_positive"]


class KvPool:
    """K and V of `blocks` blocks for every layer. Memory is uninitialised, and committed as it is written.

    Attributes:
        layers: One KvLayer per layer; layers that share memory have the same one.
        parts: Of each layer: 0, or 1 + the page that it has of a block of the layers that keep a window.
        states: The recurrent states of sequences; None for a model without them.
        beside: The draft model's K and V of the same blocks, and its scratch blocks behind them; None without one.
        tokens: [blocks, block_size, 1] int32, the ids of generated tokens (see `draft_backlog`); None if the geometry
            keeps none.
        backlog: The tokens that lack K and V; None likewise.

    Raises:
        InvalidConfiguration: The size is invalid.
        GpuError: There is not enough memory on the GPU.
        WorkerError: There is not enough memory.
    """

    def __init__(self, geometry: KvGeometry, blocks: int, device: Device) -> None:
        self.geometry = geometry
        self.blocks = blocks
        self.block_size = geometry.block_size
        self.device = device
        self.bytes = geometry.bytes_for(blocks)
        if self.bytes > device.free_bytes():
            problem = f"{blocks} blocks take {self.bytes} bytes; {device.name} has {device.free_bytes()} free"
            raise InvalidConfiguration("blocks", problem)
        self.layers: list[KvLayer] = []
        self.parts = [part for part, _ in geometry.places] if geometry.is_paged else [0] * len(geometry.layers)
        self.states: StatePages | None = None
        self.beside: KvPool | None = None
        self.tokens: torch.Tensor | None = None
        self.backlog: DraftBacklog | None = None
        self._buffers: BlockBuffers | None = None  # made when blocks are zeroed
        self._pages: tuple[torch.Tensor, ...] = ()  # [blocks and spare ones, entries, block_size, ...]: numbers, scales
        with device.errors(f"allocating a KV pool of {self.bytes} bytes"):
            if geometry.is_paged:
                self._allocate_pages()
            for shape in () if geometry.is_paged else geometry.layers:
                shared = shape.shared_with
                self.layers.append(self._allocate(shape) if shared is None else self.layers[shared])
            if geometry.keeps_tokens:
                self.tokens = device.allocate((blocks, self.block_size, 1), torch.int32).zero_()
                self.backlog = DraftBacklog(blocks, self.block_size, self.tokens)
        if geometry.beside is not None:
            self.beside = KvPool(geometry.beside, blocks + geometry.scratch_blocks, device)

    def _allocate_pages(self) -> None:
        """Allocate page-major memory.

        Raises:
            InvalidConfiguration: There are more entries than slots of 32 bits can name.
        """
        geometry, entries = self.geometry, self.geometry.entries_per_block
        if self.blocks * entries * self.block_size > SLOTS_MAX:
            most = SLOTS_MAX // (entries * self.block_size)
            raise InvalidConfiguration("blocks", f"{self.blocks} is more than {most}, the most for this model's layers")
        shape, dtype = geometry.layers[0], geometry.dtype
        blocks = self.blocks + geometry.spare_blocks
        size = (blocks, entries, self.block_size, shape.kv_heads)
        numbers = self.device.allocate((*size, shape.head_size), dtype.torch_dtype)
        scales = [self.device.allocate(size, torch.float32)] if dtype.scale_bytes else []
        self._pages = (numbers, *scales)
        if geometry.state_layout is not None:
            self.states = StatePages(geometry.state_layout, numbers.view(blocks, -1).view(torch.uint8))
        length = (self.blocks - 1) * entries + 1
        made: dict[int, KvLayer] = {}  # by entry: the layers of several parts are the same views
        for _, entry in geometry.places:
            if entry not in made:
                views = [[held.flatten(0, 1)[at : at + length] for held in self._pages] for at in (entry, entry + 1)]
                if shape.latent:
                    made[entry] = KvLayer.of_latents(views[0][0], shape.latent, *views[0][1:])
                else:
                    made[entry] = KvLayer(views[0][0], views[1][0], *(scale for _, *rest in views for scale in rest))
            self.layers.append(made[entry])

    def _allocate(self, layer: LayerShape) -> KvLayer:
        dtype, shape = self.geometry.dtype, (self.blocks, self.block_size, layer.kv_heads)
        caches = [self.device.allocate((*shape, layer.head_size), dtype.torch_dtype) for _ in range(layer.stored)]
        scales = [self.device.allocate(shape, torch.float32) for _ in range(layer.stored * bool(dtype.scale_bytes))]
        if layer.latent:
            return KvLayer.of_latents(caches[0], layer.latent, *scales)
        return KvLayer(*caches, *scales)

    def batch(
        self,
        tables: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        generated: npt.NDArray[np.bool_] | None = None,
        states: npt.NDArray[np.int32] | None = None,
        windows: WindowTables | None = None,
        sources: npt.NDArray[np.int32] | None = None,
    ) -> PagedBatch:
        """Build the batch of a step over this pool.

        Args:
            tables: [rows, width] int32, pool-local block ids.
            starts: [rows] int32.
            counts: [rows] int32.
            generated: [rows] bool; None: rows of one token.
            states: [rows, state blocks] int32, pool-local ids of the pages of each row's state; None for a model
                without one.
            windows: The pages of the layers that keep a window; None for a model without such layers.
            sources: [rows, state blocks] int32, the pages of the state that each row goes on with; None: its own.

        Returns:
            The batch.

        Raises:
            InvalidRequest: Names the invalid argument.
        """
        own = starts, counts, self.block_size, self.device, generated
        batch = PagedBatch.build(self._scaled(tables), *own)
        batch.states, batch.sources = states, sources
        if windows is not None:
            base, lowered = self._lowered(windows, batch.starts, batch.lengths)
            own = (batch.starts - base).astype(np.int32), *own[1:]
            batch.windows = _led([PagedBatch.build(each, *own) for each in lowered])
        if self._besides_apart is not None:
            batch.beside = self._besides_apart.batch(tables, starts, counts, generated)
        return batch

    @property
    def _besides_apart(self) -> KvPool | None:
        """Return the draft model's pool if its layers cannot read this pool's batches: page-major tables are scaled."""
        return self.beside if self.geometry.is_paged else None

    def static_batch(self, rows: int, width: int, shared: PagedBatch | None = None, extra: int = 0) -> PagedBatch:
        """Make a static batch over this pool; see `PagedBatch.static`.

        Behind the extra numbers of the caller lie the pages of each row's state.
        """
        own, window = (rows, self.block_size, self.device), self.geometry.window
        pages = self.geometry.state_blocks
        batch = PagedBatch.static(rows, width, *own[1:], shared, extra + pages)
        if pages:
            batch.states = self._spare_pages(rows)
            batch.state_pages = batch.extra_on_device[extra * rows :].view(rows, pages)
        if window:
            lowered = min(lowered_width(window, self.block_size), width)
            others = [None] * self.geometry.window_pages if shared is None else list(shared.windows)
            batch.windows = _led([PagedBatch.static(rows, lowered, *own[1:], each) for each in others])
        if self._besides_apart is not None:
            batch.beside = self._besides_apart.static_batch(rows, width, None if shared is None else shared.beside)
        return batch

    def fill(
        self,
        batch: PagedBatch,
        tables: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int32],
        extra: npt.NDArray[np.int32] | None = None,
        windows: WindowTables | None = None,
        states: npt.NDArray[np.int32] | None = None,
        length_max: int = 0,
        chain: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None,
    ) -> None:
        """Refill a static batch of this pool; see `PagedBatch.fill`, and `batch` for `windows` and `states`.

        Rows of one batch must be of different sequences if they have states. Those of padding lie in the spare block.

        Args:
            batch: The batch.
            tables: See `PagedBatch.fill`.
            lengths: See `PagedBatch.fill`.
            extra: See `PagedBatch.fill`.
            windows: See `batch`.
            states: See `batch`.
            length_max: See `PagedBatch.fill`.
            chain: For a batch with `PagedBatch.depth`, `sources` and `behind` of its first n rows.
        """
        assert not length_max or not (batch.windows or batch.beside), "only batches of their own become longer"
        if batch.states is not None:
            batch.states = self._spare_pages(len(batch.states))
            if states is not None:
                batch.states[: len(states)] = states
            if batch.depth:
                batch.sources, batch.spare = batch.states.copy(), self.blocks
                batch.behind = np.zeros(len(batch.states), np.int32)
                if chain is not None:
                    batch.sources[: len(chain[0])], batch.behind[: len(chain[1])] = chain
            extra = np.concatenate([np.zeros(0, np.int32) if extra is None else extra, batch.states.reshape(-1)])
        batch.fill(self._scaled(tables), lengths, extra, length_max)
        if self._besides_apart is not None:
            assert batch.beside is not None, "a batch of another pool"
            self._besides_apart.fill(batch.beside, tables, lengths)
        if not batch.windows:
            return
        if windows is None or not len(lengths):
            for each in batch.windows:
                each.fill(np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
            return
        ends = lengths.astype(np.int64)
        base, lowered = self._lowered(windows, ends - 1, ends)
        for each, part in zip(batch.windows, lowered, strict=True):
            each.fill(part, (ends - base).astype(np.int32))

    def mixed_places(self, largest: MixedSize, width: int, extra: int) -> MixedPlaces:
        """Allocate the memory of `mixed_batch`; see `MixedBatch.places`."""
        geometry = self.geometry
        own = MixedBatch.places(largest, width, self.device, extra + geometry.state_blocks * largest.rows)
        beside = None
        if self._besides_apart is not None:
            beside = self._besides_apart.mixed_places(largest, width, 0)
        if not geometry.window:
            return MixedPlaces(own)
        lowered = lowered_width(geometry.window, self.block_size) - (-largest.prompt_tokens // self.block_size)
        each = [MixedBatch.places(largest, min(lowered, width), self.device, 0) for _ in range(geometry.window_pages)]
        return MixedPlaces(own, tuple(each), beside)

    def mixed_batch(self, size: MixedSize, places: MixedPlaces, extra: int) -> MixedBatch:
        """Make a static batch of prompt rows and decodes over this pool; see `MixedBatch.mixed`.

        Behind the extra numbers of the caller lie the pages of each row's state.
        """
        pages, own = self.geometry.state_blocks, (self.block_size, self.device)
        batch = MixedBatch.mixed(size, *own, places.own, extra + pages * size.rows)
        if pages:
            batch.states = self._spare_pages(size.rows)
            batch.state_pages = batch.extra_on_device[extra:].view(size.rows, pages)
        batch.windows = _led([MixedBatch.mixed(size, *own, each, 0) for each in places.windows])
        if self._besides_apart is not None:
            assert places.beside is not None, "places of another pool"
            batch.beside = self._besides_apart.mixed_batch(size, places.beside, 0)
        return batch

    def refill_mixed(
        self,
        batch: MixedBatch,
        tables: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        decodes: int,
        extra: npt.NDArray[np.int32],
        states: npt.NDArray[np.int32] | None = None,
        windows: WindowTables | None = None,
    ) -> None:
        """Refill a batch of `mixed_batch`; see `MixedBatch.refill`, and `batch` for `states` and `windows`.

        Rows of one batch must be of different sequences if they have states. Those of padding lie in the spare block.
        """
        if batch.states is not None:
            batch.states = self._spare_pages(batch.size.rows)
            if states is not None:
                batch.states[batch.row_places(len(starts), decodes)] = states
            extra = np.concatenate([extra, batch.states.reshape(-1)])
        batch.refill(self._scaled(tables), starts, counts, decodes, extra)
        if self._besides_apart is not None:
            assert isinstance(batch.beside, MixedBatch), "a batch of another pool"
            self._besides_apart.refill_mixed(batch.beside, tables, starts, counts, decodes, np.zeros(0, np.int32))
        if not batch.windows:
            return
        lowered: Iterable[npt.NDArray[np.int32]] = [tables] * len(batch.windows)  # without rows
        if windows is not None:
            first = starts.astype(np.int64)
            base, lowered = self._lowered(windows, first, first + counts)
            starts = (first - base).astype(np.int32)
        for each, part in zip(batch.windows, lowered, strict=True):
            assert isinstance(each, MixedBatch)
            each.refill(part, starts, counts, decodes, np.zeros(0, np.int32))

    def _spare_pages(self, rows: int) -> npt.NDArray[np.int32]:
        return np.full((rows, self.geometry.state_blocks), self.blocks, np.int32)

    def batch_of(self, layer: int, batch: PagedBatch) -> PagedBatch:
        """Return the batch that a layer reads, of a batch from `batch` or `static_batch`."""
        part = self.parts[layer]
        return batch.windows[part - 1] if part else batch

    def _scaled(self, tables: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        entries = self.geometry.entries_per_block
        return tables if entries == 1 else tables * np.int32(entries)

    def _lowered(
        self, windows: WindowTables, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return how far the positions of rows are lowered, and their tables, [pages of a block, rows, width] int32."""
        own = self.geometry.window, self.block_size
        base = base_of(starts, *own)
        return base, lowered_tables(windows, starts, ends, base, *own, self.geometry.entries_per_block)

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy the first slots of blocks, K and V in every layer, with their scales, and those of a draft model.

        A copy of `block_size` tokens copies all bytes of a block, also of one that holds a part of a state.

        Args:
            copies: [n, 3] int32 (from block, to block, tokens), pool-local ids that the caller has checked. All copies
                run at once, so none may read what another writes.
        """
        if len(copies) == 0:
            return
        if self.beside is not None:
            self.beside.copy_blocks(copies)
        if self.backlog is not None:
            self.backlog.copy(copies)
        if len(copies) <= SLICED_COPIES_MAX:
            self._copy_slices(copies.tolist())
            return
        sources, targets, tokens = copies.astype(np.int64).T
        rows = np.repeat(np.arange(len(copies)), tokens)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
        if self._pages:
            upload, places = self.device.upload, self.device.upload(offsets)
            for held in self._pages:
                pages = held.view(BITS[held.itemsize])  # states are no numbers of the KV dtype
                pages[upload(targets[rows]), :, places] = pages[upload(sources[rows]), :, places]
            return
        source_slots = self.device.upload(sources[rows] * self.block_size + offsets)
        target_slots = self.device.upload(targets[rows] * self.block_size + offsets)
        for cache in self._own_tensors():
            slots = as_bytes(cache).view(-1, *cache.shape[2:])
            slots[target_slots] = slots[source_slots]

    def _copy_slices(self, copies: list[list[int]]) -> None:
        """Copy few blocks as slices: torch launches one kernel for many of them, and uploads no indices."""
        slots = (slice(None),) if self._pages else ()  # a page has the slots of every layer
        pairs = [
            (held[(target, *slots, slice(tokens))], held[(source, *slots, slice(tokens))])
            for held in (cache.view(torch.uint8) for cache in self._own_tensors())
            for source, target, tokens in copies
            if tokens
        ]
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(list(targets), list(sources))

    def zero_blocks(self, ids: npt.NDArray[np.int32]) -> None:
        """Zero all bytes of blocks, K and V in every layer, with their scales.

        Args:
            ids: [n] int32 distinct, pool-local ids that the caller has checked.
        """
        if len(ids) == 0:
            return
        if self._buffers is None:
            self._buffers = BlockBuffers(self.device, [cache.view(torch.uint8) for cache in self.tensors()])
        self._buffers.zero(ids.astype(np.int64))
        if self.beside is not None and self.beside.backlog is not None:
            self.beside.backlog.clear(ids)

    def close(self) -> None:
        """Return the memory to the device. Closing twice is harmless."""
        if self.beside is not None:
            self.beside.close()
        self.layers, self.states, self._pages, self._buffers = [], None, (), None
        self.tokens = self.backlog = None
        self.device.release_cached()

    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield every tensor of the pool once: [blocks, block_size, ...] each, or pages [blocks, entries, ...].

        Those of a draft model follow, without its scratch blocks.
        """
        yield from self._own_tensors()
        if self.beside is not None:
            yield from (each[: self.blocks] for each in self.beside.tensors())

    def _own_tensors(self) -> Iterable[torch.Tensor]:
        if self._pages:
            yield from self._pages
            return
        for layer, shape in zip(self.layers, self.geometry.layers, strict=False):  # none once it is closed
            if shape.shared_with is not None:
                continue
            yield from layer.tensors()
        if self.tokens is not None:
            yield self.tokens


def _led(batches: Sequence[PagedBatch]) -> tuple[PagedBatch, ...]:
    """Return the batches of the pages of a block, which follow the first."""
    for number, each in enumerate(batches):
        each.is_window, each.leader = True, batches[0] if number else None
    return tuple(batches)
