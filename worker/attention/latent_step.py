"""One step of attention over latents, shared by the kernels of decodes and prefills."""

from __future__ import annotations

import triton
import triton.language as tl

from .prefill_portable import _convert


@triton.jit
def load_queries(
    places, inside, dtype: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Load queries as [LATENT_TILE, queries] and [ROPE_TILE, queries], with zeros outside.

    places: [queries] addresses. inside: [queries]. dtype: dtype of the latents. WIDEN: multiply float32.
    """
    d = tl.arange(0, LATENT_TILE)
    e = tl.arange(0, ROPE_TILE)
    q = tl.load(places[:, None] + d[None, :], mask=inside[:, None] & (d < LATENT)[None, :], other=0.0)
    q_rope = tl.load(places[:, None] + (LATENT + e)[None, :], mask=inside[:, None] & (e < ROPE)[None, :], other=0.0)
    q, q_rope = q.to(dtype), q_rope.to(dtype)
    if WIDEN:
        q, q_rope = q.to(tl.float32), q_rope.to(tl.float32)
    return tl.trans(q), tl.trans(q_rope)


@triton.jit
def load_latents(
    cache, scales, table, first, end, dtype: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LATENT_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, TOKENS: tl.constexpr,
    WIDEN: tl.constexpr, QUANTISED: tl.constexpr, BITWISE: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Load latents [TOKENS, LATENT_TILE] and rotary keys [TOKENS, ROPE_TILE] from `first` on; after `end` the last one.

    Unreachable slots, which may hold NaN, are never read. QUANTISED: they become numbers of `dtype` without their
    scales [TOKENS], which are returned too; else these are 1.
    """
    d = tl.arange(0, LATENT_TILE)
    e = tl.arange(0, ROPE_TILE)
    position = tl.minimum(first + tl.arange(0, TOKENS), end - 1).to(tl.uint32)  # unsigned: divisions become shifts
    block = tl.load(table + position // BLOCK_SIZE).to(tl.uint32)
    slot = (block * BLOCK_SIZE + position % BLOCK_SIZE).to(tl.int64)
    offset = (slot * (LATENT + ROPE))[:, None]
    if LATENT == LATENT_TILE and ROPE == ROPE_TILE:
        c = tl.load((cache + d)[None, :] + offset)
        k = tl.load((cache + LATENT + e)[None, :] + offset)
    else:
        c = tl.load((cache + d)[None, :] + offset, mask=(d < LATENT)[None, :], other=0.0)
        k = tl.load((cache + LATENT + e)[None, :] + offset, mask=(e < ROPE)[None, :], other=0.0)
    scale = tl.full([TOKENS], 1.0, tl.float32)
    if QUANTISED:
        c, k = _convert(c, dtype, BITWISE, E4M3), _convert(k, dtype, BITWISE, E4M3)
        scale = tl.load(scales + slot)
    if WIDEN:
        c, k = c.to(tl.float32), k.to(tl.float32)
    return c, k, scale


@triton.jit
def attend(greatest, total, sums, c, k, scales, q, q_rope, scale, seen, QUANTISED: tl.constexpr):
    """Add latents to the state of an online softmax, which is greatest, total [queries] and sums [latent, queries].

    c: [tokens, latent]. k: [tokens, rotary key]. seen: [tokens, queries]; each query sees a token, or has seen one
    before. scale: factor of scores, giving units of log2. scales: [tokens], of c and k, if QUANTISED.
    """
    scores = tl.dot(c, q, input_precision="ieee")
    scores = tl.dot(k, q_rope, scores, input_precision="ieee") * scale
    if QUANTISED:
        scores *= scales[:, None]
    scores = tl.where(seen, scores, float("-inf"))
    new_greatest = tl.maximum(greatest, tl.max(scores, 0))
    shrink = tl.exp2(greatest - new_greatest)  # 0 where the state is empty
    weights = tl.exp2(scores - new_greatest[None, :])
    total = tl.fma(total, shrink, tl.sum(weights, 0))
    if QUANTISED:
        weights *= scales[:, None]
    sums = tl.dot(tl.trans(c), weights.to(c.dtype), sums * shrink[None, :], input_precision="ieee")
    return new_greatest, total, sums


@triton.jit
def inverse(total):
    """Return 1 / total, rounded alike in every kernel."""
    return tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
