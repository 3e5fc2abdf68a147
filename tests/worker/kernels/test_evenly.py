"""Functions of torch of which a number gets the same bits wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from worker.device.device import open_device
from worker.kernels import choose_operations
from worker.kernels.evenly import GRAIN, STEP, Evenly, even_count, evenly, mean_of_rows
from worker.kernels.steady import same_bits

WIDTHS = (1, 7, 37, 64, 100, 704)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "mish": functional.mish,
    "elu": functional.elu,
    "sigmoid": torch.sigmoid,
    "sigmoid of a tensor": torch.Tensor.sigmoid,
}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 48])
def test_no_part_of_a_thread_ends_within_a_step(threads: int) -> None:
    for count in (1, 63, 64, 65, GRAIN, GRAIN + 1, 3 * GRAIN - 1, 100_000, 7 * GRAIN + 5, 10_000_000):
        even = even_count(count, threads)
        parts = min(threads, -(-even // GRAIN))  # as torch cuts a range
        length = -(-even // parts)
        assert even % STEP == 0 and length % STEP == 0
        assert count <= even < count + 2 * STEP * threads
        assert even_count(even, threads) == even


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_has_its_bits_wherever_it_stands(name: str, dtype: torch.dtype, three_threads: None) -> None:
    function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(3)
    for width in WIDTHS:
        x = torch.randn(1, 300, 2 * width, generator=generator).to(dtype)
        for part in (x[..., :width], x[..., :width].contiguous()):  # apart, as half of a joined product is
            whole = evenly(function, part)
            torch.testing.assert_close(whole, function(part))
            with Evenly(choose_operations(open_device("cpu"), dtype)):
                inside = function(part)
            assert same_bits(inside, whole)
            for first, count in ((0, 1), (299, 1), (5, 7), (37, 129)):
                few = slice(first, first + count)
                assert same_bits(evenly(function, part[:, few]), whole[:, few]), (width, first, count)


def test_products_inside_are_those_of_the_operations() -> None:
    operations = choose_operations(open_device("cpu"), torch.float32)
    x, weight = torch.randn(2, 5, 64), torch.randn(32, 64)
    with Evenly(operations):
        found = functional.linear(x, weight)
        assert functional.linear(x[:, :0], weight).shape == (2, 0, 32)
    assert same_bits(found.view(10, 32), operations.linear(x.view(10, 64), weight))


def test_a_mean_of_rows_is_a_mean() -> None:
    x = torch.rand(3, 100)
    for keepdim in (True, False):
        torch.testing.assert_close(mean_of_rows(x, -1, keepdim=keepdim), x.mean(-1, keepdim=keepdim))
    assert mean_of_rows(x) == x.mean()
