"""The kernel that stores latents and rotary keys of new tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.target import HEAD_UNIT, Target, in_units

from .quantised import SCALE_MIN, TOP, as_bytes
from .write import _encode as encode
from .write import _largest as largest_of

COLUMNS = 1024  # numbers of a token, padded
_UNIT = tl.constexpr(HEAD_UNIT)
_SCALE_MIN = tl.constexpr(SCALE_MIN)


@triton.jit
def _scales(largest, top):
    """Return scales and divisors of rows with these largest numbers, as `write_kernel` stores them."""
    scale = tl.math.div_rn(largest, tl.zeros(largest.shape, tl.float32) + top)
    zero = scale < _SCALE_MIN
    divisors = tl.where(zero, float("inf"), scale)
    return tl.where(largest == float("inf"), float("nan"), tl.where(zero, 0.0, scale)), divisors


# As in `decode_kernel`, specialising on these arguments gains nothing.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["slots"])
def latent_write_kernel(
    numbers, cache, scales, slots, stride, top, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, QUANTISED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Store a token. Grid: [tokens].

    numbers: [tokens, WIDTH]; stride: in units of HEAD_UNIT numbers. cache: [slots of the pool, WIDTH]. slots: [tokens].
    scales: [slots of the pool] float32, if QUANTISED. top: see `quantised.TOP`.
    CHAINED: launched before the previous kernel has ended (programmatic dependent launch).
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # few programs: the next kernel fits on every multiprocessor
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, COLUMNS)
        x = tl.load(numbers + token * (stride * _UNIT) + d, mask=d < WIDTH, other=0.0)
        if QUANTISED:
            wide = x.to(tl.float32)[None, :]
            scale, divisors = _scales(largest_of(wide), top)
            tl.store(scales + slot + tl.arange(0, 1), scale)
            encoded = encode(wide, divisors, top, QUANTISED, cache.dtype.element_ty)
            tl.store(cache + slot * WIDTH + d[None, :], encoded, mask=(d < WIDTH)[None, :])
        else:
            tl.store(cache + slot * WIDTH + d, x.to(cache.dtype.element_ty), mask=d < WIDTH)


def write_latents(
    numbers: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    target: Target,
    scales: torch.Tensor | None = None,
) -> None:
    """Store latents and rotary keys of new tokens.

    Args:
        numbers: [tokens, latent + rotary key] float on the device, contiguous along a token.
        cache: [blocks, block_size, 1, latent + rotary key], contiguous: `KvLayer.keys` of a layer with latents.
        slots: [tokens] int32 or int64 on the device; -1: do not store.
        target: The architecture.
        scales: `KvLayer.key_scales`, to quantise them.
    """
    tokens, width = numbers.shape
    latent_write_kernel[(tokens,)](
        numbers,
        cache if scales is None else as_bytes(cache),
        cache if scales is None else scales,
        slots,
        *in_units(numbers.stride(0)),
        TOP.get(cache.dtype, 0.0),
        WIDTH=width,
        COLUMNS=COLUMNS,
        QUANTISED=scales is not None,
        CHAINED=target.chained,
        num_warps=target.write.warps,
        **({"launch_pdl": True} if target.chained else {}),
    )
