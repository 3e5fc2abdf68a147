"""Steps of a few decodes on the CPU: the same bits as the forward pass of `FusedDecoder`, with less overhead.

A kernel takes a few microseconds per row, and Python took as long for each call: checks, new tensors, arguments. Here
all results between products go to reused memory, and the arguments are prepared at the first such step
(`kvforge.worker.cpu.kernel.Calls`). Only the results of torch's products are allocated in each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.cpu_attention import CpuAttention
from kvforge.worker.attention.cpu_decode import DecodeAttention, DecodeLayer
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.cpu.kernel import Calls, threads_for
from kvforge.worker.cpu.layer_kernels import NUMBERS_PER_US, add_norm, embed_norm, gate, head_norm
from kvforge.worker.cpu.vector import CODES

from .interface import DecoderParts
from .layer_weights import FeedForward, FusedLayer, Norm
from .packed import Product
from .packed_table import PackedTable
from .row_counts import row_count

ROWS_MAX = 64  # for more rows, Python's overhead is small


class CpuDecoder:
    """The layers of one decoder over one pool, for which `can_decode` is true."""

    def __init__(self, decoder: DecoderParts, pool: KvPool) -> None:
        assert isinstance(decoder.attention, CpuAttention), "can_decode is false"
        self._pool = weakref.ref(pool)  # the owner decides its lifetime
        self._decoder, self._memory = decoder, RowBuffers(decoder.final_norm.weight)
        self._order = torch.arange(ROWS_MAX)
        self._residual, self._normed = (self._memory.of(decoder.table.shape[1], use) for use in ("residual", "normed"))
        layers, hidden, epsilon = decoder.layers, decoder.table.shape[1], decoder.final_norm.epsilon
        rotated = 2 * len(decoder.rotary[0].frequencies)
        attended = [self._memory.of(layer.output.weight.shape[1], "attended") for layer in layers]
        gated = [self._memory.of(_dense(layer).down.weight.shape[1], "gated") for layer in layers]
        self._attention = DecodeAttention(
            decoder.attention,
            [
                DecodeLayer(cache, layer.options, layer.heads, 0 if layer.rotary is None else rotated, output, part)
                for layer, cache, output, part in zip(layers, pool.layers, attended, pool.parts, strict=True)
            ],
        )
        code = CODES[decoder.table.dtype]
        sums = {"residual": self._residual.data_ptr(), "normed": self._normed.data_ptr(), "count": hidden}

        def adding(weights: Sequence[torch.Tensor]) -> Calls:
            shared = {**sums, "code": code, "epsilon": epsilon}
            return Calls(add_norm, [{**shared, "weight": weight.data_ptr()} for weight in weights])

        self._add_attended = adding([_weight(layer.inner_norm) for layer in layers])
        self._add_inner = adding([*(_weight(layer.input_norm) for layer in layers[1:]), decoder.final_norm.weight])
        self._gate = Calls(gate, [_gating(each, code) for each in gated])
        normed_heads = [layer for layer in layers if layer.head_norms is not None]
        self._norm_heads = Calls(head_norm, [_normed_heads(layer, code, epsilon) for layer in normed_heads])
        numbers = iter(range(len(normed_heads)))
        self._layers = [
            (
                [
                    Product(each.weight, each.bias)
                    for each in (layer.projected, layer.output, _dense(layer).gate_up, _dense(layer).down)
                ],
                None if layer.head_norms is None else next(numbers),
                into,
                inner,
            )
            for layer, into, inner in zip(layers, attended, gated, strict=True)
        ]

    def serves(self, decoder: DecoderParts, pool: KvPool) -> bool:
        """Return whether it was made for this decoder and pool."""
        return self._decoder is decoder and self._pool() is pool

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Run one step.

        Args:
            token_ids: [rows] int64, contiguous.
            positions: [rows] int64, contiguous.
            batch: At most ROWS_MAX decodes, without padding.

        Returns:
            The final norm of each row, [rows, hidden]. The next step overwrites it.
        """
        decoder, rows = self._decoder, batch.tokens
        table = decoder.table
        if isinstance(table, PackedTable):
            table, token_ids = table.rows(token_ids), self._order
        (_, hidden), code = table.shape, CODES[table.dtype]
        # The rows beyond hold data of earlier steps, which does not change the bits of the wanted rows.
        normed = self._normed
        threads = threads_for(rows * hidden / NUMBERS_PER_US)
        embed_norm(
            threads,
            tokens=token_ids.data_ptr(),
            table=table.data_ptr(),
            weight=_weight(decoder.layers[0].input_norm).data_ptr(),
            residual=self._residual.data_ptr(),
            normed=normed.data_ptr(),
            rows=rows,
            count=hidden,
            code=code,
            epsilon=decoder.final_norm.epsilon,
        )
        operations, rotary = decoder.operations, decoder.rotary[0]
        cos, sin = operations.rotary(positions, rotary.frequencies, rotary.scaling, table.dtype)
        self._attention.begin(batch, cos, sin)
        for calls in (self._add_attended, self._add_inner, self._gate, self._norm_heads):
            calls.renew(rows=rows)
        for index, ((project, output, gate_up, down), norms, attended, inner) in enumerate(self._layers):
            product = project(normed[: project.rows(rows)])
            if norms is not None:
                self._norm_heads.run(threads, norms, projected=product.data_ptr())
            self._attention.run(index, product.data_ptr())
            product = output(attended[: output.rows(rows)])
            self._add_attended.run(threads, index, addend=product.data_ptr())
            product = gate_up(normed[: gate_up.rows(rows)])
            gating = threads_for(rows * product.shape[1] / NUMBERS_PER_US)
            self._gate.run(gating, index, source=product.data_ptr())
            product = down(inner[: down.rows(rows)])
            self._add_inner.run(threads, index, addend=product.data_ptr())
        return self._normed[:rows]


class RowBuffers:
    """Reused buffers of `ROWS_MAX` rows for results of layers, shared by layers of the same width."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._made: dict[tuple[int, str], torch.Tensor] = {}

    def of(self, width: int, use: str) -> torch.Tensor:
        """Return [rows, width] in the dtype of the weights."""
        if (width, use) not in self._made:
            self._made[width, use] = self._like.new_zeros(row_count(ROWS_MAX), width)
        return self._made[width, use]


def can_decode(decoder: DecoderParts, pool: KvPool) -> bool:
    """Return whether `CpuDecoder` supports a decoder and a pool."""
    dtype = decoder.table.dtype
    return (
        decoder.is_plain
        and isinstance(decoder.attention, CpuAttention)
        and (isinstance(decoder.table, PackedTable) or decoder.table.is_contiguous())
        and all(norm.weight.dtype == dtype for norm in decoder.norms())
        and all(cache.keys.dtype == dtype for cache in pool.layers)
    )


def is_decodes(batch: PagedBatch, token_ids: torch.Tensor) -> bool:
    """Return whether `CpuDecoder.run` supports a step."""
    rows = len(batch.counts)
    return 0 < rows <= ROWS_MAX and batch.tokens == rows and bool(batch.lengths.all()) and token_ids.is_contiguous()


def _dense(layer: FusedLayer) -> FeedForward:
    assert layer.dense is not None, "can_decode is false"
    return layer.dense


def _weight(norm: Norm | None) -> torch.Tensor:
    assert norm is not None, "can_decode is false"
    return norm.weight


def _gating(gated: torch.Tensor, code: int) -> dict[str, float]:
    """Return the arguments of `gate` that no step changes."""
    count = gated.shape[1]
    return {"stride": 2 * count * gated.itemsize, "target": gated.data_ptr(), "count": count, "code": code}


def _normed_heads(layer: FusedLayer, code: int, epsilon: float) -> dict[str, float]:
    """Return the arguments of `head_norm` that no step changes."""
    assert layer.head_norms is not None
    query, key = layer.head_norms.query.weight, layer.head_norms.key.weight
    return {
        "stride": (layer.heads + 2 * layer.kv_heads) * layer.head_size * query.itemsize,
        "query_weight": query.data_ptr(),
        "key_weight": key.data_ptr(),
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "size": layer.head_size,
        "code": code,
        "epsilon": epsilon,
    }
