"""Finds which norm a transformers module computes, by trial: classes of the same name differ between families."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.plain import normalise

ROWS = 3
SMALL = 2.0**-14  # small enough to show epsilon in the result, also in 16 bits
EPSILON_TOLERANCE = 5e-2
# Largest difference of a right description, relative to the largest number: both round, perhaps in another place.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@torch.no_grad()
def norm_of(part: Any, like: torch.Tensor) -> Norm | None:
    """Describe a norm.

    Args:
        part: A module that maps [..., n] to [..., n].
        like: [n]; a norm without a weight has as many numbers, and gets a weight of ones in its dtype.

    Returns:
        The norm, with the module's own weight; None if it computes something else.
    """
    weight, epsilon = getattr(part, "weight", None), _epsilon(part)
    if weight is None:
        weight = torch.ones_like(like)
        epsilon = _measured_epsilon(part, like) if epsilon is None else epsilon
    if weight.dim() != 1 or epsilon is None or weight.dtype not in TOLERANCE:
        return None
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.empty((ROWS, len(weight)), dtype=weight.dtype, device=weight.device).normal_(1.0, generator=generator)
    wanted = part(x).float()
    bare = Norm(weight, epsilon, bias=getattr(part, "bias", None))
    largest = float(wanted.abs().max().clamp_min(1e-6))
    best, least = None, TOLERANCE[weight.dtype] * largest * wanted.numel()
    for offset, centred, rounds_first in product((0.0, 1.0), (False, True), (True, False)):
        found = replace(bare, offset=offset, centred=centred, rounds_first=rounds_first)
        apart = (normalise(x, found).float() - wanted).abs()
        if float(apart.max()) <= TOLERANCE[weight.dtype] * largest and float(apart.sum()) < least:
            best, least = found, float(apart.sum())
    return best


def _epsilon(part: Any) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(value := getattr(part, name, None), float):
            return value
    return None


def _measured_epsilon(part: Any, like: torch.Tensor) -> float | None:
    """Return the epsilon of a norm without a weight; None if it is no power of ten.

    For numbers a and -a in turn the norm is a / sqrt(a^2 + epsilon), centred or not.
    """
    x = torch.full_like(like, SMALL)
    x[1::2] = -SMALL
    normed = float(part(x[None]).float().abs().max())
    if not 0 < normed < 1:
        return None
    epsilon = SMALL**2 * (1 / normed**2 - 1)
    power = 10.0 ** round(math.log10(epsilon))
    return power if abs(epsilon / power - 1) <= EPSILON_TOLERANCE else None
