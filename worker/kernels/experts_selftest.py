"""Self-test of the experts' kernels against plain torch, on the serving device and weights; see selftest.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kvforge.worker.device.check import require_right
from kvforge.worker.device.device import WAY_OUT, Device

from .expert_sort import RANKED_MAX, sort_by_expert
from .experts import Experts
from .fused import FusedOperations
from .interface import LayerOperations
from .launching import LaunchSettings
from .plain import PlainOperations
from .router import Router
from .selftest import TOLERANCE

CHOSEN = 4  # experts per token
TOKENS = (1, 9, 300)  # one per kind of block
BLOCK = 16


@torch.inference_mode()
def experts_test(experts: Experts, device: Device) -> None:
    """Test the router, the sort, and the products of a layer's experts.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    count, width = len(experts.matrices.up), min(CHOSEN, len(experts.matrices.up))
    for tokens in TOKENS:
        shape = f"{tokens} tokens, {count} experts"
        checks: tuple[tuple[str, Callable[..., str]], ...] = (
            ("router", _compare_routes),
            ("sort by expert", _compare_sorts),
            ("experts", _compare_experts),
        )
        for kernel, check in checks:
            require_right(device, kernel, shape, partial(check, experts, tokens, width, device.torch_device), WAY_OUT)
    many = f"{RANKED_MAX // width + 1} tokens, {count} experts"
    check = partial(_compare_sorts, experts, RANKED_MAX // width + 1, width, device.torch_device)
    require_right(device, "sort by expert", many, check, WAY_OUT)


def _compare_routes(experts: Experts, tokens: int, width: int, device: torch.device) -> str:
    count = len(experts.matrices.up)
    logits = _random(tokens, count, device=device)
    bias, factors = _random(1, count, device=device)[0], _random(1, count, device=device)[0]
    routers = [
        Router(width, normalises=True, dtype=torch.bfloat16),
        Router(width, scores="", weights="softmax"),
        Router(width, scores="sigmoid", normalises=True, sum_added=1e-20, scaling=2.5),
    ]
    if count % 2 == 0 and count // 2 >= width:
        routers.append(Router(width, scores="sigmoid", groups=2, groups_chosen=1))
    gated: list[torch.Tensor] = []
    if shared := experts.matrices.shared:
        assert experts.matrices.shared_up is not None
        hidden, dtype = experts.matrices.shared_up.shape[1], experts.matrices.shared_up.dtype
        gated = [_random(rows, hidden, device=device).to(dtype) / hidden**0.5 for rows in (tokens, 1)]
        routers += [replace(each, shared=shared) for each in routers[:2]]
    for router in routers:
        given = gated if router.shared else []
        (chosen, weights), (wanted, factors_wanted) = (
            each.route(logits, router, bias, factors, *given) for each in (experts.operations, PlainOperations())
        )
        if not torch.equal(chosen, wanted):
            return "it chooses other experts than the reference"
        if problem := _difference(weights, factors_wanted, 1e-2):
            return problem
    return ""


def _compare_sorts(experts: Experts, tokens: int, width: int, device: torch.device) -> str:
    count, shared = len(experts.matrices.up), experts.matrices.shared
    chosen = _with_shared(_random(tokens, count, device=device).topk(width).indices.int(), count, shared)
    if tokens == 1:
        return ""
    operations = experts.operations
    assert isinstance(operations, FusedOperations), "the kernels run"
    found = sort_by_expert(LaunchSettings(operations.target), chosen, count, BLOCK, shared)
    wanted, places = chosen.flatten().sort(stable=True)
    if not torch.equal(found.order.long(), places):
        return "the pairs have another order than the reference's"
    blocks = found.blocks.cpu().tolist()
    ranges = [(expert, begin, end) for expert, begin, end, _ in blocks if expert >= 0]
    expected = []
    sizes = wanted.bincount(minlength=count + shared).tolist()
    for expert in (*range(count, count + shared), *range(count)):  # blocks of shared experts come first
        size = sizes[expert]
        first = sum(sizes[:expert])
        expected += [(expert, at, min(at + BLOCK, first + size)) for at in range(first, first + size, BLOCK)]
    return "" if ranges == expected else "the blocks are not the reference's"


def _compare_experts(experts: Experts, tokens: int, width: int, device: torch.device) -> str:
    down, activation = experts.matrices.down, experts.activation
    assert isinstance(down, torch.Tensor) and activation is not None
    numbers = torch.full((tokens + 3, down.shape[1]), float("nan"), dtype=down.dtype, device=device)
    x = numbers[:tokens].copy_(_random(tokens, down.shape[1], device=device))
    weights, chosen = _random(tokens, len(down), device=device).softmax(-1).topk(width)
    shared = experts.matrices.shared
    chosen = _with_shared(chosen, len(down), shared)
    weights = torch.cat((weights, weights.new_full((tokens, shared), 0.5)), dim=1)

    def run(operations: LayerOperations) -> torch.Tensor:
        return operations.experts(x, chosen, weights, experts.matrices, activation, experts.interleaved)

    return _difference(run(experts.operations), run(PlainOperations()), TOLERANCE[down.dtype])


def _with_shared(chosen: torch.Tensor, count: int, shared: int) -> torch.Tensor:
    """Append the shared experts to the choices of all tokens."""
    numbers = torch.arange(count, count + shared, dtype=chosen.dtype, device=chosen.device)
    return torch.cat((chosen, numbers.expand(len(chosen), -1)), dim=1)


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    return torch.randn((rows, columns), generator=generator, device=device)


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    difference = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6))
    if not difference <= tolerance:
        return f"it differs from the reference by {difference:.1e} of the largest number"
    return ""
