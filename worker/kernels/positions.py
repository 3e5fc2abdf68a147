"""The parts of attention that depend on the position of a token: rotations, and factors of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .partition import apply_aligned


@dataclass(frozen=True)
class RotaryTable:
    """Frequencies of a rotary embedding.

    Attributes:
        frequencies: [rotated / 2] float32; the first `rotated` numbers of each head are rotated.
        scaling: Factor of cos and sin.
    """

    frequencies: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with the position p: 1 + growth x log(1 + floor((p + offset) / length)).

    Ministral 3 and Llama 4 (arXiv 2501.19399) keep attention sharp over many keys with it.

    Attributes:
        growth: Factor of the logarithm.
        length: Positions from one step of the factor to the next.
        offset: Added to the position.
        rounds_first: Round the factor to the dtype of queries before the product, not only the product.
    """

    growth: float
    length: float
    offset: float = 0.0
    rounds_first: bool = True

    def factors(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the factor of each position.

        Args:
            positions: [tokens] int64.
            dtype: Dtype of queries.

        Returns:
            [tokens, 1, 1] float32, or `dtype` where the factor is rounded.
        """
        steps = torch.floor((positions.float() + self.offset) / self.length)
        found = 1.0 + self.growth * apply_aligned(torch.log1p, steps)
        return (found.to(dtype) if self.rounds_first else found)[:, None, None]
