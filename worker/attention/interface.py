"""What paged attention is given, and the checks at its edge.

A step is a flattened ragged batch: the tokens of row 0, then of row 1, and so on, without padding. Row r has
`counts[r]` new tokens at positions starts[r]..., attends to its own first starts[r] + counts[r] tokens, and finds
token p in slot `table[r, p // block_size] * block_size + p % block_size` of the pool. A *slot* here is a place for
one token's K and V, counted over the whole pool.

Paged attention: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023), section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvforge.protocol.errors import InvalidRequest

from .batch import PagedBatch
from .quantised import is_quantised

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionOptions:
    """Per layer. scaling: factor on q.k. window: keys a query sees, itself included (0: all before it).

    softcap: scores become softcap x tanh(scores / softcap) (0: off; Gemma 2, arXiv 2408.00118).
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class KvLayer:
    """K and V of one layer of the pool.

    keys, values: [blocks, block_size, kv_heads, head_size] kv_dtype device, contiguous. key_scales, value_scales:
    [blocks, block_size, kv_heads] float32 device, contiguous, for the quantised dtypes (int8, float8_e4m3fn): a number
    is what is stored times its scale. None for the others.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class PagedAttention(Protocol):
    """An implementation. `write` of a step comes before its `attend`; both check their arguments first."""

    def describe(
        self, head_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int, window: int
    ) -> tuple[str, str]:
        """What decodes such a layer, and what prefills it, and why: for people."""

    def kv_slots(self, batch: PagedBatch) -> torch.Tensor:
        """[tokens] int32 device: where K and V of each new token go, for kernels that store them themselves."""

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Stores K and V of the new tokens, quantised where the layer's dtype asks.

        key, value: [tokens, kv_heads, head_size] float device.
        """

    def write_rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KvLayer,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """`write` of the rotated key. Returns the rotated query: `query` itself, changed in place, or a new tensor.

        query: [tokens, heads, head_size] float device. cos, sin: [tokens, rotated] float device, contiguous: the first
        `rotated` numbers of each head are rotated (see `reference.rotate`); `rotated` is even.
        """

    def attend(self, query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions) -> torch.Tensor:
        """Causal attention of each row's new tokens to that row's tokens so far.

        query: [tokens, heads, head_size] float device; heads is a multiple of kv_heads, and query head h uses KV head
        h // (heads / kv_heads). Returns [tokens, heads, head_size], dtype of query.
        """


def check_write(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Errors: InvalidRequest names the argument whose shape, dtype, device or strides are wrong."""
    _check_layer(layer, batch)
    keys = layer.keys
    for name, tensor in (("key", key), ("value", value)):
        _check_tokens(name, tensor, batch, keys)
        if tensor.shape[1:] != keys.shape[2:]:
            raise InvalidRequest(name, f"has heads x head size {_dims(tensor, 1)}, the cache {_dims(keys, 2)}")


def check_rotary(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Errors: InvalidRequest names the argument whose shape, dtype, device or strides are wrong."""
    _check_query(query, layer.keys, batch)
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.dim() != 2 or tensor.shape[0] != batch.tokens or tensor.shape != cos.shape:
            raise InvalidRequest(
                name, f"must be [tokens, rotated], not {tuple(tensor.shape)} for {batch.tokens} tokens"
            )
        if tensor.shape[1] % 2 or not 2 <= tensor.shape[1] <= query.shape[2]:
            raise InvalidRequest(name, f"rotates {tensor.shape[1]} numbers of a head of {query.shape[2]}")
        if tensor.dtype not in FLOATS:
            raise InvalidRequest(name, f"has dtype {tensor.dtype}, not float32, float16 or bfloat16")
        if tensor.device != query.device or not tensor.is_contiguous():
            raise InvalidRequest(name, f"is on {tensor.device} with strides {tensor.stride()}")


def check_attend(query: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Errors: InvalidRequest names the argument whose shape, dtype, device or strides are wrong."""
    _check_layer(layer, batch)
    _check_query(query, layer.keys, batch)


def _check_query(query: torch.Tensor, keys: torch.Tensor, batch: PagedBatch) -> None:
    _check_tokens("query", query, batch, keys)
    if query.shape[2] != keys.shape[3]:
        raise InvalidRequest("query", f"has head size {query.shape[2]}, the cache {keys.shape[3]}")
    if query.shape[1] % keys.shape[2]:
        raise InvalidRequest("query", f"has {query.shape[1]} heads, not a multiple of {keys.shape[2]} KV heads")


def _check_tokens(name: str, tensor: torch.Tensor, batch: PagedBatch, keys: torch.Tensor) -> None:
    if tensor.dim() != 3:
        raise InvalidRequest(name, f"must be [tokens, heads, head_size], not of {tensor.dim()} dimensions")
    if tensor.shape[0] != batch.tokens:
        raise InvalidRequest(name, f"has {tensor.shape[0]} tokens, the batch {batch.tokens}")
    if tensor.dtype not in FLOATS:
        raise InvalidRequest(name, f"has dtype {tensor.dtype}, not float32, float16 or bfloat16")
    if tensor.device != keys.device:
        raise InvalidRequest(name, f"is on {tensor.device}, the cache on {keys.device}")
    if tensor.stride(2) != 1:
        raise InvalidRequest(name, f"has stride {tensor.stride(2)} along head_size, not 1")


def _check_layer(layer: KvLayer, batch: PagedBatch) -> None:
    keys, values = layer.keys, layer.values
    for name, cache in (("keys", keys), ("values", values)):
        if cache.dim() != 4:
            raise InvalidRequest(name, f"must be [blocks, block_size, kv_heads, head_size], not {tuple(cache.shape)}")
        if cache.shape[1] != batch.block_size:
            raise InvalidRequest(name, f"has block size {cache.shape[1]}, the batch {batch.block_size}")
        if not cache.is_contiguous():
            raise InvalidRequest(name, f"must be contiguous, not of strides {cache.stride()}")
        if cache.dtype not in FLOATS and not is_quantised(cache.dtype):
            raise InvalidRequest(name, f"has dtype {cache.dtype}, which K and V are not stored in")
        if cache.device != batch.device.torch_device:
            raise InvalidRequest(name, f"is on {cache.device}, the batch on {batch.device.torch_device}")
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise InvalidRequest(
            "values", f"is {tuple(values.shape)} {values.dtype}, keys {tuple(keys.shape)} {keys.dtype}"
        )
    for name, scales in (("key_scales", layer.key_scales), ("value_scales", layer.value_scales)):
        if (scales is not None) != is_quantised(keys.dtype):
            raise InvalidRequest(name, f"is {'given' if scales is not None else 'missing'} for {keys.dtype}")
        if scales is None:
            continue
        if scales.shape != keys.shape[:3] or scales.dtype != torch.float32:
            raise InvalidRequest(name, f"is {tuple(scales.shape)} {scales.dtype}, keys are {tuple(keys.shape)}")
        if scales.device != keys.device or not scales.is_contiguous():
            raise InvalidRequest(name, f"is on {scales.device} with strides {scales.stride()}")


def _dims(tensor: torch.Tensor, first: int) -> str:
    return " x ".join(str(n) for n in tensor.shape[first:])
