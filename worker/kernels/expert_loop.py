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

    Shared experts, which every token uses, are numbered behind the others. They are columns of one dense block: shared
    expert s has the rows [s n, (s + 1) n) of the block's gate and up, and these columns of its last matrix.

    Attributes:
        up: [experts, 2n, hidden] with the gate, or [experts, n, hidden]; also a view of [experts, hidden, 2n], or a
            list of packed matrices.
        up_bias: [experts, rows of `up`], or None.
        down: [experts, hidden, n], as `up`.
        down_bias: [experts, hidden], or None.
        shared_up: [2 x shared x n, hidden] with the gate first, or [shared x n, hidden]; None: no shared experts.
        shared_down: [hidden, shared x n]; None: no shared experts.
    """

    up: Matrices
    up_bias: torch.Tensor | None
    down: Matrices
    down_bias: torch.Tensor | None
    shared_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None

    @property
    def shared(self) -> int:
        """Number of shared experts."""
        return 0 if self.shared_down is None else self.shared_down.shape[1] // self.down[0].shape[1]

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the last matrix of an expert, which may be a shared one."""
        cut = expert - len(self.up)
        if self.shared_up is None or self.shared_down is None or cut < 0:
            return self.up[expert], self.down[expert]
        rows = self.shared_up.unflatten(0, (-1, self.shared, self.down[0].shape[1]))[:, cut]
        return rows.flatten(0, 1), self.shared_down.chunk(self.shared, 1)[cut]


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
