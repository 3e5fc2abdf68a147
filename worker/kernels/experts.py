"""A mixture of experts of transformers, in which a token's result does not depend on other tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from . import torch_functions
from .activations import KINDS, Activation
from .expert_loop import ExpertMatrices, run_one_by_one
from .interface import LayerOperations
from .stored import StoredWeight

TRIED = (4, 32)  # numbers that activations are compared with
TRIED_SCALE = 6.0  # beyond the limit of gpt-oss, 7


@dataclass(frozen=True)
class Experts:
    """The forward pass of a transformers module of experts.

    Attributes:
        part: The transformers module.
        operations: Operations that multiply.
        matrices: The module's matrices.
        activation: The module's activation; None: the module computes it, and experts run one after the other.
        interleaved: Whether rows of gate and up alternate.
    """

    part: Any
    operations: LayerOperations
    matrices: ExpertMatrices
    activation: Activation | None = None
    interleaved: bool = False

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the experts of each token.

        Args:
            x: [tokens, hidden].
            chosen: [tokens, experts per token] int64.
            weights: [tokens, experts per token].

        Returns:
            [tokens, hidden].
        """
        with torch._C.DisableTorchFunction():  # avoids the cost of replaced functions
            return self._all(x, chosen, weights)

    def _all(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up = self.matrices.up
        if self.activation is None or not isinstance(up, torch.Tensor) or x.dtype != up.dtype:
            return run_one_by_one(self._run, x, chosen, weights)
        return self.operations.experts(x, chosen, weights, self.matrices, self.activation, self.interleaved)

    def _run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        each = self.matrices
        bias = None if each.up_bias is None else each.up_bias[expert]
        up = torch_functions.product(self.operations, x, each.up[expert], bias)
        inner = self.part._apply_gate(up) if self.part.has_gate else self.part.act_fn(up)
        bias = None if each.down_bias is None else each.down_bias[expert]
        return torch_functions.product(self.operations, inner, each.down[expert], bias)


def is_experts(part: Any) -> bool:
    """Return whether a module is one of transformers' experts, of the kind that its implementations can replace."""
    return hasattr(part, "is_transposed") and hasattr(part, "_apply_gate")


def grouped_experts(part: Any, operations: LayerOperations) -> Experts | None:
    """Return a module's experts for one grouped product of all; None if its activation or layout is another one."""
    if getattr(part, "has_post_expert_norm", False):  # from transformers 5.24 on; not in 5.17
        return None
    held = getattr(part, "__dict__", {}).get("forward")
    if isinstance(held, Experts) and isinstance(held.matrices.up, StoredWeight):
        return None if held.activation is None else replace(held, operations=operations)
    up = "gate_up_proj" if part.has_gate else "up_proj"
    weights = [getattr(part, name).detach() for name in (up, "down_proj")]
    if not all(each.is_contiguous() for each in weights):
        return None
    activation, interleaved = find_activation(part)
    if activation is None:
        return None
    first, second = (each.transpose(1, 2) if part.is_transposed else each for each in weights)
    biases = [getattr(part, f"{name}_bias").detach() if part.has_bias else None for name in (up, "down_proj")]
    return Experts(part, operations, ExpertMatrices(first, biases[0], second, biases[1]), activation, interleaved)


@torch.no_grad()
def find_activation(part: Any) -> tuple[Activation | None, bool]:
    """Return the activation that computes what a transformers module of experts does, and whether it is interleaved.

    The activation is None if there is none.
    """
    x = torch.randn(TRIED, generator=torch.Generator().manual_seed(0)) * TRIED_SCALE
    x = x.to(part.down_proj.device)
    if not part.has_gate:
        wanted = part.act_fn(x)
        return next((each for each in map(Activation, KINDS) if _alike(each.apply(x), wanted)), None), False
    wanted = part._apply_gate(x)
    tried = list(map(Activation, KINDS))
    if hasattr(part, "alpha") and hasattr(part, "limit"):
        tried.append(Activation("clamped_swiglu", float(part.alpha), float(part.limit)))
    for activation, interleaved in product(tried, (False, True)):
        halves = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
        if _alike(activation.gate(*halves), wanted):
            return activation, interleaved
    return None, False


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-4)
