"""Torch functions inside `SteadyFunctions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from kvforge.worker.device.device import open_device
from kvforge.worker.kernels import choose_operations
from kvforge.worker.kernels.partition import apply_aligned
from kvforge.worker.kernels.steady import same_bits
from kvforge.worker.kernels.torch_functions import SteadyFunctions, mean_of_rows

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "mish": functional.mish,
    "elu": functional.elu,
    "sigmoid": torch.sigmoid,
    "sigmoid of a tensor": torch.Tensor.sigmoid,
    "power": lambda x: x.abs() ** 0.75,
    "root": lambda x: (x.abs() + 1).rsqrt(),
}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions_inside_are_applied_aligned(name: str, dtype: torch.dtype, three_threads: None) -> None:
    function = FUNCTIONS[name]
    x = torch.randn(300, 2 * 100, generator=torch.Generator().manual_seed(3)).to(dtype)[:, :100]
    whole = apply_aligned(function, x)
    torch.testing.assert_close(whole, function(x))
    for first, count in ((0, 300), (0, 1), (299, 1), (37, 129)):
        with SteadyFunctions(choose_operations(open_device("cpu"), dtype)):
            inside = function(x[first : first + count])
        assert same_bits(inside, whole[first : first + count]), (first, count)


def test_a_power_of_two_tensors_broadcasts_inside() -> None:
    x, exponents = torch.rand(5, 7), torch.rand(7)
    with SteadyFunctions(choose_operations(open_device("cpu"), torch.float32)):
        assert same_bits(torch.pow(x, exponents), x**exponents)
        assert torch.pow(2.0, x).shape == x.shape


def test_products_inside_are_those_of_the_operations() -> None:
    operations = choose_operations(open_device("cpu"), torch.float32)
    x, weight = torch.randn(2, 5, 64), torch.randn(32, 64)
    with SteadyFunctions(operations):
        found = functional.linear(x, weight)
        assert functional.linear(x[:, :0], weight).shape == (2, 0, 32)
    assert same_bits(found.view(10, 32), operations.linear(x.view(10, 64), weight))


def test_numbers_of_a_row_may_lie_apart() -> None:
    """The kernels of a GPU read a row's numbers next to each other. Mamba 1 multiplies the last column of a tensor."""
    if not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("only under Triton's interpreter")
    from kvforge.worker.kernels.fused import FusedOperations

    operations = FusedOperations(open_device("cpu"))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((1, 64, 4), generator=generator).half()[:, :, -1:].transpose(1, 2)
    weight = torch.randn((32, 64), generator=generator).half()
    assert x.stride(2) == 4
    with SteadyFunctions(operations):
        found = functional.linear(x, weight)
    torch.testing.assert_close(found, functional.linear(x.contiguous(), weight), atol=0.1, rtol=0.02)


def test_a_mean_of_rows_is_a_mean() -> None:
    x = torch.rand(3, 100)
    for keepdim in (True, False):
        torch.testing.assert_close(mean_of_rows(x, -1, keepdim=keepdim), x.mean(-1, keepdim=keepdim))
    assert mean_of_rows(x) == x.mean()
