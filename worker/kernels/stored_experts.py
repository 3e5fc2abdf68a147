"""Experts of all tokens of a step as grouped products with weights in codes: grouped.py with the sums of stored_linear.

A token's results have the same bits for any number of pairs: the depth of a step follows from the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import Target

from .activation import activate, activated
from .code_tables import CODES, WORDS
from .expert_sort import FIELDS, Blocks
from .grouped import Gating, pairs_of, split_rows
from .grouped_tiles import HOPPER_TOKENS, backend_options
from .hopper_codes import can_sum
from .launching import Launching
from .stored import Codes
from .stored_linear import (
    AHEAD,
    ALONE_COLUMNS,
    COLUMNS,
    StoredTiles,
    depth_of,
    group_steps,
    last_step,
    row_stride,
    stages_of,
    steps_of,
    steps_together,
)
from .stored_sum import TURNED, fetch_first, fetch_groups, stored_sum

OTHER_TOKENS = {16: 12, 64: 1 << 30}
_WORDS, _TURNED = tl.constexpr(WORDS), tl.constexpr(TURNED)


@triton.jit(do_not_specialize=["count", "tokens", "width", "units", "groups", "scaled"])
def stored_experts_kernel(
    x,
    words,
    scales,
    extras,
    bias,
    factors,
    order,
    blocks,
    output,
    count,
    tokens,
    width,
    n,
    units,
    groups,
    scaled,
    x_stride,
    alpha,
    limit,
    STEPS: tl.constexpr,
    LAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    DOWN: tl.constexpr,
    CODE: tl.constexpr,
    SETS: tl.constexpr,
    SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALONE: tl.constexpr,
    HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    JOIN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply each block of pairs by the weights of its expert. Grid: [blocks x tiles of rows, blocks first].

    x: [tokens, k], or [pairs, k] if DOWN; x_stride elements from row to row. words: [experts, spans, n, span]
    int16. scales: [experts, groups, scaled] float32. extras: [experts, groups, n], of factors [experts, units, n], of
    exponents half as many. bias: [experts, n]. n: rows of the weight: results, or twice as many if GATED. order,
    blocks: see Blocks. width: experts per token. output: [pairs, results], or [width, tokens, results] if DOWN.
    factors: [pairs] float32, factors of the output if DOWN. For the others see `grouped_kernel` and `stored_kernel`.
    """
    block = tl.program_id(0) % count
    NUMBERS: tl.constexpr = ROWS // 2 if GATED else ROWS
    results = n // 2 if GATED else n
    first = (tl.program_id(0) // count) * NUMBERS
    local = tl.arange(0, ROWS)
    # Rows outside repeat the last one, and are not stored.
    if GATED and INTERLEAVED:
        rows = 2 * tl.minimum(first + local // 2, results - 1) + local % 2
    else:
        rows = tl.minimum(first + local % NUMBERS, results - 1) + local // NUMBERS * results
    turn = tl.program_id(0) // count * ROWS // _TURNED
    if PREFETCH > 0:
        # The inputs of `order` and `blocks` are ready: the kernel before has waited for them.
        first_expert = tl.load(blocks + block * (1 if ALONE else FIELDS))
        if first_expert >= 0:
            of_rows = words + first_expert.to(tl.int64) * units * n * _WORDS + rows[:, None] * (SPAN * _WORDS)
            fetch_first(of_rows, 0, turn, LAST, n, STEPS, SETS, SPAN, DEPTH, PADDED, PREFETCH)
    wait_for_inputs(OVERLAP)
    expert, pairs, inside = pairs_of(order, blocks, block, TOKENS, ALONE)
    if expert < 0:
        return
    of_expert = expert.to(tl.int64)
    scales += of_expert * groups * scaled
    if EXTRA == "exponents":
        extras += of_expert * ((units + 1) // 2) * n
    else:
        extras += of_expert * (units if EXTRA == "factors" else groups) * n
    if OVERLAP:
        eighth = tl.arange(0, ROWS // 8) * 8  # rows that begin a run of eight, as above
        if GATED and INTERLEAVED:
            lines = 2 * tl.minimum(first + eighth // 2, results - 1)
        else:
            lines = tl.minimum(first + eighth % NUMBERS, results - 1) + eighth // NUMBERS * results
        fetch_groups(
            scales, extras, lines, 0, LAST, scaled, n, STEPS, GROUP, SCALED_ROWS, EXTRA, DEPTH // (_WORDS * SETS),
        )  # fmt: skip
    words_at = words + of_expert * units * n * _WORDS + rows[:, None].to(tl.int64) * (SPAN * _WORDS)
    x_rows = x + (pairs if DOWN else pairs // width)[:, None].to(tl.int64) * x_stride
    total = stored_sum(
        words_at, x_rows, inside[:, None], scales, extras, rows, expert * 0, turn, LAST, n, scaled, STEPS,
        TOGETHER, CODE, SETS, SPAN, DEPTH, GROUP, SCALED_ROWS, EXTRA, PADDED, HALF, ASSEMBLY, JOIN, ROWS, TOKENS,
        STAGES,
    )  # fmt: skip
    let_next_start(OVERLAP)
    narrow = output.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + of_expert * n + rows).to(tl.float32)[:, None]
    total = total.to(narrow).to(tl.float32)
    if GATED:
        gate, up = split_rows(total, ROWS, TOKENS, INTERLEAVED)
        total = activated(gate, up, alpha, limit, KIND, narrow)
    elif KIND != "":
        total = activate(total, KIND)
    numbers = first + tl.arange(0, NUMBERS)
    places = pairs
    if DOWN:
        total = total * tl.load(factors + pairs, mask=inside, other=0.0)[None, :]
        places = (pairs % width) * tokens + pairs // width
    at = output + places[None, :].to(tl.int64) * results + numbers[:, None]
    tl.store(at, total.to(narrow), mask=(numbers < results)[:, None] & inside[None, :])


def stored_block_tokens(pairs: int, experts: int, target: Target) -> int:
    """Return the pairs of a block."""
    if target.matrix == "v_wmma":
        return 16
    table = HOPPER_TOKENS if target.hopper else OTHER_TOKENS
    return next(tokens for tokens, most in table.items() if pairs <= most * experts)


def stored_expert_tiles(tokens: int, target: Target, codes: Codes, alone: bool = False) -> StoredTiles:
    """Return the tiles of a product.

    Args:
        tokens: Pairs of a block.
        target: The GPU.
        codes: The weight.
        alone: Whether there is one token, for which taller tiles would be too few.
    """
    if not target.hopper:
        return StoredTiles(64, tokens, 4, 3 if target.backend == "cuda" else 2)
    if tokens > 64:
        return StoredTiles(128, tokens, 8, 3)
    if codes.exponents is not None:
        return StoredTiles(64, tokens, 4, 3)
    # Taller tiles, which read x less often, were faster for groups of 32 columns.
    is_tall = group_steps(codes, target) < 0 and tokens == 16 and not alone
    return StoredTiles(128 if is_tall else 64, tokens, 4, 4)


def stored_up(
    launch: Launching,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    gating: Gating,
    sorted_pairs: Blocks,
    width: int,
    tokens_per_block: int,
) -> torch.Tensor:
    """Compute the activation of the product of each pair, as `grouped.multiply_up` does. codes: [experts, n, k].

    Returns:
        [pairs, results].
    """
    results = codes.shape[-2] // 2 if gating.gated else codes.shape[-2]
    output = torch.empty((len(x) * width, results), dtype=x.dtype, device=x.device)
    _multiply(launch, x, codes, bias, None, gating, sorted_pairs, width, output, len(x), tokens_per_block)
    return output


def stored_down(
    launch: Launching,
    inner: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    sorted_pairs: Blocks,
    tokens_per_block: int,
) -> torch.Tensor:
    """Compute the weighted product of each pair, as `grouped.multiply_down` does. codes: [experts, n, k].

    Returns:
        [experts per token, tokens, n].
    """
    tokens, width = weights.shape
    output = torch.empty((width, tokens, codes.shape[-2]), dtype=inner.dtype, device=inner.device)
    _multiply(launch, inner, codes, bias, weights, None, sorted_pairs, width, output, tokens, tokens_per_block)
    return output


def _multiply(
    launch: Launching,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
    gating: Gating | None,
    sorted_pairs: Blocks,
    width: int,
    output: torch.Tensor,
    tokens: int,
    tokens_per_block: int,
) -> None:
    _, spans, n, _ = codes.words.shape
    _, groups, scaled = codes.scales.shape
    gated = gating is not None and gating.gated
    depth, group = depth_of(codes, launch.target), group_steps(codes, launch.target)
    extra, extras = codes.extra
    tiles = stored_expert_tiles(tokens_per_block, launch.target, codes, sorted_pairs.alone)
    is_long = sorted_pairs.alone or (codes.exponents is not None and tiles.tokens == 16)
    steps, columns = steps_of(codes, launch.target), ALONE_COLUMNS if is_long else COLUMNS
    is_simple = sorted_pairs.alone and not (gating is not None and gating.interleaved)
    if is_simple and can_sum(codes, x, output.shape[-1], 2 if gated else 1, launch.target):
        from .stored_hopper_experts import multiply_alone

        multiply_alone(launch, x, codes, bias, factors, gating, sorted_pairs, output, steps)
        return
    programs = sorted_pairs.count * ceil_div(output.shape[-1], tiles.rows // 2 if gated else tiles.rows)
    stored_experts_kernel[(programs,)](
        x,
        codes.words,
        codes.scales,
        codes.scales if extras is None else extras,
        x if bias is None else bias,
        codes.scales if factors is None else factors,
        sorted_pairs.order,
        sorted_pairs.blocks,
        output,
        sorted_pairs.count,
        tokens,
        width,
        n,
        spans * codes.span,
        groups,
        scaled,
        row_stride(x),
        0.0 if gating is None else gating.activation.alpha,
        0.0 if gating is None else gating.activation.limit,
        STEPS=steps,
        LAST=last_step(codes, launch.target),
        TOGETHER=steps_together(codes, steps, tiles, columns, launch.target),
        DOWN=gating is None,
        CODE=codes.code,
        SETS=CODES[codes.code],
        SPAN=codes.span,
        DEPTH=depth,
        GROUP=group,
        SCALED_ROWS=codes.scaled_rows,
        EXTRA=extra,
        PADDED=steps * depth > codes.shape[-1],
        HAS_BIAS=bias is not None,
        KIND="" if gating is None else gating.activation.kind,
        GATED=gated,
        INTERLEAVED=gating is not None and gating.interleaved,
        ALONE=sorted_pairs.alone,
        HALF=x.dtype == torch.float16,
        ASSEMBLY=launch.target.chained,
        JOIN=launch.target.hopper,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        PREFETCH=min(AHEAD, steps) if launch.overlap and gating is None else 0,
        STAGES=stages_of(tiles, codes, launch.target),
        num_warps=tiles.warps,
        num_stages=stages_of(tiles, codes, launch.target),
        **backend_options(launch.target),
        **launch_options(launch.overlap),
    )
