"""Finds the parts of a mixture of experts in a transformers model, and packs its experts for a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from kvforge.worker.kernels.activations import Activation
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.experts import Experts, grouped_experts, is_experts
from kvforge.worker.kernels.layer_weights import Projection
from kvforge.worker.kernels.packed import PackedOperations
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.router import Router

from .description import Mixture
from .quantisation import WeightPacker
from .scaled_experts import ScaledExperts
from .split_experts import first_held


@dataclass(frozen=True)
class MixtureParts:
    """The parts of one layer's mixture of experts; see `MixtureOfExperts`.

    Attributes:
        mixture: The declaration.
        gate: The router's weight and bias.
        router: The router.
        choice_bias: [experts] float32; None: none.
        factors: [experts] float32; None: none.
        experts: The experts, with the weights of their module.
        activation: Their activation.
        is_shared: Whether there are shared experts.
    """

    mixture: Mixture
    gate: Projection
    router: Router
    choice_bias: torch.Tensor | None
    factors: torch.Tensor | None
    experts: Experts
    activation: Activation
    is_shared: bool


def mixture_of(feed: Any, mixture: Mixture, config: Any, is_shared: bool) -> MixtureParts | None:
    """Find the parts of a mixture of experts.

    Args:
        feed: The feed-forward module of a layer.
        mixture: The family's declaration.
        config: The model's configuration.
        is_shared: Whether there are shared experts.

    Returns:
        The parts; None if the experts cannot be described.

    Raises:
        AttributeError: A declared name is missing.
    """
    gate, part = getattr(feed, mixture.gate), getattr(feed, mixture.experts)
    first = first_held(part)
    if mixture.scales_input:
        if config.num_experts_per_tok != 1:
            return None  # one input for each expert of a token
        part = ScaledExperts(part)
    holder = getattr(gate, mixture.weight) if mixture.weight else gate
    experts = grouped_experts(part, PlainOperations()) if is_experts(part) else None
    if experts is None or experts.activation is None:
        return None
    assert isinstance(experts.matrices.up, torch.Tensor)
    router, held = mixture.router(config), len(experts.matrices.up)
    if held < len(holder.weight):  # expert parallelism
        router = replace(router, first_held=first, held=held)
    choice_bias, factors = (
        reduce(getattr, path.split("."), feed).flatten() if path else None
        for path in (mixture.choice_bias, mixture.factors)
    )
    return MixtureParts(
        mixture=mixture,
        gate=Projection(holder.weight, getattr(holder, "bias", None)),
        router=router if mixture.wide else replace(router, dtype=experts.matrices.up.dtype),
        choice_bias=choice_bias,
        factors=None if factors is None else factors.detach().float(),
        experts=experts,
        activation=experts.activation,
        is_shared=is_shared,
    )


@torch.no_grad()
def packed_router(gate: Projection, packer: WeightPacker) -> Projection:
    """Pack the weight of a router in float32, if others are packed: MKL sums few results by the number of rows.

    Raises:
        KernelError: As raised by `PackedOperations.pack`.
    """
    if not isinstance(packer.operations, PackedOperations) or gate.weight.dtype != torch.float32:
        return gate
    return replace(gate, weight=packer.operations.pack(gate.weight))


@torch.no_grad()
def packed_experts(experts: Experts, packer: WeightPacker) -> ExpertMatrices:
    """Pack each expert's matrices, which are no longer parameters of the module: it computes with the packed ones.

    Args:
        experts: The experts, with the weights of their module.
        packer: Packs a matrix.

    Returns:
        The packed matrices.

    Raises:
        KvforgeError: As raised by `packer`.
    """
    part, matrices = experts.part, experts.matrices
    owner = part.part if isinstance(part, ScaledExperts) else part
    assert isinstance(matrices.up, torch.Tensor) and isinstance(matrices.down, torch.Tensor)
    up, down = (packer.pack_experts(each, owner) for each in (matrices.up, matrices.down))
    packed = replace(matrices, up=up, down=down)
    if isinstance(part, ScaledExperts):
        part.compute_with(packer.operations, packed)
        return packed
    for name in ("gate_up_proj" if part.has_gate else "up_proj", "down_proj"):
        part._parameters.pop(name, None)  # codes are none
    part.forward = replace(experts, operations=packer.operations, matrices=packed, activation=None)
    return packed
