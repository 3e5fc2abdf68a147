"""int8 and fp8 KV: one float32 scale per token and head, for K and for V.

A row of head_size numbers x is stored as q with x = q x scale and scale = max|x| / top. top is the format's largest
number: 127 for int8, 448 for fp8 (e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity; Micikevicius et al., "FP8
Formats for Deep Learning", arXiv 2209.05433). q is rounded to nearest, ties to even.

Error of a number:

- int8: at most scale / 2 = max|x| / 254, equal for the whole row.
- fp8: at most |x| / 16, or max|x| x 2^-10 / 448 if that is more; small numbers keep their own precision.

Errors on normally distributed data. The first column is the relative root-mean-square error of rows of 64 to 256
numbers, the others the difference of attention from float64's; the tests hold every implementation to these.

    dtype      rows      attention, largest   attention, root mean square
    int8       0.7 %     0.05                 0.008
    fp8        2.6 %     0.25                 0.03
    bfloat16   0.17 %    0.02                 0.004
    float16    0.02 %    0.002                0.0004
    float32              0.00001              0.000001

Two kinds of rows are special. A row with a largest number below `SCALE_MIN` x top (mainly a row of zeros) is stored as
zeros with scale 0. A row with NaN or infinity has scale NaN, so that all of its numbers read back as NaN: the broken
number stays visible, and affects no other row.
"""

from __future__ import annotations

import torch

TOP: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_MIN = 2.0**-126  # the smallest normal float32: GPUs may flush smaller scales to zero


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype are stored with scales."""
    return dtype in TOP


def quantise(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise numbers [..., head_size] float; return [..., head_size] `dtype` and the scales [...] float32."""
    x = numbers.float()
    largest = x.abs().amax(dim=-1)  # NaN if any number is NaN
    scales = largest / torch.full_like(largest, TOP[dtype])  # by a scalar, GPUs multiply by 1 / it
    broken = ~torch.isfinite(largest)
    divisors = torch.where(broken | (scales < SCALE_MIN), torch.inf, scales)
    quotients = x.nan_to_num(0.0, 0.0, 0.0) / divisors[..., None]
    scales = torch.where(broken, torch.nan, torch.where(scales < SCALE_MIN, 0.0, scales))
    return (quotients.round() if dtype == torch.int8 else quotients).to(dtype), scales


def dequantise(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Dequantise stored [..., n] with scales [...] float32 or None; return [..., n] float32."""
    numbers = stored.float()
    return numbers if scales is None else numbers * scales[..., None]


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers if torch cannot index the dtype (fp8)."""
    return cache.view(torch.int8) if cache.dtype == torch.float8_e4m3fn else cache
