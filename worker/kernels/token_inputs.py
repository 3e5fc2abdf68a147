"""Blocks of a layer with an input of the token itself, beside the residual (Gemma 4)."""

from __future__ import annotations

import torch

from .interface import LayerOperations
from .layer_weights import TokenBlock, TokenInputs


def token_inputs(
    ops: LayerOperations, inputs: TokenInputs, token_ids: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    """Return the inputs of every layer.

    Args:
        ops: Operations of the layers.
        inputs: Their weights.
        token_ids: [tokens] int64.
        embedded: [tokens, hidden], the embeddings of the decoder.

    Returns:
        [tokens, layers, n].
    """
    projection, width = inputs.projection, len(inputs.norm.weight)
    projected = ops.linear(embedded, projection.weight, projection.bias) * inputs.projection_scale
    normed = ops.norm(projected.unflatten(1, (-1, width)), inputs.norm)
    rows = ops.look_up(token_ids, inputs.table) * inputs.table_scale
    return (normed + rows.view_as(normed)) * inputs.scale


def add_token_block(ops: LayerOperations, block: TokenBlock, given: torch.Tensor, residual: torch.Tensor) -> None:
    """Add a block's result to the residual [tokens, hidden] in place. given: the layer's inputs [tokens, n]."""
    gate = ops.activated(residual, block.gate.weight, block.gate.bias, block.activation)
    parts = ops.linear_parts(gate * given, block.output.weight, block.output.bias)
    ops.combine(parts, residual, block.norm, 1.0, None)
