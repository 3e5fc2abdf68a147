"""Whether a row's products have the same bits however many rows are beside it: asked at a worker's start.

Few tokens go through kernels of ours and many through torch's library, each with tiles of its own for each number of
rows. They agree where all of them add up with the same instructions from the first number to the last, which
`device.products` asks for and nothing but a trial shows. So a ladder of numbers of rows is tried, on the weights that
will serve. Where they differ every product is made in slabs of as many rows: slower, but one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.attention import KvLayer, PagedBatch
from worker.device.device import Device

if TYPE_CHECKING:
    from .decoder import FusedDecoder, Projection

# One token; around what one program's tile of our kernels takes; and what torch's library has kernels for.
CORES_LADDER = (1, 2, 3, 7, 16, 33, 65, 129)  # where each row takes its time
LADDER = (1, 2, 3, 7, 16, 17, 32, 33, 50, 64, 65, 96, 128, 129, 192, 256, 300, 512, 1000)
HEAD_LADDER = (1, 2, 3, 7, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256)
ROWS = 2048
BLOCK_SIZE = 16
OFFSET = 37  # rows before those that are compared: where a row stands is no matter either

_Product = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def unsteady_products(fused: FusedDecoder, device: Device) -> str:
    """What depends on the number of rows, for people; "" where nothing does.

    Tries the products of the first layer and of the head, with all that is computed together with one.
    """
    for name, width, wanted, multiply in _products(fused, device):
        ladder = CORES_LADDER if device.computes_on_cores else wanted
        rows = ROWS if ladder is LADDER else max(ladder) + OFFSET
        generator = torch.Generator(fused.table.device).manual_seed(rows)
        x = torch.empty((rows, width), dtype=fused.table.dtype, device=fused.table.device).normal_(generator=generator)
        whole = multiply(x)
        for count in ladder:
            # Many single rows: rounded to 16 bits, another order shows in one number of ten thousand.
            for first in range(OFFSET + 1) if count == 1 else (0, OFFSET):
                few = multiply(x[first : first + count])
                if not all(map(same_bits, few, (part[first : first + count] for part in whole))):
                    return f"{name} of {count} tokens has other bits than among {rows}"
    return ""


def _products(fused: FusedDecoder, device: Device) -> Iterator[tuple[str, int, tuple[int, ...], _Product]]:
    ops, layer = fused.operations, fused.layers[0]
    table = fused.table
    hidden, attended, inner = table.shape[1], layer.heads * layer.head_size, layer.down.weight.shape[1]

    def projected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Q, K and V as they are used and stored where nothing is quantised: each token in a block of its own."""
        count = len(x)
        tables, ones = np.arange(count, dtype=np.int32)[:, None], np.ones(count, np.int32)
        batch = PagedBatch.build(tables, 0 * ones, ones, BLOCK_SIZE, device)
        positions = (x[:, 0].float().abs() * 1000).long()  # they move with the rows
        rotary = ops.rotary(positions, fused.frequencies, fused.rotary_scaling, table.dtype)
        shape = (count, BLOCK_SIZE, layer.kv_heads, layer.head_size)
        cache = KvLayer(*(torch.zeros(shape, dtype=table.dtype, device=table.device) for _ in range(2)))
        query = fused.project(layer, x, rotary, cache, batch)
        return query, cache.keys[:, 0], cache.values[:, 0]

    def summed(projection: Projection) -> _Product:
        def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            residual = torch.ones((len(x), hidden), dtype=table.dtype, device=table.device)
            weight, bias = projection.weight, projection.bias
            addend = ops.linear_parts(x, weight, bias) if fused.ranks is None else ops.linear(x, weight, bias)[None]
            return ops.add_norm(addend, residual, layer.inner_norm, fused.epsilon), residual

        return run

    def logits(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.empty((len(x), len(fused.head.weight)), dtype=torch.float32, device=table.device)
        return (ops.linear(x, fused.head.weight, fused.head.bias, found),)

    yield "the projection to Q, K and V", hidden, LADDER, projected
    yield "the projection from attention", attended, LADDER, summed(layer.output)
    yield "the gated product", hidden, LADDER, lambda x: (ops.gated(x, layer.gate_up.weight, layer.gate_up.bias),)
    yield "the product behind it", inner, LADDER, summed(layer.down)
    yield "the head's product", hidden, HEAD_LADDER, logits


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: NaN is NaN, and 0 is not -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
