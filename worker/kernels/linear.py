"""Matrix products of few tokens with a large weight, which must be read at the memory's bandwidth.

The weight's rows are the rows of the matrix instructions' tile and the tokens its columns, because these instructions
need 64 rows or more but only 16 columns. The inner dimension may be split into parts, one program each, if the weight
alone gives too few programs to saturate the memory. The next operation adds the parts in order, so results do not
depend on which program finishes first. They would depend on the number of tokens, so a steady device splits by the
weight alone (`steady_parts`), also where torch's library multiplies, and keeps more loads in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from kvforge.worker.device.target import Target

from .activation import activate, activated
from .activations import SILU, Activation
from .launching import Launching

MEASURED = "sm_90"  # tuned on an H200 with the shapes of Llama-3.1-8B: see benchmarks/gpu_layers.py
MEASURED_TOKENS_MAX = 64  # for more, torch's library is as fast or faster there
OTHER_TOKENS_MAX = 16  # on devices that were not measured
ALIGNED = 8  # numbers of 16 bits that the library loads or stores at a time
FEW = 64  # up to this many results per token, the library's order of sums varies with the token count
ROUTER_MAX = 256  # results per token of routers
PARTS_MAX, OTHER_PARTS_MAX = 64, 4  # each number of parts compiles the norm that adds them
SHORT_PARTS_MAX = 16  # parts of a router's product
STEPS_MIN = 8  # steps of a part, to amortise its start and end
# A multiprocessor of an H200 reads at most twice its share of the bandwidth (benchmarks/NOTES.md). A weight is divided
# where its tiles have no more than this share of the multiprocessors, and its rows are as long as this.
DIVIDED_SHARE, DIVIDED_COLUMNS = 0.25, 4096
# Tokens up to this many: a program for each part; torch's library, which is faster than a program for both.
DIVIDED_FEW, DIVIDED_MANY = 256, 384


@dataclass(frozen=True)
class LinearTiles:
    """Tile sizes of a product.

    Attributes:
        rows: Rows of the weight in one tile.
        depth: Inner dimension of one step.
        tokens: Tokens in one tile.
        parts: Parts of the inner dimension.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
        prefetch: Steps of the weight that are fetched into the L2 cache before the inputs are ready.
        described: Whether Hopper's copy engine loads tiles through tensor descriptors. Rows of x and of the weight must
            then begin at multiples of 16 bytes.
        inside: Parts of the inner dimension that a program adds itself, with the bits of as many `parts` that are
            added in order.
    """

    rows: int
    depth: int
    tokens: int
    parts: int
    warps: int
    stages: int
    prefetch: int = 0
    described: bool = False
    inside: int = 1


@triton.jit
def prefetch(addresses):
    """Prefetch addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_weight(tiles, first_row, rows_at, inside_rows, first, k, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    if tiles is not None:
        return tiles.load([first_row, first])
    places = first + tl.arange(0, DEPTH)
    if EVEN:
        return tl.load(rows_at + places[None, :], eviction_policy="evict_first")
    inside = inside_rows[:, None] & (places < k)[None, :]
    return tl.load(rows_at + places[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_x(tiles, first_column, rows_at, inside_columns, first, k, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """Load [DEPTH, tokens of a tile] from index `first` of the inner dimension, with zeros outside."""
    if tiles is not None:
        return tl.trans(tiles.load([first_column, first]))
    places = first + tl.arange(0, DEPTH)
    inside = inside_columns[:, None]
    if not EVEN:
        inside = inside & (places < k)[None, :]
    return tl.trans(tl.load(rows_at + places[None, :], mask=inside, other=0.0))


@triton.jit(do_not_specialize=["tokens"])  # one compilation for all counts
def linear_kernel(
    x,
    weight,
    x_tiles,
    weight_tiles,
    bias,
    output,
    tokens,
    n,
    k,
    x_stride,
    alpha,
    limit,
    STEPS: tl.constexpr,
    INSIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply x by a weight. Grid: [blocks of n, parts, blocks of tokens].

    x: [tokens, k], x_stride elements from token to token. weight: [n, k], contiguous. x_tiles, weight_tiles: tensor
    descriptors with tiles of TOKENS x DEPTH and ROWS x DEPTH; None: load by pointer. bias: [n], added to part 0.
    output: [parts, tokens, n], contiguous. STEPS: steps of DEPTH in one part; a constant, so that the loop's length is
    known. INSIDE: parts that the program adds itself, without activation; there are no others then.
    KIND: kind of the activation of the output, with one part; "": none. alpha, limit: see Activation.
    GATED: weight is [2n, k] and bias [2n], the gate first, and the output is activation(gate) x up.
    EVEN: ROWS divides n, and the parts' steps divide k.
    """
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(2) * TOKENS
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, TOKENS)
    inside_rows = rows < n
    inside_columns = columns < tokens
    begin = tl.program_id(1) * (STEPS * DEPTH)
    weight_rows = weight + rows[:, None].to(tl.int64) * k
    up_rows = weight_rows + tl.cast(n, tl.int64) * k  # n = 1 is a constant, not a tensor
    x_rows = x + columns[:, None].to(tl.int64) * x_stride
    if PREFETCH > 0:
        lines = begin + tl.arange(0, DEPTH // 64) * 64  # a cache line holds 64 numbers of 16 bits
        for step in tl.static_range(PREFETCH):
            prefetch(weight_rows + (lines + step * DEPTH)[None, :])
            if GATED:
                prefetch(up_rows + (lines + step * DEPTH)[None, :])
    wait_for_inputs(OVERLAP)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up_total = tl.zeros([ROWS, TOKENS], tl.float32)
    added = tl.zeros([ROWS, TOKENS], tl.float32)
    if HAS_BIAS and INSIDE > 1:
        added += tl.load(bias + rows, mask=inside_rows, other=0.0).to(tl.float32)[:, None]
    # Two parts are two loops, so that the matrix instructions of a loop overlap. More would be as many copies.
    LOOPS: tl.constexpr = INSIDE if INSIDE <= 2 else 1
    for part in tl.static_range(LOOPS):
        if part > 0:
            added += total
            total = tl.zeros([ROWS, TOKENS], tl.float32)
        for step in tl.range(0, STEPS * INSIDE // LOOPS, num_stages=STAGES):
            first = begin + (part * STEPS + step) * DEPTH
            w = _load_weight(weight_tiles, first_row, weight_rows, inside_rows, first, k, DEPTH, EVEN)
            xs = _load_x(x_tiles, first_column, x_rows, inside_columns, first, k, DEPTH, EVEN)
            total = tl.dot(w, xs, total, input_precision="ieee")
            if GATED:
                up = _load_weight(weight_tiles, n + first_row, up_rows, inside_rows, first, k, DEPTH, EVEN)
                up_total = tl.dot(up, xs, up_total, input_precision="ieee")
            if LOOPS < INSIDE:
                ends = step % STEPS == STEPS - 1
                added = tl.where(ends, added + total, added)
                total = tl.where(ends, 0.0, total)
    let_next_start(OVERLAP)
    if INSIDE > 1:
        total += added
    elif HAS_BIAS:
        inside_bias = inside_rows & (tl.program_id(1) == 0)
        total += tl.load(bias + rows, mask=inside_bias, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_total += tl.load(bias + n + rows, mask=inside_bias, other=0.0).to(tl.float32)[:, None]
    narrow = output.dtype.element_ty
    if GATED:
        gate, up = total.to(narrow).to(tl.float32), up_total.to(narrow).to(tl.float32)
        total = activated(gate, up, alpha, limit, KIND, narrow)
    elif KIND != "":
        total = activate(total.to(narrow).to(tl.float32), KIND)
    place = (tl.program_id(1) * tokens + columns).to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(output + place, total.to(narrow), mask=inside_rows[:, None] & inside_columns[None, :])


def linear_parts(
    launch: Launching,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: LinearTiles,
    dtype: torch.dtype,
    *,
    output: torch.Tensor | None = None,
    activation: Activation | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Compute the parts of x weight^T + bias, as `tiles` splits them.

    Args:
        launch: How to launch it.
        x: [tokens, k]; rows may be strided, their numbers not.
        weight: [n, k], contiguous.
        bias: [n] or None.
        tiles: Tile sizes.
        dtype: Dtype of the result.
        output: Receives the parts in its own dtype; contiguous.
        activation: Activation of the result, which then has one part. None: none, or SiLU if `gated`.
        gated: Whether weight and bias are [2n], the gate first: the result is activation(gate) x up.

    Returns:
        [parts, tokens, n].
    """
    tokens, k = x.shape
    assert x.stride(1) == 1 or k == 1, "the numbers of a row lie apart"
    n = len(weight) // 2 if gated else len(weight)
    activation = SILU if gated and activation is None else activation
    assert tiles.parts == 1 or activation is None, "no activation of a sum that is added up later"
    parts, steps = split_depth(k, tiles)
    even = n % tiles.rows == 0 and k == parts * steps * tiles.depth
    if tiles.inside > 1:
        assert parts == 1 and steps % tiles.inside == 0 and activation is None, (parts, steps, tiles.inside)
        steps //= tiles.inside
    if output is None:
        output = torch.empty((parts, tokens, n), dtype=dtype, device=x.device)
    assert output.shape == (parts, tokens, n) and output.is_contiguous()
    linear_kernel[(ceil_div(n, tiles.rows), parts, ceil_div(tokens, tiles.tokens))](
        x,
        weight,
        TensorDescriptor.from_tensor(x, [tiles.tokens, tiles.depth]) if tiles.described else None,
        TensorDescriptor.from_tensor(weight, [tiles.rows, tiles.depth]) if tiles.described else None,
        weight if bias is None else bias,
        output,
        tokens,
        n,
        k,
        x.stride(0),
        0.0 if activation is None else activation.alpha,
        0.0 if activation is None else activation.limit,
        GATED=gated,
        KIND="" if activation is None else activation.kind,
        STEPS=steps,
        INSIDE=tiles.inside,
        HAS_BIAS=bias is not None,
        EVEN=even,
        ROWS=tiles.rows,
        DEPTH=tiles.depth,
        TOKENS=tiles.tokens,
        PREFETCH=min(tiles.prefetch, steps * tiles.inside) if launch.overlap and even else 0,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(launch.overlap),
    )
    return output


def split_depth(k: int, tiles: LinearTiles) -> tuple[int, int]:
    """Return the actual number of parts and the steps of each; no part is empty."""
    steps = ceil_div(k, tiles.depth)
    steps_per_part = ceil_div(steps, min(tiles.parts, steps))
    return ceil_div(steps, steps_per_part), steps_per_part


def steady_parts(n: int, k: int, target: Target) -> int:
    """Return the parts of a product with a weight [n, k] on a steady target, whatever the number of tokens."""
    if n <= ROUTER_MAX or target.name != MEASURED:
        return 1
    few = ceil_div(n, 64) <= DIVIDED_SHARE * target.multiprocessors
    return 2 if few and k % 256 == 0 and k >= DIVIDED_COLUMNS else 1


def choose_tiles(tokens: int, n: int, k: int, target: Target, *, divisible: bool, gated: bool) -> LinearTiles | None:
    """Choose the tiles for x [tokens, k] and a weight.

    Args:
        tokens: Rows of x.
        n: Rows of the weight, or of its gate if `gated`.
        k: Columns of the weight.
        target: The architecture.
        divisible: Whether the result may stay in parts.
        gated: Whether the weight holds gate and up.

    Returns:
        The tiles; None if torch's library is faster.
    """
    measured = target.name == MEASURED
    if target.backend == "cuda" and not target.matrix:
        return None  # the library has matrix instructions there, the compiler does not
    if measured and target.steady and not gated and 16 <= n <= ROUTER_MAX and n % 16 == 0 and k % 64 == 0:
        return _router_tiles(tokens, n, k, target.multiprocessors, divisible)
    # The library has other kernels for few results and for rows that are not aligned, by the number of tokens.
    if target.steady and not gated and (n <= FEW or n % ALIGNED or k % ALIGNED):
        tokens = min(tokens, MEASURED_TOKENS_MAX if measured else OTHER_TOKENS_MAX)
    if divisible and target.steady and steady_parts(n, k, target) > 1:
        return _divided_tiles(tokens)
    if tokens > (MEASURED_TOKENS_MAX if measured else OTHER_TOKENS_MAX):
        return None
    if gated and (n % 64 or k % 128):
        return None  # two masked weights in one loop exceed some GPUs' registers
    columns = max(16, triton.next_power_of_2(tokens))
    if not measured:  # these fit every GPU's shared memory
        parts = _parts(ceil_div(n, 64), k // 64, target) if divisible and not target.steady else 1
        return LinearTiles(64, 64, columns, parts, 4, 2)
    described = columns > 16 and k % 8 == 0
    if gated:
        return LinearTiles(64, 128, columns, 1, 4, 4 if columns == 64 else 3, prefetch=1, described=described)
    rows = 128 if columns > 16 and n >= 256 * target.multiprocessors else 64
    blocks = ceil_div(n, rows)
    parts = _parts(blocks, k // 128, target) if divisible and not target.steady else 1
    warps = 8 if columns == 64 and rows == 128 else 4
    if target.steady and blocks <= target.multiprocessors:
        return LinearTiles(rows, 128, columns, 1, warps, 8 if columns <= 32 else 6, prefetch=2, described=described)
    # A program alone on a multiprocessor needs more loads in flight.
    alone = columns == 16 and blocks * parts <= target.multiprocessors
    stages = 6 if alone else 5 if columns == rows == 64 else 4
    return LinearTiles(rows, 128, columns, parts, warps, stages, prefetch=2, described=described)


def _divided_tiles(tokens: int) -> LinearTiles | None:
    """Return the tiles of a sum in two parts, with programs that add both if there are many tokens."""
    if tokens <= 128:
        columns = min(64, max(16, triton.next_power_of_2(tokens)))
        return LinearTiles(64, 128, columns, 2, 4, 8 if columns <= 32 else 6, prefetch=2, described=columns > 16)
    if tokens <= 192:
        return LinearTiles(128, 64, 64, 2, 4, 6, prefetch=2, described=True)
    if tokens <= DIVIDED_FEW:
        return LinearTiles(64, 128, 128, 2, 4, 4, prefetch=2, described=True)
    if tokens <= DIVIDED_MANY:
        return None
    if tokens <= 640:
        return LinearTiles(64, 64, 128, 1, 4, 6, described=True, inside=2)
    return LinearTiles(128, 64, 128, 1, 8, 5, described=True, inside=2)


def _router_tiles(tokens: int, n: int, k: int, multiprocessors: int, divisible: bool) -> LinearTiles:
    """Return the tiles for so few results that taller ones would leave the weight to a few multiprocessors.

    With two warps the matrix instruction is the same for any number of rows and tokens, so the library is never used.
    The smallest tiles are the fastest if all programs run at once (benchmarks/NOTES.md). A program takes as long as its
    steps, so that a divisible sum has short parts.
    """
    depth = 128 if k % 128 == 0 else 64
    ahead = 8 if k >= 8 * depth else 0
    at_once = 2 * multiprocessors
    parts = _short_parts(k // depth) if divisible else 1
    programs = n // 16 * ceil_div(tokens, 16)
    if parts > 1 and programs * parts <= 2 * at_once:
        steps = k // depth // parts
        return LinearTiles(16, depth, 16, parts, 2, min(steps + 1, 7), prefetch=min(steps, 8))
    if programs <= at_once:
        # So few programs wait for each of their loads, so that as many as possible are in flight.
        return LinearTiles(16, depth, 16, 1, 2, 7 if depth == 128 else 8, prefetch=ahead, inside=parts)
    if n % 64 or n // 16 * ceil_div(tokens, 64) <= at_once:
        return LinearTiles(16, depth, 64, 1, 2, 4, prefetch=ahead, inside=parts)
    return LinearTiles(64, depth, 32, 1, 2, 3, prefetch=ahead, inside=parts)


def _short_parts(steps: int) -> int:
    """Return the parts of an inner dimension of so many steps: of two steps or more, and all of the same length."""
    return max(
        parts for parts in range(1, SHORT_PARTS_MAX + 1) if steps % parts == 0 and (parts == 1 or steps >= 2 * parts)
    )


def _parts(programs: int, steps: int, target: Target) -> int:
    """Double the parts while nearly every program has a multiprocessor to itself and parts are long enough."""
    parts, parts_max = 1, PARTS_MAX if target.name == MEASURED else OTHER_PARTS_MAX
    while (
        2 * parts <= parts_max
        and programs * 2 * parts <= 1.1 * target.multiprocessors
        and steps >= STEPS_MIN * 2 * parts
    ):
        parts *= 2
    return parts
