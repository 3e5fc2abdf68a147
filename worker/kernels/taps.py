"""Residuals that a pass keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Taps:
    """Keeps the residual that some layers read, for heads that read these (EAGLE-3).

    Attributes:
        layers: Indices of the layers.
        found: By index, [tokens, hidden] of the last pass.
    """

    layers: tuple[int, ...]
    found: dict[int, torch.Tensor] = field(default_factory=dict)
