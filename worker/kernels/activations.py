"""Activations of feed-forward blocks, and their reference in plain torch, which rounds where transformers rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from .partition import apply_aligned

XIELU_BETA, XIELU_LEAST = 0.5, -1e-6  # factor of all numbers, and the largest argument of its exponential


@dataclass(frozen=True)
class Activation:
    """An activation.

    Attributes:
        kind: A name in KINDS, "clamped_swiglu", which needs a gate, or "xielu", which has none (Apertus).
        alpha: Factor inside the sigmoid (gpt-oss), or of squares of positive numbers (xIELU).
        limit: Largest gate, and largest size of `up` (gpt-oss); 0: unlimited.
        negative: Factor of exp(x) - 1 - x of negative numbers (xIELU).
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 0.0
    negative: float = 0.0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of each number, in the dtype of x. Without a gate."""
        return apply_aligned(self._xielu if self.kind == "xielu" else KINDS[self.kind], x)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the activation of the gate times `up`, [tokens, n]."""
        if self.kind != "clamped_swiglu":
            return self.apply(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * apply_aligned(torch.sigmoid, gate * self.alpha))

    def _xielu(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        grown = torch.expm1(wide.clamp(max=XIELU_LEAST)) - wide
        found = torch.where(wide > 0, self.alpha * wide * wide, self.negative * grown)
        return (found + XIELU_BETA * wide).to(x.dtype)


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
