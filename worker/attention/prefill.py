"""Paged prefill attention: rows with several new tokens each, over the contents of their tables.

A step is split into *tiles*: up to `tokens` new tokens of one row, times query heads that share a KV head (a *pack*,
which reads the same K and V). The host plans the tiles once per step for all layers. Tiles with the most keys come
first, so that the multiprocessors finish together.

Two kernels compute tiles. `prefill_portable` runs everywhere. `prefill_hopper` is for NVIDIA's Hopper and 16-bit K and
V: copies, matrix products and softmax of different tiles run at the same time in different warps. It also serves
quantised K and V, if the caller provides a workspace into which `prefill_copy` dequantises the rows first.
"""

from __future__ import annotations

import torch

from kvforge.worker.device.target import Target, head_class, head_tiles, in_units

from .interface import AttentionOptions, KvLayer
from .prefill_copy import copy_rows
from .prefill_plan import prefill_shape
from .prefill_portable import NO_WINDOW, prefill_portable
from .quantised import as_bytes, is_quantised
from .sinks import sinks_of

LOG2_E = 1.4426950408889634


def paged_prefill(
    query: torch.Tensor,
    layer: KvLayer,
    tables: torch.Tensor,
    items: torch.Tensor,
    output: torch.Tensor,
    options: AttentionOptions,
    target: Target,
    copies: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Compute causal attention of the planned rows' new tokens to their rows' tokens so far.

    Other rows of `output` are unchanged. Matrix products use the query's dtype; sums are float32.

    Args:
        query: [tokens, heads, head_size] float on the device, contiguous along head_size.
        layer: The layer's cache.
        tables: [rows, width] int32 on the device, contiguous along width.
        items: [tiles, FIELDS] int32 on the device, from `plan_prefill` with the `tokens` of `prefill_shape` for the
            same arguments.
        output: As `query`.
        options: The layer's options.
        target: The architecture.
        copies: [copies, 8] int32 on the device from `prefill_copy.plan_copies`, for quantised K and V if
            `prefill_shape(..., copied=True)` returns `hopper`.
        workspace: [2, pages >= copies, ...] from `prefill_copy.workspace_for`, with `copies`.
    """
    if not len(items):
        return
    copied = copies is not None and workspace is not None
    shape = prefill_shape(query.shape[1], query.dtype, layer, options, target, copied)
    if shape.hopper:
        from .prefill_hopper import launch

        if copies is not None and workspace is not None:
            assert len(copies) <= workspace.shape[1], (len(copies), workspace.shape)
            layer = copy_rows(layer, tables, copies, workspace, options.window)
        numbers = (shape.pack, exponents(options), target.multiprocessors)
        launch(query, layer, tables, items, output, options, *numbers, paged=not copied)
        return
    assert not copied, "the portable kernel uses no workspace"
    keys, values = layer.keys, layer.values
    _, block_size, kv_heads, head_size = keys.shape
    stored, packs = keys.dtype, query.shape[1] // shape.pack
    quantised, bitwise = is_quantised(stored), stored in target.bitwise
    # Two tiles of a quantised head gave wrong numbers on an H100: see benchmarks/NOTES.md.
    head_tile, rest = (head_class(head_size), 0) if quantised else head_tiles(head_size)
    if bitwise:
        keys, values = as_bytes(keys), as_bytes(values)
    scale, cap = exponents(options)
    prefill_portable[(items.shape[0] * packs,)](
        query,
        *in_units(query.stride(0), query.stride(1)),
        keys,
        values,
        layer.keys if layer.key_scales is None else layer.key_scales,
        layer.values if layer.value_scales is None else layer.value_scales,
        sinks_of(options, query.shape[1], query.device),
        output,
        *in_units(output.stride(0), output.stride(1)),
        tables,
        tables.stride(0),
        items,
        scale,
        cap,
        options.window or NO_WINDOW,
        KV_HEADS=kv_heads,
        PACKS=packs,
        PACK=shape.pack,
        POOL_BLOCK=block_size,
        HEAD=head_size,
        HEAD_TILE=head_tile,
        REST=rest,
        QUERIES=shape.tiles.queries,
        KEYS=shape.tiles.keys,
        QUANTISED=quantised,
        BITWISE=bitwise,
        E4M3=stored == torch.float8_e4m3fn,
        UPCAST=target.widens and query.dtype == torch.bfloat16,
        num_warps=shape.tiles.warps,
        num_stages=shape.tiles.stages,
    )


def exponents(options: AttentionOptions) -> tuple[float, float]:
    """Return the factors of the scores inside exp2, and of q.k inside the soft cap's exp2."""
    assert options.scaling > 0, options
    if not options.softcap:
        return options.scaling * LOG2_E, 0.0
    return options.softcap * LOG2_E, 2 * LOG2_E * options.scaling / options.softcap
