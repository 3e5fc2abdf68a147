"""Finds and joins the parts of attention over latents in a transformers model (see `kernels.latent`).

The projection that expands a latent to keys and values is not multiplied: each head's part is absorbed by the
query, or follows attention. Both are views of its weight, so that no number is stored twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.packed import PackedRows

from .description import Latent
from .norms import norm_of
from .reordered import halves_of_pairs, in_every_head


@dataclass(frozen=True)
class LatentParts:
    """The small parts of one layer's attention over latents; see `LatentAttention`.

    Attributes:
        names: The declaration.
        query_norm: Norm of the latent of queries; None: queries have none.
        latent_norm: Norm of a token's latent.
        interleaved: Whether the rotary embedding pairs neighbours.
        latent: Numbers of a latent.
        plain: Numbers of a head of Q and K without rotation.
        rotated: Numbers with it.
        value: Numbers of a head of V.
    """

    names: Latent
    query_norm: Norm | None
    latent_norm: Norm | None
    interleaved: bool
    latent: int
    plain: int
    rotated: int
    value: int

    @property
    def head_size(self) -> int:
        """Numbers of a head of Q."""
        return self.plain + self.rotated

    @property
    def projected(self) -> tuple[str, str]:
        """The projections of a layer's input."""
        return self.names.query if self.query_norm is None else self.names.query_down, self.names.latent

    def order_of_queries(self, rows: int) -> torch.Tensor | None:
        """Return the order of a query projection's rows in which halves are pairs, [rows] int64; None: as they are."""
        return in_every_head(self._order(self.plain), rows) if self.interleaved else None

    def order_of_latents(self) -> torch.Tensor | None:
        """Return the same for the projection to a token's latent."""
        return self._order(self.latent) if self.interleaved else None

    def _order(self, before: int) -> torch.Tensor:
        return torch.cat((torch.arange(before), before + halves_of_pairs(self.rotated, self.rotated)))


def latent_parts(attention: Any, names: Latent) -> LatentParts | None:
    """Find the parts of an attention module.

    Args:
        attention: The module.
        names: The family's declaration.

    Returns:
        The parts; None if a norm is of another kind.

    Raises:
        AttributeError: A declared name is missing.
    """
    latent, plain, rotated, value = sizes_of(attention, names)
    query_norm = None
    if getattr(attention, names.query_norm, None) is not None:
        down = getattr(attention, names.query_down)
        query_norm = _norm(attention, names.query_norm, down.out_features)
        if query_norm is None:
            return None
    latent_norm = _norm(attention, names.latent_norm, latent)
    if latent_norm is None:
        return None
    return LatentParts(names, query_norm, latent_norm, names.interleaved(attention), latent, plain, rotated, value)


def sizes_of(attention: Any, names: Latent) -> tuple[int, int, int, int]:
    """Return the numbers of a latent, and of a head without rotation, with it, and of V."""
    found = (names.latent_size, names.plain_size, names.rotated_size, names.value_size)
    latent, plain, rotated, value = (int(getattr(attention, name)) for name in found)
    return latent, plain, rotated, value


def _norm(attention: Any, name: str, size: int) -> Norm | None:
    norm = norm_of(getattr(attention, name), torch.empty(size))
    return norm if norm is not None and len(norm.weight) == size else None


@torch.no_grad()
def absorbed(attention: Any, parts: LatentParts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `absorb`, `expand` and `expansion` of a `LatentAttention`.

    They are views of the expansion's weight; of one in codes they are views of its numbers.
    """
    projection = getattr(attention, parts.names.expansion)
    weight = projection.weight
    if isinstance(projection, PackedRows):
        weight = weight.contiguous()
    expansion = weight.detach()
    keys, values = expansion.unflatten(0, (-1, parts.plain + parts.value)).split((parts.plain, parts.value), dim=1)
    return keys, values.transpose(1, 2), expansion
