"""Widens the heads of V to the size of those of K, because the pool stores both alike (MiMo v2)."""

from __future__ import annotations

from typing import Any

import torch

from .families import family_of


@torch.no_grad()
def widen_values(module: Any) -> Any:
    """Append zeros to the heads of V in a declared model, and columns of zeros to the projection behind them.

    The results are the same, and the memory of V is that of K.

    Args:
        module: A transformers model, perhaps one rank's part or on the meta device; changed.

    Returns:
        The module.
    """
    family = family_of(module)
    if family is None or not family.value_size:
        return module
    for layer in module.model.layers:
        attention = layer.self_attn
        size, wanted = getattr(attention, family.value_size), attention.head_dim
        if size < wanted:
            value, output = getattr(attention, family.projected[-1]), getattr(attention, family.output)
            value.weight = _widened(value.weight, 0, size, wanted)
            if value.bias is not None:
                value.bias = _widened(value.bias, 0, size, wanted)
            value.out_features = len(value.weight)
            output.weight = _widened(output.weight, 1, size, wanted)
            output.in_features = output.weight.shape[1]
            setattr(attention, family.value_size, wanted)
    return module


def _widened(weight: torch.Tensor, dimension: int, size: int, wanted: int) -> torch.nn.Parameter:
    """Return the weight with zeros behind each `size` numbers of a dimension, up to `wanted`."""
    by_head = weight.unflatten(dimension, (-1, size))
    shape = list(by_head.shape)
    shape[dimension + 1] = wanted - size
    wide = torch.cat((by_head, by_head.new_zeros(shape)), dimension + 1).flatten(dimension, dimension + 1)
    return torch.nn.Parameter(wide, requires_grad=False)
