"""Products of a few rows with a packed weight, where our kernel gives the bits that oneDNN gives them among many.

For one row oneDNN takes half as long again as reading the weight does, and for a small weight most of the time is
around it. Whether its sums have the order that the kernel's have (see host_rows.py) is tried for each shape of weight:
in another version, or on another CPU, they may not, and then oneDNN makes them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import pad

from worker.device.check import require_right
from worker.device.device import WAY_OUT, Device
from worker.device.host_kernel import threads_for

from .host_rows import WIDE, multiply_rows
from .packed import EXPECTED_ROWS, set_few_rows
from .packed_table import table_of
from .selftest import TOLERANCE
from .steady import same_bits

ROWS_MAX = 3  # of more, oneDNN is as fast
TILE_BYTES_MAX = 1 << 19  # of more than one row: the second finds the tile in the core's cache
BYTES_PER_US = 20_000  # that one thread reads
TRIED, COMPARED = (2, 3, 8, 16, 40, 150), 16  # oneDNN's numbers of rows, and how many of them are compared
WIDTHS = (16, 32, 48, WIDE)
log = logging.getLogger("worker")


@dataclass(frozen=True)
class FewRows:
    """Where a packed weight [n, k] lies: tiles of `width` rows, in each of which the numbers of a column are together.

    address: of the first; the weight keeps its memory. rows_max: of x.
    """

    address: int
    n: int
    k: int
    width: int
    tile_bytes: int
    tiles: int
    rows_max: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x weight^T + bias, [..., n], contiguous. x: [..., k] float32, contiguous, at most `rows_max` rows. bias: from
        `bias_for`."""
        rows = x.numel() // self.k
        target = torch.empty((rows, self.tiles * self.width))
        self.run(x, bias, target)
        return target[:, : self.n].contiguous().view(*x.shape[:-1], self.n)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor) -> None:
        """The same into target [rows, tiles x width]."""
        rows, width = target.shape
        multiply_rows(
            threads_for(self.tiles * self.tile_bytes / BYTES_PER_US),
            x.data_ptr(),
            rows,
            self.address,
            0 if bias is None else bias.data_ptr(),
            target.data_ptr(),
            4 * width,
            self.k,
            self.width,
            self.tile_bytes,
            self.tiles,
        )

    def bias_for(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """As long as the tiles are."""
        missing = self.tiles * self.width - self.n
        return pad(bias, (0, missing)) if bias is not None and missing else bias


class Giver:
    """Gives packed weights their `FewRows`, if they may have one. What was tried for a shape holds for all of it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tried: dict[tuple[int, int], bool] = {}

    def give(self, packed: torch.Tensor, weight: torch.Tensor) -> None:
        """weight: [n, k], as it was before it was packed. Errors: KernelError where the kernel is wrong."""
        shape = (len(weight), weight.shape[1])
        if weight.dtype != torch.float32 or not packed.is_mkldnn or not self._tried.get(shape, True):
            return
        laid_out = _laid_out(packed, weight)
        if laid_out is not None:
            what = f"a weight of {shape[0]} x {shape[1]}"
            compare = partial(_compare, laid_out, weight)
            require_right(self._device, "product of a few rows", what, compare, WAY_OUT)
            if shape not in self._tried:
                self._tried[shape] = _is_onednns(laid_out, packed)
        if laid_out is None or not self._tried[shape]:
            self._tried[shape] = False
            log.info(
                "single rows times %d x %d are oneDNN's: it lays the weight out, or adds up, in another way", *shape
            )
            return
        set_few_rows(packed, laid_out)


def few_rows_test(device: Device) -> None:
    """The kernel, before there is any weight. Errors: KernelError."""
    giver = Giver(device)
    for n, k in ((130, 1100), (20, 36)):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
        giver.give(torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS), weight)


def _laid_out(packed: torch.Tensor, weight: torch.Tensor) -> FewRows | None:
    table = table_of(packed, weight)
    if table is None:
        return None
    tiles, columns, width, together = table.numbers.shape
    if together != 1 or width not in WIDTHS:
        return None
    tile_bytes = 4 * columns * width
    rows_max = ROWS_MAX if tile_bytes <= TILE_BYTES_MAX else 1
    n, k = weight.shape
    return FewRows(table.numbers.data_ptr(), n, k, width, tile_bytes, tiles, rows_max)


def _compare(laid_out: FewRows, weight: torch.Tensor) -> str:
    """What is wrong, "" where nothing is. Behind the rows lies NaN."""
    x = _numbers(laid_out.rows_max + 1, laid_out.k)
    x[-1] = torch.nan
    bias = _numbers(1, laid_out.n)[0]
    for more in (None, bias):
        target = torch.full((laid_out.rows_max, laid_out.tiles * laid_out.width), torch.nan)
        laid_out.run(x, laid_out.bias_for(more), target)
        wanted = torch.nn.functional.linear(x[:-1], weight, more)
        apart = float((target[:, : laid_out.n] - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
        if not apart <= TOLERANCE[torch.float32]:
            return f"it differs from the reference by {apart:.1e} of the largest number"
    return ""


def _is_onednns(laid_out: FewRows, packed: torch.Tensor) -> bool:
    """Whether rows have the bits that they have among many: of any of oneDNN's numbers of rows."""
    x, bias = _numbers(max(TRIED), laid_out.k), _numbers(1, laid_out.n)[0]
    for more in (None, bias):
        rows = x[:COMPARED]
        ours = torch.cat([laid_out(row[None], laid_out.bias_for(more)) for row in rows])
        for count in TRIED:
            theirs = torch.ops.mkldnn._linear_pointwise(x[:count].contiguous(), packed, more, "none", [], "")
            if not same_bits(ours[:count], theirs[:COMPARED]):
                return False
    return True


def _numbers(rows: int, count: int) -> torch.Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(count))
