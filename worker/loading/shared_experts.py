"""Shared experts as more experts of the grouped products, with the weights where they are.

A shared expert is a dense block that every token uses. As one of the grouped products' experts it needs no launch of
its own. A block with several times the inner size of an expert is as many shared experts: a product's sum over its
inner size becomes one sum for each, and these are added like the results of other experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvforge.worker.kernels.activations import Activation
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.layer_weights import FeedForward, Projection
from kvforge.worker.kernels.stored import codes_of

# Shared experts for each routed one of a token. More make a prompt's results of all experts, which are held until they
# are added, more than half as large again.
SHARE_MAX = 0.5


def beside_shared(
    matrices: ExpertMatrices, shared: FeedForward, gate: Projection | None, activation: Activation, chosen: int
) -> ExpertMatrices | None:
    """Return the matrices of experts with the shared ones.

    Args:
        matrices: The experts' matrices.
        shared: The block of shared experts.
        gate: Projection to their factor; None: it is 1.
        activation: The experts' activation.
        chosen: Experts that the router chooses for a token.

    Returns:
        The matrices, which have the memory of `shared`; None if its shape, layout or numbers are not those of experts.
    """
    up, down, shared_up, shared_down = matrices.up, matrices.down, shared.gate_up.weight, shared.down.weight
    if not isinstance(up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return None
    weights = [up, down, shared_up, shared_down, *([] if gate is None else [gate.weight])]
    if any(codes_of(each) is not None or each.dtype != up.dtype or not each.is_contiguous() for each in weights):
        return None
    biases = [matrices.up_bias, matrices.down_bias, shared.gate_up.bias, shared.down.bias]
    if any(each is not None for each in (*biases, None if gate is None else gate.bias)):
        return None
    if shared.activation != activation or shared.gate_factor != 1.0:
        return None
    rows, inner = up.shape[1], down.shape[2]
    cuts = shared_down.shape[1] // inner
    if not 1 <= cuts <= SHARE_MAX * chosen or shared.is_gated != (rows == 2 * inner):
        return None
    if shared_up.shape != (cuts * rows, up.shape[2]) or shared_down.shape != (down.shape[1], cuts * inner):
        return None
    return replace(matrices, shared_up=shared_up.detach(), shared_down=shared_down.detach())
