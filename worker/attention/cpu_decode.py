"""Rotation, KV write and attention of decodes on the CPU, with prepared arguments for each layer's calls.

`CpuAttention` checks and packs the arguments of every call, which takes as long as the work for a few rows. Between
steps only a few arguments change, in the same way for all layers, except for the address of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvforge.worker.cpu.attention_kernel import attend
from kvforge.worker.cpu.kernel import Calls
from kvforge.worker.cpu.kv_write import write_rotated
from kvforge.worker.cpu.vector import CODES

from .batch import PagedBatch
from .cpu_attention import CpuAttention, plan_of
from .interface import AttentionOptions, KvLayer


@dataclass(frozen=True)
class DecodeLayer:
    """One layer of the decodes.

    Attributes:
        cache: K and V, float.
        options: Attention options.
        heads: Query heads.
        rotated: Rotated numbers of each head.
        output: [rows, heads x head_size] in the dtype of products, receives the attention.
        part: As in `KvPool.parts`.
    """

    cache: KvLayer
    options: AttentionOptions
    heads: int
    rotated: int
    output: torch.Tensor
    part: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(heads, kv_heads, head_size, window). Layers of one shape share the plan of a batch."""
        kv_heads, size = self.cache.keys.shape[2:]
        return self.heads, kv_heads, size, self.options.window

    @property
    def width(self) -> int:
        """Numbers of a token's product: all heads of Q, then of K, then of V."""
        heads, kv_heads, size, _ = self.shape
        return (heads + 2 * kv_heads) * size


class _Group:
    """Layers of one shape and part. threads: threads that attend in this step."""

    def __init__(self, layers: Sequence[DecodeLayer]) -> None:
        self.shape, self.part, self.threads = layers[0].shape, layers[0].part, 1
        self.calls = Calls(attend, [_attending(layer) for layer in layers])


class DecodeAttention:
    """Runs decodes: each step is a `begin`, then a `run` for each layer. The caches must not move."""

    def __init__(self, attention: CpuAttention, layers: Sequence[DecodeLayer]) -> None:
        self._workspace = attention.workspace
        self._size = max(layer.shape[2] for layer in layers)
        self._width = max(layer.width for layer in layers)
        self._threads = 1  # threads that write
        parts: dict[int, list[DecodeLayer]] = {}
        members: dict[tuple[int, ...], list[DecodeLayer]] = {}
        places, self._writing = [], list[tuple[int, int]]()  # of each layer: its part, and its number there
        for layer in layers:
            parts.setdefault(layer.part, []).append(layer)
            self._writing.append((layer.part, len(parts[layer.part]) - 1))
            key = (*layer.shape, layer.part)
            members.setdefault(key, []).append(layer)
            places.append((key, len(members[key]) - 1))
        self._writers = {part: Calls(write_rotated, [_writing(each) for each in own]) for part, own in parts.items()}
        groups = {key: _Group(those) for key, those in members.items()}
        self._groups = tuple(groups.values())
        self._attending = [(groups[key], number) for key, number in places]
        # Byte offsets of K and V in a layer's product.
        self._parts = [
            (heads * size * layer.output.itemsize, (heads + kv_heads) * size * layer.output.itemsize)
            for layer in layers
            for heads, kv_heads, size, _ in (layer.shape,)
        ]

    def begin(self, batch: PagedBatch, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Begin a step.

        Args:
            batch: Decodes only, without padding.
            cos: [rows, rotated], contiguous.
            sin: [rows, rotated], contiguous.
        """
        workspace, plans, strides = self._workspace, [], []
        self._threads, stride = workspace.for_writing(batch.tokens * self._width, self._size)
        for group in self._groups:  # reserve for all groups before taking addresses: the memory may move
            heads, kv_heads, size, window = group.shape
            plans.append(plan_of(_of(batch, group.part), heads, kv_heads, size, window))
            group.threads, attend_stride = workspace.for_plan(plans[-1], kv_heads, size)
            strides.append(attend_stride)
        scratch = workspace.scratch.data_ptr()
        for part, writer in self._writers.items():
            writer.renew(
                tokens=batch.tokens,
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                slots=_of(batch, part).kv_slots.ctypes.data,
                scratch=scratch,
                scratch_stride=stride,
            )
        for group, plan, attend_stride in zip(self._groups, plans, strides, strict=True):
            group.calls.renew(
                items=plan.items.ctypes.data,
                item_count=len(plan.items),
                scratch_memory=scratch,
                scratch_stride=attend_stride,
                tables=plan.tables.ctypes.data,
                table_width=plan.tables.shape[1],
                partials=workspace.partials.data_ptr(),
                counters=workspace.counters.data_ptr(),
                members=plan.members.ctypes.data,
                stores=plan.stores.ctypes.data,
            )

    def run(self, index: int, product: int) -> None:
        """Run one layer. product: address of its product [rows, width], contiguous; Q is rotated in place."""
        keys, values = self._parts[index]
        part, place = self._writing[index]
        self._writers[part].run(self._threads, place, query=product, key=product + keys, value=product + values)
        group, number = self._attending[index]
        group.calls.run(group.threads, number, query=product)


def _of(batch: PagedBatch, part: int) -> PagedBatch:
    """Return the batch of layers of a part (see `KvPool.batch_of`)."""
    return batch.windows[part - 1] if part else batch


def _writing(layer: DecodeLayer) -> dict[str, float]:
    """Return the arguments of `write_rotated` that no step changes."""
    heads, kv_heads, size, _ = layer.shape
    code, item = CODES[layer.output.dtype], layer.output.itemsize
    keys, values = layer.cache.keys, layer.cache.values
    token_stride, head_stride = layer.width * item, size * item
    return {
        "size": size,
        "code": code,
        "rotated": layer.rotated,
        "angle_code": code,
        "query_token_stride": token_stride,
        "query_head_stride": head_stride,
        "heads": heads if layer.rotated else 0,
        "key_token_stride": token_stride,
        "key_head_stride": head_stride,
        "value_token_stride": token_stride,
        "value_head_stride": head_stride,
        "kv_heads": kv_heads,
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "kept_code": CODES[keys.dtype],
    }


def _attending(layer: DecodeLayer) -> dict[str, float]:
    """Return the arguments of `attend` that no step changes."""
    heads, kv_heads, size, window = layer.shape
    item = layer.output.itemsize
    keys, values = layer.cache.keys, layer.cache.values
    return {
        "token_stride": layer.width * item,
        "head_stride": size * item,
        "query_code": CODES[layer.output.dtype],
        "output": layer.output.data_ptr(),
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "code": CODES[keys.dtype],
        "block_size": keys.shape[1],
        "heads": heads,
        "kv_heads": kv_heads,
        "size": size,
        "scaling": layer.options.scaling,
        "softcap": layer.options.softcap,
        "window": window,
        "sinks": 0 if layer.options.sinks is None else layer.options.sinks.data_ptr(),
    }
