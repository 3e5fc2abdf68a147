"""Products of x with weights in codes (see `stored`): the codes are read, and never written out as numbers.

As in linear.py the rows of a tile are the weight's. A step multiplies the codes of one group of columns, exact in 16
bits, and its sums are scaled in float32. Whatever the number of tokens, a row is summed in the same steps and parts, so
its bits do not depend on other rows: all sums of a weight have the depth that `depth_of` gives it, and parts of the
inner dimension (for weights of too few rows to occupy all multiprocessors) follow from the weight alone. Few tokens
leave the parts to the next operation, many add them here; both add in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import Target

from .activation import activate, activated
from .activations import SILU, Activation
from .code_tables import CODES, WORDS
from .grouped import split_rows
from .grouped_tiles import backend_options
from .hopper_codes import can_sum
from .launching import Launching
from .stored import Codes
from .stored_sum import TURNED, fetch_first, fetch_groups, stored_sum

FEW_TOKENS = 64  # up to here, parts are left to the next operation
AHEAD = 2  # steps of words that are fetched into the L2 cache before the inputs are ready
PART_STEPS = 8  # least steps of a part
PARTS = (4, 2)
COLUMNS, ALONE_COLUMNS = (
    128,
    256,
)  # of a turn of a sum's loop; the second for a multiprocessor's only tile, and experts of one token
SUM_REGISTERS = 64  # of a thread, most for the sums of one turn
_WORDS, _TURNED = tl.constexpr(WORDS), tl.constexpr(TURNED)


@dataclass(frozen=True)
class StoredTiles:
    """Tile sizes of a product.

    Attributes:
        rows: Rows of the weight in one tile.
        tokens: Tokens in one tile.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
    """

    rows: int
    tokens: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["tokens", "scaled"])
def stored_kernel(
    x,
    words,
    scales,
    extras,
    bias,
    output,
    tokens,
    n,
    scaled,
    x_stride,
    alpha,
    limit,
    STEPS: tl.constexpr,
    LAST: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
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
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    JOIN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply x by a weight in codes. Grid: [blocks of results, parts if SPLIT, blocks of tokens].

    x: [tokens, k], x_stride elements from token to token. words: [spans, n, words of a span] int16. scales: [groups,
    scaled] float32. extras: [groups, n], see `load_extra`; of factors [k / unit, n], of exponents half as many, see
    `load_factors`. bias: [n], added to part 0. output: [parts if SPLIT, tokens, results], contiguous. n: rows of the
    weight: results, or twice as many if GATED, the gate first. STEPS: steps of DEPTH columns in one part. PARTS: parts
    of the inner dimension, added here unless SPLIT. SETS: codes of a word. SPAN: units of a span. TOGETHER, GROUP,
    PADDED and HALF: see `stored_sum`. KIND, alpha, limit: see Activation; "": none.
    """
    NUMBERS: tl.constexpr = ROWS // 2 if GATED else ROWS
    results = n // 2 if GATED else n
    local = tl.arange(0, ROWS)
    columns = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    # Rows outside repeat the last one, and are not stored.
    rows = tl.minimum(tl.program_id(0) * NUMBERS + local % NUMBERS, results - 1) + local // NUMBERS * results
    words_at = words + rows[:, None].to(tl.int64) * (SPAN * _WORDS)
    x_rows = x + columns[:, None].to(tl.int64) * x_stride
    turn = tl.program_id(0) * ROWS // _TURNED
    inside = (columns < tokens)[:, None]
    if PREFETCH > 0:
        fetch_first(words_at, tl.program_id(1) * STEPS, turn, LAST, n, STEPS, SETS, SPAN, DEPTH, PADDED, PREFETCH)
        # The weight's rows as above, every eighth.
        eighth = tl.arange(0, ROWS // 8) * 8
        lines = tl.minimum(tl.program_id(0) * NUMBERS + eighth % NUMBERS, results - 1) + eighth // NUMBERS * results
        fetch_groups(
            scales, extras, lines, tl.program_id(1) * STEPS, LAST, scaled, n, STEPS, GROUP, SCALED_ROWS, EXTRA,
            DEPTH // (_WORDS * SETS),
        )  # fmt: skip
    wait_for_inputs(OVERLAP)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for part in tl.range(0, 1 if SPLIT else PARTS):
        begin = (tl.program_id(1) if SPLIT else part) * STEPS
        found = stored_sum(
            words_at, x_rows, inside, scales, extras, rows, begin, turn, LAST, n, scaled, STEPS,
            TOGETHER, CODE, SETS, SPAN, DEPTH, GROUP, SCALED_ROWS, EXTRA, PADDED, HALF, ASSEMBLY, JOIN, ROWS, TOKENS,
            STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            added = tl.load(bias + rows, mask=local < tl.where(begin == 0, ROWS, 0), other=0.0)
            found += added.to(tl.float32)[:, None]
        total += found
    let_next_start(OVERLAP)
    narrow = output.dtype.element_ty
    if GATED:
        gate, up = split_rows(total.to(narrow).to(tl.float32), ROWS, TOKENS, False)
        total = activated(gate, up, alpha, limit, KIND, narrow)
    elif KIND != "":
        total = activate(total.to(narrow).to(tl.float32), KIND)
    numbers = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    at = output + (tl.program_id(1) * tokens + columns).to(tl.int64)[None, :] * results + numbers[:, None]
    tl.store(at, total.to(narrow), mask=(numbers < results)[:, None] & (columns < tokens)[None, :])


def row_stride(x: torch.Tensor) -> int:
    """Return the elements from row to row of x.

    torch's stride of a single row may be any number. A stride of 1 would be compiled as a constant, and the rows of a
    tile, which repeat the single row, would be taken for neighbours.
    """
    return x.stride(0) if len(x) > 1 else x.shape[1]


def depth_of(codes: Codes, target: Target) -> int:
    """Return the columns of a step: at most 128, and of one group or of two halves of a unit."""
    k, unit = codes.shape[-1], WORDS * CODES[codes.code]
    group = codes.group if codes.group != k else 0
    if codes.has_step_factors:
        # With exponents the last step may be half empty, because a word has those of two units.
        is_whole = codes.exponents is not None or k % (2 * unit) == 0
        return 2 * unit if is_whole and target.matrix != "v_wmma" else unit
    if group and group < unit:
        assert 2 * group == unit, "a step has two groups at most"
        return unit
    sizes = (64, 32) if target.matrix == "v_wmma" else (128, 64, 32)  # more take more than a thread's registers
    return next(size for size in sizes if k % size == 0 and (group or k) % size == 0)


def group_steps(codes: Codes, target: Target) -> int:
    """Return the steps of a group: see GROUP of `stored_sum`."""
    if codes.group == codes.shape[-1] and (codes.extra[0] == "" or codes.has_step_factors):
        return 0
    return codes.group // depth_of(codes, target) or -1


def last_step(codes: Codes, target: Target) -> int:
    """Return the number of the last step with columns, which may be half empty: see PADDED of `stored_sum`."""
    return ceil_div(codes.shape[-1], depth_of(codes, target)) - 1


def steps_of(codes: Codes, target: Target) -> int:
    """Return the steps of a sum. mxfp4 has an empty one more, if its others could share no turn."""
    steps = last_step(codes, target) + 1
    is_odd = target.hopper and codes.exponents is not None and steps % 2 and steps % 3
    return steps + 1 if is_odd else steps


def steps_together(codes: Codes, steps: int, tiles: StoredTiles, columns: int, target: Target) -> int:
    """Return the steps of a turn of the loop: TOGETHER of `stored_sum`, on which no bit depends.

    Args:
        codes: The weight.
        steps: Steps of a sum.
        tiles: The tiles.
        columns: Most columns of a turn. Three steps of an odd number of them may have half as many more.
        target: The GPU. Only on Hopper are there several.
    """
    if not target.hopper:
        return 1
    sums = (2 if group_steps(codes, target) < 0 else 1) * (2 if codes.lows is not None else 1)
    registers = sums * tiles.rows * tiles.tokens // (32 * tiles.warps)
    depth, columns = depth_of(codes, target), columns * 3 // 2 if steps % 2 else columns
    counts = (count for count in (4, 3, 2) if steps % count == 0 and count * depth <= columns)
    return next((count for count in counts if count * registers <= SUM_REGISTERS), 1)


def parts_of(codes: Codes, results: int, target: Target) -> int:
    """Return the parts of the inner dimension, which depend on the weight and the GPU alone."""
    steps = steps_of(codes, target)
    blocks = ceil_div(results, 64)
    for parts in PARTS:
        if blocks * parts <= 2 * target.multiprocessors and steps % parts == 0 and steps // parts >= PART_STEPS:
            return parts
    return 1


def tiles_of(tokens: int, n: int, target: Target, group: int = 0, added: bool = False) -> StoredTiles:
    """Return the tiles of a product with a weight of n rows. None of these sizes is one that a sum runs over.

    group: see GROUP of `stored_sum`. added: whether the kernel adds parts of the inner dimension.
    """
    if not target.hopper:
        is_small = tokens <= 16 or target.matrix == "v_wmma"  # more take more than a thread's registers
        return StoredTiles(64, 16 if is_small else 32, 4, 3 if target.backend == "cuda" else 2)
    if tokens <= 16:
        return StoredTiles(64, 16, 4, 4)
    if tokens <= 64:  # taller tiles read x less often, where there are enough of them
        return StoredTiles(128, 64, 8, 3) if n >= 128 * target.multiprocessors else StoredTiles(64, 64, 4, 4)
    if group < 0 or added:  # three sums of 128 tokens take more than a thread's registers
        return StoredTiles(128, 64, 8, 3)
    return StoredTiles(128, 128, 8, 3)


def stages_of(tiles: StoredTiles, codes: Codes, target: Target) -> int:
    """Return Triton's num_stages.

    Sums of x beside the product read x in two products. In tensor memory these are stages of their own, and Triton 3.6
    copies the next turn's x before the second one has read this turn's.
    """
    return 1 if target.tensor_memory and codes.lows is not None else tiles.stages


def stored_linear(
    launch: Launching,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    output: torch.Tensor | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    divisible: bool = False,
) -> torch.Tensor:
    """Compute x weight^T + bias.

    Args:
        launch: How to launch it.
        x: [tokens, k] bfloat16 or float16; rows may be strided, their numbers not.
        codes: The weight [n, k].
        bias: [n] or None.
        dtype: Dtype of the result, if it has one part.
        output: [tokens, n], receives the result in its own dtype; contiguous.
        activation: Activation of the result. None: none, or SiLU if `gated`.
        gated: Whether the weight holds gate and up, the gate first: the result is activation(gate) x up.
        divisible: Whether the result may stay in parts.

    Returns:
        [parts, tokens, results]; several parts are float32.
    """
    tokens, n = len(x), codes.shape[-2]
    results = n // 2 if gated else n
    activation = SILU if gated and activation is None else activation
    assert x.stride(1) == 1 and x.shape[1] == codes.shape[-1], (x.shape, codes.shape)
    if codes.order is not None:
        x = x.index_select(1, codes.order)
    depth, parts = depth_of(codes, launch.target), parts_of(codes, results, launch.target) if divisible else 1
    split = parts > 1 and tokens <= FEW_TOKENS
    if output is None:
        shape = (parts if split else 1, tokens, results)
        output = torch.empty(shape, dtype=torch.float32 if split else dtype, device=x.device)
    group, (extra, extras) = group_steps(codes, launch.target), codes.extra
    tiles = tiles_of(tokens, n, launch.target, group, parts > 1 and not split)
    grid = (
        ceil_div(results, tiles.rows // 2 if gated else tiles.rows),
        parts if split else 1,
        ceil_div(tokens, tiles.tokens),
    )
    steps = steps_of(codes, launch.target) // parts
    if (split or parts == 1) and can_sum(codes, x, results, 2 if gated else 1, launch.target):
        from .stored_hopper_linear import multiply_few

        multiply_few(launch, x, codes, bias, output, activation, gated, steps)
        return output
    is_alone = tokens <= 16 and prod(grid) <= launch.target.multiprocessors
    columns = ALONE_COLUMNS if is_alone else COLUMNS
    stored_kernel[grid](
        x,
        codes.words,
        codes.scales,
        codes.scales if extras is None else extras,
        x if bias is None else bias,
        output,
        tokens,
        n,
        codes.scales.shape[-1],
        row_stride(x),
        0.0 if activation is None else activation.alpha,
        0.0 if activation is None else activation.limit,
        STEPS=steps,
        LAST=last_step(codes, launch.target),
        PARTS=parts,
        SPLIT=split,
        TOGETHER=steps_together(codes, steps, tiles, columns, launch.target),
        CODE=codes.code,
        SETS=CODES[codes.code],
        SPAN=codes.span,
        DEPTH=depth,
        GROUP=group,
        SCALED_ROWS=codes.scaled_rows,
        EXTRA=extra,
        PADDED=steps * parts * depth > codes.shape[-1],
        HAS_BIAS=bias is not None,
        GATED=gated,
        KIND="" if activation is None else activation.kind,
        HALF=x.dtype == torch.float16,
        ASSEMBLY=launch.target.chained,
        JOIN=launch.target.hopper,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        PREFETCH=min(AHEAD, steps) if launch.overlap else 0,
        STAGES=stages_of(tiles, codes, launch.target),
        num_warps=tiles.warps,
        num_stages=stages_of(tiles, codes, launch.target),
        **backend_options(launch.target),
        **launch_options(launch.overlap),
    )
    return output
