"""The codes of weights that stay in them, and their order in memory (see `stored`).

    code   number of a code
    int8   -128 to 127
    e4m3   a float of 8 bits: 4 of exponent, 3 of mantissa, no infinity
    int4   0 to 15, less a zero for each group (8 without zeros)
    e2m1   a float of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign
    nf4    one of 16 quantiles of the normal distribution (Dettmers and others, "QLoRA", arXiv 2305.14314)
    iq4    one of 16 whole numbers, closer to each other around 0 (IQ4_NL of llama.cpp)

Codes are stored in words of 16 bits in an order that kernels unpack without moving numbers between threads: a word has
two codes of 8 bits or four of 4 bits, and those of one word are 16 columns apart. Four codes of e2m1 have their
bits mixed: a mask, or a shift and a mask, moves three of the codes to their places in a bfloat16 (`E2M1_BITS`). A unit
is the codes of 16 words of a row, 32 or 64 columns. A span is the units of a row that a product reads in one step; the
spans of the same columns are adjacent, row by row. Eight threads of a load then share a line of the cache: where they
shared two or four, an H200 read 8-bit codes at 67 % of its bandwidth, and reads them at 87 % now
(benchmarks/gpu_read_order.py).
"""

from __future__ import annotations

import torch

WORDS = 16  # words of a unit, which are 16 columns of each tile
SPAN_COLUMNS = 128  # most of a span
CODES = {"int8": 2, "e4m3": 2, "int4": 4, "e2m1": 4, "nf4": 4, "iq4": 4}  # codes of a word
NAMES = {"int8": "int8", "e4m3": "fp8", "int4": "int4", "e2m1": "mxfp4", "nf4": "nf4", "iq4": "iq4"}  # for people
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
TABLES = {"e2m1": (*E2M1, *(-each for each in E2M1)), "nf4": NF4, "iq4": IQ4}
# Places of the bits of each code in a word, the lowest bit of a code first. In e2m1 these bits are the mantissa, two of
# the exponent, and the sign; in the first code they lie where a bfloat16 has them.
BITS = {
    2: (tuple(range(8)), tuple(range(8, 16))),
    4: tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4)),
}
E2M1_BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
ZERO = 8  # the code of 0 in int4 without zeros


def unit_columns(code: str) -> int:
    """Return the columns of a unit: k of a weight must be a multiple of it."""
    return WORDS * CODES[code]


def span_of(code: str, k: int, groups: int = 1) -> int:
    """Return the units of a span: those of a step of products, which are columns of one group.

    Args:
        code: A key of `CODES`.
        k: Columns of the matrix.
        groups: Groups with a scale in a row. Those of e2m1 smaller than a unit are factors of its numbers, and do not
            count.
    """
    unit, group = unit_columns(code), k // groups
    group = k if code == "e2m1" and group < unit else group
    sizes = (SPAN_COLUMNS, SPAN_COLUMNS // 2, unit)
    return next((size // unit for size in sizes if size >= unit and group % size == 0), 1)


def bits_of(code: str) -> tuple[tuple[int, ...], ...]:
    """Return the places in a word of the bits of each of its codes, the lowest bit of a code first."""
    return E2M1_BITS if code == "e2m1" else BITS[CODES[code]]


def numbers_of(codes: torch.Tensor, code: str, zeros: torch.Tensor | None, zero: int = ZERO) -> torch.Tensor:
    """Return the numbers of codes without scales.

    Args:
        codes: [..., n, k] uint8.
        code: A key of `CODES`.
        zeros: [..., groups, n] uint8, the codes of 0 in int4, or None.
        zero: The code of 0 in int4 without zeros.

    Returns:
        [..., n, k] float32.
    """
    if code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if code == "int8":
        return codes.view(torch.int8).float()
    if code in TABLES:
        return torch.tensor(TABLES[code], device=codes.device)[codes.int()]
    if zeros is None:
        return codes.float() - zero
    by_group = codes.float().unflatten(-1, (zeros.shape[-2], -1))
    return by_group.sub_(zeros.float().transpose(-1, -2)[..., None]).flatten(-2)


def pack(codes: torch.Tensor, code: str, groups: int = 1) -> torch.Tensor:
    """Pack codes.

    Args:
        codes: [..., n, k] uint8, one code each; k is a multiple of `unit_columns`.
        code: A key of `CODES`.
        groups: See `span_of`.

    Returns:
        [..., spans, n, words of a span] int16.
    """
    count, span = CODES[code], span_of(code, codes.shape[-1], groups)
    parts = codes.unflatten(-1, (-1, count, WORDS)).unbind(-2)  # [..., n, units, WORDS] each
    words = torch.zeros(parts[0].shape, dtype=torch.int32, device=codes.device)
    for places, part in zip(bits_of(code), parts, strict=True):
        for bit, place in enumerate(places):
            words |= (part.int() >> bit & 1) << place
    return words.to(torch.int16).flatten(-2).unflatten(-1, (-1, span * WORDS)).transpose(-2, -3).contiguous()


def narrow_spans(words: torch.Tensor, span: int) -> torch.Tensor:
    """Return words [..., spans, n, words of a span] with spans of `span` units, a divisor of those they have."""
    if words.shape[-1] == span * WORDS:
        return words
    apart = words.unflatten(-1, (-1, span * WORDS)).transpose(-2, -3)  # [..., spans, pieces, n, words]
    return apart.flatten(-4, -3).contiguous()


def unpack(words: torch.Tensor, code: str) -> torch.Tensor:
    """Return the codes [..., n, k] uint8 of words [..., spans, n, words of a span]."""
    wide = words.transpose(-2, -3).int().unflatten(-1, (-1, WORDS)).flatten(-3, -2) & 0xFFFF  # [..., n, units, WORDS]
    parts = []
    for places in bits_of(code):
        found = torch.zeros_like(wide)
        for bit, place in enumerate(places):
            found |= (wide >> place & 1) << bit
        parts.append(found.to(torch.uint8))
    return torch.stack(parts, -2).flatten(-3)
