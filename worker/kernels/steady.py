"""Tests at a worker's start whether a row's products have the same bits for any number of rows.

Few tokens run through the worker's own kernels and many through torch's library, with different tiles for each number
of rows. Results agree if all kernels add with the same instructions from the first number to the last, which
`device.products` requests and only a trial proves. A ladder of row counts is tried on the serving weights. If results
differ, every product is computed in slabs of one size, which is slower but consistent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from kvforge.worker.attention import KvLayer, PagedBatch
from kvforge.worker.device.device import Device

from .decoder import FusedDecoder, combine
from .interface import LayerOperations
from .latent import expand_values, project_latents
from .layer_weights import Norm, Projection
from .recurrent import MixerStep

# One token; counts around the tiles of the worker's kernels; and counts with special kernels in torch's library.
CORES_LADDER = (1, 2, 3, 7, 16, 33, 65, 129)  # for CPUs, where each row costs time
LADDER = (1, 2, 3, 7, 16, 17, 32, 33, 50, 64, 65, 96, 128, 129, 192, 256, 300, 512, 1000)
HEAD_LADDER = (1, 2, 3, 7, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256)
ROWS = 2048
BLOCK_SIZE = 16
OFFSET = 37  # rows before the compared ones: the index of a row must not matter either

_Product = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def unsteady_products(fused: FusedDecoder, device: Device) -> str:
    """Test the products of the first layer and of the head, with the operations fused to them.

    Returns:
        The first result that depends on the number of rows, for people; "" if none does.
    """
    return _first_unsteady(_products(fused, device), fused.table, device)


def unsteady_steps(operations: LayerOperations, steps: Sequence[MixerStep], device: Device) -> str:
    """Test the products within the steps of recurrent layers, each shape once.

    Returns:
        As `unsteady_products`.
    """
    weights = {each.shape: each for step in steps for each in step.products}
    made = [(*_shape(weight), LADDER, _one(operations, weight)) for weight in weights.values()]
    return _first_unsteady(made, next(iter(weights.values())), device) if made else ""


def _shape(weight: torch.Tensor) -> tuple[str, int]:
    """Return what a product is, for people, and the numbers of a row of its input."""
    *heads, outputs, inputs = weight.shape if weight.dim() == 2 else weight.transpose(1, 2).shape
    return f"a product of {math.prod(heads) * outputs} numbers in a recurrent layer", math.prod(heads) * inputs


def _one(operations: LayerOperations, weight: torch.Tensor) -> _Product:
    if weight.dim() == 3:
        return lambda x: (operations.by_head(x.unflatten(1, (len(weight), -1)), weight),)
    return lambda x: (operations.linear(x, weight),)


def _first_unsteady(
    products: Iterable[tuple[str, int, tuple[int, ...], _Product]], like: torch.Tensor, device: Device
) -> str:
    """Return the first result that depends on the number of rows. like: has the dtype and the device."""
    for name, width, wanted, multiply in products:
        ladder = CORES_LADDER if device.computes_on_cores else wanted
        rows = ROWS if ladder is LADDER else max(ladder) + OFFSET
        generator = torch.Generator(like.device).manual_seed(rows)
        x = torch.empty((rows, width), dtype=like.dtype, device=like.device).normal_(generator=generator)
        whole = multiply(x)
        for count in ladder:
            # Many single rows: rounded to 16 bits, another order of sums changes one number in ten thousand.
            for first in range(OFFSET + 1) if count == 1 else (0, OFFSET):
                few = multiply(x[first : first + count])
                if not all(map(same_bits, few, (part[first : first + count] for part in whole))):
                    return f"{name} of {count} tokens has other bits than among {rows}"
    return ""


def _products(fused: FusedDecoder, device: Device) -> Iterator[tuple[str, int, tuple[int, ...], _Product]]:
    ops, layer = fused.operations, next(each for each in fused.layers if each.attends)
    table = fused.table
    hidden, attended = table.shape[1], layer.output.weight.shape[1]

    def projected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return Q, K and V as they are used and stored without quantisation, with each token in its own block."""
        count = len(x)
        positions = (x[:, 0].float().abs() * 1000).long()  # positions derived from the rows
        each = None if layer.rotary is None else fused.rotary[layer.rotary]
        rotary = None if each is None else ops.rotary(positions, each.frequencies, each.scaling, table.dtype)
        if layer.latent is not None and rotary is not None:
            return project_latents(ops, layer, layer.latent, x, rotary)
        tables, ones = np.arange(count, dtype=np.int32)[:, None], np.ones(count, np.int32)
        batch = PagedBatch.build(tables, 0 * ones, ones, BLOCK_SIZE, device)
        shape = (count, BLOCK_SIZE, layer.kv_heads, layer.head_size)
        cache = KvLayer(*(torch.zeros(shape, dtype=table.dtype, device=table.device) for _ in range(2)))
        query, gate = fused.project(layer, x, rotary, cache, batch)
        return query, cache.keys[:, 0], cache.values[:, 0], *([] if gate is None else [gate])

    def summed(projection: Projection, after: Norm | None, following: Norm | None) -> _Product:
        def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            residual = torch.ones((len(x), hidden), dtype=table.dtype, device=table.device)
            weight, bias = projection.weight, projection.bias
            addend = ops.linear_parts(x, weight, bias) if fused.ranks is None else ops.linear(x, weight, bias)[None]
            return combine(ops, addend, residual, after, layer.residual_scale, following), residual

        return run

    def logits(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.empty((len(x), len(fused.head.weight)), dtype=torch.float32, device=table.device)
        return (ops.linear(x, fused.head.weight, fused.head.bias, found),)

    yield "the projection to Q, K and V", hidden, LADDER, projected
    if (latent := layer.latent) is not None:
        heads = layer.heads
        yield (
            "the values of attention",
            heads * latent.size,
            LADDER,
            lambda x: (expand_values(ops, latent, x.unflatten(1, (heads, -1))),),
        )
    yield "the projection from attention", attended, LADDER, summed(layer.output, layer.attended_norm, layer.inner_norm)
    dense = next(filter(None, (each.dense for each in fused.layers)), None)
    if dense is not None:
        inner = dense.down.weight.shape[1]
        yield "the gated product", hidden, LADDER, lambda x: (fused.feed(dense, x),)
        yield "the product behind it", inner, LADDER, summed(dense.down, layer.fed_norm, fused.final_norm)
    experts = next(filter(None, (each.mixture for each in fused.layers)), None)
    if experts is not None:
        yield "the mixture of experts", hidden, LADDER, lambda x: tuple(fused.mix(experts, x))
    yield "the head's product", hidden, HEAD_LADDER, logits


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit: NaN equals NaN, and 0 differs from -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
