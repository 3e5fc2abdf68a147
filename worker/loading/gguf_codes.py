"""Quantised rows of a GGUF file as codes that a GPU's kernels multiply, with exactly the file's numbers.

Layout of the blocks: ggml-common.h and the functions dequantize_row of ggml-quants.c
(https://github.com/ggml-org/llama.cpp). Scales that a file divides into a float16 for 256 numbers and some bits for
each group become one float32 for a group, and levels of 5 and 6 bits become codes of 8:

    type                 codes  group  bits of a number, in the file and here
    Q4_0                 int4   32     4.5   5
    Q4_1                 int4   32     5     6 with lows
    Q4_K                 int4   32     4.5   6 with lows
    IQ4_NL, IQ4_XS       iq4    32     4.5   5, 4.25  5
    MXFP4                e2m1   32     4.25  5, then 4.25: see `stored.with_exponents`
    Q8_0                 int8   32     8.5   9
    Q5_0                 int8   32     5.5   9
    Q5_1, Q5_K           int8   32     6     10 with lows, 5.5  10
    Q6_K                 int8   16     6.6   10
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvforge.worker.kernels.code_tables import pack
from kvforge.worker.kernels.stored import Codes

Parts = tuple[
    str, torch.Tensor, torch.Tensor, torch.Tensor | None
]  # code, codes [n, k] uint8, scales, lows [n, groups]


def codes_of_rows(octets: torch.Tensor, type_name: str) -> Codes:
    """Decode quantised rows.

    Args:
        octets: [n, bytes of a row] uint8, as stored.
        type_name: A key of `READERS`.

    Returns:
        Codes [n, k] on the same device.

    Raises:
        ValueError: A scale is not finite.
    """
    size, read = READERS[type_name]
    code, codes, scales, lows = read(octets.unflatten(1, (-1, size)))
    if not bool(scales.isfinite().all()) or (lows is not None and not bool(lows.isfinite().all())):
        raise ValueError("holds a scale that is not finite")
    of_groups = None if lows is None else lows.t().contiguous()
    return Codes(code, pack(codes, code, scales.shape[1]), scales.t().contiguous(), lows=of_groups, format=type_name)


def _floats(octets: torch.Tensor) -> torch.Tensor:
    """Return float16 numbers [n, blocks, count] as float32. octets: [n, blocks, 2 x count]."""
    return octets.contiguous().view(torch.float16).float()


def _halves(octets: torch.Tensor, width: int) -> torch.Tensor:
    """Return the lower and then the upper four bits of each `width` bytes, [n, k]. octets: [n, blocks, bytes]."""
    parts = octets.flatten(1).unflatten(1, (-1, width))
    return torch.stack((parts & 15, parts >> 4), 2).flatten(1)


def _bits(octets: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Return each `width` bytes' first `count` bits, then the next ones, and so on, [n, k]."""
    parts = octets.flatten(1).unflatten(1, (-1, 1, width))
    shifts = torch.arange(0, 8, count, device=octets.device, dtype=torch.uint8)[:, None]
    return ((parts >> shifts) & ((1 << count) - 1)).flatten(1)


def _six_bits(octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack [n, blocks, 12] bytes into scales and minima, [n, blocks, 8] float32; see `gguf_groups`."""
    first, second, last = octets.split(4, -1)
    scales = torch.cat((first & 63, (last & 15) | ((first >> 6) << 4)), -1)
    return scales.float(), torch.cat((second & 63, (last >> 4) | ((second >> 6) << 4)), -1).float()


def _of_256(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and lows [n, groups] of Q4_K and Q5_K: their blocks begin alike."""
    of_scales, of_lows = _six_bits(blocks[..., 4:16])
    return (_floats(blocks[..., :2]) * of_scales).flatten(1), -(_floats(blocks[..., 2:4]) * of_lows).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return "int4", _halves(blocks[..., 2:], 16), _floats(blocks[..., :2]).flatten(1), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    scales, lows = _floats(blocks[..., :4]).unbind(-1)
    return "int4", _halves(blocks[..., 4:], 16), scales, lows


def _q4_k(blocks: torch.Tensor) -> Parts:
    return "int4", _halves(blocks[..., 16:], 32), *_of_256(blocks)


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return "iq4", _halves(blocks[..., 2:], 16), _floats(blocks[..., :2]).flatten(1), None


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    lower = _halves(blocks[..., 4:8], 1).unflatten(1, (-1, 8))
    upper = _bits(blocks[..., 2:4], 1, 2).unflatten(1, (-1, 8))
    scales = _floats(blocks[..., :2]) * ((lower | (upper << 4)).float() - 32)
    return "iq4", _halves(blocks[..., 8:], 16), scales.flatten(1), None


def _mxfp4(blocks: torch.Tensor) -> Parts:
    scales = torch.exp2(blocks[..., 0].float() - 127)
    return "e2m1", _halves(blocks[..., 1:], 16), scales, None


def _q8_0(blocks: torch.Tensor) -> Parts:
    return "int8", blocks[..., 2:].flatten(1), _floats(blocks[..., :2]).flatten(1), None


def _fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the bits of each four bytes in order, at bit 4, [n, k]."""
    return _bits(octets, 1, 1) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    codes = _halves(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return "int8", codes - 16, _floats(blocks[..., :2]).flatten(1), None  # wraps to the bits of a negative number


def _q5_1(blocks: torch.Tensor) -> Parts:
    scales, lows = _floats(blocks[..., :4]).unbind(-1)
    return "int8", _halves(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8]), scales, lows


def _q5_k(blocks: torch.Tensor) -> Parts:
    return "int8", _halves(blocks[..., 48:], 32) | (_bits(blocks[..., 16:48], 32, 1) << 4), *_of_256(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    codes = _halves(blocks[..., :128], 64) | (_bits(blocks[..., 128:192], 32, 2) << 4)
    scales = _floats(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return "int8", codes - 32, scales.flatten(1), None


# By a type's name: bytes of a block, and what decodes blocks [n, blocks, bytes].
READERS: dict[str, tuple[int, Callable[[torch.Tensor], Parts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
    "Q8_0": (34, _q8_0),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
