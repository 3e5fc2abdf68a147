"""Kernels that sample tokens and feed them back: the most likely token, or a draw from the whole vocabulary.

The logits are read once. `scan_kernel` handles a piece of a row's vocabulary: its best token, and its part of the
normaliser (rescaled as the maximum grows: Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv 1805.02867). `merge_kernel` merges the pieces of a row and advances its slot. The draw equals that of
`sampler.SamplingState` in plain torch, from the same bits (see `draws`). The vocabulary alone determines the pieces, so
no result depends on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker import wanted as row_modes
from kvforge.worker.device.grids import ceil_div
from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

PIECE = 4096  # numbers of a row per program, all at once if it does not draw
DRAW_TILE = 1024  # numbers in flight if it draws, which needs more registers
WARPS = 8
FEED_ROWS = 128

ADVANCES: tl.constexpr = tl.constexpr(row_modes.ADVANCES)
AHEAD: tl.constexpr = tl.constexpr(row_modes.AHEAD)
PHILOX_ROUNDS: tl.constexpr = tl.constexpr(10)
PHILOX_0: tl.constexpr = tl.constexpr(0xD2511F53)
PHILOX_1: tl.constexpr = tl.constexpr(0xCD9E8D57)
WEYL_0: tl.constexpr = tl.constexpr(0x9E3779B9)
WEYL_1: tl.constexpr = tl.constexpr(0xBB67AE85)
GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
SPLITMIX_0: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
SPLITMIX_1: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["packed", "fed"])  # one compilation
def feed_kernel(packed, last_token, fed, rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Prepare the inputs of a decode step; see `feed_tokens`.

    Grid: [cdiv(rows, ROWS)]. packed: [4, rows] int32, fed: [4, rows] int64.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = tl.load(packed + row, mask=inside, other=0).to(tl.int64)
    slot = tl.load(packed + rows + row, mask=inside, other=0)
    last = tl.load(last_token + slot, mask=inside, other=0)
    tl.store(fed + row, tl.where(token < 0, tl.maximum(last, 0), token), mask=inside)
    tl.store(fed + rows + row, slot.to(tl.int64), mask=inside)
    for part in tl.static_range(2, 4):
        number = tl.load(packed + part * rows + row, mask=inside, other=0)
        tl.store(fed + part * rows + row, number.to(tl.int64), mask=inside)


@triton.jit
def _philox_state(seed, position):  # type: ignore[no-untyped-def]
    """Return the first 64 bits of Philox4x32-10 for key `seed` and counter `position`, both uint64."""
    mask = tl.full([], 0xFFFFFFFF, tl.uint64)
    zero = tl.full([], 0, tl.uint64)
    c0, c1, c2, c3 = position & mask, position >> 32, zero, zero
    k0, k1 = seed & mask, seed >> 32
    for _ in range(PHILOX_ROUNDS):
        product_0 = c0 * tl.full([], PHILOX_0, tl.uint64)
        product_1 = c2 * tl.full([], PHILOX_1, tl.uint64)
        c0 = (product_1 >> 32) ^ c1 ^ k0
        c1 = product_1 & mask
        c2 = (product_0 >> 32) ^ c3 ^ k1
        c3 = product_0 & mask
        k0 = (k0 + tl.full([], WEYL_0, tl.uint64)) & mask
        k1 = (k1 + tl.full([], WEYL_1, tl.uint64)) & mask
    return c0 | (c1 << 32)


@triton.jit
def _uniforms(state, index):  # type: ignore[no-untyped-def]
    """Return numbers in (0, 1) at `index` of the sequence that SplitMix64 starts from `state`: float64."""
    gamma = tl.full([], GAMMA, tl.uint64)
    z = state + (index.to(tl.uint64) + 1) * gamma
    z = (z ^ (z >> 30)) * tl.full([], SPLITMIX_0, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], SPLITMIX_1, tl.uint64)
    z = z ^ (z >> 31)
    return ((z >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    logits,
    begin,
    vocab,
    state,
    temperature,
    mask,
    PIECE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    DRAWS: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
):
    """Scan the numbers of a row from `begin` on.

    logits: the row. state: state of its uniforms, if it DRAWS. mask: the row's mask, if it is MASKED: a bit for each
    allowed token. Returns the best key and its token; the greatest logit; the sum of exp(logit - greatest), NaN if a
    logit is not finite.
    """
    greatest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], float("-inf"), tl.float64)
    token = tl.full([], 0, tl.int32)
    broken = tl.zeros([TILE], tl.int32)
    for tile in range(PIECE // TILE):
        at = begin + tile * TILE + tl.arange(0, TILE)
        inside = at < vocab
        x = tl.load(logits + at, mask=inside, other=float("-inf"))
        finite = tl.abs(x) < float("inf")
        broken |= (inside & ~finite).to(tl.int32)
        x = tl.where(finite, x, float("-inf"))
        tile_greatest = tl.max(x, axis=0)
        higher = tl.maximum(greatest, tile_greatest)
        shift = tl.where(higher > float("-inf"), higher, 0.0)  # avoids -inf minus -inf
        total = total * tl.exp(greatest - shift) + tl.sum(tl.exp(x - shift), axis=0)
        greatest = higher
        if MASKED:
            word = tl.load(mask + at // 32, mask=inside, other=0)
            x = tl.where(((word >> (at % 32)) & 1) != 0, x, float("-inf"))
            tile_greatest = tl.max(x, axis=0)
        if DRAWS:
            key = x.to(tl.float64) / temperature - tl.log(-tl.log(_uniforms(state, at)))
            tile_best = tl.max(key, axis=0)
            first = tl.min(tl.where(key == tile_best, at, vocab), axis=0)
        else:
            tile_best = tile_greatest.to(tl.float64)
            first = tl.min(tl.where(x == tile_greatest, at, vocab), axis=0)
        if tile_best > best:
            best = tile_best
            token = first
    return best, token, greatest, tl.where(tl.max(broken, axis=0) > 0, float("nan"), total)


# Each program loads one slot, at any alignment; masks may have any width.
@triton.jit(do_not_specialize=["masks_stride"], do_not_specialize_on_alignment=["slots", "wanted", "masks"])
def scan_kernel(  # type: ignore[no-untyped-def]
    logits,
    slots,
    wanted,
    values,
    seeds,
    generated,
    keys,
    tokens,
    sums,
    masks,
    vocab,
    logits_stride,
    values_stride,
    masks_stride,
    PIECE: tl.constexpr,  # noqa: N803
    DRAW_TILE: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    """Scan one piece of each row. Grid: [rows, pieces].

    logits: [rows, vocab] float32. slots, wanted: [rows] int64, see `choose_tokens`. values, seeds, generated: by slot.
    keys: [rows, pieces] float64, key of the best token. tokens: [rows, pieces] int32. sums: [rows, pieces, 2] float32:
    the greatest logit, and the sum of exp(logit - greatest), NaN if a logit is not finite. masks: [rows, any] int32 if
    MASKED, a bit for each token; they limit the best token, not the sum.
    """
    let_next_start(OVERLAP)
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + row)
    temperature = tl.load(values + slot * values_stride)
    numbers, mask, begin = logits + row * logits_stride, masks + row * masks_stride, piece * PIECE
    if temperature > 0.0:
        position = tl.load(generated + slot) + tl.maximum(tl.load(wanted + row) - AHEAD, 0)
        state = _philox_state(tl.load(seeds + slot).to(tl.uint64), position.to(tl.uint64))
        best, token, greatest, total = _scan(
            numbers, begin, vocab, state, temperature, mask, PIECE, DRAW_TILE, True, MASKED
        )
    else:
        best, token, greatest, total = _scan(numbers, begin, vocab, 0, temperature, mask, PIECE, PIECE, False, MASKED)
    place = row * pieces + piece
    tl.store(keys + place, best)
    tl.store(tokens + place, token)
    tl.store(sums + 2 * place, greatest)
    tl.store(sums + 2 * place + 1, total)


@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["slots", "wanted", "packed"])
def merge_kernel(  # type: ignore[no-untyped-def]
    logits,
    slots,
    wanted,
    keys,
    tokens,
    sums,
    last_token,
    generated,
    packed,
    vocab,
    logits_stride,
    pieces,
    PIECES: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    """Merge the pieces of each row. Grid: [rows].

    packed: [3, rows] int32, see `sampler.SampledRows.packed`. PIECES: `pieces` rounded up to a
    power of two. The rest: see `scan_kernel`.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    wait_for_inputs(OVERLAP)
    piece = tl.arange(0, PIECES)
    inside = piece < pieces
    key = tl.load(keys + row * pieces + piece, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * pieces + piece, mask=inside, other=0)
    greatest = tl.load(sums + 2 * (row * pieces + piece), mask=inside, other=float("-inf"))
    total = tl.load(sums + 2 * (row * pieces + piece) + 1, mask=inside, other=0.0)
    highest = tl.max(greatest, axis=0)
    highest = tl.where(highest > float("-inf"), highest, 0.0)
    parts = total.to(tl.float64) * tl.exp(greatest - highest).to(tl.float64)
    finite = tl.sum(total, axis=0) > 0.0  # False for NaN, or if nothing was finite
    normaliser = tl.log(tl.where(finite, tl.sum(parts, axis=0), 1.0)) + highest.to(tl.float64)
    first = tl.min(tl.where(key == tl.max(key, axis=0), piece, PIECES), axis=0)
    chosen = tl.sum(tl.where(piece == first, token, 0), axis=0)
    chosen = tl.minimum(chosen, vocab - 1)  # a row of NaN has no best token
    logit = tl.load(logits + row * logits_stride + chosen)
    tl.store(packed + row, chosen)
    tl.store(packed + rows + row, (logit.to(tl.float64) - normaliser).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(packed + 2 * rows + row, finite.to(tl.int32))
    if finite & (tl.load(wanted + row) == ADVANCES):
        slot = tl.load(slots + row)
        tl.store(last_token + slot, chosen.to(tl.int64))
        tl.store(generated + slot, tl.load(generated + slot) + 1)


def feed_tokens(packed: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """Prepare the inputs of a decode step.

    Args:
        packed: [4, rows] int32 on the device: token, slot, and two rows that are copied. A negative token stands for
            the slot's last one, or 0 if it has none.
        last_token: [slots] int64 on the device.

    Returns:
        [4, rows] int64 on the device.
    """
    rows = packed.shape[1]
    fed = torch.empty((4, rows), dtype=torch.int64, device=packed.device)
    feed_kernel[(ceil_div(rows, FEED_ROWS),)](packed, last_token, fed, rows, ROWS=FEED_ROWS, num_warps=1)
    return fed


def pieces_of(vocab: int) -> int:
    """Return the number of pieces of a row."""
    return -(-vocab // PIECE)


def choose_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    wanted: torch.Tensor,
    values: torch.Tensor,
    seeds: torch.Tensor,
    generated: torch.Tensor,
    last_token: torch.Tensor,
    packed: torch.Tensor,
    overlap: bool = False,
    masks: torch.Tensor | None = None,
) -> None:
    """Sample a token for each row, and advance the slots of rows that are wanted and behind no draft.

    Args:
        logits: [rows, vocab] float32 on the device.
        slots: [rows] int64 on the device.
        wanted: [rows] int64 on the device, see `SamplingState.sample_simple`.
        values: [slots, any] float64; the first column is the temperature.
        seeds: [slots] int64.
        generated: [slots] int64, updated.
        last_token: [slots] int64, updated.
        packed: [3 * rows] int32 on the device, receives the result in the format of `sampler.SampledRows.packed`.
        overlap: See `kvforge.worker.device.overlap`.
        masks: [rows, words] int32 on the device: bit t % 32 of word t // 32 allows token t, at least one per row; None:
            all tokens are allowed.
    """
    rows, vocab = logits.shape
    pieces = pieces_of(vocab)
    where = logits.device
    keys = torch.empty((rows, pieces), dtype=torch.float64, device=where)
    tokens = torch.empty((rows, pieces), dtype=torch.int32, device=where)
    sums = torch.empty((rows, pieces, 2), dtype=torch.float32, device=where)
    scan_kernel[(rows, pieces)](
        logits,
        slots,
        wanted,
        values,
        seeds,
        generated,
        keys,
        tokens,
        sums,
        tokens if masks is None else masks,
        vocab,
        logits.stride(0),
        values.stride(0),
        0 if masks is None else masks.stride(0),
        PIECE=PIECE,
        DRAW_TILE=DRAW_TILE,
        MASKED=masks is not None,
        num_warps=WARPS,
        **launch_options(overlap),
    )
    merge_kernel[(rows,)](
        logits,
        slots,
        wanted,
        keys,
        tokens,
        sums,
        last_token,
        generated,
        packed,
        vocab,
        logits.stride(0),
        pieces,
        PIECES=triton.next_power_of_2(pieces),
        num_warps=1,
        **launch_options(overlap),
    )
