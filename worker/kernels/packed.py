"""Products with weights that oneDNN has laid out once, for CPUs: `PlainOperations` otherwise.

A plain product reads its weight as the file has it, and has to lay it out anew in every call, or reads it badly. The
layout in blocks ("packed") is an opaque tensor that oneDNN's own products alone can read; which blocks it takes depends
on the rows that it is told to expect. Sums are taken in another order than in torch's library: float32 differs in the
last bits, 16 bits now and then in the last one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import linear

from worker.device.check import require_right
from worker.device.device import Device

from .plain import PlainOperations
from .selftest import TOLERANCE

# Blocks for 1 row make float32 products slower at every number of rows; those for 16 are as fast as any others at 1 and
# at 8, and faster than those for 64 at 256 and more (benchmarks/NOTES.md, "CPU: packed weights").
EXPECTED_ROWS = 16
CHECKED_ROWS = (1, 20, 100)  # a single row is a product of its own kind
WAY_OUT = "set kernels = 'reference' to serve with plain torch"


def packing_problem(device: Device, dtype: torch.dtype) -> str:
    """Why weights of `dtype` stay as they are; "" where `PackedOperations` serve."""
    if not device.kernels:
        return "kernels = 'reference'"
    if problem := device.packing_problem(dtype):
        return problem
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')} is not packed"
    return ""


class PackedOperations(PlainOperations):
    """See LayerOperations. Weights that `pack` returned are multiplied by oneDNN, all others by torch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._checked: set[tuple[int, int]] = set()

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A packed copy of a weight [n, k], which takes part in this class's products alone.

        Errors: KernelError where a product with it is not what torch computes with `weight`.
        """
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
        n, k = weight.shape
        rows = CHECKED_ROWS if (n, k) not in self._checked else CHECKED_ROWS[:1]
        self._checked.add((n, k))
        for count in rows:
            what = f"{count} tokens, a weight of {n} x {k}, {str(weight.dtype).removeprefix('torch.')}"
            require_right(self._device, "packed product", what, partial(_compare, packed, weight, count), WAY_OUT)
        return packed

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _product(x, weight, bias)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not weight.is_mkldnn:
            return super().linear(x, weight, bias, output)
        found = self.product(x, weight, bias)
        return found if output is None else output.copy_(found)


class PackedRows(torch.nn.Module):
    """Stands in a transformers model where a Linear was, whose weight is some rows of a packed one.

    The weight is unpacked whenever it is asked for, and kept by nobody: the model computes what it did, slowly, and its
    state has the names it had.
    """

    def __init__(self, packed: torch.Tensor, rows: slice, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed, self._rows = packed, rows
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """[n, k], new."""
        return self._packed.to_dense()[self._rows].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As Linear's, in the dtype of x."""
        return linear(x, self.weight.to(x.dtype), self.bias)

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes, packed (where blocks are filled up) or not."""
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not weight.is_mkldnn:
        return linear(x, weight, bias)
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


@torch.no_grad()
def _compare(packed: torch.Tensor, weight: torch.Tensor, rows: int) -> str:
    """What is wrong, "" where nothing is. Behind the rows lies NaN."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.full((rows + 1, weight.shape[1]), float("nan"), dtype=weight.dtype)
    x = numbers[:rows].normal_(generator=generator)
    got, want = _product(x, packed, None).float(), linear(x, weight).float()
    difference = float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))
    if not difference <= TOLERANCE[weight.dtype]:
        return f"it differs from the reference by {difference:.1e} of the largest number"
    return ""
