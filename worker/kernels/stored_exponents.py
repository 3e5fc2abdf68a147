"""Scales of mxfp4 in the 8 bits of the file: exponents of powers of two, four in a word.

A code of e2m1 times a power of two is exact in 16 bits, except near the ends of their range. It is therefore multiplied
before the product, and a group of 32 columns needs no product of its own.
"""

from __future__ import annotations

import torch

EXPONENT_COLUMNS = 32  # that share an exponent
ZEROS_BELOW = 2  # exponents that become 0, which stands for a factor of 0: such numbers are below 2 ** -122
# Exponents with which 0.5 to 6 times the power of two is exact, up to those that RAISE leaves in 8 bits.
EXACT = {torch.bfloat16: (2, 128), torch.float16: (104, 128)}
# Added to exponents: the bits of a code are those of a bfloat16 that is too small by this power of two, so that one
# product makes up for it and scales.
RAISE = 126
_PER_WORD = 4


def exponents_of(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return scales as exponents.

    Args:
        scales: [(experts,) groups, n] float32, each of 32 columns; a multiple of two groups.
        dtype: Dtype of the products.

    Returns:
        [(experts,) groups / 4 rounded up, n] int32, see `Codes`; None: a scale is no power of two, or above 2, or the
        products with it are not exact, or those in this dtype not known to be.
    """
    if dtype not in EXACT:
        return None
    bits = scales.view(torch.int32)
    exponents = bits >> 23
    least, most = EXACT[dtype]
    tiny = (exponents >= 0) & (exponents < ZEROS_BELOW)
    fits = (bits & ((1 << 23) - 1) == 0) & (exponents >= least) & (exponents <= most)
    if not bool((tiny | fits).all()):
        return None
    exponents = (exponents + RAISE).masked_fill(tiny, 0)
    if exponents.shape[-2] % _PER_WORD:
        exponents = torch.cat((exponents, torch.zeros_like(exponents[..., :2, :])), -2)
    first, second, third, fourth = exponents.unflatten(-2, (-1, _PER_WORD)).unbind(-2)
    return first | (second << 8) | (third << 16) | (fourth << 24)


def powers_of(exponents: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the powers of two of exponents.

    Args:
        exponents: [(experts,) words, n] int32, from `exponents_of`.
        groups: Groups of a row.

    Returns:
        [(experts,) n, groups] float32.
    """
    places = torch.arange(0, 8 * _PER_WORD, 8, device=exponents.device, dtype=torch.int32)
    raised = (exponents.transpose(-1, -2)[..., None] >> places) & 255
    bits = (raised - RAISE).clamp_min(0) << 23
    return bits.view(torch.float32).flatten(-2)[..., :groups]
