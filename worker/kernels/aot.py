"""Compiles the kernels of this package for GPUs that are not here, as `worker.attention.aot` does those of attention.

    python -m worker.kernels.aot [--target gfx942 ...]

prints a line for each configuration that `FusedOperations` can launch; the exit status is 1 where one does not compile.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from worker.attention.aot import Configuration, compile_one
from worker.attention.targets import HEAD_CLASSES, TARGETS, Target

from . import HIDDEN_MAX, activation, norm, rotary
from .linear import OTHER_PARTS_MAX, choose_tiles, linear_constants, linear_kernel
from .project import HEAD_SIZES, project_constants, project_kernel

NARROW = ("bf16", "fp16")
FLOATS = (*NARROW, "fp32")
# Factors: what the dispatcher passes on.
TOKENS = (1, 32, 64)
SIZES = ((6144, 4096), (4096, 14336), (14336, 4096), (128256, 4096), (1000, 1000))  # n, k: the last divided by no tile
USES = ("whole", "wide", "parts", "gated")  # what comes of a product: as it is, float32, parts of a sum, or gated
HIDDEN = tuple(1 << exponent for exponent in range(norm.BLOCK_MIN.bit_length() - 1, HIDDEN_MAX.bit_length()))
PARTS = (1, 2, 3, OTHER_PARTS_MAX)


def layer_configurations(target: Target) -> list[Configuration]:
    """What `FusedOperations` can launch on `target`, equal ones once."""
    product = itertools.product
    made: list[Configuration | None] = [
        _product(target, *each) for each in product(NARROW, TOKENS, SIZES, USES, (False, True))
    ]
    made += [_project(target, *each) for each in product(NARROW, TOKENS, HEAD_SIZES, (False, True))]
    for dtype in FLOATS:
        made += [_embed(target, dtype, hidden) for hidden in HIDDEN]
        made += [_sum(target, dtype, each, dtype, 1) for each in HIDDEN]
        parts = PARTS if dtype in NARROW else ()
        made += [_sum(target, dtype, hidden, "fp32", count) for hidden, count in product(HIDDEN, parts)]
        made += [make(target, dtype, head) for head in HEAD_CLASSES for make in (_head_norm, _rotary)]
        made.append(_silu(target, dtype))
    return list({each.kind(): each for each in reversed(made) if each is not None}.values())[::-1]


def _product(
    target: Target, dtype: str, tokens: int, sizes: tuple[int, int], use: str, biased: bool
) -> Configuration | None:
    (n, k), gated, overlap = sizes, use == "gated", target.chained
    tiles = choose_tiles(tokens, n, k, target, divisible=use == "parts", gated=gated)
    if tiles is None:
        return None
    tile = {"x_tiles": tiles.tokens, "weight_tiles": tiles.rows}
    described = {name: f"tensordesc<{dtype}[{rows}, {tiles.depth}]>" for name, rows in tile.items()}
    return Configuration(
        label=f"linear {dtype} {tokens} x {k} x {n} {use}{' biased' * biased}",
        kernel=linear_kernel,
        pointers=dict.fromkeys(("x", "weight", "bias"), dtype)
        | {"output": "fp32" if use in ("wide", "parts") else dtype}
        | (described if tiles.described else {}),
        constants=linear_constants(n, k, tiles, biased=biased, gated=gated, overlap=overlap)
        | {"OVERLAP": overlap}
        | ({} if tiles.described else dict.fromkeys(tile)),
        warps=tiles.warps,
        stages=tiles.stages,
        matrix=True,
    )


def _project(target: Target, dtype: str, tokens: int, head_size: int, biased: bool) -> Configuration | None:
    k, overlap = 4096, target.chained
    tiles = choose_tiles(tokens, 6 * head_size, k, target, divisible=False, gated=False)
    if tiles is None:
        return None
    return Configuration(
        label=f"project {dtype} {tokens} x {k}, heads of {head_size}{' biased' * biased}",
        kernel=project_kernel,
        pointers=dict.fromkeys(("x", "weight", "bias", "cosines", "sines", "query", "keys", "values"), dtype)
        | {"slots": "i32"},
        constants=project_constants(k, head_size, tiles, biased=biased, overlap=overlap) | {"OVERLAP": overlap},
        warps=tiles.warps,
        stages=tiles.stages,
        matrix=True,
    )


def _embed(target: Target, dtype: str, hidden: int) -> Configuration:
    pointers = dict.fromkeys(("table", "weight", "residual", "output"), dtype) | {"tokens": "i32"}
    block = norm.block_of(hidden)
    warps = norm.warps_of(block, target.warp_size)
    constants = {"BLOCK": block, "OVERLAP": target.chained}
    return _elementwise(f"embed, norm {dtype} {hidden}", norm.embed_norm_kernel, pointers, constants, warps)


def _sum(target: Target, dtype: str, hidden: int, added: str, parts: int) -> Configuration:
    pointers = dict.fromkeys(("residual", "weight", "output"), dtype) | {"addend": added}
    block = norm.block_of(hidden)
    constants = {"PARTS": parts, "BLOCK": block, "OVERLAP": target.chained}
    label = f"sum of {parts} {added}, norm {dtype} {hidden}"
    return _elementwise(label, norm.add_norm_kernel, pointers, constants, norm.warps_of(block, target.warp_size))


def _head_norm(target: Target, dtype: str, head: int) -> Configuration:
    pointers = dict.fromkeys(("projected", "query_weight", "key_weight"), dtype)
    constants = {"HEADS": 32, "BLOCK": head, "OVERLAP": target.chained}
    warps = norm.warps_of(head, target.warp_size)
    return _elementwise(f"head norm {dtype} {head}", norm.head_norm_kernel, pointers, constants, warps)


def _rotary(target: Target, dtype: str, head: int) -> Configuration:
    pointers = {"positions": "i32", "frequencies": "fp32", "cosines": dtype, "sines": dtype}
    constants = {"BLOCK": head // 2, "OVERLAP": target.chained}
    return _elementwise(f"rotary {dtype} {head}", rotary.rotary_kernel, pointers, constants, 1)


def _silu(target: Target, dtype: str) -> Configuration:
    pointers = dict.fromkeys(("gate_up", "output"), dtype)
    constants = {"BLOCK": activation.BLOCK, "OVERLAP": target.chained}
    return _elementwise(f"silu {dtype}", activation.silu_mul_kernel, pointers, constants, activation.WARPS)


def _elementwise(
    label: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int
) -> Configuration:
    return Configuration(label, kernel, pointers, constants, warps, stages=1, matrix=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels of decoder layers for GPUs that are not here.")
    names = [name for name, target in TARGETS.items() if target.backend != "cpu"]
    parser.add_argument("--target", nargs="*", choices=names, default=names)
    failures = 0
    for name in parser.parse_args().target:
        for configuration in layer_configurations(TARGETS[name]):
            try:
                print(compile_one(configuration, TARGETS[name]).line(), flush=True)
            except Exception as error:  # noqa: BLE001 - the compiler raises what it likes; the others are wanted too
                failures += 1
                print(f"{name:8} {configuration.label:52} FAILED: {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
