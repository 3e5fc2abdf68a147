"""int8 and fp8 KV: one float32 scale for each token and head, of K and of V.

A row of head_size numbers x is stored as q with x = q x scale and scale = max|x| / top, where top is the largest
number of the format: 127 for int8, 448 for fp8 (e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity; Micikevicius
et al., "FP8 Formats for Deep Learning", arXiv 2209.05433). q is rounded to nearest, ties to even.

What is read back differs from x by
    int8: at most scale / 2 = max|x| / 254, the same everywhere in the row;
    fp8:  at most |x| / 16, or max|x| x 2^-10 / 448 where that is more: small numbers keep their own precision.
On normally distributed rows of 64 to 256 numbers that is a root-mean-square error, relative to that of x, of about
0.7 % for int8 and 2.6 % for fp8. bfloat16 gives 0.17 %, float16 0.02 %.

What attention gives over normally distributed K and V then differs from float64's by at most (and by root mean square)
    int8 0.05 (0.008), fp8 0.25 (0.03), bfloat16 0.02 (0.004), float16 0.002 (0.0004), float32 0.00001 (0.000001);
the tests hold every implementation to that.

Two kinds of row are special. One whose largest number is below `SCALE_MIN` x top (a row of zeros, above all) is stored
as zeros with scale 0. One with a NaN or an infinity has scale NaN, so that all of it reads back as NaN: a broken
number stays visible, and breaks no other row.
"""

from __future__ import annotations

import torch

TOP: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_MIN = 2.0**-126  # the smallest normal float32: GPUs may take anything smaller for zero, so no scale is smaller


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype are stored with scales."""
    return dtype in TOP


def quantise(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """numbers: [..., head_size] float. Returns [..., head_size] `dtype` and the scales [...] float32."""
    x = numbers.float()
    largest = x.abs().amax(dim=-1)  # NaN where any number is
    scales = largest / torch.full_like(largest, TOP[dtype])  # not by a number: on a GPU torch multiplies by 1 / it
    broken = ~torch.isfinite(largest)
    divisors = torch.where(broken | (scales < SCALE_MIN), torch.inf, scales)
    quotients = x.nan_to_num(0.0, 0.0, 0.0) / divisors[..., None]
    scales = torch.where(broken, torch.nan, torch.where(scales < SCALE_MIN, 0.0, scales))
    return (quotients.round() if dtype == torch.int8 else quotients).to(dtype), scales


def dequantise(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """stored: [..., n] any dtype; scales: [...] float32 or None. Returns [..., n] float32."""
    numbers = stored.float()
    return numbers if scales is None else numbers * scales[..., None]


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The same memory as integers where torch cannot index the dtype itself (fp8)."""
    return cache.view(torch.int8) if cache.dtype == torch.float8_e4m3fn else cache
