"""Activations of feed-forward blocks, and their reference in plain torch, which rounds where transformers rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from .partition import apply_aligned


@dataclass(frozen=True)
class Activation:
    """An activation.

    Attributes:
        kind: A name in KINDS, or "clamped_swiglu", which needs a gate.
        alpha: Factor inside the sigmoid (gpt-oss).
        limit: Largest gate, and largest size of `up` (gpt-oss); 0: unlimited.
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 0.0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of each number, in the dtype of x. Without a gate."""
        return apply_aligned(KINDS[self.kind], x)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the activation of the gate times `up`, [tokens, n]."""
        if self.kind != "clamped_swiglu":
            return self.apply(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * apply_aligned(torch.sigmoid, gate * self.alpha))


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _squared_relu,
}
# transformers' names of activations (ACT2FN).
NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
SILU = Activation()
