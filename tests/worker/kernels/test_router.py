"""Routers choose what transformers' modules choose, in plain torch and as a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels.launching import LaunchSettings
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.router import AWAY, Router
from tests import emulated

pytest.importorskip("triton")

from triton import knobs

from kvforge.worker.kernels import router_kernel

has_kernels = knobs.runtime.interpret or bool(emulated.TARGET)
interpreted = pytest.mark.skipif(not has_kernels, reason="only under Triton's interpreter")
BF16 = torch.bfloat16
HIDDEN, TOKENS = 32, 20
FLOAT32 = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe")  # multiply by float32 weights
# Name: router of transformers, its configuration, ours, and whether a bias corrects the choice.
FAMILIES: dict[str, tuple[Any, str, dict[str, Any], Router, bool]] = {
    "qwen3_moe": (
        Qwen3MoeTopKRouter,
        "qwen3_moe",
        {"num_experts": 24, "num_experts_per_tok": 5, "norm_topk_prob": True},
        Router(5, normalises=True, dtype=BF16),
        False,
    ),
    "not normalised": (
        Qwen3MoeTopKRouter,
        "qwen3_moe",
        {"num_experts": 24, "num_experts_per_tok": 5, "norm_topk_prob": False},
        Router(5, dtype=BF16),
        False,
    ),
    "mixtral": (
        MixtralTopKRouter,
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        Router(2, normalises=True),
        False,
    ),
    "gpt_oss": (
        GptOssTopKRouter,
        "gpt_oss",
        {"num_local_experts": 32, "num_experts_per_tok": 4},
        Router(4, scores="", weights="softmax", dtype=BF16),
        False,
    ),
    "granitemoe": (
        GraniteMoeTopKRouter,
        "granitemoe",
        {"num_local_experts": 40, "num_experts_per_tok": 8},
        Router(8, scores="", weights="softmax", dtype=BF16),
        False,
    ),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        {
            "n_routed_experts": 24,
            "num_experts_per_tok": 4,
            "n_group": 6,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
        Router(4, groups=6, groups_chosen=2, group_best=1, scaling=1.5),
        False,
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        {"n_routed_experts": 24, "num_experts_per_tok": 4, "n_group": 6, "topk_group": 2, "norm_topk_prob": True},
        Router(4, "sigmoid", groups=6, groups_chosen=2, normalises=True, sum_added=1e-20, scaling=2.5),
        True,
    ),
    "minimax_m2": (
        MiniMaxM2TopKRouter,
        "minimax_m2",
        {"num_local_experts": 16, "num_experts_per_tok": 3},
        Router(3, "sigmoid", normalises=True),
        True,
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeTopKRouter,
        "ernie4_5_moe",
        {"moe_num_experts": 64, "moe_k": 6},
        Router(6, normalises=True, sum_min=1e-12, dtype=BF16),
        True,
    ),
}


def bias_of(part: Any) -> Any:
    if hasattr(part, "moe_statics"):
        return part.moe_statics.e_score_correction_bias.data.flatten()
    return part.e_score_correction_bias


@torch.no_grad()
def theirs(name: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return logits and bias of transformers' router, and the weight of each chosen expert."""
    kind, model_type, fields, _router, biased = FAMILIES[name]
    part = kind(AutoConfig.for_model(model_type, hidden_size=HIDDEN, **fields))
    generator = torch.Generator().manual_seed(3)
    for parameter in part.parameters():
        parameter.normal_(generator=generator)
    if name not in FLOAT32:
        part = part.to(BF16)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(BF16)
    if not biased:
        logits, weights, chosen = part(x)
        return logits, None, chosen, weights
    bias = torch.randn(len(part.weight), generator=generator) * 0.1
    if name == "minimax_m2":
        logits, weights, chosen = part(x, bias)
        return logits, bias, chosen, weights
    bias_of(part).copy_(bias)
    logits, weights, chosen = part(x)
    return logits, bias, chosen, weights


def by_expert(chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros(len(chosen), experts).scatter_(1, chosen.long(), weights.float())


def same(got: tuple[torch.Tensor, torch.Tensor], chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> bool:
    """Whether the same experts have the same weights, up to one rounding to bfloat16."""
    return torch.allclose(by_expert(*got, experts), by_expert(chosen, weights, experts), rtol=1e-2, atol=1e-6)


Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]
launch_route = partial(router_kernel.route, LaunchSettings(TARGETS["sm_90"]))
ROUTES = [
    pytest.param(PlainOperations().route, id="plain"),
    pytest.param(launch_route, id="kernel", marks=interpreted),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_router_is_that_of_transformers(name: str, route: Route) -> None:
    logits, bias, chosen, weights = theirs(name)
    got = route(logits, FAMILIES[name][3], bias)
    assert got[0].dtype == torch.int32 and got[1].dtype == torch.float32
    assert same(got, chosen, weights, logits.shape[1])


@pytest.mark.parametrize("route", ROUTES)
def test_equal_scores_choose_the_lowest_index(route: Route) -> None:
    logits = torch.zeros(3, 12)
    logits[1, 7] = logits[1, 4] = 1.0
    logits[2, :] = torch.tensor([0.0, -0.0] * 6)
    for router in (Router(3), Router(3, scores="", weights="softmax"), Router(3, "sigmoid")):
        assert route(logits, router)[0].tolist() == [[0, 1, 2], [4, 7, 0], [0, 1, 2]]
    grouped = route(logits, Router(3, "sigmoid", groups=3, groups_chosen=1))[0]
    assert grouped.tolist() == [[0, 1, 2], [4, 7, 5], [0, 1, 2]]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("parts", [1, 2, 15])
def test_logits_in_parts_are_added_in_order_and_rounded(parts: int, route: Route) -> None:
    """float16, because Triton's interpreter cuts off bits of bfloat16."""
    logits = torch.randn(parts, 9, 24, generator=torch.Generator().manual_seed(parts))
    total = reduce(torch.add, logits)
    router = Router(5, normalises=True)
    for x, added in ((None, total), (torch.zeros(9, 8, dtype=torch.float16), total.half().float())):
        found, wanted = route(logits, router, None, None, x), route(added, router)
        assert all(map(torch.equal, found, wanted))
    assert not torch.equal(route(total, router)[1], wanted[1])


@interpreted
def test_company_does_not_matter() -> None:
    logits = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    for router in (each[3] for each in FAMILIES.values()):
        whole = launch_route(logits, router)
        one = launch_route(logits[13:14], router)
        assert all(torch.equal(part[13:14], alone) for part, alone in zip(whole, one, strict=True))


@interpreted
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")
def test_nan_chooses_existing_experts_once() -> None:
    """Padding rows of a graph may hold NaN."""
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1, 3], logits[2, 5:] = float("nan"), float("nan"), -torch.inf
    for router in (Router(4, normalises=True), Router(4, "sigmoid", groups=2, groups_chosen=1)):
        chosen = launch_route(logits, router)[0]
        assert all(len(set(row)) == 4 and set(row) <= set(range(10)) for row in chosen.tolist())


@pytest.mark.parametrize("route", ROUTES)
def test_factors_of_experts(route: Route) -> None:
    logits, factors = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2.0, 0.5, 4.0])
    chosen, weights = route(logits, Router(2, scores="", scaling=10.0), None, factors)
    assert chosen.tolist() == [[1, 2]] and weights.tolist() == [[15.0, 80.0]]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("experts", [4, 5])
def test_every_token_uses_shared_experts(experts: int, route: Route) -> None:
    logits = torch.randn(3, experts, generator=torch.Generator().manual_seed(0))
    chosen, weights = route(logits, Router(2, scores="sigmoid", normalises=True, scaling=3.0, shared=2))
    alone = route(logits, Router(2, scores="sigmoid", normalises=True, scaling=3.0))
    assert torch.equal(chosen[:, :2], alone[0]) and torch.equal(weights[:, :2], alone[1])
    assert chosen[:, 2:].tolist() == [[experts, experts + 1]] * 3 and (weights[:, 2:] == 1.0).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("hidden", [64, 1024, 1500])
def test_a_gate_weights_shared_experts(hidden: int, route: Route) -> None:
    """Rounded where transformers rounds: the product and its sigmoid are of the model's dtype.

    float16, because Triton's interpreter cuts off bits of bfloat16.
    """
    generator = torch.Generator().manual_seed(hidden)
    x = torch.full((7, hidden + 8), float("nan"), dtype=torch.float16)[:, :hidden]
    x.copy_(torch.randn(7, hidden, generator=generator))
    gate = (torch.randn(1, hidden, generator=generator) * hidden**-0.5).to(torch.float16)
    logits = torch.randn(7, 6, generator=generator)
    router = Router(2, normalises=True, dtype=torch.float16, shared=1)
    chosen, weights = route(logits, router, None, None, x, gate)
    wanted = torch.sigmoid(torch.nn.functional.linear(x, gate))
    assert (chosen[:, 2] == 6).all()
    assert torch.allclose(weights[:, 2:], wanted.float(), rtol=2e-3) and weights[:, 2].unique().numel() > 1
    assert torch.equal(weights, weights.to(torch.float16).float())
    few = route(logits[3:4], router, None, None, x[3:4], gate)
    assert all(torch.equal(one, whole[3:4]) for one, whole in zip(few, (chosen, weights), strict=True))


@pytest.mark.parametrize("route", ROUTES)
def test_experts_of_other_ranks_are_away(route: Route) -> None:
    logits, factors = torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([1.0, 2.0, 4.0, 8.0])
    found = [route(logits, Router(3, scores="", first_held=first, held=2), None, factors) for first in (0, 2)]
    assert [chosen.tolist() for chosen, _ in found] == [[[1, AWAY, 0]], [[AWAY, 0, AWAY]]]
    assert all(weights.tolist() == [[6.0, 8.0, 1.0]] for _, weights in found), "all ranks have the same weights"
