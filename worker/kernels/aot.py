"""Compiles the kernels of this package for GPUs that are not here, as `worker.attention.aot` does those of attention.

    python -m worker.kernels.aot [--target gfx942 ...]

prints a line for each configuration that `FusedOperations`, the sampler and small copies can launch; the exit status is
1 where one does not compile.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial

import torch

from worker.attention import KvLayer
from worker.attention.aot import BF16, DTYPE_NAMES, F16, F32, FAR_BYTES, Configuration, compile_one, once
from worker.attention.specialise import recorded
from worker.attention.targets import HEAD_CLASSES, TARGETS, Target
from worker.choice import PIECE, choose_tokens, feed_tokens
from worker.copies import copy_numbers
from worker.sampler import COLUMNS

from . import HIDDEN_MAX, activation, norm, rotary
from .linear import OTHER_PARTS_MAX, choose_tiles, linear_parts
from .project import HEAD_SIZES, project

NARROW = (BF16, F16)
FLOATS = (*NARROW, F32)
# Factors: what the dispatcher passes on. Of every size there is one that 16 divides, and one that it does not.
TOKENS = (1, 32, 64)
SIZES = (
    *((6144, 4096), (4096, 14336), (14336, 4096), (128256, 4096)),  # n, k: divided by every tile, and by none
    *((1008, 1008), (1000, 1008), (1008, 1000), (1000, 1000)),
)
USES = ("whole", "wide", "parts", "gated")  # what comes of a product: as it is, float32, parts of a sum, or gated
BLOCKS = tuple(1 << exponent for exponent in range(norm.BLOCK_MIN.bit_length() - 1, HIDDEN_MAX.bit_length()))
HIDDEN = tuple(size for block in BLOCKS for size in (block, block - 8))
HEADS = tuple(size for head in HEAD_CLASSES for size in (head, head - 8))
PARTS = (1, 2, 3, OTHER_PARTS_MAX)
FAR = (False, True)  # whether a weight, K and V, or the logits take 2 GiB or more: nothing else does
VOCABS = tuple(size for pieces in (1, 2, 4, 8, 16, 32, 64) for size in (PIECE * pieces, PIECE * pieces - 5))
COPIED = (1, 16, 17)  # numbers


def layer_configurations(target: Target) -> list[Configuration]:
    """What `FusedOperations` can launch on `target`, equal ones once."""
    product = itertools.product
    made: list[Configuration | None] = [
        _product(target, *each) for each in product(NARROW, TOKENS, SIZES, USES, (False, True), FAR)
    ]
    made += [_project(target, *each) for each in product(NARROW, TOKENS, HEAD_SIZES, (False, True), FAR, FAR)]
    for dtype in FLOATS:
        made += [_embed(target, dtype, *each) for each in product(HIDDEN, FAR)]
        made += [_sum(target, dtype, hidden, dtype, 1) for hidden in HIDDEN]
        parts = PARTS if dtype in NARROW else ()
        made += [_sum(target, dtype, hidden, F32, count) for hidden, count in product(HIDDEN, parts)]
        made += [_head_norm(target, dtype, *each) for each in product(HEADS, (1, 2))]
        made += [_rotary(target, dtype, head) for head in HEADS]
        made += [_silu(target, dtype, size) for size in (14336, 1000)]
    return once(each for each in made if each is not None)


def sampling_configurations(target: Target) -> list[Configuration]:
    """What the sampler and small copies can launch on `target`, equal ones once. Vocabularies: up to 262,144."""
    made: list[Configuration] = []
    for vocab, far in itertools.product(VOCABS, FAR):
        with recorded(target) as launched:
            _choose(vocab, far, target.chained)
        scan, settle = launched
        for name, each in (("scan", scan), ("settle", settle)):
            made.append(Configuration(f"choice: {name} {vocab}{' far' * far}", each, False))
    packed, last_token = _numbers(4, 1, dtype=torch.int32), _numbers(1, dtype=torch.int64)
    made.append(_configuration(target, "choice: feed", lambda: feed_tokens(packed, last_token)))
    for count in COPIED:
        numbers = _numbers(count, dtype=torch.int32)
        made.append(_configuration(target, f"copy {count}", partial(copy_numbers, numbers, numbers)))
    return once(made)


def _choose(vocab: int, far: bool, overlap: bool) -> None:
    rows = 1 + FAR_BYTES // (4 * vocab) if far else 1
    slots, packed = _numbers(rows, dtype=torch.int64), _numbers(3 * rows, dtype=torch.int32)
    values = _numbers(rows, len(COLUMNS), dtype=torch.float64)
    choose_tokens(_numbers(rows, vocab, dtype=F32), slots, slots, values, slots, slots, slots, packed, overlap)


def _product(
    target: Target, dtype: torch.dtype, tokens: int, sizes: tuple[int, int], use: str, biased: bool, far: bool
) -> Configuration | None:
    (n, k), gated = sizes, use == "gated"
    tiles = choose_tiles(tokens, n, k, target, divisible=use == "parts", gated=gated)
    if tiles is None:
        return None
    x, weight = _numbers(tokens, k, dtype=dtype), _weight(2 * n if gated else n, k, dtype, far)
    bias = _numbers(len(weight), dtype=dtype) if biased else None
    result = F32 if use in ("wide", "parts") else dtype
    return _configuration(
        target,
        f"linear {DTYPE_NAMES[dtype]} {tokens} x {k} x {n} {use}{' biased' * biased}{' far' * far}",
        lambda: linear_parts(x, weight, bias, tiles, result, gated=gated, overlap=target.chained),
        matrix=True,
    )


def _project(
    target: Target, dtype: torch.dtype, tokens: int, head_size: int, biased: bool, far: bool, far_cache: bool
) -> Configuration | None:
    k, heads, kv_heads = 4096, 4, 1
    tiles = choose_tiles(tokens, 6 * head_size, k, target, divisible=False, gated=False)
    if tiles is None:
        return None
    x, weight = _numbers(tokens, k, dtype=dtype), _weight((heads + 2 * kv_heads) * head_size, k, dtype, far)
    bias = _numbers(len(weight), dtype=dtype) if biased else None
    angles, slots = _numbers(tokens, head_size, dtype=dtype), _numbers(tokens, dtype=torch.int32)
    cache = _weight(16, kv_heads * head_size, dtype, far_cache).view(1, 16, kv_heads, head_size)
    layer = KvLayer(cache, cache)
    return _configuration(
        target,
        f"project {DTYPE_NAMES[dtype]} {tokens} x {k}, heads of {head_size}"
        f"{' biased' * biased}{' far' * far}{' to far' * far_cache}",
        lambda: project(x, weight, bias, angles, angles, layer, slots, tiles, overlap=target.chained),
        matrix=True,
    )


def _embed(target: Target, dtype: torch.dtype, hidden: int, far: bool) -> Configuration:
    tokens, table, weight = (
        _numbers(1, dtype=torch.int64),
        _weight(2, hidden, dtype, far),
        _numbers(hidden, dtype=dtype),
    )
    return _configuration(
        target,
        f"embed, norm {DTYPE_NAMES[dtype]} {hidden}{' far' * far}",
        lambda: norm.embed_norm(tokens, table, weight, 1e-5, target.chained, target.warp_size),
    )


def _sum(target: Target, dtype: torch.dtype, hidden: int, added: torch.dtype, parts: int) -> Configuration:
    addend = _numbers(parts, 1, hidden, dtype=added)
    residual, weight = _numbers(1, hidden, dtype=dtype), _numbers(hidden, dtype=dtype)
    return _configuration(
        target,
        f"sum of {parts} {DTYPE_NAMES[added]}, norm {DTYPE_NAMES[dtype]} {hidden}",
        lambda: norm.add_norm(addend, residual, weight, 1e-5, target.chained, target.warp_size),
    )


def _head_norm(target: Target, dtype: torch.dtype, head: int, heads: int) -> Configuration:
    kv_heads = 1
    projected, weight = _numbers(1, (heads + 2 * kv_heads) * head, dtype=dtype), _numbers(head, dtype=dtype)
    return _configuration(
        target,
        f"head norm {DTYPE_NAMES[dtype]} {heads} + {kv_heads} x {head}",
        lambda: norm.head_norm(projected, weight, weight, heads, kv_heads, 1e-5, target.chained, target.warp_size),
    )


def _rotary(target: Target, dtype: torch.dtype, head: int) -> Configuration:
    positions, frequencies = _numbers(1, dtype=torch.int64), _numbers(head // 2, dtype=F32)
    return _configuration(
        target,
        f"rotary {DTYPE_NAMES[dtype]} {head}",
        lambda: rotary.rotary(positions, frequencies, 1.0, dtype, target.chained),
    )


def _silu(target: Target, dtype: torch.dtype, size: int) -> Configuration:
    gate_up = _numbers(1, 2 * size, dtype=dtype)
    label = f"silu {DTYPE_NAMES[dtype]} {size}"
    return _configuration(target, label, lambda: activation.silu_mul(gate_up, target.chained))


def _configuration(target: Target, label: str, launch: Callable[[], object], matrix: bool = False) -> Configuration:
    with recorded(target) as launched:
        launch()
    assert len(launched) == 1, label
    return Configuration(label, launched[0], matrix)


def _weight(rows: int, columns: int, dtype: torch.dtype, far: bool) -> torch.Tensor:
    """[rows, columns]. far: of a storage of 2 GiB or more."""
    size = max(rows * columns, FAR_BYTES // dtype.itemsize if far else 0)
    return _numbers(size, dtype=dtype)[: rows * columns].view(rows, columns)


def _numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels of decoder layers for GPUs that are not here.")
    names = [name for name, target in TARGETS.items() if target.backend != "cpu"]
    parser.add_argument("--target", nargs="*", choices=names, default=names)
    failures = 0
    for name in parser.parse_args().target:
        for configuration in layer_configurations(TARGETS[name]) + sampling_configurations(TARGETS[name]):
            try:
                print(compile_one(configuration, TARGETS[name]).line(), flush=True)
            except Exception as error:  # noqa: BLE001 - the compiler raises what it likes; the others are wanted too
                failures += 1
                print(f"{name:8} {configuration.label:52} FAILED: {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
