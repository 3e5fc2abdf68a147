"""Configurations of the experts' kernels: the layouts, routers and sizes of the models that people run.

Others are compiled on first use: further numbers of experts and choices, activations, and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from kvforge.worker.device.target import Target
from kvforge.worker.kernels.activations import SILU, Activation
from kvforge.worker.kernels.expert_sort import FEW, RANKED_MAX, Blocks, sort_by_expert
from kvforge.worker.kernels.grouped import Gating, multiply_down, multiply_up, sum_places
from kvforge.worker.kernels.grouped_tiles import tiles_for, tokens_per_block
from kvforge.worker.kernels.linear import SHORT_PARTS_MAX
from kvforge.worker.kernels.router import Router
from kvforge.worker.kernels.router_kernel import route

from .compilation import BF16, DTYPE_NAMES, F16, F32, FAR_BYTES, Configuration, distinct, launched_on, meta_tensor
from .specialise import recorded

FLOATS = (BF16, F16, F32)


@dataclass(frozen=True)
class Layout:
    """A layout of experts.

    oss: gpt-oss's activation, transposed weights and biases. shared: whether a shared expert is beside them.
    """

    hidden: int
    inner: int
    oss: bool = False
    shared: bool = False


EVEN, UNEVEN, OSS = Layout(2048, 768), Layout(1000, 1000), Layout(2880, 2880, oss=True)
SHARED = Layout(2048, 768, shared=True)
USES = (*product((BF16, F16), (EVEN, SHARED)), (BF16, UNEVEN), (BF16, OSS), (F32, EVEN), (F32, SHARED))
EXPERTS = (8, 32, 128, 256, 512)
CHOSEN = (2, 4, 8)
SUMMED = (*CHOSEN, 9)  # with a shared expert of ranks
OSS_GATING = Gating(Activation("clamped_swiglu", 1.702, 7.0), interleaved=True)
ROUTERS = {
    "of Qwen3": (Router(8, normalises=True, dtype=BF16), 128, BF16, False),
    "of Mixtral": (Router(2, normalises=True), 8, BF16, False),
    "of gpt-oss": (Router(4, scores="", weights="softmax", dtype=BF16), 32, BF16, False),
    "of DeepSeek V2": (Router(6, groups=8, groups_chosen=3, group_best=1, scaling=16.0), 160, F32, False),
    "of DeepSeek V3": (
        Router(8, "sigmoid", groups=8, groups_chosen=4, normalises=True, sum_added=1e-20, scaling=2.5),
        256,
        F32,
        True,
    ),
    "of GLM-4": (Router(8, "sigmoid", normalises=True, sum_added=1e-20), 128, F32, True),
    "of Llama 4": (Router(1, scores="", weights="sigmoid", dtype=BF16), 16, BF16, False),
    "of Qwen3.5": (Router(8, normalises=True, dtype=BF16, shared=1), 256, BF16, False),
    "of Qwen3-Next": (Router(10, normalises=True, dtype=BF16, shared=1), 512, BF16, False),
}
LOGITS = (0, 1, SHORT_PARTS_MAX)  # parts of logits, in float32; 0: rounded by their product
GATES = {"of Qwen3.5": 2048, "of Qwen3-Next": 2048}  # hidden sizes of routers with a gate of the shared expert


def route_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `route_kernel` on `target`."""
    made = [_route(target, name, parts) for name in ROUTERS for parts in LOGITS if parts < 2 or target.hopper]
    return distinct(each for each in made if each is not None)


def rank_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `rank_kernel` on `target`."""
    return distinct(
        _sort(target, *each) for each in product(EXPERTS, _block_sizes(target), (FEW // 8, RANKED_MAX // 8))
    )


def divide_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `divide_kernel` on `target`."""
    return distinct(_sort(target, *each, RANKED_MAX // 8 + 1) for each in product(EXPERTS, _block_sizes(target)))


def grouped_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `grouped_kernel` on `target`."""
    made: list[Configuration] = []
    for dtype, layout in USES:
        sizes = (16,) if layout == UNEVEN else _block_sizes(target, dtype)
        for tokens in (0, *sizes):
            made += _products(target, dtype, layout, tokens, far=False)
    for tokens in (0, *_block_sizes(target)):
        made += _products(target, BF16, EVEN, tokens, far=True)
    return distinct(made)


def sum_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `sum_kernel` on `target`."""
    return distinct(_sum(target, *each) for each in product(FLOATS, SUMMED, (2048, 1000)))


def _block_sizes(target: Target, dtype: torch.dtype = BF16) -> list[int]:
    return sorted({tokens_per_block(pairs, 8, dtype, target) for pairs in (8, 80, 300, 4096)})


def _route(target: Target, name: str, parts: int) -> Configuration | None:
    router, experts, dtype, biased = ROUTERS[name]
    if dtype == F32 and parts:  # weights in float32 have a kernel of their own
        return None
    logits = meta_tensor(max(1, parts), 1, experts, dtype=F32 if parts else dtype)
    bias = meta_tensor(experts, dtype=F32) if biased else None
    given = [meta_tensor(1, GATES.get(name, 8), dtype=dtype) for _ in range(1 + (name in GATES))]
    label = f"route {name}" + (f" {parts} parts" if parts else "")
    return _one(
        target,
        label,
        lambda: route(launched_on(target), logits[0] if dtype == F32 else logits, router, bias, None, *given),
    )


def _sort(target: Target, experts: int, tokens: int, rows: int) -> Configuration:
    chosen = meta_tensor(rows, 8, dtype=torch.int32)
    label = f"sort {8 * rows} pairs of {experts} experts by {tokens}"
    return _one(target, label, lambda: sort_by_expert(launched_on(target), chosen, experts, tokens))


def _sum(target: Target, dtype: torch.dtype, width: int, n: int) -> Configuration:
    parts, chosen = meta_tensor(width, 1, n, dtype=dtype), meta_tensor(1, width, dtype=torch.int32)
    label = f"sum of {width} experts {DTYPE_NAMES[dtype]} {n}"
    return _one(target, label, lambda: sum_places(launched_on(target), parts, chosen))


def _products(target: Target, dtype: torch.dtype, layout: Layout, tokens: int, far: bool) -> Iterator[Configuration]:
    """Yield both products. tokens: pairs of a block; 0: a single token."""
    experts, width, hidden, inner = 8, 2, layout.hidden, layout.inner
    alone, rows = tokens == 0, 1 if tokens == 0 else 2
    chosen = meta_tensor(rows, width, dtype=torch.int32)
    pairs = Blocks(chosen, chosen, width, alone=True) if alone else Blocks(chosen, chosen, 4, alone=False)
    first = _weight(experts, 2 * inner, hidden, dtype, layout.oss, far)
    second = _weight(experts, hidden, inner, dtype, layout.oss, far)
    biases = [meta_tensor(experts, each.shape[1], dtype=dtype) if layout.oss else None for each in (first, second)]
    gating = OSS_GATING if layout.oss else Gating(SILU)
    tiles = [tiles_for(max(16, tokens), each.shape[1], each.shape[2], dtype, target) for each in (first, second)]
    block = [
        meta_tensor(*each, dtype=dtype) if layout.shared else None for each in ((2 * inner, hidden), (hidden, inner))
    ]
    x, inside = meta_tensor(rows, hidden, dtype=dtype), meta_tensor(rows * width, inner, dtype=dtype)
    weights = meta_tensor(rows, width, dtype=F32)
    label = f"experts {DTYPE_NAMES[dtype]} {hidden} x {inner}{' gpt-oss' * layout.oss}{' far' * far}"
    label += " beside a shared one" * layout.shared
    label += " one token" if alone else f" by {tokens}"
    launch = launched_on(target)
    matrix = bool(target.matrix) and (dtype != F32 or target.matrix == "v_mfma")
    yield _one(
        target,
        f"{label} up",
        lambda: multiply_up(launch, x, first, biases[0], gating, pairs, width, tiles[0], block[0]),
        matrix,
    )
    yield _one(
        target,
        f"{label} down",
        lambda: multiply_down(launch, inside, second, biases[1], weights, pairs, tiles[1], block[1]),
        matrix,
    )


def _weight(experts: int, rows: int, k: int, dtype: torch.dtype, transposed: bool, far: bool) -> torch.Tensor:
    """Return [experts, rows, k], or a view of [experts, k, rows]. far: part of a storage of 2 GiB or more."""
    size = experts * rows * k
    whole = meta_tensor(max(size, FAR_BYTES // dtype.itemsize if far else 0), dtype=dtype)[:size]
    return whole.view(experts, k, rows).transpose(1, 2) if transposed else whole.view(experts, rows, k)


def _one(target: Target, label: str, launch: Callable[[], object], matrix: bool = False) -> Configuration:
    with recorded(target) as launched:
        launch()
    assert len(launched) == 1, label
    return Configuration(label, launched[0], matrix)
