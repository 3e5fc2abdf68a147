"""Compiles the kernels of this package for GPUs that are not here, as `worker.attention.aot` does those of attention.

    python -m worker.kernels.aot [--target gfx942 ...]

prints a line for each configuration that `FusedOperations` can launch; the exit status is 1 where one does not compile.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import triton

from worker.attention.aot import Configuration, compile_one
from worker.attention.targets import TARGETS, Target

from . import activation, norm, rotary
from .linear import choose_tiles, linear_constants, linear_kernel

NARROW = ("bf16", "fp16")
FLOATS = (*NARROW, "fp32")
HIDDEN = 4096
TOKENS = (1, 32, 64)
# n, k, may be left in parts, gated, biased: the products of a layer and of the head, and sizes that no tile divides.
PRODUCTS = (
    (6144, 4096, False, False, True),
    (4096, 14336, True, False, False),
    (14336, 4096, False, True, False),
    (128256, 4096, False, False, False),
    (1000, 1000, True, False, True),
    (1000, 1000, False, True, True),
)


def layer_configurations(target: Target) -> list[Configuration]:
    """Every kernel and dtype; the products with every choice of tiles, equal ones once."""
    found = [_product(target, dtype, tokens, *p) for dtype, tokens, p in itertools.product(NARROW, TOKENS, PRODUCTS)]
    found += [each for dtype in FLOATS for each in _elementwise(target, dtype)]
    return [each for each in found if each is not None]


def _product(
    target: Target, dtype: str, tokens: int, n: int, k: int, divisible: bool, gated: bool, biased: bool
) -> Configuration | None:
    tiles = choose_tiles(tokens, n, k, target, divisible=divisible, gated=gated)
    if tiles is None:
        return None
    overlap = target.backend == "cuda"
    constants = linear_constants(n, k, tiles, biased=biased, gated=gated, overlap=overlap) | {"OVERLAP": overlap}
    return Configuration(
        label=f"linear {dtype} {tokens} x {k} x {n}{' parts' * divisible}{' gated' * gated}",
        kernel=linear_kernel,
        pointers=dict.fromkeys(("x", "weight", "bias"), dtype) | {"output": "fp32" if divisible else dtype},
        constants=constants,
        warps=tiles.warps,
        stages=tiles.stages,
        matrix=True,
    )


def _elementwise(target: Target, dtype: str) -> list[Configuration]:
    overlap = {"OVERLAP": target.backend == "cuda"}
    rows = {"BLOCK": HIDDEN}
    head = {"HEADS": 32, "BLOCK": 128}

    def one(name: str, kernel: Any, pointers: tuple[str, ...], constants: dict[str, Any], warps: int) -> Configuration:
        named = dict.fromkeys(pointers, dtype) | dict.fromkeys(("tokens", "positions"), "i32")
        named = {name: kind for name, kind in named.items() if name in kernel.arg_names}
        return Configuration(f"{name} {dtype}", kernel, named, constants, warps, stages=1, matrix=False)

    norm_warps = norm.warps_of(HIDDEN)
    found = [
        one("embed, norm", norm.embed_norm_kernel, ("table", "weight", "residual", "output"), rows, norm_warps),
        one(
            "head norm",
            norm.head_norm_kernel,
            ("projected", "query_weight", "key_weight"),
            head | overlap,
            norm.warps_of(128),
        ),
        one("silu", activation.silu_mul_kernel, ("gate_up", "output"), {"BLOCK": activation.BLOCK}, activation.WARPS),
    ]
    for parts in (1, 2):
        each = one(
            f"sum of {parts}, norm",
            norm.add_norm_kernel,
            ("residual", "weight", "output"),
            rows | overlap | {"PARTS": parts},
            norm_warps,
        )
        each.pointers["addend"] = dtype if parts == 1 else "fp32"
        found.append(each)
    each = one("rotary", rotary.rotary_kernel, ("cosines", "sines"), {"BLOCK": triton.next_power_of_2(64)}, 1)
    each.pointers["frequencies"] = "fp32"
    return [*found, each]


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
