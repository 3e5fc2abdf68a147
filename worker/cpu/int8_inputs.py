"""Numba's implementation of `InputQuantiser`, for int8 products on the CPU (see int8_kernels.py)."""

from __future__ import annotations

import torch

from kvforge.worker.cpu.kernel import threads_for
from kvforge.worker.cpu.vector import CODES

from .int8_kernels import NUMBERS_PER_US, make_numbers, quantise


class CpuInputQuantiser:
    """Quantises the inputs of int8 products; see InputQuantiser. smallest: lower bound of a row's scale."""

    def __init__(self, smallest: float) -> None:
        self._smallest = smallest
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def quantise(self, x: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `InputQuantiser.quantise`."""
        x, (rows, count) = x.contiguous(), x.shape
        levels, largest = torch.empty((rows, count), dtype=torch.uint8), torch.empty((rows, 1))
        threads, stride = threads_for(rows * count / NUMBERS_PER_US) if rows > 1 else 1, -(-4 * count // 64) * 64
        if len(self._scratch) < threads * stride:
            self._scratch = torch.empty(threads * stride, dtype=torch.uint8)
        quantise(
            threads,
            source=x.data_ptr(),
            code=CODES[x.dtype],
            rows=rows,
            count=count,
            size=len(rotation),
            levels=levels.data_ptr(),
            peaks=largest.data_ptr(),
            scratch=self._scratch.data_ptr(),
            scratch_stride=stride,
            smallest=self._smallest,
        )
        return levels, largest

    def make_numbers(
        self, sums: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Implement `InputQuantiser.make_numbers`."""
        rows, count = sums.shape
        found = sums if dtype == torch.float32 else torch.empty((rows, count), dtype=dtype)
        threads = threads_for(rows * count / (4 * NUMBERS_PER_US)) if rows > 1 else 1
        make_numbers(
            threads,
            sums=sums.data_ptr(),
            peaks=largest.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            target=found.data_ptr(),
            rows=rows,
            count=count,
            code=CODES[dtype],
        )
        return found
