"""Sums over the columns of a weight in codes, a few steps at a time, for the kernels of stored_linear and others.

A step multiplies the columns of one group, of one unit or two, or of two groups of half a unit, and has a sum of its
own. Its scales are multiplied into the sum in float32. A turn of the loop has TOGETHER steps, which share its barriers
and its wait for memory, and the scales of the next turn are on their way meanwhile. The order of the additions is that
of the steps, whatever TOGETHER is, so the bits are the same.

Factors of e2m1 (of nvfp4 and mxfp4) belong to the numbers, before the product. They are loaded in the step that needs
them, so that the compiler copies them ahead with the words, in the layout of the words. Loaded one turn ahead into
registers, they took the numbers of the step through shared memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .code_tables import WORDS
from .linear import prefetch
from .stored_unpack import unpack_exponents, unpack_factors, unpack_four, unpack_two

TURNED = 256  # rows of a weight that begin their sums at the same step, and are summed alike by every tile
_WORDS = tl.constexpr(WORDS)


@triton.jit
def load_set(
    x_rows,
    inside,
    count,
    SET: tl.constexpr,
    SETS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return the columns of x for one set of numbers of COLUMNS words, transposed. See `multiply_words`."""
    words = tl.arange(0, COLUMNS)
    places = words // _WORDS * (_WORDS * SETS) + SET * _WORDS + words % _WORDS
    exist = inside & (places < count)[None, :] if PADDED else inside
    return tl.trans(tl.load(x_rows + places[None, :], mask=exist, other=0.0))


@triton.jit
def load_extra(extras, group, n, rows, EXTRA: tl.constexpr, HALF: tl.constexpr):
    """Return what a group's rows have beside their scale, [rows].

    EXTRA: "zeros": codes of 0, as `unpack_four` subtracts them, which "" makes of a constant. "lows": float32 numbers
    that are added.
    """
    FIRST: tl.constexpr = 1024 if HALF else 128
    TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    at = extras + (group * n + rows)
    if EXTRA == "zeros":
        return (tl.load(at).to(tl.int32) + FIRST).to(tl.float32).to(TYPE)
    elif EXTRA == "lows":
        return tl.load(at)
    else:
        return tl.full(rows.shape, FIRST + 8, TYPE)


@triton.jit
def load_factors(extras, step, n, rows, EXTRA: tl.constexpr, UNITS: tl.constexpr):
    """Return the factors of a step of UNITS units of e2m1, [rows, UNITS] int32.

    EXTRA: "factors": four e4m3 factors of 16 columns each. "exponents": those of two factors of 32 columns each, in the
    lower bits; a word in memory has those of two units.
    """
    if EXTRA == "factors":
        units = step * UNITS + tl.arange(0, UNITS)
        return tl.load(extras + (units[None, :] * n + rows[:, None]))
    elif UNITS == 2:
        both = tl.load(extras + (step * n + rows))
        return tl.join(both, both >> 16)
    else:
        return (tl.load(extras + (step // 2 * n + rows)) >> (step % 2 * 16))[:, None]


@triton.jit
def spread(factors):
    """Return a factor for each number of a set, [rows, words]. factors: [rows, units]."""
    ROWS: tl.constexpr = factors.shape[0]
    UNITS: tl.constexpr = factors.shape[1]
    return tl.reshape(tl.broadcast_to(factors[:, :, None], [ROWS, UNITS, _WORDS]), [ROWS, UNITS * _WORDS])


@triton.jit
def unpack_tiles(words, extra, CODE: tl.constexpr, EXTRA: tl.constexpr, HALF: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return four tiles of numbers without the scales of their rows. extra: from `load_extra` or `load_factors`."""
    FIRST: tl.constexpr = 1024 if HALF else 128
    TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    if EXTRA == "zeros" or EXTRA == "":
        zero = tl.broadcast_to(extra[:, None], words.shape)
    else:
        zero = tl.full(words.shape, FIRST, TYPE)
    a, b, c, d = unpack_four(words, zero, CODE, HALF, ASSEMBLY, EXTRA == "exponents")
    # Both have few bits: the products are exact.
    if EXTRA == "factors":
        of_a, of_b, of_c, of_d = unpack_factors(extra, HALF)
        a, b, c, d = a * spread(of_a), b * spread(of_b), c * spread(of_c), d * spread(of_d)
    elif EXTRA == "exponents":
        of_first, of_second = unpack_exponents(extra, HALF, ASSEMBLY)
        a, b = a * spread(of_first), b * spread(of_first)
        c, d = c * spread(of_second), d * spread(of_second)
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
    count,
    CODE: tl.constexpr,
    SETS: tl.constexpr,
    HALVES: tl.constexpr,
    PADDED: tl.constexpr,
    EXTRA: tl.constexpr,
    JOIN: tl.constexpr,
    HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the products of words [ROWS, COLUMNS] with x [TOKENS, k] from `x_rows` on.

    count: columns of x that exist, if PADDED; without it all do.

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
        exist = inside & (columns < count)[None, :] if PADDED else inside
        x = tl.trans(tl.load(x_rows + columns[None, :], mask=exist, other=0.0))
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
        first = load_set(x_rows, inside, count, 0, SETS, COLUMNS, PADDED)
        second = load_set(x_rows, inside, count, 1, SETS, COLUMNS, PADDED)
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
            third = load_set(x_rows, inside, count, 2, SETS, COLUMNS, PADDED)
            fourth = load_set(x_rows, inside, count, 3, SETS, COLUMNS, PADDED)
            x_other = sum_rows(third, empty if HALVES else x_total, ROWS) if SUMS else empty
            x_other = sum_rows(fourth, x_other, ROWS) if SUMS else empty
            a, b, c, d = unpack_tiles(words, extra, CODE, EXTRA, HALF, ASSEMBLY)
            total = tl.dot(b, second, tl.dot(a, first, empty, input_precision="ieee"), input_precision="ieee")
            other = empty if HALVES else total
            other = tl.dot(d, fourth, tl.dot(c, third, other, input_precision="ieee"), input_precision="ieee")
            return total, other, x_total, x_other


@triton.jit
def _step(turned, STEPS: tl.constexpr):
    """Return a step of a sum that begins in the middle. turned: counted from the first step, below 2 STEPS."""
    return tl.where(turned < STEPS, turned, turned - STEPS)  # fewer instructions than a remainder


@triton.jit
def fetch_first(
    words_at,
    begin,
    turn,
    last,
    n,
    STEPS: tl.constexpr,
    SETS: tl.constexpr,
    SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Fetch the words of the first PREFETCH steps into the L2 cache. For the others see `stored_sum`."""
    turn = turn % STEPS
    UNITS: tl.constexpr = DEPTH // (_WORDS * SETS)  # of a step
    for ahead in tl.static_range(PREFETCH):
        step = begin + _step(turn + ahead, STEPS)
        units = step * UNITS + tl.arange(0, UNITS)
        if PADDED:
            units = tl.minimum(units, last * UNITS)
        spans = (units // SPAN).to(tl.int64) * n * SPAN
        prefetch(words_at + (spans + units % SPAN)[None, :] * _WORDS)


@triton.jit
def fetch_scales(
    of_groups,
    lines,
    begin,
    last,
    n,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Fetch the scales of STEPS steps from step `begin` on, at most to step `last`, into the L2 cache.

    They are loaded one step ahead, which is too late for what is still in memory. of_groups: scales [groups, n].
    lines: numbers of the rows that begin a run of 8. GROUP: see `stored_sum`.
    """
    FIRST: tl.constexpr = 2 if GROUP < 0 else 1
    COUNT: tl.constexpr = STEPS * 2 if GROUP < 0 else (STEPS + GROUP - 1) // GROUP
    first = begin * FIRST if GROUP < 0 else begin // GROUP
    last = last * FIRST + 1 if GROUP < 0 else last // GROUP
    for chunk in tl.static_range(0, COUNT, 32):
        groups = tl.minimum(first + tl.minimum(chunk + tl.arange(0, 32), COUNT - 1), last)
        prefetch(of_groups + groups[:, None].to(tl.int64) * n + lines[None, :])


@triton.jit
def fetch_groups(
    scales,
    extras,
    lines,
    begin,
    last,
    scaled,
    n,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Fetch the scales of STEPS steps of UNITS units, and what is beside them; see `fetch_scales` and `load_extra`."""
    if GROUP != 0:
        fetch_scales(scales, lines // SCALED_ROWS, begin, last, scaled, STEPS, GROUP)
    if EXTRA == "factors" or EXTRA == "exponents":
        # Of exponents a word has those of two units.
        WORDS_OF_STEP: tl.constexpr = UNITS if EXTRA == "factors" else 1
        end = (last + 1) * WORDS_OF_STEP
        fetch_scales(extras, lines, begin * WORDS_OF_STEP, end - 1, n, STEPS * WORDS_OF_STEP, 1)
    elif EXTRA != "":
        fetch_scales(extras, lines, begin, last, n, STEPS, GROUP)


@triton.jit
def load_groups(
    of_rows,
    extras,
    step,
    n,
    scaled,
    rows,
    GROUP: tl.constexpr,
    EXTRA: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return the scale of each group of a step, and what it has beside it, [rows] each: two or four vectors.

    of_rows: the rows' first scales.
    """
    first = step // GROUP if GROUP > 0 else step * 2
    scale = tl.load(of_rows + first * scaled)
    extra = load_extra(extras, first, n, rows, EXTRA, HALF)
    if GROUP < 0:
        other_scale = tl.load(of_rows + (first + 1) * scaled)
        other_extra = load_extra(extras, first + 1, n, rows, EXTRA, HALF)
        return scale, extra, other_scale, other_extra
    else:
        return scale, extra


@triton.jit
def _words_before(step, n, UNITS: tl.constexpr, SPAN: tl.constexpr):
    """Return how far the words of a row in a step of UNITS units lie behind the first words of the row."""
    if UNITS >= SPAN:
        return step * (UNITS * _WORDS * n)
    else:
        unit = step * UNITS
        return (unit // SPAN) * (SPAN * _WORDS * n) + unit % SPAN * _WORDS


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
    last,
    n,
    scaled,
    STEPS: tl.constexpr,
    TOGETHER: tl.constexpr,
    CODE: tl.constexpr,
    SETS: tl.constexpr,
    SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    PADDED: tl.constexpr,
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
    Programs that read different columns of x at a time do not wait for the same lines of the cache. last: the last step
    of the weight; with PADDED its second half does not exist, and steps behind it are empty. scaled: scales of a group.
    TOGETHER: steps of a turn of the loop, a divisor of STEPS. GROUP: columns of a group in units of DEPTH; 0: all; -1:
    half of DEPTH. HALF: whether x is float16. JOIN: see `multiply_words`. For others see `stored_kernel`.
    """
    COLUMNS: tl.constexpr = DEPTH // SETS
    SPAN_WORDS: tl.constexpr = SPAN * _WORDS
    POLICY: tl.constexpr = "evict_first" if TOKENS == 16 else ""
    OF_STEPS: tl.constexpr = EXTRA == "factors" or EXTRA == "exponents"
    VECTORS: tl.constexpr = 4 if GROUP < 0 else 2  # of a step, from `load_groups`
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    units = tl.arange(0, COLUMNS)
    at = words_at + (units // SPAN_WORDS).to(tl.int64)[None, :] * n * SPAN_WORDS + (units % SPAN_WORDS)[None, :]
    of_rows = scales + rows // SCALED_ROWS
    turn = turn % STEPS
    if GROUP == 0:
        scale = tl.load(of_rows)
        constant = load_extra(extras, turn, n, rows, "", HALF)  # what int4 subtracts; of other codes unused
    groups = ()
    if GROUP != 0:
        for ahead in tl.static_range(TOGETHER):
            groups = groups + load_groups(
                of_rows, extras, begin + _step(turn + ahead, STEPS), n, scaled, rows, GROUP, EXTRA, HALF
            )
    for index in tl.range(0, STEPS // TOGETHER, num_stages=STAGES):
        turned = _step(index * TOGETHER + turn, STEPS)
        following = ()
        if GROUP != 0:
            for ahead in tl.static_range(TOGETHER):
                next_step = begin + _step(turned + TOGETHER + ahead, STEPS)
                following = following + load_groups(of_rows, extras, next_step, n, scaled, rows, GROUP, EXTRA, HALF)
        products = ()
        for ahead in tl.static_range(TOGETHER):
            step = begin + _step(turned + ahead, STEPS)
            before = _words_before(step, n, COLUMNS // _WORDS, SPAN)
            if PADDED:
                count = last * DEPTH + DEPTH // 2 - step * DEPTH  # none in steps behind the last one
                exist = (units < last * COLUMNS + COLUMNS // 2 - step * COLUMNS)[None, :]
                words = tl.load(at + before, mask=exist, other=0, eviction_policy=POLICY)
            else:
                count = 0
                words = tl.load(at + before, eviction_policy=POLICY)
            if OF_STEPS:
                existing = tl.minimum(step, last) if PADDED else step
                extra = load_factors(extras, existing, n, rows, EXTRA, COLUMNS // _WORDS)
            elif GROUP == 0:
                extra = constant
            else:
                extra = groups[ahead * VECTORS + 1]
            # Each step has a sum of its own: a longer one stays in flight, and has other bits in tiles of other sizes.
            products = products + multiply_words(
                words, extra, x_rows + step * DEPTH, inside, count, CODE, SETS, GROUP < 0, PADDED, EXTRA, JOIN, HALF,
                ASSEMBLY, COLUMNS, ROWS, TOKENS,
            )  # fmt: skip
        for ahead in tl.static_range(TOGETHER):
            if GROUP == 0:
                total += products[4 * ahead + 1] * scale[:, None]
            elif GROUP > 0:
                total += products[4 * ahead + 1] * groups[2 * ahead][:, None]
                if EXTRA == "lows":
                    total += products[4 * ahead + 3] * groups[2 * ahead + 1][:, None]
            else:
                total += products[4 * ahead] * groups[4 * ahead][:, None]
                total += products[4 * ahead + 1] * groups[4 * ahead + 2][:, None]
                if EXTRA == "lows":
                    total += products[4 * ahead + 2] * groups[4 * ahead + 1][:, None]
                    total += products[4 * ahead + 3] * groups[4 * ahead + 3][:, None]
        groups = following
    return total
