"""Grids have the sizes that Triton would count."""

from __future__ import annotations

import pytest

from kvforge.worker.device.grids import ceil_div

triton = pytest.importorskip("triton")


@pytest.mark.parametrize(("count", "size"), [(0, 8), (1, 8), (8, 8), (9, 8), (1 << 40, 3)])
def test_a_quotient_is_rounded_up(count: int, size: int) -> None:
    constant = triton.language.constexpr(size)
    assert ceil_div(count, size) == ceil_div(count, constant) == triton.cdiv(count, size)
    assert type(ceil_div(count, constant)) is int
