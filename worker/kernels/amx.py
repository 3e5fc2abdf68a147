"""bfloat16 products with weights in oneDNN's layout, in the tiles of Intel's AMX, by a kernel of the worker's own.

oneDNN's own kernels for AMX give a row other bits for other numbers of rows, so steady workers keep oneDNN from AMX
(`device.products`). Without it oneDNN packs a weight in the very order that AMX's instructions read, and this kernel
reads it in place: as fast as oneDNN with AMX, and a row's sums do not depend on other rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch.nn.functional import linear, pad

from kvforge.worker.cpu.amx_kernel import BLOCK, DEPTH, ROWS, WIDE, multiply_amx
from kvforge.worker.cpu.kernel import threads_for
from kvforge.worker.device.check import require_right
from kvforge.worker.device.device import WAY_OUT, Device
from kvforge.worker.device.products import keeps_from_tiles

from .packed import EXPECTED_ROWS
from .packed_table import table_of
from .selftest import TOLERANCE
from .steady import same_bits

BYTES_PER_US, MULTIPLIED_PER_US = 20_000, 450_000  # throughput of one thread: reading, and multiplying and adding
CACHED_BYTES = 1 << 20  # of x, which stay in a core's cache while the weight passes
TICKETS_PER_THREAD = 4
TRIED_ROWS = (1, 2, ROWS - 1, ROWS, ROWS + 1, BLOCK - 1, BLOCK, BLOCK + 1)  # of TOGETHER, the first and the last
TOGETHER = 3 * BLOCK + 1
log = logging.getLogger("worker")


@lru_cache(maxsize=1)
def amx_problem() -> str:
    """Return why this process cannot run the kernel; "" if it can."""
    if not torch.cpu._is_amx_tile_supported():
        return "this CPU has no AMX"
    from numba.core.registry import cpu_target

    if "+amx-bf16" not in cpu_target.target_context.codegen().magic_tuple()[2]:
        return "Numba compiles for a CPU without AMX"
    if not torch.cpu._init_amx():  # asks the system, for all threads of the process and for its forks
        return "the system does not let this process use AMX"
    return ""


@dataclass(frozen=True)
class AmxTiles:
    """A packed weight [n, k]: tiles [steps, 16, 64, 2] bfloat16, each of 64 rows, zeros behind the last row and column.

    Attributes:
        address: Address of the first tile; the weight owns the memory.
        n: Rows of the weight.
        k: Columns of the weight.
        steps: Instructions that pass over the columns of a tile.
        tiles: Number of tiles.
    """

    name: ClassVar[str] = "Numba with AMX in oneDNN's tiles"
    address: int
    n: int
    k: int
    steps: int
    tiles: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x weight^T + bias, [..., n], contiguous. x: [..., k] bfloat16, contiguous. bias: from `bias_for`."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous(), "the kernel reads x by address"
        target = torch.empty((x.numel() // self.k, self.tiles * WIDE), dtype=x.dtype)
        missing = self.steps * DEPTH - self.k
        self.multiply(pad(x, (0, missing)) if missing else x, bias, target)
        return target[:, : self.n].contiguous().view(*x.shape[:-1], self.n)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor) -> None:
        """Compute the product of x [rows, steps x 32] into target [rows, tiles x 64]."""
        rows, width = target.shape
        in_registers = -(-rows // ROWS) * ROWS
        per_row = width * self.steps * DEPTH
        threads = threads_for(max(2 * per_row / BYTES_PER_US, in_registers * per_row / MULTIPLIED_PER_US))
        multiply_amx(
            threads,
            x=x.data_ptr(),
            rows=rows,
            weight=self.address,
            bias=0 if bias is None else bias.data_ptr(),
            target=target.data_ptr(),
            target_bytes=2 * width,
            steps=self.steps,
            tiles=self.tiles,
            part_rows=self._part_rows(rows, threads),
        )

    def bias_for(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias [n] in bfloat16, padded to the length of the tiles."""
        if bias is None:
            return None
        missing, narrow = self.tiles * WIDE - self.n, bias.to(torch.bfloat16)
        return pad(narrow, (0, missing)) if missing else narrow

    def _part_rows(self, rows: int, threads: int) -> int:
        """Return the rows of x of a ticket, few enough to stay in the cache and to give each thread tickets."""
        cached = CACHED_BYTES // (2 * self.steps * DEPTH)
        shared = -(-rows * self.tiles // (TICKETS_PER_THREAD * threads))
        return max(1, min(cached // BLOCK, -(-shared // BLOCK))) * BLOCK


def find_amx_tiles(packed: torch.Tensor, weight: torch.Tensor, device: Device) -> AmxTiles | None:
    """Find the tiles of a packed weight, and try their products.

    Args:
        packed: The packed weight.
        weight: [n, k], the original.
        device: The CPU.

    Returns:
        The tiles; None if oneDNN multiplies by the weight: another dtype or layout, a CPU without AMX, a limit of the
        environment below AMX, or a row's bits depend on other rows.

    Raises:
        KernelError: The kernel is wrong, does not compile, or cannot be launched.
    """
    if weight.dtype != torch.bfloat16 or not keeps_from_tiles() or amx_problem():
        return None
    if (tiles := _tiles_of(packed, weight)) is None:
        return None
    what = f"a weight of {tiles.n} x {tiles.k}"
    require_right(device, "product by AMX", what, partial(_compare, tiles, weight, BLOCK + 1), WAY_OUT)
    if problem := _unsteady(tiles):
        log.warning("%s is multiplied without AMX: %s", what, problem)
        return None
    return tiles


def amx_test(device: Device) -> None:
    """Test the kernel on random weights.

    Raises:
        KernelError: The kernel is wrong; names the shape.
    """
    if not keeps_from_tiles() or amx_problem():
        return
    for n, k in ((130, 1100), (20, 36)):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        if (tiles := _tiles_of(packed, weight)) is None:
            return
        for rows in TRIED_ROWS:
            what = f"{rows} tokens, a weight of {n} x {k}"
            require_right(device, "product by AMX", what, partial(_compare, tiles, weight, rows), WAY_OUT)
        require_right(device, "product by AMX", f"a weight of {n} x {k}", partial(_unsteady, tiles), WAY_OUT)


def _tiles_of(packed: torch.Tensor, weight: torch.Tensor) -> AmxTiles | None:
    table = table_of(packed, weight)
    if table is None:
        return None
    tiles, pairs, width, together = table.numbers.shape
    if (width, together) != (WIDE, 2) or 2 * pairs % DEPTH:
        return None
    n, k = weight.shape
    return AmxTiles(table.numbers.data_ptr(), n, k, 2 * pairs // DEPTH, tiles)


@torch.no_grad()
def _compare(tiles: AmxTiles, weight: torch.Tensor, rows: int) -> str:
    """Return the difference from the reference, or "". NaN follows the rows in memory and fills the result."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.zeros(rows + 1, tiles.steps * DEPTH, dtype=weight.dtype)
    x[:, : tiles.k].normal_(generator=generator)
    x[-1] = torch.nan
    bias = torch.randn(tiles.n, generator=generator).bfloat16()
    target = torch.full((rows, tiles.tiles * WIDE), torch.nan, dtype=weight.dtype)
    tiles.multiply(x[:-1], tiles.bias_for(bias), target)
    wanted = linear(x[:-1, : tiles.k], weight, bias).float()
    # The few results of a narrow weight may all be near 0 by chance.
    usual = torch.maximum(wanted.abs().max(), weight.float().norm(dim=1).max())
    apart = float((target[:, : tiles.n].float() - wanted).abs().max() / usual)
    return "" if apart <= TOLERANCE[weight.dtype] else f"it differs from the reference by {apart:.1e} of the largest"


@torch.no_grad()
def _unsteady(tiles: AmxTiles) -> str:
    """Return how a row's bits depend on the others, infinities and NaN among them, or ""."""
    x = torch.randn(TOGETHER, tiles.k, generator=torch.Generator().manual_seed(tiles.n)).bfloat16()
    x[ROWS // 2], x[BLOCK] = torch.nan, torch.inf
    whole = tiles(x, None)
    for count in TRIED_ROWS:
        for first in (0, TOGETHER - count):
            if not same_bits(tiles(x[first : first + count], None), whole[first : first + count]):
                return f"{count} tokens have other bits than among {TOGETHER}"
    return ""
