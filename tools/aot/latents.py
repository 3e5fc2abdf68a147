"""Configurations of the kernels of attention over latents, from launches by the functions that a worker calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from kvforge.worker.attention.latent_decode import LatentWorkspace, latent_decode, latent_planner, latent_problem
from kvforge.worker.attention.latent_prefill import latent_prefill
from kvforge.worker.attention.latent_write import write_latents
from kvforge.worker.attention.plan_items import FIELDS
from kvforge.worker.device.target import Target

from .compilation import BF16, DTYPE_NAMES, F16, F32, FAR_BYTES, Configuration, distinct, meta_tensor
from .specialise import recorded

DTYPES = (BF16, F16, F32)
SIZES = ((512, 64), (256, 64), (512, 32), (256, 32))  # latents and rotary keys: of each class whole, and padded
HEADS = (16, 32, 64)  # on Hopper the tiles of heads differ
FAR = (False, True)  # whether the latents take 2 GiB or more
BLOCK_SIZE, ROWS = 16, 1000

Launch = Callable[[Target, torch.dtype, int, int, int, bool], object]


def decode_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_decode_kernel` on `target`."""
    return _all(target, "latent decode", 0, _decode, matrix=True)


def merge_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_merge_kernel` on `target`."""
    return _all(target, "latent merge", 1, _decode)


def prefill_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_prefill_kernel` on `target`."""
    return _all(target, "latent prefill", 0, _prefill, matrix=True)


def write_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_write_kernel` on `target`."""
    return _all(target, "latent write", 0, _write)


def _all(target: Target, name: str, index: int, launch: Launch, matrix: bool = False) -> list[Configuration]:
    """Return the configurations of the launch `index` of `launch`. matrix: whether they have matrix products."""
    made = []
    for dtype, (latent, rope), heads, far in itertools.product(DTYPES, SIZES, HEADS, FAR):
        if latent_problem(latent, rope, dtype, target):
            continue
        with recorded(target) as launched:
            launch(target, dtype, latent, rope, heads, far)
        label = f"{name} {DTYPE_NAMES[dtype]} {latent} + {rope} heads {heads}{' far' * far}"
        has_matrix = matrix and (dtype != F32 or target.backend == "hip")
        made.append(Configuration(label, launched[index], has_matrix))
    return distinct(made)


def _cache(dtype: torch.dtype, latent: int, rope: int, far: bool) -> torch.Tensor:
    blocks = 1 + FAR_BYTES // (BLOCK_SIZE * (latent + rope) * dtype.itemsize) if far else 1
    return meta_tensor(blocks, BLOCK_SIZE, 1, latent + rope, dtype=dtype)


def _decode(target: Target, dtype: torch.dtype, latent: int, rope: int, heads: int, far: bool) -> None:
    planner = latent_planner(1, heads, latent, dtype, target)
    workspace = LatentWorkspace.allocate(planner, heads, latent, torch.device("meta"))
    query, output = (meta_tensor(1, heads, width, dtype=dtype) for width in (latent + rope, latent))
    tables, plan = meta_tensor(1, 8, dtype=torch.int32), meta_tensor(planner.size, dtype=torch.int32)
    cache = _cache(dtype, latent, rope, far)
    latent_decode(query, cache, tables, planner, plan, output, workspace, 1.0, target)


def _prefill(target: Target, dtype: torch.dtype, latent: int, rope: int, heads: int, far: bool) -> None:
    query, output = (meta_tensor(ROWS, heads, width, dtype=dtype) for width in (latent + rope, latent))
    tables, items = (meta_tensor(ROWS, FIELDS, dtype=torch.int32) for _ in range(2))
    latent_prefill(query, _cache(dtype, latent, rope, far), tables, items, output, 1.0, target)


def _write(target: Target, dtype: torch.dtype, latent: int, rope: int, heads: int, far: bool) -> None:
    numbers, slots = meta_tensor(ROWS, latent + rope, dtype=dtype), meta_tensor(ROWS, dtype=torch.int32)
    write_latents(numbers, _cache(dtype, latent, rope, far), slots, target)
