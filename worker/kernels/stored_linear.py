"""Products of x with weights in codes (see `stored`): the codes are read, and never written out as numbers.

As in linear.py the rows of a tile are the weight's. A step multiplies the codes of one group of columns, exact in 16
bits, and its sums are scaled in float32. Whatever the number of tokens, a row is summed in the same steps and parts, so
its bits do not depend on other rows: all sums of a weight have the depth that `depth_of` gives it, and parts of the
inner dimension (for weights of too few rows to occupy all multiprocessors) follow from the weight alone. Few tokens
leave the parts to the next operation, many add them here; both add in order.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from .launching import Launching
from .linear import prefetch
from .stored import Codes
from .stored_unpack import unpack_factors, unpack_four, unpack_two

FEW_TOKENS = 64  # up to here, parts are left to the next operation
AHEAD = 2  # steps of words that are fetched into the L2 cache before the inputs are ready
PART_STEPS = 8  # least steps of a part
PARTS = (4, 2)
TURNED = 256  # rows of a weight that begin their sums at the same step, and are summed alike by every tile
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


@triton.jit
def places_of(units, SET: tl.constexpr, SETS: tl.constexpr):
    """Return the columns of x for one set of numbers. units: [words of a step], numbers of words."""
    return units // _WORDS * (_WORDS * SETS) + SET * _WORDS + units % _WORDS


@triton.jit
def load_extra(extras, group, n, rows, EXTRA: tl.constexpr, HALF: tl.constexpr):
    """Return what a group's rows have beside their scale, [rows].

    EXTRA: "zeros": codes of 0, as `unpack_four` subtracts them, which "" makes of a constant. "lows": float32 numbers
    that are added. "factors": int32, four e4m3 factors of 16 columns each.
    """
    FIRST: tl.constexpr = 1024 if HALF else 128
    TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    at = extras + group.to(tl.int64) * n + rows
    if EXTRA == "zeros":
        return (tl.load(at).to(tl.int32) + FIRST).to(tl.float32).to(TYPE)
    elif EXTRA == "":
        return tl.full(rows.shape, FIRST + 8, TYPE)
    else:
        return tl.load(at)


@triton.jit
def unpack_tiles(words, extra, CODE: tl.constexpr, EXTRA: tl.constexpr, HALF: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return four tiles of numbers without the scales of their rows. extra: from `load_extra`."""
    FIRST: tl.constexpr = 1024 if HALF else 128
    TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    if EXTRA == "zeros" or EXTRA == "":
        zero = tl.broadcast_to(extra[:, None], words.shape)
    else:
        zero = tl.full(words.shape, FIRST, TYPE)
    a, b, c, d = unpack_four(words, zero, CODE, HALF, ASSEMBLY)
    if EXTRA == "factors":
        # Both have few bits: the products are exact.
        of_a, of_b, of_c, of_d = unpack_factors(extra, HALF)
        a, b = a * of_a[:, None], b * of_b[:, None]
        c, d = c * of_c[:, None], d * of_d[:, None]
    return a, b, c, d


@triton.jit
def sum_rows(x, others, ROWS: tl.constexpr):
    """Return `others` and the sums of x [columns, TOKENS] for each of ROWS rows, in the order of a product's sum."""
    return tl.dot(tl.full([ROWS, x.shape[0]], 1.0, x.dtype), x, others, input_precision="ieee")


@triton.jit
def join_two(a, b):
    """Return [rows, 2 x words]: the numbers of two sets in the order of their columns. None moves between threads."""
    ROWS: tl.constexpr = a.shape[0]
    COLUMNS: tl.constexpr = a.shape[1]
    found = tl.reshape(tl.join(a, b), [ROWS, COLUMNS // _WORDS, _WORDS, 2])
    return tl.reshape(tl.permute(found, (0, 1, 3, 2)), [ROWS, 2 * COLUMNS])


@triton.jit
def join_four(a, b, c, d):
    """Return [rows, 4 x words]: the numbers of four sets in the order of their columns. None moves between threads."""
    ROWS: tl.constexpr = a.shape[0]
    COLUMNS: tl.constexpr = a.shape[1]
    found = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLUMNS // _WORDS, _WORDS, 4])
    return tl.reshape(tl.permute(found, (0, 1, 3, 2)), [ROWS, 4 * COLUMNS])


@triton.jit
def multiply_words(
    words,
    extra,
    x_rows,
    inside,
    CODE: tl.constexpr,
    SETS: tl.constexpr,
    HALVES: tl.constexpr,
    EXTRA: tl.constexpr,
    JOIN: tl.constexpr,
    HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the products of words [ROWS, COLUMNS] with x [TOKENS, k] from `x_rows` on.

    The second result has all products; with HALVES those of a unit's second half alone, and the first one the others.
    With lows as EXTRA, two more results are the sums of the same columns of x.
    JOIN: multiply all sets of numbers at once, in the order of their columns. The columns of x are then neighbours in
    memory (apart, each 16 of them are a request of their own), and a step waits for one product of a warp group
    instead of two or four. The order of the sum is another one: all tiles of a target must do the same.
    """
    empty = tl.zeros([ROWS, TOKENS], tl.float32)
    SUMS: tl.constexpr = EXTRA == "lows"
    if JOIN:
        NUMBERS: tl.constexpr = SETS * COLUMNS // 2 if HALVES else SETS * COLUMNS
        columns = tl.arange(0, NUMBERS)
        x = tl.trans(tl.load(x_rows + columns[None, :], mask=inside, other=0.0))
        x_total = sum_rows(x, empty, ROWS) if SUMS else empty
        if HALVES:
            others = tl.trans(tl.load(x_rows + (NUMBERS + columns)[None, :], mask=inside, other=0.0))
            x_other = sum_rows(others, empty, ROWS) if SUMS else empty
            if SETS == 2:
                one, other = unpack_two(words, CODE, HALF, ASSEMBLY)
            else:
                a, b, c, d = unpack_tiles(words, extra, CODE, EXTRA, HALF, ASSEMBLY)
                one, other = join_two(a, b), join_two(c, d)
            total = tl.dot(one, x, empty, input_precision="ieee")
            return total, tl.dot(other, others, empty, input_precision="ieee"), x_total, x_other
        else:
            if SETS == 2:
                a, b = unpack_two(words, CODE, HALF, ASSEMBLY)
                every = join_two(a, b)
            else:
                a, b, c, d = unpack_tiles(words, extra, CODE, EXTRA, HALF, ASSEMBLY)
                every = join_four(a, b, c, d)
            total = tl.dot(every, x, empty, input_precision="ieee")
            return total, total, x_total, x_total
    else:
        units = tl.arange(0, COLUMNS)
        first = tl.trans(tl.load(x_rows + places_of(units, 0, SETS)[None, :], mask=inside, other=0.0))
        second = tl.trans(tl.load(x_rows + places_of(units, 1, SETS)[None, :], mask=inside, other=0.0))
        x_total = sum_rows(first, empty, ROWS) if SUMS else empty
        if SETS == 2:
            a, b = unpack_two(words, CODE, HALF, ASSEMBLY)
            total = tl.dot(a, first, empty, input_precision="ieee")
            if HALVES:
                x_other = sum_rows(second, empty, ROWS) if SUMS else empty
                return total, tl.dot(b, second, empty, input_precision="ieee"), x_total, x_other
            else:
                total = tl.dot(b, second, total, input_precision="ieee")
                x_total = sum_rows(second, x_total, ROWS) if SUMS else empty
                return total, total, x_total, x_total
        else:
            x_total = sum_rows(second, x_total, ROWS) if SUMS else empty
            third = tl.trans(tl.load(x_rows + places_of(units, 2, SETS)[None, :], mask=inside, other=0.0))
            fourth = tl.trans(tl.load(x_rows + places_of(units, 3, SETS)[None, :], mask=inside, other=0.0))
            x_other = sum_rows(third, empty if HALVES else x_total, ROWS) if SUMS else empty
            x_other = sum_rows(fourth, x_other, ROWS) if SUMS else empty
            a, b, c, d = unpack_tiles(words, extra, CODE, EXTRA, HALF, ASSEMBLY)
            total = tl.dot(b, second, tl.dot(a, first, empty, input_precision="ieee"), input_precision="ieee")
            other = empty if HALVES else total
            other = tl.dot(d, fourth, tl.dot(c, third, other, input_precision="ieee"), input_precision="ieee")
            return total, other, x_total, x_other


@triton.jit
def fetch_first(
    words_at, begin, turn, n, STEPS: tl.constexpr, SETS: tl.constexpr, DEPTH: tl.constexpr, PREFETCH: tl.constexpr
):
    """Fetch the words of the first PREFETCH steps into the L2 cache. For the others see `stored_sum`."""
    UNITS: tl.constexpr = DEPTH // (_WORDS * SETS)  # of a step
    for ahead in tl.static_range(PREFETCH):
        step = begin + (turn + ahead) % STEPS
        units = (step * UNITS + tl.arange(0, UNITS)).to(tl.int64)
        prefetch(words_at + units[None, :] * n * _WORDS)


@triton.jit
def fetch_scales(
    of_groups,
    lines,
    begin,
    n,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Fetch the scales of STEPS steps from step `begin` on into the L2 cache.

    They are loaded one step ahead, which is too late for what is still in memory. of_groups: scales [groups, n].
    lines: numbers of the rows that begin a run of 8. GROUP: see `stored_sum`.
    """
    FIRST: tl.constexpr = 2 if GROUP < 0 else 1
    COUNT: tl.constexpr = STEPS * 2 if GROUP < 0 else (STEPS + GROUP - 1) // GROUP
    first = begin * FIRST if GROUP < 0 else begin // GROUP
    for chunk in tl.static_range(0, COUNT, 32):
        groups = first + tl.minimum(chunk + tl.arange(0, 32), COUNT - 1)
        prefetch(of_groups + groups[:, None].to(tl.int64) * n + lines[None, :])


@triton.jit
def fetch_groups(
    scales,
    extras,
    lines,
    begin,
    scaled,
    n,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
):
    """Fetch the scales of STEPS steps, and what groups have beside them; see `fetch_scales` and `load_extra`."""
    if GROUP != 0:
        fetch_scales(scales, lines // SCALED_ROWS, begin, scaled, STEPS, GROUP)
    if EXTRA == "factors":
        fetch_scales(extras, lines, begin, n, STEPS, 1)
    elif EXTRA != "":
        fetch_scales(extras, lines, begin, n, STEPS, GROUP)


@triton.jit
def stored_sum(
    words_at,
    x_rows,
    inside,
    scales,
    extras,
    rows,
    begin,
    turn,
    n,
    scaled,
    STEPS: tl.constexpr,
    CODE: tl.constexpr,
    SETS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    JOIN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the sum of STEPS steps from step `begin` on, [ROWS, TOKENS] float32.

    words_at: [ROWS, 1] the first words of the rows. x_rows: [TOKENS, 1] the rows of x; inside: which exist. rows:
    [ROWS], inside of the weight. turn: the first step, counted from `begin`; the steps before it are the last ones.
    Programs that read different columns of x at a time do not wait for the same lines of the cache. scaled: scales of
    a group. GROUP: columns of a group in units of DEPTH; 0: all; -1: half of DEPTH. HALF: whether x is float16. JOIN:
    see `multiply_words`. For others see `stored_kernel`.
    """
    COLUMNS: tl.constexpr = DEPTH // SETS
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    units = tl.arange(0, COLUMNS)
    at = words_at + (units // _WORDS).to(tl.int64)[None, :] * n * _WORDS + (units % _WORDS)[None, :]
    step_words = tl.cast(COLUMNS, tl.int64) * n
    of_rows = scales + rows // SCALED_ROWS
    turn = turn % STEPS
    first = (begin + turn) // GROUP if GROUP > 0 else (begin + turn) * 2
    group = first if GROUP != 0 else begin * 0
    scale = tl.load(of_rows + group.to(tl.int64) * scaled)
    # Factors are of a step each, whatever the group.
    extra = load_extra(extras, begin + turn if EXTRA == "factors" else group, n, rows, EXTRA, HALF)
    if GROUP < 0:
        other_scale = tl.load(of_rows + (first + 1).to(tl.int64) * scaled)
        other_extra = load_extra(extras, first + 1, n, rows, EXTRA, HALF)
    for index in tl.range(0, STEPS, num_stages=STAGES):
        step = begin + (index + turn) % STEPS
        following_step = begin + (index + 1 + turn) % STEPS
        words = tl.load(at + step * step_words, eviction_policy="evict_first" if TOKENS == 16 else "")
        x_step = x_rows + step * DEPTH
        # Each step has a sum of its own: a longer one stays in flight, and has other bits in tiles of other sizes.
        part, other, x_part, x_other = multiply_words(
            words, extra, x_step, inside, CODE, SETS, GROUP < 0, EXTRA, JOIN, HALF, ASSEMBLY, COLUMNS, ROWS, TOKENS
        )
        if GROUP == 0:
            total += other * scale[:, None]
            if EXTRA == "factors":
                extra = load_extra(extras, following_step, n, rows, EXTRA, HALF)
        else:
            # The next step's scales are on their way while this step is multiplied.
            following = following_step // GROUP if GROUP > 0 else following_step * 2
            next_scale = tl.load(of_rows + following.to(tl.int64) * scaled)
            next_extra = load_extra(extras, following, n, rows, EXTRA, HALF)
            if GROUP > 0:
                total += other * scale[:, None]
                if EXTRA == "lows":
                    total += x_other * extra[:, None]
            else:
                next_other = tl.load(of_rows + (following + 1).to(tl.int64) * scaled)
                next_other_extra = load_extra(extras, following + 1, n, rows, EXTRA, HALF)
                total += part * scale[:, None]
                total += other * other_scale[:, None]
                if EXTRA == "lows":
                    total += x_part * extra[:, None]
                    total += x_other * other_extra[:, None]
                other_scale, other_extra = next_other, next_other_extra
            scale, extra = next_scale, next_extra
    return total


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
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CODE: tl.constexpr,
    SETS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
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

    x: [tokens, k], x_stride elements from token to token. words: [k / unit, n, 16] int16. scales: [groups, scaled]
    float32. extras: [groups, n], of factors [k / unit, n]: see `load_extra`. bias: [n], added to part 0. output:
    [parts if SPLIT, tokens, results], contiguous. n: rows of the weight: results, or twice as many if GATED, the gate
    first. STEPS: steps of DEPTH columns in one part. PARTS: parts of the inner dimension, added here unless SPLIT.
    SETS: codes of a word. GROUP and HALF: see `stored_sum`. KIND, alpha, limit: see Activation; "": none.
    """
    NUMBERS: tl.constexpr = ROWS // 2 if GATED else ROWS
    results = n // 2 if GATED else n
    local = tl.arange(0, ROWS)
    columns = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    # Rows outside repeat the last one, and are not stored.
    rows = tl.minimum(tl.program_id(0) * NUMBERS + local % NUMBERS, results - 1) + local // NUMBERS * results
    words_at = words + rows[:, None].to(tl.int64) * _WORDS
    x_rows = x + columns[:, None].to(tl.int64) * x_stride
    turn = tl.program_id(0) * ROWS // _TURNED
    inside = (columns < tokens)[:, None]
    if PREFETCH > 0:
        fetch_first(words_at, tl.program_id(1) * STEPS, turn, n, STEPS, SETS, DEPTH, PREFETCH)
        # The weight's rows as above, every eighth.
        eighth = tl.arange(0, ROWS // 8) * 8
        lines = tl.minimum(tl.program_id(0) * NUMBERS + eighth % NUMBERS, results - 1) + eighth // NUMBERS * results
        fetch_groups(scales, extras, lines, tl.program_id(1) * STEPS, scaled, n, STEPS, GROUP, SCALED_ROWS, EXTRA)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for part in tl.range(0, 1 if SPLIT else PARTS):
        begin = (tl.program_id(1) if SPLIT else part) * STEPS
        found = stored_sum(
            words_at, x_rows, inside, scales, extras, rows, begin, turn, n, scaled, STEPS, CODE, SETS, DEPTH, GROUP,
            SCALED_ROWS, EXTRA, HALF, ASSEMBLY, JOIN, ROWS, TOKENS, STAGES,
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
    if codes.factors is not None:
        return unit
    if group and group < unit:
        assert 2 * group == unit, "a step has two groups at most"
        return unit
    sizes = (64, 32) if target.matrix == "v_wmma" else (128, 64, 32)  # more take more than a thread's registers
    return next(size for size in sizes if k % size == 0 and (group or k) % size == 0)


def group_steps(codes: Codes, target: Target) -> int:
    """Return the steps of a group: see GROUP of `stored_sum`."""
    if codes.group == codes.shape[-1] and codes.extra[0] in ("", "factors"):
        return 0
    return codes.group // depth_of(codes, target) or -1


def parts_of(codes: Codes, results: int, target: Target) -> int:
    """Return the parts of the inner dimension, which depend on the weight and the GPU alone."""
    steps = codes.shape[-1] // depth_of(codes, target)
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
        STEPS=codes.shape[-1] // depth // parts,
        PARTS=parts,
        SPLIT=split,
        CODE=codes.code,
        SETS=CODES[codes.code],
        DEPTH=depth,
        GROUP=group,
        SCALED_ROWS=codes.scaled_rows,
        EXTRA=extra,
        HAS_BIAS=bias is not None,
        GATED=gated,
        KIND="" if activation is None else activation.kind,
        HALF=x.dtype == torch.float16,
        ASSEMBLY=launch.target.chained,
        JOIN=launch.target.hopper,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        PREFETCH=min(AHEAD, codes.shape[-1] // depth // parts) if launch.overlap else 0,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **backend_options(launch.target),
        **launch_options(launch.overlap),
    )
    return output
