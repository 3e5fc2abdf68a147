"""Projections with reordered rows, for rotary embeddings that pair neighbours."""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def halves_of_pairs(rotated: int, head_size: int) -> torch.Tensor:
    """Return the order of a head's rows in which number i and i + rotated / 2 are a pair, [head_size] int64."""
    pairs = torch.arange(rotated).view(-1, 2)
    return torch.cat((pairs.t().flatten(), torch.arange(rotated, head_size)))


def in_every_head(order: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the order of all rows of a projection, [rows] int64. order: that of one head's rows."""
    return (torch.arange(0, rows, len(order))[:, None] + order).flatten()


class ReorderedRows(torch.nn.Module):
    """Replaces a Linear of a transformers model by rows in another order: it computes the same results.

    Args:
        rows: [n, k], a view of the joined weight.
        bias: [n] in the order of `rows`, or None.
        order: [n] int64; `rows` are the original weight's rows of these numbers.
    """

    def __init__(self, rows: torch.Tensor, bias: torch.Tensor | None, order: torch.Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = rows.shape
        self._rows, self._inverse = rows, order.to(rows.device).argsort()
        self.bias = None if bias is None else torch.nn.Parameter(bias[self._inverse], requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [n, k] in its original order, a new tensor."""
        return self._rows[self._inverse]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute as Linear does."""
        found = linear(x, self._rows.to(x.dtype))[..., self._inverse]
        return found if self.bias is None else found + self.bias

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)
