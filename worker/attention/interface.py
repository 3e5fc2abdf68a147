"""What paged attention is given, and the checks at its edge.

A step is a flattened ragged batch: the tokens of row 0, then of row 1, and so on, without padding. Row r has
`counts[r]` new tokens at positions starts[r]..., attends to its own first starts[r] + counts[r] tokens, and finds
token p in slot `table[r, p // block_size] * block_size + p % block_size` of the pool. A *slot* here is a place for
one token's K and V, counted over the whole pool.

Paged attention: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023), section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import InvalidRequest
from worker.device import Device

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionOptions:
    """Per layer. scaling: factor on q.k. window: keys a query sees, itself included (0: all before it).

    softcap: scores become softcap x tanh(scores / softcap) (0: off; Gemma 2, arXiv 2408.00118).
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class PagedBatch:
    """One step's structure, built once and shared by all layers.

    tables: [rows, width] int64 host, block ids in the pool. starts, counts, lengths: [rows] int64 host;
    lengths = starts + counts. query_starts: [rows + 1] int64 host: where each row's tokens begin in the flat batch.
    slot_mapping: [tokens] int64 device: where each new token's K and V go.
    plans: what an implementation derives from the above; lives as long as the step.
    """

    tables: IntArray
    starts: IntArray
    counts: IntArray
    lengths: IntArray
    query_starts: IntArray
    slot_mapping: torch.Tensor
    block_size: int
    device: Device
    plans: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        tables: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        block_size: int,
        device: Device,
    ) -> PagedBatch:
        """tables: [rows, width] int32; starts, counts: [rows] int32. Errors: InvalidRequest names the argument."""
        _check_rows(tables, starts, counts, block_size)
        tables64, starts64, counts64 = tables.astype(np.int64), starts.astype(np.int64), counts.astype(np.int64)
        query_starts = np.zeros(len(counts64) + 1, np.int64)
        np.cumsum(counts64, out=query_starts[1:])
        rows = np.repeat(np.arange(len(counts64)), counts64)
        positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts64, counts64)
        slots = tables64[rows, positions // block_size] * block_size + positions % block_size
        lengths = starts64 + counts64
        return cls(tables64, starts64, counts64, lengths, query_starts, device.upload(slots), block_size, device)

    @property
    def tokens(self) -> int:
        return int(self.query_starts[-1])

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Slots in the pool of `positions` [n, p] of `rows` [n]: [n, p] int64."""
        blocks = self.tables[rows[:, None], positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size)


class PagedAttention(Protocol):
    """An implementation. `write` of a step comes before its `attend`; both check their arguments first."""

    def write(
        self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch
    ) -> None:
        """Stores K and V of the new tokens.

        key, value: [tokens, kv_heads, head_size] float device.
        keys, values: [blocks, block_size, kv_heads, head_size] kv_dtype device, one layer of the pool.
        """

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Causal attention of each row's new tokens to that row's tokens so far.

        query: [tokens, heads, head_size] float device; heads is a multiple of kv_heads, and query head h uses KV head
        h // (heads / kv_heads). Returns [tokens, heads, head_size], dtype of query.
        """


def check_write(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch
) -> None:
    """Errors: InvalidRequest names the argument whose shape, dtype, device or strides are wrong."""
    _check_caches(keys, values, batch)
    for name, tensor in (("key", key), ("value", value)):
        _check_tokens(name, tensor, batch, keys)
        if tensor.shape[1:] != keys.shape[2:]:
            raise InvalidRequest(name, f"has heads x head size {_dims(tensor, 1)}, the cache {_dims(keys, 2)}")


def check_attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch) -> None:
    """Errors: InvalidRequest names the argument whose shape, dtype, device or strides are wrong."""
    _check_caches(keys, values, batch)
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
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidRequest(name, f"has dtype {tensor.dtype}, not float32, float16 or bfloat16")
    if tensor.device != keys.device:
        raise InvalidRequest(name, f"is on {tensor.device}, the cache on {keys.device}")
    if tensor.stride(2) != 1:
        raise InvalidRequest(name, f"has stride {tensor.stride(2)} along head_size, not 1")


def _check_caches(keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch) -> None:
    for name, cache in (("keys", keys), ("values", values)):
        if cache.dim() != 4:
            raise InvalidRequest(name, f"must be [blocks, block_size, kv_heads, head_size], not {tuple(cache.shape)}")
        if cache.shape[1] != batch.block_size:
            raise InvalidRequest(name, f"has block size {cache.shape[1]}, the batch {batch.block_size}")
        if not cache.is_contiguous():
            raise InvalidRequest(name, f"must be contiguous, not of strides {cache.stride()}")
        if cache.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise InvalidRequest(name, f"has dtype {cache.dtype}, not float32, float16 or bfloat16")
        if cache.device != batch.slot_mapping.device:
            raise InvalidRequest(name, f"is on {cache.device}, the batch on {batch.slot_mapping.device}")
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise InvalidRequest(
            "values", f"is {tuple(values.shape)} {values.dtype}, keys {tuple(keys.shape)} {keys.dtype}"
        )


def _check_rows(
    tables: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], block_size: int
) -> None:
    for name, array, dimensions in (("tables", tables, 2), ("starts", starts, 1), ("counts", counts, 1)):
        if array.ndim != dimensions:
            raise InvalidRequest(name, f"must have {dimensions} dimensions, not {array.ndim}")
        if array.dtype != np.int32:
            raise InvalidRequest(name, f"must be int32, not {array.dtype}")
        if len(array) != len(counts):
            raise InvalidRequest(name, f"has {len(array)} rows, counts {len(counts)}")
    if len(counts) == 0:
        raise InvalidRequest("counts", "names no row")
    if counts.min() < 1:
        raise InvalidRequest("counts", "every row needs at least 1 token")
    if starts.min() < 0:
        raise InvalidRequest("starts", "positions begin at 0")
    if int((starts.astype(np.int64) + counts).max()) > tables.shape[1] * block_size:
        raise InvalidRequest("tables", f"{tables.shape[1]} blocks of {block_size} are fewer than a row's tokens")


def _dims(tensor: torch.Tensor, first: int) -> str:
    return " x ".join(str(n) for n in tensor.shape[first:])
