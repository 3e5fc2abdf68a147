"""Routers of mixtures of experts: the choice of a token's experts and their weights, in plain torch.

Equal scores choose the expert with the lower index, so that the choice is defined and no other token matters to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .partition import apply_aligned

AWAY = -1  # stands for an expert that another rank holds


@dataclass(frozen=True)
class Router:
    """A router. The order of its steps is that of the attributes.

    Attributes:
        chosen: Experts per token.
        scores: Function of the logits of all experts, before the choice: one of SCORES.
        groups: Groups of experts. Only experts of the best groups can be chosen (DeepSeek V3).
        groups_chosen: Groups that a token's experts may come from.
        group_best: A group's score is the sum of this many best ones: 1, or 2.
        weights: Function of the scores of the chosen experts, after the choice: one of SCORES.
        normalises: Whether the weights are then divided by their sum.
        sum_added: Added to that sum.
        sum_min: Smallest divisor.
        scaling: Factor of the weights.
        dtype: Dtype that the weights are rounded to at last; None: float32.
        first_held: The first expert that this process holds (expert parallelism). Experts are numbered from it on, and
            the others are AWAY.
        held: The experts that this process holds; 0: all.
        shared: Shared experts, which are chosen for each token behind the others. Their numbers follow those of all
            experts, and their weight is 1, or the sigmoid of one more logit.
    """

    chosen: int
    scores: str = "softmax"
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 2
    weights: str = ""
    normalises: bool = False
    sum_added: float = 0.0
    sum_min: float = 0.0
    scaling: float = 1.0
    dtype: torch.dtype | None = None
    first_held: int = 0
    held: int = 0
    shared: int = 0

    def __post_init__(self) -> None:
        assert self.scores in SCORES and self.weights in SCORES, (self.scores, self.weights)
        assert 1 <= self.groups_chosen <= self.groups, self.groups_chosen
        assert self.group_best in (1, 2), self.group_best
        assert not self.held or not self.shared, "ranks that divide experts have shared ones apart"


SCORES = ("", "softmax", "sigmoid")


def route(
    logits: torch.Tensor,
    router: Router,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    shared_logit: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `LayerOperations.route` in plain torch.

    shared_logit: [tokens, 1], of the factor of the shared experts; None: that is 1.
    """
    scores = _function(router.scores, logits.float())
    ranked = scores if bias is None else scores + bias.float()
    if router.groups > 1:
        by_group = ranked.unflatten(-1, (router.groups, -1))
        best = by_group.sort(dim=-1, descending=True, stable=True).values[..., : router.group_best].sum(-1)
        away = _order(best)[:, router.groups_chosen :]
        ranked = by_group.clone().scatter_(1, away[..., None].expand(-1, -1, by_group.shape[-1]), -torch.inf).flatten(1)
    chosen = _order(ranked)[:, : router.chosen]
    weights = _function(router.weights, scores.gather(-1, chosen))
    if router.normalises:
        total = weights.sum(-1, keepdim=True) + router.sum_added
        weights = weights / (total.clamp_min(router.sum_min) if router.sum_min else total)
    if factors is not None:
        weights = weights * factors.float()[chosen]
    weights = weights * router.scaling
    if router.shared:
        chosen, weights = _with_shared(chosen, weights, router, logits.shape[1], shared_logit)
    rounded = weights if router.dtype is None else weights.to(router.dtype).float()
    if router.held:
        chosen = chosen - router.first_held
        chosen = torch.where((chosen >= 0) & (chosen < router.held), chosen, AWAY)
    return chosen.int(), rounded


def _with_shared(
    chosen: torch.Tensor, weights: torch.Tensor, router: Router, experts: int, logit: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the shared experts to the choices and weights of all tokens."""
    numbers = torch.arange(experts, experts + router.shared, device=chosen.device)
    factor = weights.new_ones((len(weights), 1)) if logit is None else _function("sigmoid", logit.float())
    return (
        torch.cat((chosen, numbers.expand(len(chosen), -1)), dim=1),
        torch.cat((weights, factor.expand(-1, router.shared)), dim=1),
    )


def _order(scores: torch.Tensor) -> torch.Tensor:
    """Return the indices from the largest score to the smallest, equal ones by index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def _function(kind: str, numbers: torch.Tensor) -> torch.Tensor:
    if kind == "softmax":
        return numbers.softmax(-1)
    return apply_aligned(torch.sigmoid, numbers) if kind == "sigmoid" else numbers
