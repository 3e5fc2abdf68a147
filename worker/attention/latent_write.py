"""The kernel that stores latents and rotary keys of new tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.target import HEAD_UNIT, Target, in_units

COLUMNS = 1024  # numbers of a token, padded
_UNIT = tl.constexpr(HEAD_UNIT)


# As in `decode_kernel`, specialising on these arguments gains nothing.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["slots"])
def latent_write_kernel(
    numbers, cache, slots, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr
):
    """Store a token. Grid: [tokens].

    numbers: [tokens, WIDTH]; stride: in units of HEAD_UNIT numbers. cache: [slots of the pool, WIDTH]. slots: [tokens].
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
        tl.store(cache + slot * WIDTH + d, x.to(cache.dtype.element_ty), mask=d < WIDTH)


def write_latents(numbers: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, target: Target) -> None:
    """Store latents and rotary keys of new tokens.

    Args:
        numbers: [tokens, latent + rotary key] float on the device, contiguous along a token.
        cache: [blocks, block_size, 1, latent + rotary key], contiguous: `KvLayer.keys` of a layer with latents.
        slots: [tokens] int32 or int64 on the device; -1: do not store.
        target: The architecture.
    """
    tokens, width = numbers.shape
    latent_write_kernel[(tokens,)](
        numbers,
        cache,
        slots,
        *in_units(numbers.stride(0)),
        WIDTH=width,
        COLUMNS=COLUMNS,
        CHAINED=target.chained,
        num_warps=target.write.warps,
        **({"launch_pdl": True} if target.chained else {}),
    )
