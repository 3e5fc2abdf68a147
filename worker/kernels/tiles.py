"""Float32 products with weights in oneDNN's layout, by a kernel of the worker's own: for CPUs with AVX2.

oneDNN packs a weight into tiles in the order of multiplication, and this kernel reads them in place. For one row it
takes as long as reading the weight, while oneDNN's call takes half as long again. For many rows it is as fast as MKL or
faster (benchmarks/NOTES.md, "CPU: products by tiles"). A row's sums do not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch.nn.functional import linear, pad

from kvforge.worker.cpu.kernel import threads_for
from kvforge.worker.cpu.tile_kernel import TICKET_ROWS, WIDE, multiply_tiles
from kvforge.worker.device.check import require_right
from kvforge.worker.device.device import WAY_OUT, Device

from .amx import AmxTiles, find_amx_tiles
from .packed import EXPECTED_ROWS, set_product
from .packed_table import table_of
from .selftest import TOLERANCE

BYTES_PER_US, MULTIPLIED_PER_US = 20_000, 40_000  # throughput of one thread: reading, and multiplying and adding
WIDTHS = (16, 32, 48, WIDE)
TESTED_ROWS = (1, 3, 5, 16, TICKET_ROWS + 1)


@dataclass(frozen=True)
class Tiles:
    """The layout of a packed weight [n, k]: tiles of `width` rows each, with adjacent numbers of a column.

    Attributes:
        address: Address of the first tile; the weight owns the memory.
        n: Rows of the weight.
        k: Columns of the weight.
        width: Rows of a tile.
        tile_bytes: Distance between tiles.
        tiles: Number of tiles.
    """

    name: ClassVar[str] = "Numba in oneDNN's tiles"
    address: int
    n: int
    k: int
    width: int
    tile_bytes: int
    tiles: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x weight^T + bias, [..., n], contiguous. x: [..., k] float32, contiguous. bias: from `bias_for`."""
        assert x.dtype == torch.float32 and x.is_contiguous(), "the kernel reads x by address"
        target = torch.empty((x.numel() // self.k, self.tiles * self.width))
        self.multiply(x, bias, target)
        return target[:, : self.n].contiguous().view(*x.shape[:-1], self.n)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor) -> None:
        """Compute the product into target [rows, tiles x width]."""
        rows, width = target.shape
        parts = -(-rows // TICKET_ROWS)
        took_us = max(self.tiles * self.tile_bytes / BYTES_PER_US, rows * width * self.k / MULTIPLIED_PER_US)
        multiply_tiles(
            threads_for(took_us),
            x=x.data_ptr(),
            rows=rows,
            weight=self.address,
            bias=0 if bias is None else bias.data_ptr(),
            target=target.data_ptr(),
            target_bytes=4 * width,
            count=self.k,
            width=self.width,
            tile_bytes=self.tile_bytes,
            tiles=self.tiles,
            parts=parts,
        )

    def bias_for(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias padded to the length of the tiles."""
        missing = self.tiles * self.width - self.n
        return pad(bias, (0, missing)) if bias is not None and missing else bias


class Layouts:
    """Finds the tiles of packed weights. Weights of one shape share a layout; packing compares each product."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._found: dict[tuple[int, int, torch.dtype], Tiles | AmxTiles | None] = {}

    def find(self, packed: torch.Tensor, weight: torch.Tensor) -> None:
        """Make this kernel, or that of amx.py, compute the products of `packed`, if possible.

        Args:
            packed: The packed weight.
            weight: [n, k], the original.

        Raises:
            KernelError: See `find_amx_tiles`.
        """
        n, k = weight.shape
        key = n, k, weight.dtype
        if key not in self._found:
            self._found[key] = _find(packed, weight, self._device)
        if (tiles := self._found[key]) is not None:
            set_product(packed, replace(tiles, address=torch.ops.mkldnn.data_ptr(packed)))


def tiles_test(device: Device) -> None:
    """Test the kernel on random weights.

    Raises:
        KernelError: The kernel is wrong; names the shape.
    """
    for n, k in ((130, 1100), (20, 36)):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        if (tiles := _tiles_of(packed, weight)) is None:
            return
        for rows in TESTED_ROWS:
            what = f"{rows} tokens, a weight of {n} x {k}"
            require_right(device, "product by tiles", what, partial(_compare, tiles, weight, rows), WAY_OUT)


def _find(packed: torch.Tensor, weight: torch.Tensor, device: Device) -> Tiles | AmxTiles | None:
    if weight.dtype != torch.float32:
        return find_amx_tiles(packed, weight, device)
    return _tiles_of(packed, weight) if torch.backends.cpu.get_cpu_capability() == "AVX2" else None


def _tiles_of(packed: torch.Tensor, weight: torch.Tensor) -> Tiles | None:
    table = table_of(packed, weight)
    if table is None:
        return None
    tiles, columns, width, together = table.numbers.shape
    if together != 1 or width not in WIDTHS:
        return None
    n, k = weight.shape
    return Tiles(table.numbers.data_ptr(), n, k, width, 4 * columns * width, tiles)


def _compare(tiles: Tiles, weight: torch.Tensor, rows: int) -> str:
    """Return the difference from the reference, or "". NaN follows the rows in memory and fills the result."""
    generator = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows + 1, tiles.k, generator=generator), torch.randn(tiles.n, generator=generator)
    x[-1] = torch.nan
    target = torch.full((rows, tiles.tiles * tiles.width), torch.nan)
    tiles.multiply(x, tiles.bias_for(bias), target)
    wanted = linear(x[:-1], weight, bias)
    apart = float((target[:, : tiles.n] - wanted).abs().max() / wanted.abs().max())
    if apart <= TOLERANCE[torch.float32]:
        return ""
    return f"it differs from the reference by {apart:.1e} of the largest number"
