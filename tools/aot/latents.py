"""Configurations of the kernels of attention over latents, from launches by the functions that a worker calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from kvforge.worker.attention.latent_decode import LatentWorkspace, latent_decode, latent_planner, latent_problem
from kvforge.worker.attention.latent_prefill import latent_prefill
from kvforge.worker.attention.latent_write import write_latents
from kvforge.worker.attention.plan_items import FIELDS
from kvforge.worker.device.target import Target

from .compilation import BF16, DTYPE_NAMES, F16, F32, FAR_BYTES, Configuration, distinct, meta_tensor
from .specialise import recorded

DTYPES = (BF16, F16, F32)
QUANTISED = (torch.int8, torch.float8_e4m3fn)  # with queries of bfloat16, in the size of DeepSeek
SIZES = ((512, 64), (256, 64), (512, 32), (256, 32))  # latents and rotary keys: of each class whole, and padded
HEADS = (16, 32, 64)  # on Hopper the tiles of heads differ
FAR = (False, True)  # whether the latents take 2 GiB or more
BLOCK_SIZE, ROWS, ROWS_MERGED = 16, 1000, (1, 5, 10, 100)  # few and many programs of a merge


@dataclass(frozen=True)
class Shape:
    """Dtypes of queries and latents, numbers of a latent and a rotary key, query heads, whether the pool is large."""

    dtype: torch.dtype
    stored: torch.dtype
    latent: int
    rope: int
    heads: int
    far: bool = False

    @property
    def label(self) -> str:
        """The shape in words."""
        kept = f" over {DTYPE_NAMES[self.stored]}" * (self.stored != self.dtype)
        size = f"{self.latent} + {self.rope} heads {self.heads}"
        return f"{DTYPE_NAMES[self.dtype]}{kept} {size}{' far' * self.far}"

    def cache(self) -> torch.Tensor:
        """Return a pool of latents."""
        width = self.latent + self.rope
        blocks = 1 + FAR_BYTES // (BLOCK_SIZE * width * self.stored.itemsize) if self.far else 1
        return meta_tensor(blocks, BLOCK_SIZE, 1, width, dtype=self.stored)


Launch = Callable[[Target, Shape], object]


def decode_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_decode_kernel` on `target`."""
    return _all(target, "latent decode", "latent_decode_kernel", _decode, matrix=True)


def hopper_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_hopper_kernel` on `target`."""
    return _all(target, "latent decode on Hopper", "latent_hopper_kernel", _decode, matrix=True)


def merge_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_merge_kernel` on `target`."""
    return _all(target, "latent merge", "latent_merge_kernel", _merge)


def prefill_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_prefill_kernel` on `target`."""
    return _all(target, "latent prefill", "latent_prefill_kernel", _prefill, matrix=True)


def write_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `latent_write_kernel` on `target`."""
    return _all(target, "latent write", "latent_write_kernel", _write)


def _all(target: Target, name: str, kernel: str, launch: Launch, matrix: bool = False) -> list[Configuration]:
    """Return the configurations of `kernel` in launches of `launch`. matrix: whether they have matrix products."""
    every = [Shape(dtype, dtype, *size, heads, far) for dtype, size, heads, far in product(DTYPES, SIZES, HEADS, FAR)]
    every += [Shape(BF16, stored, *SIZES[0], HEADS[0]) for stored in QUANTISED]
    made = []
    for shape in every:
        if latent_problem(shape.latent, shape.rope, shape.stored, target):
            continue
        with recorded(target) as launched:
            launch(target, shape)
        has_matrix = matrix and (shape.dtype != F32 or target.backend == "hip")
        label = f"{name} {shape.label}"
        made += [Configuration(label, each, has_matrix) for each in launched if each.kernel.__name__ == kernel]
    return distinct(made)


def _scales(cache: torch.Tensor) -> torch.Tensor | None:
    return meta_tensor(*cache.shape[:3], dtype=F32) if cache.dtype in QUANTISED else None


def _merge(target: Target, shape: Shape) -> None:
    for rows in ROWS_MERGED:
        _decode(target, shape, rows)


def _decode(target: Target, shape: Shape, rows: int = 1) -> None:
    heads, latent, cache = shape.heads, shape.latent, shape.cache()
    planner = latent_planner(rows, heads, latent, shape.dtype, target)
    workspace = LatentWorkspace.allocate(planner, heads, latent, torch.device("meta"))
    query, output = (meta_tensor(rows, heads, width, dtype=shape.dtype) for width in (latent + shape.rope, latent))
    tables, plan = meta_tensor(rows, 8, dtype=torch.int32), meta_tensor(planner.size, dtype=torch.int32)
    latent_decode(query, cache, tables, planner, plan, output, workspace, 1.0, target, _scales(cache))


def _prefill(target: Target, shape: Shape) -> None:
    latent, cache = shape.latent, shape.cache()
    widths = latent + shape.rope, latent
    query, output = (meta_tensor(ROWS, shape.heads, width, dtype=shape.dtype) for width in widths)
    tables, items = (meta_tensor(ROWS, FIELDS, dtype=torch.int32) for _ in range(2))
    latent_prefill(query, cache, tables, items, output, 1.0, target, _scales(cache))


def _write(target: Target, shape: Shape) -> None:
    numbers = meta_tensor(ROWS, shape.latent + shape.rope, dtype=shape.dtype)
    slots, cache = meta_tensor(ROWS, dtype=torch.int32), shape.cache()
    write_latents(numbers, cache, slots, target, _scales(cache))
