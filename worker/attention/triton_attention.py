"""Paged attention on Triton kernels: chooses the kernels for a step and prepares their arguments.

Generated tokens go to `decode`, prompt tokens to `prefill`. Kernels read and write the model's dtype or a quantised
one. If a pool stores floats of another dtype than the model's, attention is computed in the pool's. Unsupported shapes
(see `supports`) go to the plain-torch reference.

Plans depend on a layer's heads and window. The plans that one step needed are made for the next one before its first
layer runs, so that one copy sends the whole structure of a step to the device.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from triton import knobs

from kvforge.worker.device.device import Device
from kvforge.worker.device.target import HEAD_CLASSES, HEAD_UNIT, Target
from kvforge.worker.device.targets import current_target

from .batch import Int32Array, IntArray, PagedBatch
from .decode import DecodeWorkspace, decode_planner, paged_decode
from .decode_plan import DecodePlanner
from .expanded_space import ExpandedSpaces
from .interface import AttentionOptions, KvLayer, PagedAttention, check_attend, check_latents, check_rotary, check_write
from .latent_decode import LatentWorkspace, latent_decode, latent_planner, latent_problem
from .latent_plan import LatentPlanner
from .latent_prefill import latent_prefill, latent_prefill_tokens
from .latent_write import write_latents
from .mixed_batch import MixedBatch
from .plan_items import FIELDS
from .prefill import paged_prefill
from .prefill_copy import PAGE, PAGES_MAX, copy_groups, plan_copies, workspace_for
from .prefill_plan import gluon_problem, hopper_problem, padded_tiles, plan_prefill, prefill_shape
from .quantised import is_quantised
from .reference import PLAIN, ReferenceAttention, rotate
from .shared_decode import shared_decode, shared_planner
from .shared_plan import SAVED_BYTES_MIN, SharedPlanner, SharedPlans, may_share, was_measured
from .write import write_kv

_NOTHING = np.zeros(0, np.int32)
_Shape = tuple[int, int, int, torch.dtype, int]  # query heads, KV heads, head size, dtype of K and V, window
DECODES_MAX = 512  # rows of one launch, to bound the workspace of parts; also the rows of the largest graph


@dataclass(frozen=True)
class _Decodes:
    """Decodes of one launch.

    Attributes:
        at: [n] int64 on the host, rows of the batch.
        tokens: Their tokens in the flat batch, if consecutive.
        rows: Their rows, if consecutive.
        token_index: [n] int64 on the device, otherwise.
        row_index: [n] int64 on the device, otherwise.
    """

    at: IntArray
    tokens: slice | None = None
    rows: slice | None = None
    token_index: torch.Tensor | None = None
    row_index: torch.Tensor | None = None


@dataclass
class _PlansInUse:
    """Plans of the layers of one kind.

    Attributes:
        known: Those of the previous step.
        needed: Those of this step so far.
        current: The batch of this step.
    """

    known: dict[Hashable, Callable[[PagedBatch], Int32Array]] = field(default_factory=dict)
    needed: dict[Hashable, Callable[[PagedBatch], Int32Array]] = field(default_factory=dict)
    current: weakref.ref[PagedBatch] | None = None


def is_interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, on the CPU."""
    return bool(knobs.runtime.interpret)


def supports(head_size: int) -> bool:
    """Return whether the kernels support heads of this size; the reference serves all others."""
    return head_size % HEAD_UNIT == 0 and head_size <= HEAD_CLASSES[-1]


class TritonAttention:
    """Attention on Triton kernels; see PagedAttention. One instance serves all layers of a model, on one stream."""

    def __init__(self, device: Device) -> None:
        self._target: Target = current_target(device)
        self._reference = ReferenceAttention()
        self._uses = {False: _PlansInUse(), True: _PlansInUse()}  # of layers without and with windows of their own
        self._workspaces: dict[tuple[int, int], list[DecodeWorkspace]] = {}
        self._latent_workspaces: dict[tuple[int, int], list[LatentWorkspace]] = {}
        self._copies: dict[tuple[int | torch.dtype, ...], torch.Tensor] = {}
        self._saved_bytes_min = SAVED_BYTES_MIN
        self._shapes = dict[_Shape, None]()  # of the decodes so far, in their order
        # Where the prefill kernel for K and V is that of Hopper, which outweighs the expansion.
        expands = self._target.hopper and not gluon_problem()
        self.expanded_spaces = ExpandedSpaces(device.torch_device) if expands else None

    def describe(
        self,
        head_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        options: AttentionOptions,
        latent: int = 0,
    ) -> tuple[str, str]:
        """Implement `PagedAttention.describe`."""
        if latent:
            problem = latent_problem(latent, head_size - latent, kv_dtype, self._target)
            text = f"{PLAIN}: {problem}" if problem else f"Triton, latents read once, tiles for {self._target.name}"
            return text, text
        if not supports(head_size):
            reason = f"{PLAIN}: no kernel supports heads of {head_size}"
            return reason, reason
        decode = f"Triton, tiles for {self._target.name}"
        copied = is_quantised(kv_dtype) and not hopper_problem(dtype, dtype, head_size, PAGE, options, self._target)
        problem = hopper_problem(dtype, kv_dtype, head_size, block_size, options, self._target)
        if copied:
            return decode, "Triton for Hopper after a copy, portable for few new tokens"
        return decode, f"Triton, portable: {problem}" if problem else "Triton for Hopper"

    def kv_slots(self, batch: PagedBatch) -> torch.Tensor:
        """Implement `PagedAttention.kv_slots`."""
        self._preload(batch)
        return batch.kv_slots_on_device

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Implement `PagedAttention.write`."""
        if not supports(key.shape[2]):
            self._reference.write(key, value, layer, batch)
            return
        check_write(key, value, layer, batch)
        self._preload(batch)
        dtype = _stored_from(key.dtype, layer)
        key, value = _placed(key.to(dtype)), _placed(value.to(dtype))
        write_kv(None, key, value, None, None, layer, batch.kv_slots_on_device, self._target)

    def write_latent(self, latents: torch.Tensor, layer: KvLayer, batch: PagedBatch) -> None:
        """Implement `PagedAttention.write_latent`."""
        if self._latent_problem(layer):
            self._reference.write_latent(latents, layer, batch)
            return
        check_latents(latents, layer, batch)
        self._preload(batch)
        latents = _placed(latents.to(_stored_from(latents.dtype, layer))[:, None])[:, 0]
        write_latents(latents, layer.keys, batch.kv_slots_on_device, self._target, layer.key_scales)

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
        if not supports(key.shape[2]):
            return self._reference.write_rotated(query, key, value, cos, sin, layer, batch)
        check_write(key, value, layer, batch)
        check_rotary(query, cos, sin, layer, batch)
        self._preload(batch)
        if _stored_from(key.dtype, layer) != key.dtype:
            self.write(rotate(key, cos, sin), value, layer, batch)
            return rotate(query, cos, sin)
        query, key, value = _placed(query), _placed(key), _placed(value)
        write_kv(query, key, value, cos, sin, layer, batch.kv_slots_on_device, self._target)
        return query

    def attend(self, query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions) -> torch.Tensor:
        """Implement `PagedAttention.attend`."""
        check_attend(query, layer, batch, options)
        if self._latent_problem(layer) if layer.latent else not supports(query.shape[2]):
            return self._reference.attend(query, layer, batch, options)
        self._preload(batch)
        dtype = _computed_in(query.dtype, layer)
        if layer.latent and self._target.widens and is_quantised(layer.keys.dtype):
            dtype = torch.float16  # the interpreter converts no int8 to bfloat16
        output = torch.empty((*query.shape[:2], layer.values.shape[3]), dtype=dtype, device=query.device)
        self._attend(_placed(query.to(dtype)), layer, batch, options, output)
        return output.to(query.dtype)

    def gains_from_sharing(
        self, tables: Int32Array, lengths: Int32Array, block_size: int, saved_bytes_min: int = 0
    ) -> bool:
        """Implement `PagedAttention.gains_from_sharing`, for the shapes that have been decoded so far."""
        if not may_share(tables, lengths):
            return False
        planners = (self._shared_planner(len(lengths), shape) for shape in self._shapes)
        batch = tables, lengths, block_size, max(self._saved_bytes_min, saved_bytes_min)
        return any(planner is not None and planner.plan(*batch) is not None for planner in planners)

    def always_sharing(self) -> PagedAttention | None:
        """Implement `PagedAttention.always_sharing`."""
        if not self._target.steady:
            return None
        copied = copy.deepcopy(self)
        copied._saved_bytes_min = 0
        return copied

    def _attend(
        self, query: torch.Tensor, layer: KvLayer, batch: PagedBatch, options: AttentionOptions, output: torch.Tensor
    ) -> None:
        tables = batch.tables_on_device
        if len(_others_of(batch)):
            self._prefill(query, layer, tables, batch, options, output)
        for number, rows in enumerate(_decodes_of(batch)):
            if rows.tokens is not None and rows.rows is not None:
                part = output[rows.tokens]
                self._decode(query[rows.tokens], layer, tables[rows.rows], batch, number, options, part)
            else:
                assert rows.token_index is not None and rows.row_index is not None
                part = torch.empty((len(rows.at), *output.shape[1:]), dtype=output.dtype, device=output.device)
                own = query[rows.token_index], layer, tables[rows.row_index]
                self._decode(*own, batch, number, options, part)
                output[rows.token_index] = part

    def _prefill(
        self,
        query: torch.Tensor,
        layer: KvLayer,
        tables: torch.Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> None:
        """Prefill, after dequantising quantised rows with many new tokens if a faster kernel can serve them then."""
        heads, target = query.shape[1], self._target
        if layer.latent:
            self._prefill_latents(query, layer, tables, batch, options, output)
            return
        shapes = [prefill_shape(heads, query.dtype, layer, options, target, copied) for copied in (False, True)]
        copies = is_quantised(layer.keys.dtype) and shapes[True].hopper
        group = heads // layer.keys.shape[2] if copies else 0
        steady = target.steady
        for number in range(len(_prefill_parts(batch, group, steady))):
            shape = shapes[number > 0]
            part = shape.tokens, group, number
            items = self._resident(batch, ("prefill", *part), partial(_prefill_plan, *part, steady)).view(-1, FIELDS)
            if number == 0:
                paged_prefill(query, layer, tables, items, output, options, target)
                continue
            pages = self._resident(batch, ("copies", *part), partial(_copy_plan, *part, steady)).view(-1, FIELDS)
            workspace = self._pages(len(pages), layer, query.dtype)
            paged_prefill(query, layer, tables, items, output, options, target, pages, workspace)

    def _pages(self, pages: int, layer: KvLayer, dtype: torch.dtype) -> torch.Tensor:
        """Return a workspace of at least `pages` pages, shared by all layers of a shape, which run in sequence."""
        key = (*layer.keys.shape[2:], dtype)
        held = self._copies.get(key)
        if held is None or held.shape[1] < pages:
            self._copies.pop(key, None)
            del held
            self._copies[key] = workspace_for(min(PAGES_MAX, 1 << (pages - 1).bit_length()), layer, dtype)
        return self._copies[key]

    def _decode(
        self,
        query: torch.Tensor,
        layer: KvLayer,
        tables: torch.Tensor,
        batch: PagedBatch,
        number: int,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> None:
        """Decode the rows of launch `number`."""
        count, heads, head_size = query.shape
        if layer.latent:
            self._decode_latents(query, layer, tables, batch, number, options, output)
            return
        shape = (heads, layer.keys.shape[2], head_size, layer.keys.dtype, options.window)
        self._shapes[shape] = None
        planner = decode_planner(count, *shape, self._target)
        plan = self._resident(batch, ("decode", number, *shape), partial(self._decode_plan, shape, number))
        query = query if query.stride(1) == head_size else query.contiguous()
        workspace = self._workspace(planner, heads, head_size, query.device)
        if self._runs_shared(batch, shape, number):
            shared = self._resident(batch, ("shared", number, *shape), partial(self._shared_plan, shape, number))
            shared_decode(query, layer, tables, shared, workspace, options, self._target)
        paged_decode(query, layer, tables, plan, output, workspace, options, self._target)

    def _decode_plan(self, shape: _Shape, number: int, batch: PagedBatch) -> Int32Array:
        """Return the plan of launch `number` without shared parts, or nothing if the batch has no such launch."""
        launches = _decodes_of(batch)
        if number >= len(launches):
            return _NOTHING
        plans = self._plans_of(batch, shape, number)
        if plans is not None:
            return plans.own
        lengths = batch.lengths[launches[number].at]
        planner, key = decode_planner(len(lengths), *shape, self._target), ("decode plan", shape, number)
        if key in batch.earlier:
            before, made = batch.earlier[key]
            plan = planner.plan_after(before, made, lengths)
        else:
            plan = planner.plan(lengths)
        if batch.is_static:
            batch.earlier[key] = lengths, plan
        return plan

    def _shared_plan(self, shape: _Shape, number: int, batch: PagedBatch) -> Int32Array:
        """Return the plan of the shared parts of launch `number`; without any, an empty one if the batch is static."""
        plans = self._plans_of(batch, shape, number)
        if plans is not None:
            return plans.shared
        if not batch.is_static:
            return _NOTHING
        planner = self._shared_planner(len(_decodes_of(batch)[number].at), shape)
        assert planner is not None, "a static batch launches what its shapes can share"
        return np.zeros(planner.size, np.int32)

    def _shared_planner(self, rows_max: int, shape: _Shape) -> SharedPlanner | None:
        """Return the planner of shared parts for a shape of layers; None if these never share."""
        heads, kv_heads, head_size, dtype, window = shape
        if not was_measured(self._target, head_size, dtype):
            return None
        return shared_planner(rows_max, heads, kv_heads, head_size, dtype, window, self._target)

    def _runs_shared(self, batch: PagedBatch, shape: _Shape, number: int) -> bool:
        """Return whether launch `number` of a layer is preceded by one of the shared parts."""
        if batch.is_static:
            return batch.shares_reads and self._shared_planner(1, shape) is not None
        return self._plans_of(batch, shape, number) is not None

    def _plans_of(self, batch: PagedBatch, shape: _Shape, number: int) -> SharedPlans | None:
        """Return the plans of launch `number` with shared parts; None if no rows share, or too little."""
        if batch.leader is not None or batch.is_window or (batch.is_static and not batch.shares_reads):
            return None
        key = ("shared plans", number, shape)
        if key not in batch.plans:
            launches = _decodes_of(batch)
            batch.plans[key] = None
            if number < len(launches):
                at = launches[number].at
                planner = self._shared_planner(len(at), shape)
                at = at[at < len(batch.tables)]  # a static batch has no tables for its padding
                if planner is not None and may_share(batch.tables[at, :1], batch.lengths[at]):
                    own = batch.tables[at], batch.lengths[at], batch.block_size
                    batch.plans[key] = planner.plan(*own, self._saved_bytes_min)
        plans: SharedPlans | None = batch.plans[key]
        return plans

    def _prefill_latents(
        self,
        query: torch.Tensor,
        layer: KvLayer,
        tables: torch.Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> None:
        shape = query.shape[1], layer.latent, query.dtype
        tokens = latent_prefill_tokens(*shape, self._target)
        part = tokens, 0, 0
        make = partial(_prefill_plan, *part, self._target.steady)
        items = self._resident(batch, ("prefill", *part), make).view(-1, FIELDS)
        query = query if query.stride(1) == query.shape[2] else query.contiguous()
        arguments = query, layer.keys, tables, items, output, options.scaling, self._target
        latent_prefill(*arguments, layer.key_scales)

    def _decode_latents(
        self,
        query: torch.Tensor,
        layer: KvLayer,
        tables: torch.Tensor,
        batch: PagedBatch,
        number: int,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> None:
        count, heads, head_size = query.shape
        shape = heads, layer.latent, query.dtype
        planner = latent_planner(count, *shape, self._target)
        plan = self._resident(batch, ("latents", number, *shape), partial(self._latent_plan, shape, number))
        query = query if query.stride(1) == head_size else query.contiguous()
        workspace = self._latent_workspace(planner, heads, layer.latent, query.device)
        arguments = query, layer.keys, tables, planner, plan, output, workspace, options.scaling
        latent_decode(*arguments, self._target, layer.key_scales)

    def _latent_plan(self, shape: tuple[int, int, torch.dtype], number: int, batch: PagedBatch) -> Int32Array:
        """As `_decode_plan`."""
        launches = _decodes_of(batch)
        if number >= len(launches):
            return _NOTHING
        lengths = batch.lengths[launches[number].at]
        return latent_planner(len(lengths), *shape, self._target).plan(lengths)

    def _latent_problem(self, layer: KvLayer) -> str:
        """Return why the reference serves a layer's latents; "" if kernels do."""
        return latent_problem(layer.latent, layer.keys.shape[3] - layer.latent, layer.keys.dtype, self._target)

    def _preload(self, batch: PagedBatch) -> None:
        """Send the plans that the previous step needed, in one copy, before the batch is used otherwise."""
        if batch.is_static:
            return
        uses, first = self._uses[batch.is_window], batch.leader or batch
        if uses.current is None or uses.current() is not first:
            uses.known, uses.needed, uses.current = uses.needed, {}, weakref.ref(first)
            first.preload(uses.known)
        if batch is not first:
            batch.preload({})

    def _resident(self, batch: PagedBatch, key: Hashable, make: Callable[[PagedBatch], Int32Array]) -> torch.Tensor:
        if not batch.is_static:
            self._uses[batch.is_window].needed[key] = make
        return batch.device_array(key, make)

    def _workspace(self, planner: DecodePlanner, heads: int, head_size: int, device: torch.device) -> DecodeWorkspace:
        """Return memory for one launch, shared by all launches, which run one after another.

        Memory once returned stays allocated, because a captured graph may read it.
        """
        made = self._workspaces.setdefault((heads, head_size), [])
        counters = planner.rows_max * heads
        if not made or len(made[-1].partials) < planner.items_max or len(made[-1].counters) < counters:
            rows_max = 1 << (planner.rows_max - 1).bit_length()  # doubling bounds the waste
            made.append(DecodeWorkspace.allocate(replace(planner, rows_max=rows_max), heads, head_size, device))
        return replace(made[-1], partials=made[-1].partials[: planner.items_max])

    def _latent_workspace(
        self, planner: LatentPlanner, heads: int, latent: int, device: torch.device
    ) -> LatentWorkspace:
        """As `_workspace`."""
        made = self._latent_workspaces.setdefault((heads, latent), [])
        if not made or len(made[-1].partials) < planner.items_max:
            rows_max = 1 << (planner.rows_max - 1).bit_length()
            made.append(LatentWorkspace.allocate(replace(planner, rows_max=rows_max), heads, latent, device))
        return made[-1]


def _placed(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers [tokens, heads, head_size], copied if its heads are not aligned to 16 bytes."""
    if numbers.data_ptr() % 16 or any(stride % HEAD_UNIT for stride in numbers.stride()[:2]):
        return numbers.clone(memory_format=torch.contiguous_format)
    return numbers


def _stored_from(dtype: torch.dtype, layer: KvLayer) -> torch.dtype:
    """Return the input dtype of `write_kernel`: the model's, or the pool's if that is another float dtype."""
    return dtype if is_quantised(layer.keys.dtype) else layer.keys.dtype


def _computed_in(dtype: torch.dtype, layer: KvLayer) -> torch.dtype:
    """Return the dtype of queries and results of attention."""
    if not is_quantised(layer.keys.dtype):
        return layer.keys.dtype
    return torch.float16 if dtype == torch.float32 else dtype


def _prefill_parts(batch: PagedBatch, group: int, steady: bool) -> list[IntArray]:
    """Return the rows that are no decodes: first those read in place, then each group to copy first.

    group: query heads of a KV head if copies help, else 0. steady: see `copy_groups`.
    """
    batch = batch.leader or batch
    key = ("prefill parts", group)
    if key not in batch.plans:
        others = _others_of(batch)
        straight, groups = copy_groups(batch.starts, batch.counts, group, others, steady) if group else (others, [])
        batch.plans[key] = [straight, *groups]
    parts: list[IntArray] = batch.plans[key]
    return parts


def _prefill_plan(tokens: int, group: int, number: int, steady: bool, batch: PagedBatch) -> Int32Array:
    """Return the tiles of part `number`, or nothing if the batch has no such part."""
    parts = _prefill_parts(batch, group, steady)
    if number >= len(parts) or not len(parts[number]):
        return _NOTHING
    planned = plan_prefill(batch.starts, batch.counts, batch.query_starts, tokens, parts[number])
    return padded_tiles(planned, batch.size, tokens) if isinstance(batch, MixedBatch) else planned


def _copy_plan(tokens: int, group: int, number: int, steady: bool, batch: PagedBatch) -> Int32Array:
    return plan_copies(_prefill_plan(tokens, group, number, steady, batch).reshape(-1, FIELDS))


def _others_of(batch: PagedBatch) -> IntArray:
    """Return the rows that are no decodes: [n] int64 on the host."""
    return np.flatnonzero(~batch.generated)


def _decodes_of(batch: PagedBatch) -> list[_Decodes]:
    batch = batch.leader or batch
    if "decodes" not in batch.plans:
        rows = np.flatnonzero(batch.generated)
        batch.plans["decodes"] = [
            _decodes(batch, rows[first : first + DECODES_MAX]) for first in range(0, len(rows), DECODES_MAX)
        ]
    decodes: list[_Decodes] = batch.plans["decodes"]
    return decodes


def _decodes(batch: PagedBatch, rows: IntArray) -> _Decodes:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        token = int(batch.query_starts[first])
        return _Decodes(rows, slice(token, token + len(rows)), slice(first, last + 1))
    upload = batch.device.upload
    return _Decodes(rows, None, None, upload(batch.query_starts[rows]), upload(rows))
