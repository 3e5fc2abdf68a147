"""Configurations of the products with weights in codes: the layouts that published formats become, in common sizes.

Others are compiled on first use: further activations and biases, and columns that a step of 64 or 32 divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from kvforge.worker.attention import KvLayer
from kvforge.worker.device.target import Target
from kvforge.worker.kernels.activations import SILU
from kvforge.worker.kernels.code_tables import WORDS, span_of, unit_columns
from kvforge.worker.kernels.expert_sort import Blocks
from kvforge.worker.kernels.grouped import Gating
from kvforge.worker.kernels.project import HEAD_SIZES
from kvforge.worker.kernels.stored import Codes
from kvforge.worker.kernels.stored_experts import stored_block_tokens, stored_down, stored_up
from kvforge.worker.kernels.stored_linear import stored_linear
from kvforge.worker.kernels.stored_project import project_codes

from .compilation import BF16, DTYPE_NAMES, F16, F32, Configuration, distinct, launched_on, meta_tensor
from .experts import OSS_GATING
from .specialise import recorded

I16 = torch.int16
EXTRA_TYPES = {"zeros": torch.uint8, "lows": F32, "factors": torch.int32, "exponents": torch.int32}


@dataclass(frozen=True)
class CodeLayout:
    """A layout of codes. group: columns of a group; 0: all. extra: see `Codes`. shared: rows that share a scale."""

    code: str
    group: int
    extra: str = ""
    shared: int = 1

    def __str__(self) -> str:
        """Return a label."""
        group = f" by {self.group}" if self.group else ""
        extra = f" {self.extra}" if self.extra else ""
        return f"{self.code}{group}{extra}{f' blocks of {self.shared}' * (self.shared > 1)}"

    def codes(self, n: int, k: int, experts: tuple[int, ...] = ()) -> Codes:
        """Return codes without memory."""
        groups, units = k // self.group if self.group else 1, k // unit_columns(self.code)
        span = span_of(self.code, k, groups)
        words = meta_tensor(*experts, units // span, n, span * WORDS, dtype=I16)
        scales = meta_tensor(*experts, groups, -(-n // self.shared), dtype=F32)
        rows = {"factors": units, "exponents": -(-units // 2)}.get(self.extra, groups)
        extras: dict[str, Any] = (
            {self.extra: meta_tensor(*experts, rows, n, dtype=EXTRA_TYPES[self.extra])} if self.extra else {}
        )
        return Codes(self.code, words, scales, scaled_rows=self.shared, **extras)


MXFP4 = CodeLayout("e2m1", 0, extra="exponents")
LAYOUTS = (
    *(CodeLayout("int8", 0), CodeLayout("e4m3", 0), CodeLayout("e4m3", 128, shared=128), CodeLayout("e4m3", 128)),
    *(CodeLayout("int4", 128), CodeLayout("int4", 128, extra="zeros"), CodeLayout("int4", 64), CodeLayout("int4", 32)),
    *(MXFP4, CodeLayout("e2m1", 0, extra="factors"), CodeLayout("nf4", 64)),
)
# Only the products of one token and of many; llama.cpp's Q4_K_M has the first two. mxfp4 has scales of 32 bits only
# where products with those of 8 are not exact.
RARE = (
    *(CodeLayout("int4", 32, extra="lows"), CodeLayout("int8", 16), CodeLayout("iq4", 32)),
    *(CodeLayout("int8", 32), CodeLayout("int8", 32, extra="lows"), CodeLayout("int8", 16, extra="lows")),
    CodeLayout("e2m1", 32),
)
HALF = (CodeLayout("int4", 128, extra="zeros"), CodeLayout("e4m3", 0))  # published in float16 too
BIASED = (CodeLayout("int4", 128, extra="zeros"), CodeLayout("e4m3", 0))
OF_EXPERTS = (
    *(CodeLayout("int8", 0), CodeLayout("e4m3", 0), CodeLayout("e4m3", 128, shared=128)),
    *(CodeLayout("int4", 128), MXFP4, CodeLayout("e2m1", 0, extra="factors"), CodeLayout("nf4", 64)),
)
WIDE = (CodeLayout("int8", 0), CodeLayout("e4m3", 0))  # of heads
# Of up to 16 tokens: `stored_hopper`.
OF_HOPPER = (
    *(CodeLayout("int4", 128), CodeLayout("int4", 128, extra="zeros"), CodeLayout("int4", 64)),
    *(CodeLayout("int4", 64, extra="zeros"), CodeLayout("nf4", 64)),
)
K, ODD_K, LONG = 4096, 2944, 14336
ROWS = {"gated": 28672, "wide": 128256}  # others 4096
TOKENS = (1, 32, 64, 300)
EXPERTS, WIDTH = 8, 2
HIDDEN, INNER = 2048, 768  # of experts
# Hidden and inner sizes in groups: even and odd numbers of steps, for few programs and for many.
HOPPER_EXPERTS = ((32, 12), (33, 11), (320, 160), (321, 161))
ODD_INNERS = (640, 1152)  # of 5 and 9 steps, with as many in a turn for one token as no even number has


def stored_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `stored_kernel` on `target`."""
    return _of("stored_kernel", _products(target))


def hopper_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `stored_hopper_kernel` on `target`."""
    return _of("stored_hopper_kernel", _products(target))


def stored_project_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `stored_project_kernel` on `target`."""
    return _of("stored_project_kernel", _projections(target))


def hopper_project_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `project_hopper_kernel` on `target`."""
    return _of("project_hopper_kernel", _projections(target))


def stored_experts_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `stored_experts_kernel` on `target`."""
    return _of("stored_experts_kernel", _mixtures(target))


def hopper_experts_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `experts_hopper_kernel` on `target`."""
    return _of("experts_hopper_kernel", _mixtures(target))


def _of(name: str, made: list[Configuration]) -> list[Configuration]:
    """Return the configurations of the kernel of that name. Hopper has two for the same operations."""
    return [each for each in made if each.specialisation.kernel.fn.__name__ == name]


def _products(target: Target) -> list[Configuration]:
    if target.backend == "cuda" and not target.matrix:
        return []
    made: list[Configuration] = []
    for tokens, layout in product(TOKENS, LAYOUTS):
        uses = ["whole", "parts", "gated", *(["biased"] if layout in BIASED else []), *(["wide"] * (layout in WIDE))]
        made += [_product(target, BF16, tokens, layout, use) for use in uses]
    for layout, tokens in product(RARE, (TOKENS[0], TOKENS[-1])):
        made.append(_product(target, BF16, tokens, layout, "gated"))
    for layout, use in product(HALF, ("whole", "parts", "gated")):
        made.append(_product(target, F16, 1, layout, use))
    if target.hopper:
        for layout, use in product(OF_HOPPER, ("whole", "parts", "gated", "biased")):
            made += [_product(target, BF16, tokens, layout, use) for tokens in (1, 16)]
            made.append(_product(target, BF16, 1, layout, use, ODD_K))
    return distinct(made)


def _projections(target: Target) -> list[Configuration]:
    if target.backend == "cuda" and not target.matrix:
        return []
    tokens = TOKENS[:3] if target.hopper else TOKENS[:1]
    made = [_project(target, BF16, *each) for each in product(tokens, LAYOUTS, HEAD_SIZES, (False, True))]
    made += [_project(target, F16, 1, layout, 128, biased) for layout, biased in product(HALF, (False, True))]
    if target.hopper:
        for count in (1, 16):
            made += [_project(target, BF16, count, *each) for each in product(OF_HOPPER, HEAD_SIZES, (False, True))]
    return distinct(made)


def _mixtures(target: Target) -> list[Configuration]:
    if target.backend == "cuda" and not target.matrix:
        return []
    sizes = sorted({stored_block_tokens(pairs, EXPERTS, target) for pairs in (8, 80, 300, 4096)})
    made: list[Configuration] = []
    for layout, tokens in product(OF_EXPERTS, (0, *sizes)):
        made += _experts(target, layout, tokens)
    for layout, inner in product(OF_EXPERTS, ODD_INNERS if target.hopper else ()):
        made += _experts(target, layout, 0, inner)
    for layout, (hidden, inner) in product(OF_HOPPER, HOPPER_EXPERTS if target.hopper else ()):
        made += _experts(target, layout, 0, inner * layout.group, hidden * layout.group)
    return distinct(made)


def _product(
    target: Target, dtype: torch.dtype, tokens: int, layout: CodeLayout, use: str, columns: int = K
) -> Configuration:
    n, k = ROWS.get(use, 4096), LONG if use == "parts" and columns == K else columns
    x, codes = meta_tensor(tokens, k, dtype=dtype), layout.codes(n, k)
    bias = meta_tensor(n, dtype=dtype) if use == "biased" else None
    result, gated, divisible = F32 if use == "wide" else dtype, use == "gated", use == "parts"
    label = f"codes {layout} {DTYPE_NAMES[dtype]} {tokens} {use}"
    launch = launched_on(target)
    return _one(target, label, lambda: stored_linear(launch, x, codes, bias, result, gated=gated, divisible=divisible))


def _project(
    target: Target, dtype: torch.dtype, tokens: int, layout: CodeLayout, head_size: int, biased: bool
) -> Configuration:
    heads, kv_heads = 4, 2
    n = (heads + 2 * kv_heads) * head_size
    x, angles = meta_tensor(tokens, K, dtype=dtype), meta_tensor(tokens, head_size, dtype=dtype)
    bias, slots = meta_tensor(n, dtype=dtype) if biased else None, meta_tensor(tokens, dtype=torch.int32)
    cache = meta_tensor(1, 16, kv_heads, head_size, dtype=dtype)
    label = f"codes projected {layout} {DTYPE_NAMES[dtype]} {tokens}, heads of {head_size}{' biased' * biased}"
    launch, layer = launched_on(target), KvLayer(cache, cache)
    return _one(target, label, lambda: project_codes(launch, x, layout.codes(n, K), bias, angles, angles, layer, slots))


def _experts(
    target: Target, layout: CodeLayout, tokens: int, inner: int = INNER, hidden: int = HIDDEN
) -> Iterator[Configuration]:
    """Yield both products. tokens: pairs of a block; 0: a single token. inner: size of an expert, but of gpt-oss."""
    is_oss, alone, rows = layout == MXFP4, tokens == 0, 1 if tokens == 0 else 2
    hidden, inner = (2880, 2880) if is_oss else (hidden, inner)
    chosen = meta_tensor(rows, WIDTH, dtype=torch.int32)
    pairs = Blocks(chosen, chosen, WIDTH, alone=True) if alone else Blocks(chosen, chosen, 4, alone=False)
    up, down = layout.codes(2 * inner, hidden, (EXPERTS,)), layout.codes(hidden, inner, (EXPERTS,))
    biases = [meta_tensor(EXPERTS, each.shape[-2], dtype=BF16) if is_oss else None for each in (up, down)]
    gating = OSS_GATING if is_oss else Gating(SILU)
    x, inside = meta_tensor(rows, hidden, dtype=BF16), meta_tensor(rows * WIDTH, inner, dtype=BF16)
    weights = meta_tensor(rows, WIDTH, dtype=F32)
    sizes = f" {inner}" * (inner in ODD_INNERS) if hidden == HIDDEN else f" {hidden} {inner}"
    label = f"codes of experts {layout} {'one token' if alone else f'by {tokens}'}{sizes}"
    launch, size = launched_on(target), max(16, tokens)
    yield _one(target, f"{label} up", lambda: stored_up(launch, x, up, biases[0], gating, pairs, WIDTH, size))
    yield _one(target, f"{label} down", lambda: stored_down(launch, inside, down, biases[1], weights, pairs, size))


def _one(target: Target, label: str, launch: Callable[[], object]) -> Configuration:
    with recorded(target) as launched:
        launch()
    assert len(launched) == 1, label
    return Configuration(label, launched[0], bool(target.matrix))
