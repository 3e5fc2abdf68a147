"""Weights of 8 and 4 bits for a CPU, multiplied by torch kernels that never widen the whole weight.

int8 (`Int8Weight`) has one scale per row of the weight. Each row of x is quantised separately at run time, and oneDNN
multiplies integers with exact sums, so a row's result does not depend on other rows. A few columns of x are often 20
times as large as the others and would leave these few levels. Weight and x are therefore rotated first, in blocks of up
to 128 columns, by the Hadamard matrix (Ashkboos and others, "QuaRot", arXiv 2404.00456), which changes no product.

int4 (`Int4Weight`) has a bfloat16 scale and minimum for each 32 numbers of a row: the groups of Q4_0, Q4_1 and Q4_K of
GGUF files, which keep their levels. x is rounded to bfloat16, not quantised. From 128 rows on, the weight is widened to
bfloat16 in pieces for oneDNN's product, because torch's int4 kernel is optimised for few rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, Self

import torch

from kvforge.worker.cpu.kernel import cpu_kernels_problem

from .row_counts import padded

GROUP = 32  # numbers of a row that share a scale in int4
TILE = 64  # rows of a weight per tile of torch's layout on AVX-512
WIDENED_ROWS = 128  # rows of x; see benchmarks/NOTES.md, "CPU: quantised weights"
WIDENED_NUMBERS = 1 << 21  # numbers of a weight widened at once
QUANTISED_NUMBERS = 1 << 21  # numbers of a weight that are quantised or compared at once
LEVELS = 127  # int8 levels on either side of 0; int4 has 15 above its minimum
ROTATED = 128  # most columns rotated together; fewer if this power of 2 does not divide k
SMALLEST = 1e-30  # scale of a row of zeros, to avoid division by 0
EXPECTED_ROWS = 16  # see packed.py


class QuantisedWeight(torch.Tensor):
    """A weight [n, k] that presents itself as float32 but supports only `product`."""

    @staticmethod
    def __new__(cls, n: int, k: int, *_: Any) -> Self:
        """Make a tensor without memory, with the shape [n, k]."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, (n, k), dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} does not support a quantised weight")

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes that the weight takes."""

    @abstractmethod
    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute x weight^T + bias.

        Args:
            x: [tokens, k] float32 or bfloat16.
            bias: [n].

        Returns:
            [tokens, n] in the dtype of x.
        """

    @abstractmethod
    def widened(self) -> torch.Tensor:
        """Return the represented numbers, [n, k] float32, new."""

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the represented numbers of some rows after the other, [rows, k] float32."""
        yield self.widened()

    @abstractmethod
    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as `product` rounds it, [tokens, k] float32."""


class Int8Weight(QuantisedWeight):
    """A weight of 8 bits.

    Args:
        n: Rows.
        k: Columns.
        levels: [n, k] int8, -127 to 127, of the rotated weight.
        scales: [n] float32, the value of one level.
        rotation: From `rotation_of`.
    """

    def __init__(self, n: int, k: int, levels: torch.Tensor, scales: torch.Tensor, rotation: torch.Tensor) -> None:
        assert (n, k) == levels.shape
        self._packed = torch.ops.onednn.qlinear_prepack(levels, [EXPECTED_ROWS, k])
        self._scales = scales / LEVELS  # includes the levels of x: the row's largest number is multiplied last
        self._zeros = torch.zeros(n, dtype=torch.int32)
        self._rotation = rotation
        self._quantiser = choose_input_quantiser()

    @property
    def stored_bytes(self) -> int:
        """Implement `QuantisedWeight.stored_bytes`."""
        return int(torch.ops.mkldnn._nbytes(self._packed)) + self._scales.nbytes + self._zeros.nbytes

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `QuantisedWeight.product`."""
        levels, largest = self._quantiser.quantise(padded(x), self._rotation)
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, 128, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return self._quantiser.make_numbers(sums, largest, bias, x.dtype)[: x.shape[0]]

    def widened(self) -> torch.Tensor:
        """Implement `QuantisedWeight.widened`."""
        return torch.cat(list(self.pieces()))

    def pieces(self) -> Iterator[torch.Tensor]:
        """Implement `QuantisedWeight.pieces`."""
        levels, scales = self._packed.to_dense().t(), self._scales[:, None] * LEVELS
        for rows in _pieces_of(*levels.shape):
            yield rotate(levels[rows].float().mul_(scales[rows]), self._rotation)

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `QuantisedWeight.seen`."""
        levels, largest = self._quantiser.quantise(x, self._rotation)
        return rotate((levels.float() - 128) * (largest / LEVELS), self._rotation)


class InputQuantiser(Protocol):
    """Quantisation of x before an int8 product, and conversion of its sums afterwards."""

    def quantise(self, x: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate and quantise x [tokens, k].

        Returns:
            Levels [tokens, k] uint8 around 128, and the largest number of each row, [tokens, 1] float32.
        """

    def make_numbers(
        self, sums: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Compute sums x largest + bias, in `dtype`.

        Args:
            sums: [tokens, n] float32; may be overwritten with the result.
            largest: From `quantise`.
            bias: [n].
            dtype: Dtype of the result.

        Returns:
            [tokens, n].
        """


class PlainInputQuantiser:
    """Quantisation in plain torch; see InputQuantiser."""

    def __init__(self) -> None:
        self._middle = torch.tensor(128.5)  # middle of the levels 1 to 255; the half rounds

    def quantise(self, x: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `InputQuantiser.quantise`."""
        x = rotate(x.float(), rotation)
        largest = x.abs().amax(1, keepdim=True).clamp_min_(SMALLEST)
        return torch.addcmul(self._middle, x, LEVELS / largest).to(torch.uint8), largest

    def make_numbers(
        self, sums: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Implement `InputQuantiser.make_numbers`."""
        found = sums.mul_(largest).to(dtype)
        return found if bias is None else found.add_(bias)


@lru_cache(maxsize=1)
def choose_input_quantiser() -> InputQuantiser:
    """Return the fastest implementation that this process can run."""
    if cpu_kernels_problem():
        return PlainInputQuantiser()
    from kvforge.worker.cpu.int8_inputs import CpuInputQuantiser  # imports numba

    return CpuInputQuantiser(SMALLEST)


@dataclass(frozen=True)
class Groups:
    """A weight [n, k] in groups of 32 numbers: level x scale + low.

    Attributes:
        levels: [n, k] uint8, 0 to 15.
        scales: [n, k / 32] float32.
        lows: [n, k / 32] float32.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor

    def widened(self) -> torch.Tensor:
        """Return the represented numbers, [n, k] float32."""
        return (self.levels.unflatten(1, (-1, GROUP)) * self.scales[..., None]).add_(self.lows[..., None]).flatten(1)


class Int4Weight(QuantisedWeight):
    """A weight of 4 bits: levels of `groups`, with scales and lows in bfloat16. n: multiple of 64, k: of 32."""

    def __init__(self, n: int, k: int, groups: Groups) -> None:
        assert (n, k) == groups.levels.shape
        packed = [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.levels[rows].int(), 1)
            for rows in _pieces_of(n, k, TILE)
        ]
        self._packed = torch.cat(packed)
        # The kernel subtracts 8 from each level, so its zero is the value of level 8.
        zeros = groups.lows + 8 * groups.scales
        both = torch.stack((groups.scales.t(), zeros.t()), dim=2)
        self._scales_and_zeros = both.to(torch.bfloat16).contiguous()

    @property
    def stored_bytes(self) -> int:
        """Implement `QuantisedWeight.stored_bytes`."""
        return self._packed.nbytes + self._scales_and_zeros.nbytes

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `QuantisedWeight.product`."""
        narrow = x.to(torch.bfloat16).contiguous()
        if len(x) >= WIDENED_ROWS:
            narrow = padded(narrow)
            found = torch.cat([narrow @ part for part in self._parts()], dim=1)[: len(x)]
        else:
            found = torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, self._packed, GROUP, self._scales_and_zeros)
        found = found.to(x.dtype)
        return found if bias is None else found.add_(bias)

    def widened(self) -> torch.Tensor:
        """Implement `QuantisedWeight.widened`."""
        return torch.cat(list(self.pieces()))

    def pieces(self) -> Iterator[torch.Tensor]:
        """Implement `QuantisedWeight.pieces`."""
        n, k = self.shape
        for rows in _pieces_of(n, k, TILE):
            scales, zeros = self._scales_and_zeros[:, rows].float().unbind(2)
            tiles = slice(rows.start // TILE, rows.stop // TILE)
            levels = self._levels(tiles).float().view(k // GROUP, GROUP, -1) - 8
            yield (levels * scales[:, None] + zeros[:, None]).view(k, -1).t().contiguous()

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `QuantisedWeight.seen`."""
        return x.to(torch.bfloat16).float()

    def _parts(self) -> Iterator[torch.Tensor]:
        """Yield pieces of the transposed weight, [k, some of n] bfloat16 each."""
        n, k = self.shape
        tiles = max(1, WIDENED_NUMBERS // (k * TILE))
        for first in range(0, n // TILE, tiles):
            rows = slice(first * TILE, (first + tiles) * TILE)
            scales, zeros = self._scales_and_zeros[:, rows].unbind(2)
            scales = scales.contiguous()
            lows = zeros.float().sub_(8 * scales.float()).to(torch.bfloat16)
            levels = self._levels(slice(first, first + tiles)).to(torch.bfloat16).view(k // GROUP, GROUP, -1)
            yield levels.mul_(scales[:, None]).add_(lows[:, None]).view(k, -1)

    def _levels(self, tiles: slice) -> torch.Tensor:
        """Unpack the levels of the rows in some tiles: [k, rows] uint8.

        In torch's layout on AVX-512, each 64 rows have 32 bytes per column: rows 0 to 31 in the lower halves, the
        others in the upper halves.
        """
        n, k = self.shape
        octets = self._packed.view(n // TILE, k, TILE // 2)[tiles]
        return torch.cat((octets & 15, octets >> 4), dim=2).permute(1, 0, 2).reshape(k, -1)


def can_be_int4(weight: torch.Tensor) -> bool:
    """Return whether `Int4Weight` supports a weight of this shape."""
    n, k = weight.shape
    return n % TILE == 0 and k % GROUP == 0


@lru_cache(maxsize=16)
def rotation_of(k: int) -> torch.Tensor:
    """Return Sylvester's Hadamard matrix, orthonormal and its own inverse, [size, size] float32.

    size is the largest power of 2 up to ROTATED that divides k.
    """
    size = math.gcd(k, ROTATED)
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), found)
    return found / math.sqrt(size)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate each block of columns of x [rows, k] float32; return a new tensor of the same shape."""
    return (x.reshape(-1, len(rotation)) @ rotation).view(x.shape)


def quantise_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantise to the nearest levels; a row's largest number has the largest level. weight: [n, k], finite."""
    n, k = weight.shape
    rotation = rotation_of(k)
    levels, scales = torch.empty((n, k), dtype=torch.int8), torch.empty(n)
    for rows in _pieces_of(n, k):
        rotated = rotate(weight.detach()[rows].float(), rotation)
        scales[rows] = rotated.abs().amax(1).clamp_min_(SMALLEST) / LEVELS
        levels[rows] = rotated.div_(scales[rows, None]).round_().to(torch.int8)
    return Int8Weight(n, k, levels, scales, rotation)


def _pieces_of(n: int, k: int, multiple: int = 1) -> Iterator[slice]:
    """Yield ranges of rows of a weight [n, k], each a multiple of rows, with about QUANTISED_NUMBERS numbers."""
    step = max(1, QUANTISED_NUMBERS // (k * multiple)) * multiple
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))


def quantise_int4(weight: torch.Tensor) -> Groups:
    """Quantise each group to the nearest levels between its smallest and its largest number.

    Args:
        weight: [n, k], finite; see `can_be_int4`.

    Returns:
        The groups.
    """
    parts = [_int4_groups(weight.detach()[rows]) for rows in _pieces_of(*weight.shape)]
    return Groups(*(torch.cat([getattr(part, name) for part in parts]) for name in ("levels", "scales", "lows")))


def _int4_groups(weight: torch.Tensor) -> Groups:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    smallest, largest = torch.aminmax(grouped, dim=2)
    # Rounded first, so that the levels are the nearest for the stored scales.
    scales = ((largest - smallest) / 15).clamp_min_(SMALLEST).to(torch.bfloat16).float()
    zeros = (smallest + 8 * scales).to(torch.bfloat16).float()
    lows = zeros - 8 * scales
    levels = ((grouped - lows[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    return Groups(levels.to(torch.uint8).flatten(1), scales, lows)
