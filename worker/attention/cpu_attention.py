"""Paged attention on the CPU with Numba kernels: see PagedAttention, and cpu/attention_kernel.py for the method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvforge.worker.cpu.attention_kernel import ITEM_FIELDS, PART, attend, partial_bytes, scratch_bytes
from kvforge.worker.cpu.kernel import threads_for
from kvforge.worker.cpu.kv_write import write_rotated
from kvforge.worker.cpu.vector import CODES

from .batch import Int32Array, IntArray, PagedBatch
from .expanded_space import ExpandedSpaces
from .interface import AttentionOptions, KvLayer, check_attend, check_latents, check_rotary, check_write
from .quantised import is_quantised
from .reference import ReferenceAttention
from .shared_prefixes import shared_prefixes

QUERIES = 48  # least queries of an item, if a row has as many, to amortise loading a chunk
# Throughput of one thread per microsecond: numbers of K and V loaded, products, and numbers stored.
BROUGHT_PER_US, MULTIPLIED_PER_US = 5_000, 30_000
COPIED_PER_US = 2_000
ALONE = (-1, 0, 0, 0, -1)  # an item that stores no sums


@dataclass(frozen=True)
class Plan:
    """The work of a batch, for layers of one shape.

    Attributes:
        items: [n, ITEM_FIELDS] int64, see `attention_kernel.attend`.
        tables: [rows, width] int64.
        microseconds: Time of one thread for one KV head.
        queries: Queries of the largest item.
        group: Queries of a token and KV head.
        members: [n] int64, the tokens of the rows of each shared item.
        stores: [n] int64, how many sums each row with stored ones waits for.
        sums: Places of stored sums.
    """

    items: IntArray
    tables: IntArray
    microseconds: float
    queries: int
    group: int
    members: IntArray
    stores: IntArray
    sums: int


class CpuAttention:
    """Attention on CPU kernels; see PagedAttention. Supports every head, block and group size and KV dtype."""

    expanded_spaces: ExpandedSpaces | None = None

    def __init__(self) -> None:
        self._reference = ReferenceAttention()
        self.workspace = Workspace()

    def describe(self, *_: Any, latent: int = 0) -> tuple[str, str]:
        """Implement `PagedAttention.describe`."""
        what = f"latents of {latent} numbers" if latent else "K and V"
        text = f"Numba for {torch.backends.cpu.get_cpu_capability()}, {what} read in place"
        return text, text

    def kv_slots(self, batch: PagedBatch) -> torch.Tensor:
        """Implement `PagedAttention.kv_slots`."""
        return self._reference.kv_slots(batch)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Implement `PagedAttention.write`."""
        if is_quantised(layer.keys.dtype):
            self._reference.write(key, value, layer, batch)
            return
        check_write(key, value, layer, batch)
        self._store(key[:, :0], key, value, None, layer, batch)

    def write_latent(self, latents: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Implement `PagedAttention.write_latent`."""
        check_latents(latents, layer, batch)
        if is_quantised(layer.keys.dtype):
            self._reference.write_latent(latents, layer, batch)
            return
        key = latents[:, None]
        self._store(key[:, :0], key, key, None, layer, batch)  # K and V are in one place

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
        """Implement `PagedAttention.write_rotated`."""
        if is_quantised(layer.keys.dtype) or not query.dtype == key.dtype == value.dtype:
            return self._reference.write_rotated(query, key, value, cos, sin, layer, batch)
        check_write(key, value, layer, batch)
        check_rotary(query, cos, sin, layer, batch)
        self._store(query, key, value, (cos, sin), layer, batch)
        return query

    def _store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        layer: KvLayer,
        batch: PagedBatch,
    ) -> None:
        """Rotate the query in place, and store key and value. angles: cos and sin; None: no rotation."""
        tokens, kv_heads, size = key.shape
        cos, sin = angles or (key, key)
        threads, stride = self.workspace.for_writing(tokens * (query.shape[1] + 2 * kv_heads) * size, size)
        (query_step, query_head_step), (key_step, key_head_step) = _strides(query), _strides(key)
        value_step, value_head_step = _strides(value)
        write_rotated(
            threads,
            tokens=tokens,
            size=size,
            code=CODES[key.dtype],
            rotated=0 if angles is None else cos.shape[1],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            angle_code=CODES[cos.dtype],
            query=query.data_ptr(),
            query_token_stride=query_step,
            query_head_stride=query_head_step,
            heads=query.shape[1],
            key=key.data_ptr(),
            key_token_stride=key_step,
            key_head_stride=key_head_step,
            value=value.data_ptr(),
            value_token_stride=value_step,
            value_head_stride=value_head_step,
            kv_heads=kv_heads,
            slots=batch.kv_slots.ctypes.data,
            keys=layer.keys.data_ptr(),
            values=layer.values.data_ptr(),
            kept_code=CODES[layer.keys.dtype],
            scratch=self.workspace.scratch.data_ptr(),
            scratch_stride=stride,
        )

    def gains_from_sharing(
        self,
        tables: Int32Array,  # noqa: ARG002
        lengths: Int32Array,  # noqa: ARG002
        block_size: int,  # noqa: ARG002
        saved_bytes_min: int = 0,  # noqa: ARG002
    ) -> bool:
        """Implement `PagedAttention.gains_from_sharing`: no kernel shares by a launch of its own."""
        return False

    def always_sharing(self) -> None:
        """Implement `PagedAttention.always_sharing`."""

    def attend(self, query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions) -> torch.Tensor:
        """Implement `PagedAttention.attend`."""
        check_attend(query, layer, batch, options)
        _, heads, size = query.shape
        kv_heads, keys = layer.keys.shape[2], layer.keys
        plan = plan_of(batch, heads, kv_heads, size, options.window)
        # The padding of a static batch is skipped.
        output = (torch.empty if batch.lengths.all() else torch.zeros)(query.shape, dtype=query.dtype)
        workspace = self.workspace
        threads, stride = workspace.for_plan(plan, kv_heads, size)
        token_stride, head_stride = _strides(query)
        attend(
            threads,
            items=plan.items.ctypes.data,
            item_count=len(plan.items),
            scratch_memory=workspace.scratch.data_ptr(),
            scratch_stride=stride,
            query=query.data_ptr(),
            token_stride=token_stride,
            head_stride=head_stride,
            query_code=CODES[query.dtype],
            output=output.data_ptr(),
            keys=keys.data_ptr(),
            values=layer.values.data_ptr(),
            key_scales=0 if layer.key_scales is None else layer.key_scales.data_ptr(),
            value_scales=0 if layer.value_scales is None else layer.value_scales.data_ptr(),
            code=CODES[keys.dtype],
            tables=plan.tables.ctypes.data,
            table_width=plan.tables.shape[1],
            block_size=batch.block_size,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            scaling=options.scaling,
            softcap=options.softcap,
            window=options.window,
            partials=workspace.partials.data_ptr(),
            counters=workspace.counters.data_ptr(),
            sinks=0 if options.sinks is None else options.sinks.data_ptr(),
            members=plan.members.ctypes.data,
            stores=plan.stores.ctypes.data,
        )
        return output[..., : layer.values.shape[3]]  # of latents: the sums of rotary keys are no result


class Workspace:
    """Workspace of the kernels, kept between calls; it only grows."""

    def __init__(self) -> None:
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.partials = torch.empty(0, dtype=torch.uint8)
        self.counters = torch.zeros(0, dtype=torch.int64)  # each call leaves zeros

    def for_plan(self, plan: Plan, kv_heads: int, size: int) -> tuple[int, int]:
        """Reserve workspace for attention. Return the number of threads, and the bytes of scratch of each."""
        threads = threads_for(plan.microseconds * kv_heads)
        stride = -(-scratch_bytes(plan.queries, size) // 64) * 64
        partials, counters = plan.sums * kv_heads * partial_bytes(plan.group, size), plan.stores.size * kv_heads
        self._grow(threads * stride)
        if len(self.partials) < partials:
            self.partials = torch.empty(partials, dtype=torch.uint8)
        if len(self.counters) < counters:
            self.counters = torch.zeros(counters, dtype=torch.int64)
        return threads, stride

    def for_writing(self, numbers: int, size: int) -> tuple[int, int]:
        """Reserve workspace to rotate and store `numbers` numbers in heads of `size`. Return as `for_plan` does."""
        threads, stride = threads_for(numbers / COPIED_PER_US), -(-4 * size // 64) * 64
        self._grow(threads * stride)
        return threads, stride

    def _grow(self, scratch: int) -> None:
        if len(self.scratch) < scratch:
            self.scratch = torch.empty(scratch, dtype=torch.uint8)


def plan_of(batch: PagedBatch, heads: int, kv_heads: int, size: int, window: int) -> Plan:
    """Return the plan of a batch for layers of this shape, made once per batch."""
    key = ("host", heads, kv_heads, size, window)
    plan: Plan | None = batch.plans.get(key)
    if plan is None and batch.leader is not None:
        equal = plan_of(batch.leader, heads, kv_heads, size, window)
        plan = batch.plans[key] = replace(equal, tables=np.ascontiguousarray(batch.tables))
    elif plan is None:
        plan = batch.plans[key] = _plan(batch, heads // kv_heads, kv_heads, size, window)
    return plan


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the strides in bytes from token to token and from head to head."""
    return tensor.stride(0) * tensor.itemsize, tensor.stride(1) * tensor.itemsize


class _Items:
    """The items of a plan, and what each costs."""

    def __init__(self, group: int, size: int) -> None:
        self._group, self._size = group, size
        self.items: list[tuple[int, ...]] = []
        self.costs: list[float] = []
        self.members: list[int] = []
        self.stores: list[int] = []
        self.sums = 0

    def add(self, place: tuple[int, ...], parts: tuple[int, int], keys: float, stored: tuple[int, ...] = ALONE) -> None:
        """Add an item: its row, token, position and count; its parts; the keys that it reads; and where it stores."""
        multiplied = 2 * place[3] * self._group / MULTIPLIED_PER_US
        self.items.append((*place, *parts, *stored))
        self.costs.append(keys * self._size * (2 / BROUGHT_PER_US + multiplied))

    def add_decode(self, place: tuple[int, ...], parts: int, keys: float) -> None:
        """Add a decode of one row; threads share its parts."""
        stored = self.sums, parts, len(self.stores)
        for part in range(parts):
            self.add(place, (part, part + 1), keys / parts, (stored[0], part, *stored[1:], -1))
        self.stores.append(parts)
        self.sums += parts

    def add_shared(self, rows: IntArray, parts: int, batch: PagedBatch, split: bool) -> None:
        """Add decodes of rows that have the same first `parts` parts.

        Args:
            rows: The rows, [n].
            parts: How many parts.
            batch: The batch.
            split: Threads share these parts.
        """
        shared = parts if split else 1  # stored sums
        ends = -(-batch.lengths[rows] // PART)
        each, kept, counter = shared + int(ends.max()) - parts, self.sums, len(self.stores)
        tokens = batch.query_starts[rows].tolist()
        for own in range(shared):
            span = (own, own + 1) if split else (0, parts)
            place = int(rows[0]), tokens[0], span[1] * PART - 1, len(tokens)
            self.add(place, span, (span[1] - span[0]) * PART, (kept, own, each, counter, len(self.members)))
        self.members += tokens
        for number, (row, token, end) in enumerate(zip(rows.tolist(), tokens, ends.tolist(), strict=True)):
            stored, length = kept + number * each, int(batch.lengths[row])
            for part in range(parts, end):
                keys = min(length - part * PART, PART)
                own = shared + part - parts
                self.add((row, token, length - 1, 1), (part, part + 1), keys, (stored, own, each, counter + number, -1))
            self.stores.append(shared + end - parts)
        self.sums += each * len(tokens)


def _plan(batch: PagedBatch, group: int, kv_heads: int, size: int, window: int) -> Plan:
    tokens, made = max(1, QUERIES // group), _Items(group, size)
    split, together = _splits(batch, kv_heads, window), set[int]()
    if tokens > 1 and not window and not batch.is_window:
        for rows, parts in shared_prefixes(batch, PART):
            together.update(rows.tolist())
            for some in np.array_split(rows, -(-rows.size // tokens)):
                made.add_shared(some, parts, batch, split)
    for row in range(len(batch.counts)):
        if row in together:
            continue
        start, end, first = int(batch.starts[row]), int(batch.lengths[row]), int(batch.query_starts[row])
        for position in range(start, end, tokens):
            count = min(tokens, end - position)
            end_part = -(-(position + count) // PART)
            place = row, first + position - start, position, count
            keys = min(position + count, window + count) if window else position + count
            if split and count == 1 and end_part > 1:
                made.add_decode(place, end_part, keys)
            else:
                made.add(place, (0, end_part), keys)
    order = np.argsort(-np.array(made.costs), kind="stable")  # longest first
    planned = np.array(made.items, np.int64).reshape(-1, ITEM_FIELDS)[order]
    queries = group * int(planned[:, 3].max(initial=1))
    tables = np.ascontiguousarray(batch.tables)
    lists = np.array(made.members, np.int64), np.array(made.stores, np.int64)
    return Plan(planned, tables, sum(made.costs), queries, group, *lists, made.sums)


def _splits(batch: PagedBatch, kv_heads: int, window: int) -> bool:
    """Return whether threads share a decode: if there are few decodes, and long ones."""
    alone = len(batch.counts) * kv_heads
    return window == 0 and int(batch.lengths.max(initial=0)) > 2 * PART and alone < 8 * torch.get_num_threads()
