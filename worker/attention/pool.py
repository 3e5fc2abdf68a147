"""The KV pool: geometry, byte counts, and tensors.

Invariants: every byte count comes from `KvGeometry.bytes_per_block`, in exact integers with a 64-bit bound, and is
checked before memory is allocated. No unwritten slot is read: new memory is uninitialised, and attention gathers only
slots below a row's length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.device.device import Device

from .interface import KvLayer
from .quantised import as_bytes

BYTES_MAX = 2**63 - 1
SLICED_COPIES_MAX = 16  # beyond, the host takes longer to cut slices than to copy by indices


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

    Raises:
        InvalidConfiguration: Names the invalid field: block_size, layers, kv_heads, head_size, latent, shared_with,
            kv_dtype, bytes_per_block.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    kv_dtype: str

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
        with device.errors(f"allocating a KV pool of {self.bytes} bytes"):
            self.layers: list[KvLayer] = []
            for shape in geometry.layers:
                shared = shape.shared_with
                self.layers.append(self._allocate(shape) if shared is None else self.layers[shared])

    def _allocate(self, layer: LayerShape) -> KvLayer:
        dtype, shape = self.geometry.dtype, (self.blocks, self.block_size, layer.kv_heads)
        caches = [self.device.allocate((*shape, layer.head_size), dtype.torch_dtype) for _ in range(layer.stored)]
        scales = [self.device.allocate(shape, torch.float32) for _ in range(layer.stored * bool(dtype.scale_bytes))]
        if layer.latent:
            return KvLayer.of_latents(caches[0], layer.latent, *scales)
        return KvLayer(*caches, *scales)

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy the first slots of blocks, K and V in every layer, with their scales.

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
        source_slots = self.device.upload(sources[rows] * self.block_size + offsets)
        target_slots = self.device.upload(targets[rows] * self.block_size + offsets)
        for cache in self.tensors():
            slots = as_bytes(cache).view(-1, *cache.shape[2:])
            slots[target_slots] = slots[source_slots]

    def _copy_slices(self, copies: list[list[int]]) -> None:
        """Copy few blocks as slices: torch launches one kernel for many of them, and uploads no indices."""
        pairs = [
            (held[target, :tokens], held[source, :tokens])
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
        self.layers = []
        self.device.release_cached()

    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield every tensor of the pool once: [blocks, block_size, ...] each."""
        for layer, shape in zip(self.layers, self.geometry.layers, strict=False):  # none once it is closed
            if shape.shared_with is not None:
                continue
            yield from layer.tensors()
