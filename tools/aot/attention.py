"""Configurations of the attention kernels.

All come from launches by the functions that a worker calls: the product of the factors below, without duplicates.
Numbers that only change constants of address arithmetic (block size, numbers of heads, a head size within its class)
are not factors. On AMD, kernels receive possible further factors (soft cap, window, tall groups) at run time, so that
the tests can compile every configuration.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from kvforge.worker.attention.decode import DecodeWorkspace, decode_planner, is_few, paged_decode
from kvforge.worker.attention.interface import AttentionOptions, KvLayer
from kvforge.worker.attention.plan_items import FIELDS
from kvforge.worker.attention.prefill import paged_prefill
from kvforge.worker.attention.prefill_copy import PAGE, copy_rows
from kvforge.worker.attention.prefill_plan import prefill_shape
from kvforge.worker.attention.quantised import is_quantised
from kvforge.worker.attention.shared_decode import shared_decode, shared_planner
from kvforge.worker.attention.write import write_kv
from kvforge.worker.device.target import Target

from .compilation import BF16, DTYPE_NAMES, F16, F32, FAR_BYTES, FP8, I8, Configuration, distinct, meta_tensor
from .specialise import recorded

Dtypes = tuple[torch.dtype, torch.dtype]
# Factors of the dispatcher's choice.
DTYPES = ((BF16, BF16), (F16, F16), (F32, F32), (BF16, I8), (F16, I8), (BF16, FP8), (F16, FP8))  # model's, pool's
WRITTEN = (*DTYPES[:3], *((model, I8) for model in (BF16, F16, F32)))  # int8 and fp8 are one kernel
PADDED = {64: 56, 128: 120, 256: 192}  # for each class of head sizes, one that is padded
SPLIT = (96, 80)  # of the class of 128, in two tiles that hold 96: see `head_tiles`
HEAD_SIZES = (*PADDED, *PADDED.values(), *SPLIT)
GROUPS = (4, 32, 128)  # query heads of one KV head: one tile of rows, a tall one, several
CAPPED = (False, True)
FEW = (False, True)  # rows: see decode.is_few
ROTATED = (1, 2)  # whole heads, or half of each
# Whether K and V of a layer take 2 GiB or more. The other arguments belong to one step and never do. (Scales may, but
# no kernel is specialised for that.)
FAR = (False, True)
COPIED = DTYPES[3:]  # dtypes copied to a workspace for Hopper's kernel
BLOCK_SIZES = (8, 16, 32, 64, 128, None)  # Hopper's kernel copies block by block; None: a workspace
WINDOWED = (False, True)
BLOCK_SIZE, KV_HEADS, ROWS_MANY = 16, 8, 1000


def decode_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `decode_kernel` that the dispatcher can choose on `target`."""
    return distinct(_decode(target, *each) for each in itertools.product(DTYPES, HEAD_SIZES, GROUPS, CAPPED, FEW, FAR))


def shared_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `shared_decode_kernel` on `target`, which runs where rows are steady."""
    steady = replace(target, steady=True)
    made = [_shared(steady, *each) for each in itertools.product(DTYPES, HEAD_SIZES, CAPPED, FAR, (ROWS_MANY, 1))]
    return distinct(each for each in made if each is not None)


def prefill_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the portable prefill kernel on `target`."""
    return distinct(_prefill(target, *each) for each in itertools.product(DTYPES, HEAD_SIZES, FAR))


def hopper_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of Hopper's prefill kernel on `target`."""
    if not target.hopper:
        return []
    made = [
        _hopper(target, *each) for each in itertools.product((BF16, F16), HEAD_SIZES, BLOCK_SIZES, WINDOWED, CAPPED)
    ]
    return distinct(each for each in made if each is not None)


def copy_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the kernel that copies rows to Hopper's workspace."""
    if not target.hopper:
        return []
    return distinct(_copy(target, *each) for each in itertools.product(COPIED, HEAD_SIZES))


def write_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `write_kernel` on `target`."""
    return distinct(_write(target, *each) for each in itertools.product(WRITTEN, PADDED.values(), ROTATED, FAR))


def _decode(
    target: Target, dtypes: Dtypes, head_size: int, group: int, cap: bool, few: bool, far: bool
) -> Configuration:
    (model, stored), rows, kv_heads = dtypes, 1 if few else ROWS_MANY, KV_HEADS
    while few and not is_few(rows, kv_heads * group, kv_heads, head_size, stored, target):
        kv_heads //= 2
    layer = _layer(stored, kv_heads, head_size, far)
    options = AttentionOptions(1.0, softcap=50.0 if cap else 0.0)
    query = meta_tensor(rows, kv_heads * group, head_size, dtype=model)
    planner = decode_planner(rows, kv_heads * group, kv_heads, head_size, stored, options.window, target)
    workspace = DecodeWorkspace.allocate(planner, kv_heads * group, head_size, query.device)
    plan = meta_tensor(planner.size, dtype=torch.int32)
    with recorded(target) as launched:
        tables = meta_tensor(rows, 8, dtype=torch.int32)
        paged_decode(query, layer, tables, plan, torch.empty_like(query), workspace, options, target)
    label = f"decode {_dtypes(dtypes)} head {head_size} group {group}{' capped' * cap}{' few rows' * few}{' far' * far}"
    return Configuration(label, launched[0], _has_matrix(stored, target))


def _shared(target: Target, dtypes: Dtypes, head_size: int, cap: bool, far: bool, rows: int) -> Configuration | None:
    (model, stored), heads = dtypes, KV_HEADS * GROUPS[0]
    planner = shared_planner(rows, heads, KV_HEADS, head_size, stored, 0, target)
    if planner is None:
        return None
    options = AttentionOptions(1.0, softcap=50.0 if cap else 0.0)
    query = meta_tensor(rows, heads, head_size, dtype=model)
    workspace = DecodeWorkspace.allocate(planner.decode, heads, head_size, query.device)
    tables, plan = meta_tensor(rows, 8, dtype=torch.int32), meta_tensor(planner.size, dtype=torch.int32)
    with recorded(target) as launched:
        shared_decode(query, _layer(stored, KV_HEADS, head_size, far), tables, plan, workspace, options, target)
    label = f"decode of common parts {_dtypes(dtypes)} head {head_size}{' capped' * cap}{' far' * far}"
    label += " few rows" * (rows == 1)
    return Configuration(label, launched[0], _has_matrix(stored, target))


def _prefill(target: Target, dtypes: Dtypes, head_size: int, far: bool) -> Configuration:
    model, stored = dtypes
    layer = _layer(stored, KV_HEADS, head_size, far)
    query = meta_tensor(ROWS_MANY, KV_HEADS * GROUPS[0], head_size, dtype=model)
    tables, items = (meta_tensor(ROWS_MANY, FIELDS, dtype=torch.int32) for _ in range(2))
    with recorded(target) as launched:
        # `prefill_hopper` does not support windows of one token.
        options = AttentionOptions(1.0, window=1)
        paged_prefill(query, layer, tables, items, torch.empty_like(query), options, target)
    label = f"prefill {_dtypes(dtypes)} head {head_size}{' far' * far}"
    return Configuration(label, launched[0], _has_matrix(model, target))


def _hopper(
    target: Target, dtype: torch.dtype, head_size: int, block_size: int | None, windowed: bool, cap: bool
) -> Configuration | None:
    """Return None if the portable kernel runs instead. block_size: None for rows copied to a workspace."""
    options = AttentionOptions(1.0, window=1000 if windowed else 0, softcap=50.0 if cap else 0.0)
    copied, stored = block_size is None, I8 if block_size is None else dtype
    layer = _layer(stored, KV_HEADS, head_size, far=False, block_size=block_size or BLOCK_SIZE)
    query = meta_tensor(ROWS_MANY, KV_HEADS * GROUPS[0], head_size, dtype=dtype)
    if not prefill_shape(query.shape[1], dtype, layer, options, target, copied).hopper:
        return None
    tables, items = (meta_tensor(ROWS_MANY, FIELDS, dtype=torch.int32) for _ in range(2))
    workspace = meta_tensor(2, ROWS_MANY, PAGE, KV_HEADS, head_size, dtype=dtype) if copied else None
    with recorded(target) as launched:
        copies = items if copied else None
        paged_prefill(query, layer, tables, items, torch.empty_like(query), options, target, copies, workspace)
    blocks = "copied" if copied else f"blocks of {block_size}"
    label = f"hopper {_dtypes((dtype, dtype))} head {head_size} {blocks}{' windowed' * windowed}{' capped' * cap}"
    return Configuration(label, launched[-1], True)


def _copy(target: Target, dtypes: Dtypes, head_size: int) -> Configuration:
    """Return the configuration for one page: Triton compiles the number 1 as a constant."""
    (model, stored), pages = dtypes, 1
    layer = _layer(stored, KV_HEADS, head_size, far=False)
    tables, copies = meta_tensor(pages, pages, dtype=torch.int32), meta_tensor(pages, FIELDS, dtype=torch.int32)
    workspace = meta_tensor(2, pages, PAGE, KV_HEADS, head_size, dtype=model)
    with recorded(target) as launched:
        copy_rows(layer, tables, copies, workspace, window=0)
    label = f"copy {_dtypes(dtypes)} head {head_size}"
    return Configuration(label, launched[0], False)


def _write(target: Target, dtypes: Dtypes, head_size: int, rotated: int, far: bool) -> Configuration:
    model, stored = dtypes
    key, layer = meta_tensor(ROWS_MANY, KV_HEADS, head_size, dtype=model), _layer(stored, KV_HEADS, head_size, far)
    angles = meta_tensor(ROWS_MANY, head_size // rotated, dtype=model)
    slots = meta_tensor(ROWS_MANY, dtype=torch.int32)
    with recorded(target) as launched:
        write_kv(key, key, key, angles, angles, layer, slots, target)
    label = f"write {_dtypes(dtypes)} head {head_size}{' half rotated' * (rotated - 1)}{' far' * far}"
    return Configuration(label, launched[0], False)


def _layer(stored: torch.dtype, kv_heads: int, head_size: int, far: bool, block_size: int = BLOCK_SIZE) -> KvLayer:
    """Return a layer's cache. far: K and V take more than 2 GiB each."""
    blocks = 1 + FAR_BYTES // (block_size * kv_heads * head_size * stored.itemsize) if far else 1
    caches = [meta_tensor(blocks, block_size, kv_heads, head_size, dtype=stored) for _ in range(2)]
    scales = [meta_tensor(blocks, block_size, kv_heads, dtype=F32) for _ in range(2)] if is_quantised(stored) else []
    return KvLayer(*caches, *scales)


def _has_matrix(dtype: torch.dtype, target: Target) -> bool:
    """Return whether products of this dtype use matrix instructions: for float32 only on gfx9."""
    return dtype != F32 or target.name.startswith("gfx9")


def _dtypes(dtypes: Dtypes) -> str:
    return "/".join(dict.fromkeys(DTYPE_NAMES[dtype] for dtype in dtypes))
