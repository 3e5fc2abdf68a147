"""The interface of paged attention, and the checks of its arguments.

A step is a flattened ragged batch: the tokens of row 0, then of row 1, and so on, without padding. Row r has
`counts[r]` new tokens at positions starts[r]..., attends to its own first starts[r] + counts[r] tokens, and finds
token p in slot `table[r, p // block_size] * block_size + p % block_size` of the pool. A *slot* is the place of one
token's K and V, counted over the whole pool.

Paged attention: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023), section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvforge.protocol.errors import InvalidRequest

from .batch import Int32Array, PagedBatch
from .expanded_space import ExpandedSpaces
from .quantised import is_quantised

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionOptions:
    """Attention options of a layer.

    Attributes:
        scaling: Factor of q.k.
        window: Keys that a query sees, with its own (0: all before it).
        softcap: Scores become softcap x tanh(scores / softcap) (0: off; Gemma 2, arXiv 2408.00118).
        sinks: [heads] float32 on the device, contiguous: for each query head one more score, neither scaled nor capped,
            whose key has no value (None: off; "attention sinks" of gpt-oss, arXiv 2508.10925). Equality ignores them.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class KvLayer:
    """K and V of one layer of the pool.

    Attributes:
        keys: [blocks, block_size, kv_heads, head_size] in the KV dtype on the device, contiguous.
        values: As `keys`.
        key_scales: [blocks, block_size, kv_heads] float32 on the device, contiguous, for quantised dtypes (int8,
            float8_e4m3fn): a number is its stored value times its scale. None for other dtypes.
        value_scales: As `key_scales`.
        latent: Size of the values of a layer with latents; 0: K and V have memory of their own. A token of such a layer
            has one KV head of a latent and a rotary key, stored once: `values` is a view of the first `latent` numbers
            of `keys`, and `value_scales` is `key_scales` ("multi-head latent attention": DeepSeek-V2, arXiv 2405.04434,
            section 2.1).
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    latent: int = field(default=0, kw_only=True)

    @classmethod
    def of_latents(cls, latents: torch.Tensor, latent: int, scales: torch.Tensor | None = None) -> KvLayer:
        """Return a layer with latents.

        Args:
            latents: [blocks, block_size, 1, latent + rotary key] in the KV dtype on the device, contiguous.
            latent: Size of a latent.
            scales: As `key_scales`.

        Returns:
            The layer.
        """
        return cls(latents, latents[..., :latent], scales, scales, latent=latent)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the layer's memory, each tensor once."""
        parts = (self.keys, self.key_scales, *(() if self.latent else (self.values, self.value_scales)))
        yield from (part for part in parts if part is not None)


class PagedAttention(Protocol):
    """An implementation of paged attention. In a step `write` precedes `attend`; both check their arguments first.

    Attributes:
        expanded_spaces: Memory for prompt tokens of layers with latents, which then read keys and values that are
            expanded from the latents (see `expanded`); None: all tokens read latents.
    """

    expanded_spaces: ExpandedSpaces | None

    def describe(
        self,
        head_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        options: AttentionOptions,
        latent: int = 0,
    ) -> tuple[str, str]:
        """Describe how such a layer is decoded and prefilled, with reasons, for people.

        latent: as in KvLayer.
        """

    def kv_slots(self, batch: PagedBatch) -> torch.Tensor:
        """Return the slots of new tokens, [tokens] int32 on the device, for kernels that store K and V themselves."""

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Store K and V of the new tokens, quantised if the layer's dtype requires it.

        Args:
            key: [tokens, kv_heads, head_size] float on the device.
            value: As `key`.
            layer: The layer's cache.
            batch: The step.
        """

    def write_latent(self, latents: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Store the latents and rotary keys of the new tokens, quantised if the layer's dtype requires it.

        Args:
            latents: [tokens, latent + rotary key] float on the device.
            layer: The layer's cache, of latents.
            batch: The step.
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
        """Store the rotated key and the value, and rotate the query.

        Args:
            query: [tokens, heads, head_size] float on the device.
            key: [tokens, kv_heads, head_size] float on the device.
            value: As `key`.
            cos: [tokens, rotated] float on the device, contiguous: the first `rotated` numbers of each head are
                rotated (see `reference.rotate`); `rotated` is even.
            sin: As `cos`.
            layer: The layer's cache.
            batch: The step.

        Returns:
            The rotated query: `query` changed in place, or a new tensor.
        """

    def attend(self, query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions) -> torch.Tensor:
        """Compute causal attention of each row's new tokens to that row's tokens so far.

        Args:
            query: [tokens, heads, head_size] float on the device; heads is a multiple of kv_heads, and query head h
                uses KV head h // (heads / kv_heads).
            layer: The layer's cache.
            batch: The step.
            options: The layer's options.

        Returns:
            [tokens, heads, head_size] in the dtype of query; of a layer with latents [tokens, heads, latent].
        """

    def gains_from_sharing(
        self, tables: Int32Array, lengths: Int32Array, block_size: int, saved_bytes_min: int = 0
    ) -> bool:
        """Return whether a captured step of these decodes is faster if its launches read common blocks once.

        Asked at each step: the answer takes microseconds where no first blocks are alike.

        Args:
            tables: [rows, any width].
            lengths: [rows], with the new token.
            block_size: Tokens per block.
            saved_bytes_min: Fewest bytes of a layer's K and V that need not be read again, if plans are dearer for
                this step than for others.
        """

    def always_sharing(self) -> PagedAttention | None:
        """Return a copy that reads what rows have in common once, however little it saves.

        A self-test compares its bits with those of rows that are read alone.

        Returns:
            The copy; None if decodes run without other kernels where rows have something in common.
        """


def check_write(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Check the arguments of `write`.

    Raises:
        InvalidRequest: Names the argument with a wrong shape, dtype, device or stride.
    """
    _check_layer(layer, batch)
    if layer.latent:
        raise InvalidRequest("layer", "stores latents, not K and V")
    keys = layer.keys
    for name, tensor in (("key", key), ("value", value)):
        _check_tokens(name, tensor, batch, keys)
        if tensor.shape[1:] != keys.shape[2:]:
            raise InvalidRequest(name, f"has heads x head size {_dims(tensor, 1)}, the cache {_dims(keys, 2)}")


def check_latents(latents: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Check the arguments of `write_latent`.

    Raises:
        InvalidRequest: Names the argument with a wrong shape, dtype, device or stride.
    """
    _check_layer(layer, batch)
    if not layer.latent:
        raise InvalidRequest("layer", "stores K and V, not latents")
    if latents.dim() != 2:
        raise InvalidRequest("latents", f"must be [tokens, numbers], not of {latents.dim()} dimensions")
    _check_tokens("latents", latents[:, None], batch, layer.keys)
    if latents.shape[1] != layer.keys.shape[3]:
        raise InvalidRequest("latents", f"has {latents.shape[1]} numbers of a token, the cache {layer.keys.shape[3]}")


def check_rotary(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
    """Check the arguments of a rotation.

    Raises:
        InvalidRequest: Names the argument with a wrong shape, dtype, device or stride.
    """
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


def check_attend(query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions) -> None:
    """Check the arguments of `attend`.

    Raises:
        InvalidRequest: Names the argument with a wrong shape, dtype, device or stride.
    """
    _check_layer(layer, batch)
    _check_query(query, layer.keys, batch)
    if options.sinks is not None:
        _check_sinks(options.sinks, query)


def _check_sinks(sinks: torch.Tensor, query: torch.Tensor) -> None:
    if sinks.shape != query.shape[1:2] or sinks.dtype != torch.float32:
        heads = query.shape[1]
        raise InvalidRequest("sinks", f"is {tuple(sinks.shape)} {sinks.dtype}, not [{heads}] float32, one of each head")
    if sinks.device != query.device or not sinks.is_contiguous():
        raise InvalidRequest("sinks", f"is on {sinks.device} with strides {sinks.stride()}")


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
    for name, cache in (("keys", keys),) if layer.latent else (("keys", keys), ("values", values)):
        if cache.dim() != 4:
            raise InvalidRequest(name, f"must be [blocks, block_size, kv_heads, head_size], not {tuple(cache.shape)}")
        if cache.shape[1] != batch.block_size:
            raise InvalidRequest(name, f"has block size {cache.shape[1]}, the batch {batch.block_size}")
        if not cache.is_contiguous():
            raise InvalidRequest(name, f"must be contiguous, not of strides {cache.stride()}")
        if cache.dtype not in FLOATS and not is_quantised(cache.dtype):
            raise InvalidRequest(name, f"has dtype {cache.dtype}, which is no KV dtype")
        if cache.device != batch.device.torch_device:
            raise InvalidRequest(name, f"is on {cache.device}, the batch on {batch.device.torch_device}")
    if not layer.latent and (values.shape != keys.shape or values.dtype != keys.dtype):
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
