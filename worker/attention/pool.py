"""The KV pool: geometry, byte counts, and tensors.

Memory is layer-major: K and V of each layer have a tensor of their own. For models with recurrent states it is
page-major: the K and V of all layers of a block lie together in one page, so that a page can hold a part of a
sequence's state instead. K and V of a layer are then views in which block b is entry b x `entries_per_block`, and block
tables are scaled by that factor once per step (`KvPool.batch`). Attention is the same for both.

Invariants: every byte count comes from `KvGeometry.bytes_per_block`, in exact integers with a 64-bit bound, and is
checked before memory is allocated. No unwritten slot is read: new memory is uninitialised, and attention gathers only
slots below a row's length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.device.device import Device

from .batch import PagedBatch
from .interface import KvLayer
from .quantised import as_bytes
from .states import StateLayout, StatePages, StateTensor

BYTES_MAX = 2**63 - 1
SLICED_COPIES_MAX = 16  # beyond, the host takes longer to cut slices than to copy by indices
SLOTS_MAX = 2**31 - 1  # kernels take slots of 32 bits
BITS = {2: torch.int16, 4: torch.int32}  # by bytes


@dataclass(frozen=True)
class KvDtype:
    """Storage format of K and V. scale_bytes: bytes of a float32 scale per token and head, for each of K and V."""

    name: str
    itemsize: int
    scale_bytes: int
    torch_dtype: torch.dtype


KV_DTYPES: dict[str, KvDtype] = {
    dtype.name: dtype
    for dtype in (
        KvDtype("float32", 4, 0, torch.float32),
        KvDtype("float16", 2, 0, torch.float16),
        KvDtype("bfloat16", 2, 0, torch.bfloat16),
        KvDtype("int8", 1, 4, torch.int8),
        KvDtype("fp8", 1, 4, torch.float8_e4m3fn),
    )
}


@dataclass(frozen=True)
class LayerShape:
    """The memory of one layer.

    Attributes:
        kv_heads: KV heads.
        head_size: Numbers of a head.
        shared_with: Index of an earlier layer of the same shape with the same K and V, which has the memory of both;
            None: memory of its own.
        latent: A token has one latent of this many numbers, with its rotary key behind it, and they are K; the latent
            is V as well (see KvLayer). There is one KV head then. 0: K and V are stored apart.
    """

    kv_heads: int
    head_size: int
    shared_with: int | None = None
    latent: int = 0

    @property
    def stored(self) -> int:
        """How often the numbers of a head are stored: 2 for K and V, 1 for a latent."""
        return 1 if self.latent else 2


@dataclass(frozen=True)
class KvGeometry:
    """Layout of a block: `block_size` tokens of K and V for every layer. Layers may differ in shape.

    Attributes:
        layers: The layers that attend.
        block_size: Tokens per block.
        kv_dtype: A name in `KV_DTYPES`.
        states: The recurrent state of a sequence, for models that have one. All layers then have the same shape and
            memory of their own, without scales.

    Raises:
        InvalidConfiguration: Names the invalid field: block_size, layers, kv_heads, head_size, latent, shared_with,
            kv_dtype, bytes_per_block.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    kv_dtype: str
    states: tuple[StateTensor, ...] = ()

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidConfiguration("kv_dtype", f"{self.kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
        require_positive("layers", len(self.layers))
        require_positive("block_size", self.block_size)
        for shape in self.layers:
            require_positive("kv_heads", shape.kv_heads)
            require_positive("head_size", shape.head_size)
            if shape.latent and not (0 < shape.latent <= shape.head_size and shape.kv_heads == 1):
                problem = (
                    f"{shape.latent} of {shape.kv_heads} KV heads of {shape.head_size}: expected a part of one head"
                )
                raise InvalidConfiguration("latent", problem)
        for index, shape in enumerate(self.layers):
            shared = shape.shared_with
            if shared is not None and not (
                0 <= shared < index and self.layers[shared] == replace(shape, shared_with=None)
            ):
                problem = (
                    f"layer {index} cannot share the memory of layer {shared}: expected an earlier layer of its shape"
                )
                raise InvalidConfiguration("shared_with", problem)
        if self.bytes_per_block > BYTES_MAX:
            raise InvalidConfiguration("bytes_per_block", f"{self.bytes_per_block} does not fit in 64 bits")
        if self.states:
            self._check_states()

    def _check_states(self) -> None:
        """Check that all K and V of a block are equal parts of a page."""
        if self.dtype.scale_bytes:
            problem = (
                f"{self.kv_dtype!r} has scales, and the model has recurrent states: use float32, float16 or bfloat16"
            )
            raise InvalidConfiguration("kv_dtype", problem)
        first = self.layers[0]
        for index, shape in enumerate(self.layers):
            if shape != first or shape.shared_with is not None:
                problem = (
                    f"layer {index} is {shape}, the first {first}: a model with recurrent states needs equal layers"
                )
                raise InvalidConfiguration("layers", problem)
        assert self.state_layout is not None  # checks the size of a page

    @cached_property
    def state_layout(self) -> StateLayout | None:
        """The places of a sequence's state in its pages; None for a model without one."""
        return StateLayout(self.states, self.bytes_per_block) if self.states else None

    @property
    def state_blocks(self) -> int:
        """Blocks that a sequence's state takes; 0 for a model without one."""
        return self.state_layout.pages if self.state_layout is not None else 0

    @property
    def entries_per_block(self) -> int:
        """Entries of a layer's K and V tensors from one block to the next: see the module."""
        return len(self.layers) * self.layers[0].stored if self.states else 1

    @classmethod
    def uniform(cls, *, layers: int, kv_heads: int, head_size: int, block_size: int, kv_dtype: str) -> KvGeometry:
        """Return the geometry of `layers` equal layers.

        Raises:
            InvalidConfiguration: Names the invalid field.
        """
        require_positive("layers", layers)
        if layers > 1 << 20:  # a tuple of 2**60 shapes would exhaust memory before any bound is checked
            raise InvalidConfiguration("layers", f"{layers} is more than {1 << 20}")
        return cls((LayerShape(kv_heads, head_size),) * layers, block_size, kv_dtype)

    @property
    def dtype(self) -> KvDtype:
        """The storage format."""
        return KV_DTYPES[self.kv_dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block.

        That is 2 (K and V) x sum over layers of kv_heads x (head_size x itemsize + scale bytes) x block_size. A layer
        with latents stores them once instead of twice, and one that shares another one's memory adds nothing.

        For equal layers without scales: 2 x layers x kv_heads x head_size x block_size x itemsize. Quantised dtypes
        (int8, fp8) store one float32 scale per token and head, for K and for V: 4 bytes beside head_size bytes.
        """
        dtype = self.dtype
        own = [shape for shape in self.layers if shape.shared_with is None]
        per_token = sum(s.stored * s.kv_heads * (s.head_size * dtype.itemsize + dtype.scale_bytes) for s in own)
        return per_token * self.block_size

    def bytes_for(self, blocks: int) -> int:
        """Return the bytes of a pool of `blocks` blocks.

        Raises:
            InvalidConfiguration: Names `blocks`.
        """
        require_positive("blocks", blocks)
        total = blocks * self.bytes_per_block
        if total > BYTES_MAX:
            raise InvalidConfiguration("blocks", f"{blocks} blocks take {total} bytes, which do not fit in 64 bits")
        return total

    def blocks_for(self, memory_bytes: int) -> int:
        """Return the most blocks that fit into `memory_bytes`.

        Raises:
            InvalidConfiguration: Not even one fits.
        """
        require_positive("memory_bytes", memory_bytes)
        blocks = min(memory_bytes, BYTES_MAX) // self.bytes_per_block
        if blocks == 0:
            problem = f"{memory_bytes} bytes hold no block; one takes {self.bytes_per_block}"
            raise InvalidConfiguration("memory_bytes", problem)
        return blocks


def require_positive(field: str, value: int) -> None:
    """Check that a value is an integer of at least 1.

    Raises:
        InvalidConfiguration: Names `field`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidConfiguration(field, f"must be an integer, not {value!r}")
    if value < 1:
        raise InvalidConfiguration(field, f"must be at least 1, not {value}")


class KvPool:
    """K and V of `blocks` blocks for every layer. Memory is uninitialised, and committed as it is written.

    Attributes:
        layers: One KvLayer per layer; layers that share memory have the same one.
        states: The recurrent states of sequences; None for a model without them.

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
        self.states: StatePages | None = None
        self._pages: torch.Tensor | None = None  # [blocks, entries per block, block_size, kv_heads, head_size]
        with device.errors(f"allocating a KV pool of {self.bytes} bytes"):
            if geometry.state_layout is not None:
                self._allocate_pages(geometry.state_layout)
                return
            for shape in geometry.layers:
                shared = shape.shared_with
                self.layers.append(self._allocate(shape) if shared is None else self.layers[shared])

    def _allocate_pages(self, states: StateLayout) -> None:
        """Allocate page-major memory.

        Raises:
            InvalidConfiguration: There are more entries than slots of 32 bits can name.
        """
        geometry, entries = self.geometry, self.geometry.entries_per_block
        if self.blocks * entries * self.block_size > SLOTS_MAX:
            most = SLOTS_MAX // (entries * self.block_size)
            raise InvalidConfiguration("blocks", f"{self.blocks} is more than {most}, the most for this model's layers")
        shape = geometry.layers[0]
        size = (self.blocks, entries, self.block_size, shape.kv_heads, shape.head_size)
        self._pages = self.device.allocate(size, geometry.dtype.torch_dtype)
        self.states = StatePages(states, self._pages.view(self.blocks, -1).view(torch.uint8))
        flat, length = self._pages.flatten(0, 1), (self.blocks - 1) * entries + 1
        views = [flat[first : first + length] for first in range(entries)]
        for index in range(0, entries, shape.stored):
            if shape.latent:
                self.layers.append(KvLayer.of_latents(views[index], shape.latent))
            else:
                self.layers.append(KvLayer(*views[index : index + 2]))

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
    ) -> PagedBatch:
        """Build the batch of a step over this pool.

        Args:
            tables: [rows, width] int32, pool-local block ids.
            starts: [rows] int32.
            counts: [rows] int32.
            generated: [rows] bool; None: rows of one token.
            states: [rows, state blocks] int32, pool-local ids of the pages of each row's state; None for a model
                without one.

        Returns:
            The batch.

        Raises:
            InvalidRequest: Names the invalid argument.
        """
        entries = self.geometry.entries_per_block
        batch = PagedBatch.build(
            tables if entries == 1 else tables * np.int32(entries),
            *(starts, counts, self.block_size, self.device, generated),
        )
        batch.states = states
        return batch

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy the first slots of blocks, K and V in every layer, with their scales.

        A copy of `block_size` tokens copies all bytes of a block, also of one that holds a part of a state.

        Args:
            copies: [n, 3] int32 (from block, to block, tokens), pool-local ids that the caller has checked. All copies
                run at once, so none may read what another writes.
        """
        if len(copies) == 0:
            return
        if len(copies) <= SLICED_COPIES_MAX:
            self._copy_slices(copies.tolist())
            return
        sources, targets, tokens = copies.astype(np.int64).T
        rows = np.repeat(np.arange(len(copies)), tokens)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
        if self._pages is not None:
            upload, places = self.device.upload, self.device.upload(offsets)
            pages = self._pages.view(BITS[self._pages.itemsize])  # states are no numbers of the KV dtype
            pages[upload(targets[rows]), :, places] = pages[upload(sources[rows]), :, places]
            return
        source_slots = self.device.upload(sources[rows] * self.block_size + offsets)
        target_slots = self.device.upload(targets[rows] * self.block_size + offsets)
        for cache in self.tensors():
            slots = as_bytes(cache).view(-1, *cache.shape[2:])
            slots[target_slots] = slots[source_slots]

    def _copy_slices(self, copies: list[list[int]]) -> None:
        """Copy few blocks as slices: torch launches one kernel for many of them, and uploads no indices."""
        slots = (slice(None),) if self._pages is not None else ()  # a page has the slots of every layer
        pairs = [
            (held[(target, *slots, slice(tokens))], held[(source, *slots, slice(tokens))])
            for held in (cache.view(torch.uint8) for cache in self.tensors())
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
        blocks = self.device.upload(ids.astype(np.int64))
        for cache in self.tensors():
            as_bytes(cache).index_fill_(0, blocks, 0)

    def close(self) -> None:
        """Return the memory to the device. Closing twice is harmless."""
        self.layers, self.states, self._pages = [], None, None
        self.device.release_cached()

    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield every tensor of the pool once: [blocks, block_size, ...] each, or all pages [blocks, entries, ...]."""
        if self._pages is not None:
            yield self._pages
            return
        for layer, shape in zip(self.layers, self.geometry.layers, strict=False):  # none once it is closed
            if shape.shared_with is not None:
                continue
            yield from layer.tensors()
