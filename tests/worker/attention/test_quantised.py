"""int8 and fp8 storage: the documented accuracy, and unusual rows."""

from __future__ import annotations

import math

import pytest
import torch

from kvforge.worker.attention.quantised import TOP, dequantise, is_quantised, quantise

DTYPES = pytest.mark.parametrize("dtype", TOP, ids=["int8", "fp8"])


def read_back(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    stored, scales = quantise(numbers, dtype)
    assert stored.dtype == dtype
    assert stored.shape == numbers.shape
    assert scales.dtype == torch.float32
    assert scales.shape == numbers.shape[:-1]
    return dequantise(stored, scales)


@DTYPES
@pytest.mark.parametrize("head_size", [1, 64, 256])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_error_of_each_number(size: float, head_size: int, dtype: torch.dtype) -> None:
    x = torch.randn(200, 3, head_size, generator=torch.Generator().manual_seed(1)) * size
    largest = x.abs().amax(-1, keepdim=True).double()
    error = (read_back(x, dtype).double() - x.double()).abs()
    allowed = largest / 254 if dtype == torch.int8 else torch.maximum(x.double().abs() / 16, largest * 2**-10 / 448)
    assert (error <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize(("dtype", "promised"), [(torch.int8, 0.0071), (torch.float8_e4m3fn, 0.027)])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_error_of_normally_distributed_rows(head_size: int, dtype: torch.dtype, promised: float) -> None:
    x = torch.randn(2000, head_size, generator=torch.Generator().manual_seed(2))
    assert float((read_back(x, dtype) - x).square().mean().sqrt()) <= promised


@DTYPES
def test_rows_out_of_the_ordinary(dtype: torch.dtype) -> None:
    x = torch.ones(6, 8)
    x[0] = 0.0
    x[1, 3] = math.nan
    x[2, 0] = -math.inf
    x[3] = 1e-44  # a subnormal scale
    x[4] = 3e38
    stored, scales = quantise(x, dtype)
    back = dequantise(stored, scales)
    assert torch.isfinite(stored.float()).all()
    assert torch.equal(back[[0, 3]], torch.zeros(2, 8))
    assert back[1:3].isnan().all()
    assert torch.equal(back[5], x[5])
    assert (back[4] / x[4] - 1).abs().max() < 1e-6


@DTYPES
def test_the_largest_number_is_kept(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.1, -3.0, 2.0], [5.0, 5.0, -5.0]])
    back = read_back(x, dtype)
    assert back[0, 1] == pytest.approx(-3.0, rel=1e-6)
    assert back[1].tolist() == pytest.approx([5.0, 5.0, -5.0], rel=1e-6)


def test_which_dtypes_are_quantised() -> None:
    assert is_quantised(torch.int8)
    assert is_quantised(torch.float8_e4m3fn)
    assert not is_quantised(torch.bfloat16)
    numbers = torch.ones(2, 3, dtype=torch.bfloat16)
    assert dequantise(numbers, None).dtype == torch.float32
