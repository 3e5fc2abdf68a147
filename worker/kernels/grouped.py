"""Experts of all tokens of a step as grouped products: gate and up with the activation, down, and the sum.

Pairs of a token and an expert are sorted by expert (expert_sort.py), and each block of pairs of one expert is
multiplied by that expert's weights. As in linear.py, the rows of the matrix instructions' tile are the weight's, which
must be read at the memory's bandwidth. A token's results are added in the order of the router.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .activation import activate, activated
from .activations import Activation
from .expert_sort import FIELDS, Blocks
from .grouped_tiles import GroupedTiles, backend_options
from .launching import Launching
from .linear import prefetch

LINE = 64  # numbers of 16 bits in a cache line
SUM_BLOCK, SUM_WARPS = 1024, 4


@dataclass(frozen=True)
class Gating:
    """What follows the first product. gated: the product gives gate and up. interleaved: their numbers alternate."""

    activation: Activation
    gated: bool = True
    interleaved: bool = False


_LINE = tl.constexpr(LINE)


@triton.jit
def pairs_of(order, blocks, block, TOKENS: tl.constexpr, ALONE: tl.constexpr):
    """Return the expert of a block (-1: empty, or AWAY), its pairs [TOKENS], and which of them exist."""
    columns = tl.arange(0, TOKENS)
    if ALONE:
        expert = tl.load(blocks + block)
        pairs = block + tl.zeros([TOKENS], tl.int32)
        inside = columns == 0
    else:
        expert = tl.load(blocks + block * FIELDS)
        places = tl.load(blocks + block * FIELDS + 1, mask=expert >= 0, other=0) + columns
        inside = places < tl.load(blocks + block * FIELDS + 2, mask=expert >= 0, other=0)
        pairs = tl.load(order + places, mask=inside, other=0)
    return expert, pairs, inside


@triton.jit
def split_rows(total, ROWS: tl.constexpr, TOKENS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return gate and up [ROWS / 2, TOKENS] of a tile [ROWS, TOKENS]."""
    if INTERLEAVED:
        both = tl.permute(tl.reshape(total, [ROWS // 2, 2, TOKENS]), [0, 2, 1])
    else:
        both = tl.permute(tl.reshape(total, [2, ROWS // 2, TOKENS]), [1, 2, 0])
    return tl.split(both)


@triton.jit
def _rows_beside_shared(
    weight,
    shared,
    expert,
    experts,
    cuts,
    first,
    n,
    k,
    DOWN: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the addresses [ROWS, 1] of the rows of an expert's tile; see ExpertMatrices for those of a shared one."""
    local = tl.arange(0, ROWS)
    is_shared = expert >= experts
    cut, cuts = tl.where(is_shared, expert - experts, 0), tl.where(is_shared, cuts, 1)
    all_rows = 2 * n if GATED else n
    if is_shared:  # AMD's passes fail for a pointer that `where` chooses
        weight = shared
    at = weight + tl.where(is_shared, 0, expert).to(tl.int64) * all_rows * k
    if DOWN:
        return at + cut * k + (first + local)[:, None].to(tl.int64) * (cuts * k)
    rows = first + cut * n + local
    if GATED:
        numbers: tl.constexpr = ROWS // 2
        rows = first + cut * n + local % numbers + (local // numbers) * (cuts * n)
    return at + rows[:, None].to(tl.int64) * k


@triton.jit(do_not_specialize=["count", "tokens", "width", "experts", "cuts"])
def grouped_kernel(
    x,
    weight,
    shared,
    bias,
    scales,
    order,
    blocks,
    output,
    count,
    tokens,
    width,
    experts,
    cuts,
    n,
    k,
    x_stride,
    alpha,
    limit,
    STEPS: tl.constexpr,
    DOWN: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALONE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply each block of pairs by the weights of its expert. Grid: [blocks x tiles of rows, blocks first].

    x: [tokens, k], or [pairs, k] if DOWN; x_stride elements from row to row. weight: [experts, rows, k], or
    [experts, k, rows] if TRANSPOSED, contiguous; rows: 2n if GATED, else n. shared: if SHARED, the matrix of `cuts`
    shared experts, contiguous; see ExpertMatrices. bias: [experts, rows]. order, blocks: see Blocks. width: experts per
    token. output: [pairs, n], or [width, tokens, n] if DOWN. scales: [pairs] float32, factors of the output if DOWN.
    KIND, alpha, limit: see Activation; "": none. STEPS: steps of DEPTH in k. EVEN: the
    tiles divide n and k.
    """
    block = tl.program_id(0) % count
    NUMBERS: tl.constexpr = ROWS // 2 if GATED else ROWS
    first = (tl.program_id(0) // count) * NUMBERS
    local = tl.arange(0, ROWS)
    if GATED and INTERLEAVED:
        rows, inside_rows = 2 * first + local, 2 * first + local < 2 * n
    elif GATED:
        rows = first + local % NUMBERS + (local // NUMBERS) * n
        inside_rows = first + local % NUMBERS < n
    else:
        rows, inside_rows = first + local, first + local < n
    all_rows = 2 * n if GATED else n
    if TRANSPOSED:
        at_rows, step_size = weight + rows[:, None], all_rows
    else:
        at_rows, step_size = weight + rows[:, None].to(tl.int64) * k, 1
    if PREFETCH > 0:
        # The inputs of `order` and `blocks` are ready: the kernel before has waited for them.
        expert = tl.load(blocks + block * (1 if ALONE else FIELDS))
        if expert >= 0:
            if SHARED:
                at_expert = _rows_beside_shared(weight, shared, expert, experts, cuts, first, n, k, DOWN, GATED, ROWS)
            else:
                at_expert = at_rows + expert.to(tl.int64) * all_rows * k
            lines = tl.arange(0, DEPTH // _LINE) * _LINE
            for step in tl.static_range(PREFETCH):
                prefetch(at_expert + (lines + step * DEPTH)[None, :])
    wait_for_inputs(OVERLAP)
    if EARLY:
        let_next_start(OVERLAP)
    expert, pairs, inside = pairs_of(order, blocks, block, TOKENS, ALONE)
    if expert < 0:
        return
    if SHARED:
        at_rows = _rows_beside_shared(weight, shared, expert, experts, cuts, first, n, k, DOWN, GATED, ROWS)
    else:
        at_rows += expert.to(tl.int64) * all_rows * k
    x_rows = x + (pairs if DOWN else pairs // width)[:, None].to(tl.int64) * x_stride
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        places = step * DEPTH + tl.arange(0, DEPTH)
        at = at_rows + places[None, :] * step_size
        if EVEN:
            w = tl.load(at, eviction_policy="evict_first" if TOKENS == 16 else "")
            xs = tl.load(x_rows + places[None, :], mask=inside[:, None], other=0.0)
        else:
            w = tl.load(at, mask=inside_rows[:, None] & (places < k)[None, :], other=0.0)
            xs = tl.load(x_rows + places[None, :], mask=inside[:, None] & (places < k)[None, :], other=0.0)
        total = tl.dot(w, tl.trans(xs), total, input_precision="ieee")
    if not EARLY:
        let_next_start(OVERLAP)
    narrow = output.dtype.element_ty
    if HAS_BIAS:
        of_expert = bias + expert.to(tl.int64) * all_rows
        total += tl.load(of_expert + rows, mask=inside_rows, other=0.0).to(tl.float32)[:, None]
    total = total.to(narrow).to(tl.float32)
    if GATED:
        gate, up = split_rows(total, ROWS, TOKENS, INTERLEAVED)
        total = activated(gate, up, alpha, limit, KIND, narrow)
    elif KIND != "":
        total = activate(total, KIND)
    numbers = first + tl.arange(0, NUMBERS)
    places = pairs
    if DOWN:
        total = total * tl.load(scales + pairs, mask=inside, other=0.0)[None, :]
        places = (pairs % width) * tokens + pairs // width
    at = output + places[None, :].to(tl.int64) * n + numbers[:, None]
    tl.store(at, total.to(narrow), mask=(numbers < n)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(parts, chosen, output, tokens, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Add the results of a token's experts in order. Grid: [blocks of n, tokens].

    parts: [WIDTH, tokens, n]; what belongs to an expert of another rank was never written. chosen: [tokens, WIDTH].
    """
    let_next_start(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(WIDTH):
        here = tl.load(chosen + token * WIDTH + place) >= 0
        at = parts + (tl.cast(place, tl.int64) * tokens + token) * n + columns
        total += tl.load(at, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(output + token * n + columns, total.to(output.dtype.element_ty), mask=inside)


def multiply_up(
    launch: Launching,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gating: Gating,
    sorted_pairs: Blocks,
    width: int,
    tiles: GroupedTiles,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the activation of the product of each pair.

    Args:
        launch: How to launch it.
        x: [tokens, k]; rows may be strided.
        weight: [experts, rows, k], contiguous, or a view of a contiguous [experts, k, rows].
        bias: [experts, rows], contiguous.
        gating: The activation.
        sorted_pairs: The pairs by expert.
        width: Experts per token.
        tiles: Tile sizes.
        shared: `ExpertMatrices.shared_up`, contiguous. Experts then have neither biases nor other strides.

    Returns:
        [pairs, n].
    """
    n = weight.shape[1] // 2 if gating.gated else weight.shape[1]
    output = torch.empty((len(x) * width, n), dtype=x.dtype, device=x.device)
    cuts = 0 if shared is None else len(shared) // weight.shape[1]
    _multiply(launch, x, weight, bias, None, gating, sorted_pairs, width, output, len(x), tiles, shared, cuts)
    return output


def multiply_down(
    launch: Launching,
    inner: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    sorted_pairs: Blocks,
    tiles: GroupedTiles,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the weighted product of each pair.

    Args:
        launch: How to launch it.
        inner: [pairs, k], contiguous.
        weight: [experts, n, k], contiguous, or a view of a contiguous [experts, k, n].
        bias: [experts, n], contiguous.
        weights: [tokens, experts per token] float32, contiguous: of the router.
        sorted_pairs: The pairs by expert.
        tiles: Tile sizes.
        shared: `ExpertMatrices.shared_down`, contiguous. Experts then have neither biases nor other strides.

    Returns:
        [experts per token, tokens, n]; the parts of experts that are AWAY are not written.
    """
    tokens, width = weights.shape
    output = torch.empty((width, tokens, weight.shape[1]), dtype=inner.dtype, device=inner.device)
    cuts = 0 if shared is None else shared.shape[1] // weight.shape[2]
    _multiply(launch, inner, weight, bias, weights, None, sorted_pairs, width, output, tokens, tiles, shared, cuts)
    return output


def _multiply(
    launch: Launching,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    gating: Gating | None,
    sorted_pairs: Blocks,
    width: int,
    output: torch.Tensor,
    tokens: int,
    tiles: GroupedTiles,
    shared: torch.Tensor | None,
    cuts: int,
) -> None:
    n, k = output.shape[-1], x.shape[1]
    transposed = not weight.is_contiguous()
    assert weight.transpose(1, 2).is_contiguous() or not transposed, "neither layout"
    gated = gating is not None and gating.gated
    interleaved = gating is not None and gating.interleaved
    if shared is not None:
        assert bias is None and not transposed and not interleaved, "shared experts beside another layout"
        assert shared.is_contiguous() and shared.dtype == weight.dtype and cuts > 0, (shared.shape, shared.dtype)
    numbers = tiles.rows // 2 if gated else tiles.rows
    steps = ceil_div(k, tiles.depth)
    prefetches = launch.overlap and scales is not None and not transposed and tiles.depth >= LINE
    even = n % numbers == 0 and k % tiles.depth == 0
    grouped_kernel[(sorted_pairs.count * ceil_div(n, numbers),)](
        x,
        weight,
        weight if shared is None else shared,
        weight if bias is None else bias,
        x if scales is None else scales,
        sorted_pairs.order,
        sorted_pairs.blocks,
        output,
        sorted_pairs.count,
        tokens,
        width,
        len(weight),
        cuts,
        n,
        k,
        x.stride(0),
        0.0 if gating is None else gating.activation.alpha,
        0.0 if gating is None else gating.activation.limit,
        STEPS=steps,
        DOWN=gating is None,
        SHARED=shared is not None,
        HAS_BIAS=bias is not None,
        KIND="" if gating is None else gating.activation.kind,
        GATED=gated,
        INTERLEAVED=interleaved,
        TRANSPOSED=transposed,
        ALONE=sorted_pairs.alone,
        EVEN=even,
        ROWS=tiles.rows,
        DEPTH=tiles.depth,
        TOKENS=tiles.tokens,
        PREFETCH=min(tiles.prefetch, steps) if prefetches and even else 0,
        EARLY=tiles.early,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **backend_options(launch.target),
        **launch_options(launch.overlap),
    )


def sum_places(
    launch: Launching, parts: torch.Tensor, chosen: torch.Tensor, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the results of a token's experts in order.

    Args:
        launch: How to launch it.
        parts: [experts per token, tokens, n]. The part of an expert that is AWAY is not read.
        chosen: [tokens, experts per token] int32, contiguous.
        output: [tokens, n], contiguous, receives the result; None: allocate it.

    Returns:
        [tokens, n].
    """
    width, tokens, n = parts.shape
    if output is None:
        output = torch.empty((tokens, n), dtype=parts.dtype, device=parts.device)
    grid = (ceil_div(n, SUM_BLOCK), tokens)
    sum_kernel[grid](
        parts,
        chosen,
        output,
        tokens,
        n,
        WIDTH=width,
        BLOCK=SUM_BLOCK,
        num_warps=SUM_WARPS,
        **launch_options(launch.overlap),
    )
    return output
