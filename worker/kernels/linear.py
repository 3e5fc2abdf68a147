"""Matrix products of few tokens with a large weight: what matters is that the weight is read at the memory's speed.

The weight's rows are the rows of the tile that the matrix instructions see, and the tokens its columns, because those
instructions want 64 rows or more and are content with 16 columns. The inner dimension may be cut into parts, one
program each, where the weight alone gives too few programs to keep the memory busy: parts are added up by whatever
reads the result next, in their order, so results do not depend on which program finished first. They would depend on
how many tokens there are: so where the device is to be steady nothing is cut, and more is in flight instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from worker.device.overlap import launch_options, let_next_start, wait_for_inputs
from worker.device.target import Target

MEASURED = "sm_90"  # an H200, with the shapes of Llama-3.1-8B: see benchmarks/gpu_layers.py
MEASURED_TOKENS_MAX = 64  # beyond, torch's library is as fast or faster there
OTHER_TOKENS_MAX = 16  # where nothing was measured
FEW = 64  # results of a token up to which the library sums in another order for each number of tokens
PARTS_MAX, OTHER_PARTS_MAX = 64, 4  # each number of parts is a compilation of the norm that adds them up
STEPS_MIN = 8  # of a part: its start and end should not outweigh it


@dataclass(frozen=True)
class LinearTiles:
    """rows: of the weight in one tile. depth: of the inner dimension in one step. tokens: in one tile.

    parts: of the inner dimension. warps, stages: Triton's num_warps and num_stages.
    prefetch: steps of the weight that are asked into the L2 cache before the inputs are there.
    described: tiles are copied through tensor descriptors, by Hopper's copy engine; rows of x and of the weight must
    begin at multiples of 16 bytes then.
    """

    rows: int
    depth: int
    tokens: int
    parts: int
    warps: int
    stages: int
    prefetch: int = 0
    described: bool = False


@triton.jit
def prefetch(addresses):
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
    """[DEPTH, tokens of a tile], from `first` of the inner dimension on, zeros where there is nothing."""
    if tiles is not None:
        return tl.trans(tiles.load([first_column, first]))
    places = first + tl.arange(0, DEPTH)
    inside = inside_columns[:, None]
    if not EVEN:
        inside = inside & (places < k)[None, :]
    return tl.trans(tl.load(rows_at + places[None, :], mask=inside, other=0.0))


@triton.jit(do_not_specialize=["tokens"])  # one compilation for 1, for multiples of 16, and for all others
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
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [blocks of n, parts, blocks of tokens].

    x: [tokens, k], x_stride elements from token to token. weight: [n, k], contiguous. x_tiles, weight_tiles: the same,
    described in tiles of TOKENS x DEPTH and ROWS x DEPTH; None: they are read by pointer. bias: [n], added to part 0.
    output: [parts, tokens, n], contiguous. STEPS: of DEPTH in one part; a constant, so that the loop's length is known.
    GATED: weight is [2n, k] and bias [2n], the gate first, and the output silu(gate) x up; there is one part then.
    EVEN: ROWS divides n, and the parts' steps divide k.
    """
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(2) * TOKENS
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, TOKENS)
    inside_rows = rows < n
    inside_columns = columns < tokens
    begin = tl.program_id(1) * (STEPS * DEPTH)
    weight_rows = weight + rows[:, None].to(tl.int64) * k
    up_rows = weight_rows + tl.cast(n, tl.int64) * k  # of one number n is no tensor
    x_rows = x + columns[:, None].to(tl.int64) * x_stride
    if PREFETCH > 0:
        lines = begin + tl.arange(0, DEPTH // 64) * 64  # a line of the cache holds 64 numbers of 16 bits
        for step in tl.static_range(PREFETCH):
            prefetch(weight_rows + (lines + step * DEPTH)[None, :])
            if GATED:
                prefetch(up_rows + (lines + step * DEPTH)[None, :])
    wait_for_inputs(OVERLAP)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up_total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = begin + step * DEPTH
        w = _load_weight(weight_tiles, first_row, weight_rows, inside_rows, first, k, DEPTH, EVEN)
        xs = _load_x(x_tiles, first_column, x_rows, inside_columns, first, k, DEPTH, EVEN)
        total = tl.dot(w, xs, total, input_precision="ieee")
        if GATED:
            up = _load_weight(weight_tiles, n + first_row, up_rows, inside_rows, first, k, DEPTH, EVEN)
            up_total = tl.dot(up, xs, up_total, input_precision="ieee")
    let_next_start(OVERLAP)
    if HAS_BIAS:
        inside_bias = inside_rows & (tl.program_id(1) == 0)
        total += tl.load(bias + rows, mask=inside_bias, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_total += tl.load(bias + n + rows, mask=inside_bias, other=0.0).to(tl.float32)[:, None]
    narrow = output.dtype.element_ty
    if GATED:
        gate = total.to(narrow).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32)
        total = silu * up_total.to(narrow).to(tl.float32)
    place = (tl.program_id(1) * tokens + columns).to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(output + place, total.to(narrow), mask=inside_rows[:, None] & inside_columns[None, :])


def linear_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: LinearTiles,
    dtype: torch.dtype,
    *,
    output: torch.Tensor | None = None,
    gated: bool = False,
    overlap: bool = False,
) -> torch.Tensor:
    """The parts of x weight^T + bias [parts, tokens, n] dtype, as `tiles` cuts them.

    x: [tokens, k], tokens may be apart. weight: [n, k], contiguous. bias: [n] or None.
    gated: weight and bias are of the gate and of up, [2n]; the result is silu(gate) x up [1, tokens, n].
    output: where the parts go, in its own dtype; contiguous.
    """
    tokens, k = x.shape
    n = len(weight) // 2 if gated else len(weight)
    assert tiles.parts == 1 or not gated, "parts of a gate cannot be added up later"
    parts = split_depth(k, tiles)[0]
    if output is None:
        output = torch.empty((parts, tokens, n), dtype=dtype, device=x.device)
    assert output.shape == (parts, tokens, n) and output.is_contiguous()
    linear_kernel[(triton.cdiv(n, tiles.rows), parts, triton.cdiv(tokens, tiles.tokens))](
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
        **linear_constants(n, k, tiles, biased=bias is not None, gated=gated, overlap=overlap),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(overlap),
    )
    return output


def linear_constants(
    n: int, k: int, tiles: LinearTiles, *, biased: bool, gated: bool, overlap: bool
) -> dict[str, int | bool]:
    """The compile-time constants of `linear_kernel`, but for OVERLAP."""
    parts, steps = split_depth(k, tiles)
    even = n % tiles.rows == 0 and k == parts * steps * tiles.depth
    return {
        "STEPS": steps,
        "HAS_BIAS": biased,
        "GATED": gated,
        "EVEN": even,
        "ROWS": tiles.rows,
        "DEPTH": tiles.depth,
        "TOKENS": tiles.tokens,
        "PREFETCH": min(tiles.prefetch, steps) if overlap and even else 0,
        "STAGES": tiles.stages,
    }


def split_depth(k: int, tiles: LinearTiles) -> tuple[int, int]:
    """How many parts there really are, and the steps of each: no part is empty."""
    steps = triton.cdiv(k, tiles.depth)
    steps_per_part = triton.cdiv(steps, min(tiles.parts, steps))
    return triton.cdiv(steps, steps_per_part), steps_per_part


def choose_tiles(tokens: int, n: int, k: int, target: Target, *, divisible: bool, gated: bool) -> LinearTiles | None:
    """The tiles for x [tokens, k] and a weight [n, k], or [2n, k] where `gated`; None: torch's library is better.

    divisible: the result may be left in parts.
    """
    measured = target.name == MEASURED
    if target.backend == "cuda" and not target.matrix:
        return None  # the compiler knows no matrix instructions there, and the library does
    if target.steady and n <= FEW and not gated:
        tokens = min(tokens, MEASURED_TOKENS_MAX if measured else OTHER_TOKENS_MAX)  # of one block: never the library's
    if tokens > (MEASURED_TOKENS_MAX if measured else OTHER_TOKENS_MAX):
        return None
    if gated and (n % 64 or k % 128):
        return None  # two masked weights in one loop are too much for the registers of some
    columns = max(16, triton.next_power_of_2(tokens))
    if not measured:  # every GPU has room for these in its shared memory
        parts = _parts(triton.cdiv(n, 64), k // 64, target) if divisible and not target.steady else 1
        return LinearTiles(64, 64, columns, parts, 4, 2)
    described = columns > 16 and k % 8 == 0
    if gated:
        return LinearTiles(64, 128, columns, 1, 4, 4 if columns == 64 else 3, prefetch=1, described=described)
    rows = 128 if columns > 16 and n >= 256 * target.multiprocessors else 64
    blocks = triton.cdiv(n, rows)
    parts = _parts(blocks, k // 128, target) if divisible and not target.steady else 1
    warps = 8 if columns == 64 and rows == 128 else 4
    if target.steady and blocks <= target.multiprocessors:
        return LinearTiles(rows, 128, columns, 1, warps, 8 if columns <= 32 else 6, prefetch=2, described=described)
    # A program that has a multiprocessor to itself needs more in flight.
    alone = columns == 16 and blocks * parts <= target.multiprocessors
    stages = 6 if alone else 5 if columns == rows == 64 else 4
    return LinearTiles(rows, 128, columns, parts, warps, stages, prefetch=2, described=described)


def _parts(programs: int, steps: int, target: Target) -> int:
    """Doubled while every program still has a multiprocessor to itself, or nearly, and parts are not short."""
    parts, parts_max = 1, PARTS_MAX if target.name == MEASURED else OTHER_PARTS_MAX
    while (
        2 * parts <= parts_max
        and programs * 2 * parts <= 1.1 * target.multiprocessors
        and steps >= STEPS_MIN * 2 * parts
    ):
        parts *= 2
    return parts
