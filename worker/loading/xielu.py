"""Describes transformers' xIELU, which has its factors as weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus

from kvforge.worker.kernels.activations import Activation

TRIED = (-20.0, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0, 20.0)
# Largest difference of a right description, relative to each number or 0.01: transformers rounds every step.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@torch.no_grad()
def xielu_of(part: Any) -> Activation | None:
    """Return the activation that a transformers module computes with its weights; None if it is another one."""
    positive, negative, beta = (getattr(part, name, None) for name in ("alpha_p", "alpha_n", "beta"))
    if positive is None or negative is None or beta is None:
        return None
    found = Activation("xielu", alpha=float(softplus(positive)), negative=float(beta + softplus(negative)))
    x = torch.tensor([TRIED], dtype=positive.dtype, device=positive.device)
    wanted = part(x).float()
    apart = (found.apply(x).float() - wanted).abs() / wanted.abs().clamp_min(1e-2)
    return found if float(apart.max()) <= TOLERANCE[positive.dtype] else None
