"""Attention sinks as kernels take them: one more score of each query head, -inf in layers without sinks.

A kernel computes the same with -inf as without sinks, bit for bit, so layers with and without share one compilation.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from .interface import AttentionOptions


def sinks_of(options: AttentionOptions, heads: int, device: torch.device) -> torch.Tensor:
    """Return the sinks of a layer: [heads] float32 on the device."""
    return _none(heads, device) if options.sinks is None else options.sinks


@cache  # captured graphs read the results
def _none(heads: int, device: torch.device) -> torch.Tensor:
    return torch.full((heads,), -math.inf, dtype=torch.float32, device=device)
