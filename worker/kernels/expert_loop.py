"""Experts one after the other: the reference of the grouped products, and the path of devices without kernels.

Each expert has its own product of its tokens. The results of a token's experts are added in the order of the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Matrices = torch.Tensor | Sequence[torch.Tensor]  # one [n, k] per expert


@dataclass(frozen=True)
class ExpertMatrices:
    """The matrices of a layer's experts.

    Attributes:
        up: [experts, 2n, hidden] with the gate, or [experts, n, hidden]; also a view of [experts, hidden, 2n], or a
            list of packed matrices.
        up_bias: [experts, rows of `up`], or None.
        down: [experts, hidden, n], as `up`.
        down_bias: [experts, hidden], or None.
    """

    up: Matrices
    up_bias: torch.Tensor | None
    down: Matrices
    down_bias: torch.Tensor | None


def run_one_by_one(
    run: Callable[[int, torch.Tensor], torch.Tensor], x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of each token.

    Args:
        run: Computes an expert, given its index and its tokens [count, hidden].
        x: [tokens, hidden].
        chosen: [tokens, experts per token] int; a negative number adds nothing: an expert of another rank.
        weights: [tokens, experts per token].

    Returns:
        [tokens, hidden].
    """
    tokens, width = chosen.shape
    if not tokens:
        return torch.empty_like(x)
    if tokens == 1:
        given = torch.cat([run(expert, x) if expert >= 0 else torch.zeros_like(x) for expert in chosen[0].tolist()])
    else:
        given = _by_expert(run, x, chosen.reshape(-1), width)
    weighted = (given.view(tokens, width, -1) * weights[..., None]).to(x.dtype)
    total = weighted[:, 0].float()
    for place in range(1, width):
        total = total + weighted[:, place]
    return total.to(x.dtype)


def _by_expert(
    run: Callable[[int, torch.Tensor], torch.Tensor], x: torch.Tensor, by_place: torch.Tensor, width: int
) -> torch.Tensor:
    """Return the result of each chosen expert, [tokens x width, hidden]."""
    order = by_place.argsort(stable=True)
    first, *counts = (by_place + 1).clamp_min(0).bincount(minlength=1).tolist()
    given = x.new_zeros((len(by_place), x.shape[1])) if first else None
    for expert, count in enumerate(counts):
        if count:
            places = order[first : first + count]
            found = run(expert, x[places // width])
            if given is None:
                given = found.new_empty((len(by_place), found.shape[1]))
            given[places] = found
            first += count
    assert given is not None, "no token"
    return given
