"""Q, K and V of few tokens in one kernel: projection, rotation, and storing of K and V.

It works like `linear`, followed by the task of `kvforge.worker.attention.write` for numbers that are not quantised (a
scale would need a whole head, more than one program has). This saves a kernel and a pass through memory. A program has
64 rows of the weight, half from the first half of a head and half from the second, because rotation mixes number i of
both halves. Groups of eight rows alternate, so that both numbers of a pair are computed in the same thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.attention import KvLayer
from kvforge.worker.attention.write import rotated_pair
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching
from .linear import LinearTiles, prefetch

ROWS = tl.constexpr(64)  # rows of the weight in one tile
HEAD_SIZES = (64, 128, 256)


# One compilation for all counts, and one for slots at any alignment.
@triton.jit(do_not_specialize=["tokens", "heads", "kv_heads"], do_not_specialize_on_alignment=["slots"])
def project_kernel(
    x,
    weight,
    bias,
    cosines,
    sines,
    slots,
    query,
    keys,
    values,
    tokens,
    k,
    x_stride,
    heads,
    kv_heads,
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Project, rotate and store. Grid: [(heads + 2 kv_heads) x HEAD_SIZE / ROWS, blocks of tokens].

    x: [tokens, k], x_stride elements from token to token. weight: [(heads + 2 kv_heads) x HEAD_SIZE, k], contiguous, Q
    first, then K, then V. bias: as many numbers as rows. cosines, sines: [tokens, HEAD_SIZE]. slots: [tokens] int32;
    -1: do not store K and V. query: [tokens, heads, HEAD_SIZE]. keys, values: [slots, kv_heads, HEAD_SIZE]. STEPS: k /
    DEPTH.
    """
    HALF: tl.constexpr = HEAD_SIZE // 2
    PAIRS: tl.constexpr = ROWS // 2
    head = tl.program_id(0) // (HALF // PAIRS)
    first_pair = tl.program_id(0) % (HALF // PAIRS) * PAIRS
    i = tl.arange(0, ROWS)
    rows = head * HEAD_SIZE + i // 8 % 2 * HALF + first_pair + i // 16 * 8 + i % 8
    columns = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = columns < tokens
    weight_rows = weight + rows[:, None].to(tl.int64) * k
    x_rows = x + columns[:, None].to(tl.int64) * x_stride
    if PREFETCH > 0:
        lines = tl.arange(0, DEPTH // 64) * 64  # a cache line holds 64 numbers of 16 bits
        for step in tl.static_range(PREFETCH):
            prefetch(weight_rows + (lines + step * DEPTH)[None, :])
    wait_for_inputs(OVERLAP)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        places = step * DEPTH + tl.arange(0, DEPTH)
        w = tl.load(weight_rows + places[None, :], eviction_policy="evict_first")
        xs = tl.trans(tl.load(x_rows + places[None, :], mask=inside[:, None], other=0.0))
        total = tl.dot(w, xs, total, input_precision="ieee")
    let_next_start(OVERLAP)
    if HAS_BIAS:
        total += tl.load(bias + rows).to(tl.float32)[:, None]
    rotate_and_store(
        total, cosines, sines, slots, query, keys, values, columns, inside, head, first_pair, heads, kv_heads,
        HEAD_SIZE, TOKENS,
    )  # fmt: skip


@triton.jit
def rotate_and_store(
    total,
    cosines,
    sines,
    slots,
    query,
    keys,
    values,
    columns,
    inside,
    head,
    first_pair,
    heads,
    kv_heads,
    HEAD_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rotate and store the numbers of a tile of one head.

    total: [ROWS, TOKENS] float32, with the rows of `project_kernel`. columns: [TOKENS] the tokens. inside: which exist.
    head: of all heads of Q, K and V in order. first_pair: number of the tile's first pair in the head. For the
    others see `project_kernel`.
    """
    HALF: tl.constexpr = HEAD_SIZE // 2
    PAIRS: tl.constexpr = ROWS // 2
    # Rounded like a separate product.
    total = total.to(query.dtype.element_ty).to(tl.float32)
    pairs = tl.permute(tl.reshape(total, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1))
    first, second = tl.split(tl.reshape(pairs, [PAIRS, TOKENS, 2]))
    pair = first_pair + tl.arange(0, PAIRS)
    if head < heads + kv_heads:
        angle = columns[None, :] * HEAD_SIZE + pair[:, None]
        cosine_first = tl.load(cosines + angle, mask=inside[None, :], other=0.0).to(tl.float32)
        cosine_second = tl.load(cosines + angle + HALF, mask=inside[None, :], other=0.0).to(tl.float32)
        sine_first = tl.load(sines + angle, mask=inside[None, :], other=0.0).to(tl.float32)
        sine_second = tl.load(sines + angle + HALF, mask=inside[None, :], other=0.0).to(tl.float32)
        first, second = rotated_pair(first, second, cosine_first, cosine_second, sine_first, sine_second)
    if head < heads:
        place = (columns.to(tl.int64) * heads + head)[None, :] * HEAD_SIZE + pair[:, None]
        _store(query + place, first, second, inside, HALF)
    else:
        slot = tl.load(slots + columns, mask=inside, other=-1).to(tl.int64)
        kv_head = head - heads
        cache = keys
        if kv_head >= kv_heads:
            kv_head -= kv_heads
            cache = values
        place = (slot * kv_heads + kv_head)[None, :] * HEAD_SIZE + pair[:, None]
        _store(cache + place, first, second, slot >= 0, HALF)


@triton.jit
def _store(target, first, second, wanted, HALF: tl.constexpr):
    """Store the numbers of both halves. wanted: [columns]."""
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target, first.to(dtype), mask=wanted[None, :])
    tl.store(target + HALF, second.to(dtype), mask=wanted[None, :])


def can_project(weight: torch.Tensor, cos: torch.Tensor, layer: KvLayer, tiles: LinearTiles) -> bool:
    """Return whether the kernel supports these shapes and dtypes."""
    head_size = layer.keys.shape[3]
    return (
        layer.key_scales is None
        and layer.keys.dtype == weight.dtype
        and head_size in HEAD_SIZES
        and cos.shape[1] == head_size
        and tiles.rows == ROWS.value
        and weight.shape[1] % tiles.depth == 0
    )


def project(
    launch: Launching,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: KvLayer,
    slots: torch.Tensor,
    tiles: LinearTiles,
) -> torch.Tensor:
    """Implement `LayerOperations.project`, if `can_project` is true."""
    (tokens, k), (_, _, kv_heads, head_size) = x.shape, layer.keys.shape
    heads, steps = len(weight) // head_size - 2 * kv_heads, k // tiles.depth
    query = torch.empty((tokens, heads, head_size), dtype=x.dtype, device=x.device)
    project_kernel[(len(weight) // ROWS.value, ceil_div(tokens, tiles.tokens))](
        x,
        weight,
        weight if bias is None else bias,
        cos,
        sin,
        slots,
        query,
        layer.keys,
        layer.values,
        tokens,
        k,
        x.stride(0),
        heads,
        kv_heads,
        STEPS=steps,
        HAS_BIAS=bias is not None,
        HEAD_SIZE=head_size,
        DEPTH=tiles.depth,
        TOKENS=tiles.tokens,
        PREFETCH=min(tiles.prefetch, steps) if launch.overlap else 0,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(launch.overlap),
    )
    return query
