"""Q, K and V of few tokens in one kernel from a weight in codes: project.py with the sums of stored_linear."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.attention import KvLayer
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import Target

from .code_tables import CODES, WORDS
from .grouped_tiles import backend_options
from .hopper_codes import can_sum
from .launching import Launching
from .project import HEAD_SIZES, ROWS, rotate_and_store
from .stored import Codes
from .stored_linear import (
    AHEAD,
    ALONE_COLUMNS,
    COLUMNS,
    depth_of,
    group_steps,
    last_step,
    row_stride,
    stages_of,
    steps_of,
    steps_together,
    tiles_of,
)
from .stored_sum import TURNED, fetch_first, fetch_groups, stored_sum

TOKENS_MAX, OTHER_TOKENS_MAX = 64, 16  # more take a kernel for the product and one for the rest
_WORDS, _TURNED = tl.constexpr(WORDS), tl.constexpr(TURNED)


@triton.jit(do_not_specialize=["tokens", "heads", "kv_heads", "scaled"], do_not_specialize_on_alignment=["slots"])
def stored_project_kernel(
    x,
    words,
    scales,
    extras,
    bias,
    cosines,
    sines,
    slots,
    query,
    keys,
    values,
    tokens,
    n,
    scaled,
    x_stride,
    heads,
    kv_heads,
    STEPS: tl.constexpr,
    LAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    CODE: tl.constexpr,
    SETS: tl.constexpr,
    SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    JOIN: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Project, rotate and store. Grid: [(heads + 2 kv_heads) x HEAD_SIZE / ROWS, blocks of tokens].

    words, scales, extras, n, scaled, and the constants of the sum: see `stored_kernel`. The others: see
    `project_kernel`.
    """
    PAIRS: tl.constexpr = ROWS // 2
    TILES: tl.constexpr = HEAD_SIZE // ROWS  # of a head
    head = tl.program_id(0) // TILES
    first_pair = tl.program_id(0) % TILES * PAIRS
    i = tl.arange(0, ROWS)
    rows = head * HEAD_SIZE + i // 8 % 2 * (HEAD_SIZE // 2) + first_pair + i // 16 * 8 + i % 8
    columns = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = columns < tokens
    words_at = words + rows[:, None].to(tl.int64) * (SPAN * _WORDS)
    x_rows = x + columns[:, None].to(tl.int64) * x_stride
    turn = head * HEAD_SIZE // _TURNED
    if PREFETCH > 0:
        fetch_first(words_at, 0, turn, LAST, n, STEPS, SETS, SPAN, DEPTH, PADDED, PREFETCH)
        eighth = tl.arange(0, ROWS // 8) * 8  # rows that begin a run of eight, as above
        lines = head * HEAD_SIZE + eighth // 8 % 2 * (HEAD_SIZE // 2) + first_pair + eighth // 16 * 8
        fetch_groups(
            scales, extras, lines, 0, LAST, scaled, n, STEPS, GROUP, SCALED_ROWS, EXTRA, DEPTH // (_WORDS * SETS),
        )  # fmt: skip
    wait_for_inputs(OVERLAP)
    total = stored_sum(
        words_at, x_rows, inside[:, None], scales, extras, rows, head * 0, turn, LAST, n, scaled, STEPS, TOGETHER,
        CODE, SETS, SPAN, DEPTH, GROUP, SCALED_ROWS, EXTRA, PADDED, HALF, ASSEMBLY, JOIN, ROWS, TOKENS, STAGES,
    )  # fmt: skip
    let_next_start(OVERLAP)
    if HAS_BIAS:
        total += tl.load(bias + rows).to(tl.float32)[:, None]
    rotate_and_store(
        total, cosines, sines, slots, query, keys, values, columns, inside, head, first_pair, heads,
        kv_heads, HEAD_SIZE, TOKENS,
    )  # fmt: skip


def can_project_codes(x: torch.Tensor, cos: torch.Tensor, layer: KvLayer, target: Target) -> bool:
    """Return whether the kernel supports these shapes and dtypes."""
    head_size = layer.keys.shape[3]
    return (
        len(x) <= (TOKENS_MAX if target.hopper else OTHER_TOKENS_MAX)
        and layer.key_scales is None
        and layer.keys.dtype == x.dtype
        and head_size in HEAD_SIZES
        and cos.shape[1] == head_size
    )


def project_codes(
    launch: Launching,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: KvLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Implement `LayerOperations.project` for a weight in codes, if `can_project_codes` is true."""
    if codes.order is not None:
        x = x.index_select(1, codes.order)
    tokens, n, (_, _, kv_heads, head_size) = len(x), codes.shape[0], layer.keys.shape
    heads, depth = n // head_size - 2 * kv_heads, depth_of(codes, launch.target)
    steps, (extra, extras) = steps_of(codes, launch.target), codes.extra
    tiles = tiles_of(tokens, 0, launch.target)
    query = torch.empty((tokens, heads, head_size), dtype=x.dtype, device=x.device)
    if can_sum(codes, x, head_size // 2, 2, launch.target):
        from .stored_hopper_project import project_few

        project_few(launch, x, codes, bias, cos, sin, layer, slots, query, steps)
        return query
    stored_project_kernel[(n // ROWS.value, ceil_div(tokens, tiles.tokens))](
        x,
        codes.words,
        codes.scales,
        codes.scales if extras is None else extras,
        x if bias is None else bias,
        cos,
        sin,
        slots,
        query,
        layer.keys,
        layer.values,
        tokens,
        n,
        codes.scales.shape[-1],
        row_stride(x),
        heads,
        kv_heads,
        STEPS=steps,
        LAST=last_step(codes, launch.target),
        TOGETHER=steps_together(codes, steps, tiles, ALONE_COLUMNS if tokens <= 16 else COLUMNS, launch.target),
        CODE=codes.code,
        SETS=CODES[codes.code],
        SPAN=codes.span,
        DEPTH=depth,
        GROUP=group_steps(codes, launch.target),
        SCALED_ROWS=codes.scaled_rows,
        EXTRA=extra,
        PADDED=steps * depth > codes.shape[-1],
        HAS_BIAS=bias is not None,
        HALF=x.dtype == torch.float16,
        ASSEMBLY=launch.target.chained,
        JOIN=launch.target.hopper,
        HEAD_SIZE=head_size,
        TOKENS=tiles.tokens,
        PREFETCH=min(AHEAD, steps) if launch.overlap else 0,
        STAGES=stages_of(tiles, codes, launch.target),
        num_warps=tiles.warps,
        num_stages=stages_of(tiles, codes, launch.target),
        **backend_options(launch.target),
        **launch_options(launch.overlap),
    )
    return query
