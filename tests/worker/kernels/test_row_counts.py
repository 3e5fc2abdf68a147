"""oneDNN keeps a compiled product for each number of rows: a serving worker uses few row counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvforge.worker.device.device import Device
from kvforge.worker.kernels import PlainOperations, plain
from kvforge.worker.kernels.packed import PackedOperations, packing_problem, quantising_problem
from kvforge.worker.kernels.row_counts import padded, row_count

ROWS_MAX = 160
GROWTH_BYTES_MAX = 6 << 20  # compiling all row counts takes 16 MB and more
CPU = Device("cpu", torch.device("cpu"), "CPU")


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


def test_few_numbers_of_rows_are_computed_and_none_with_more_than_an_eighth_too_many() -> None:
    counts = [row_count(rows) for rows in range(2049)]
    assert counts == sorted(counts)
    assert all(rows <= count <= rows * 9 / 8 for rows, count in enumerate(counts))
    assert counts[:9] == list(range(9))
    assert len(set(counts[1:513])) == 56 and len(set(counts[1:])) == 72
    assert all(row_count(count) == count for count in counts)


def test_rows_of_zeros_stand_behind_those_that_are_wanted() -> None:
    x = torch.randn(34, 5)[::2]
    assert torch.equal(padded(x), torch.cat((x, torch.zeros(1, 5))))
    whole = torch.randn(10, 5)
    assert padded(whole) is whole


@pytest.mark.parametrize("stored", [False, True], ids=["new", "into a place"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.inference_mode()
def test_plain_products_of_16_bits_have_few_numbers_of_rows(
    dtype: torch.dtype, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of all token counts up to 512 took 1.3 GB without release. float32 is not compiled, so it is not padded."""
    x, weight = torch.randn(512, 8).to(dtype), torch.randn(16, 8).to(dtype)
    whole, computed = torch.nn.functional.linear(x, weight), set()

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        computed.add(len(rows))
        return torch.nn.functional.linear(rows, weight, bias)

    def product_into(rows: torch.Tensor, turned: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        computed.add(len(rows))
        return out.copy_(rows @ turned)

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # pads less than AVX-512
    monkeypatch.setattr(plain, "linear", product)
    monkeypatch.setattr(torch, "mm", product_into)
    for rows in range(1, 513):
        place = torch.empty(rows, 16, dtype=dtype) if stored else None
        found = PlainOperations().linear(x[:rows], weight, output=place)
        torch.testing.assert_close(found, whole[:rows], rtol=2e-2, atol=2e-2)
    few = int(plain._few_rows() > 0)
    assert len(computed) == (497 + few if dtype == torch.float32 else 56)  # MKL gets 16 rows at least, or 4


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@torch.inference_mode()
def test_products_of_any_number_of_rows_need_no_more_memory(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    problem = quantising_problem(CPU, dtype, kind) if kind.startswith("int") else packing_problem(CPU, dtype)
    if problem:
        pytest.skip(problem)
    operations = PackedOperations(CPU)
    weight = torch.randn(192, 96).to(dtype)
    laid_out = operations.quantise(weight, kind) if kind.startswith("int") else operations.pack(weight)
    x = torch.randn(ROWS_MAX, 96).to(dtype)
    whole = operations.product(x, laid_out)

    def check(rows: int) -> None:
        found = operations.product(x[:rows], laid_out)
        assert found.shape == (rows, 192)
        torch.testing.assert_close(found, whole[:rows], rtol=2e-2, atol=0.5)  # int4 computes in bfloat16

    for rows in sorted({row_count(rows) for rows in range(1, ROWS_MAX + 1)}):
        check(rows)
    before = resident_bytes()
    for rows in range(1, ROWS_MAX + 1):
        check(rows)
    assert resident_bytes() - before < GROWTH_BYTES_MAX
