"""Quantising, comparing and widening a weight go piece by piece: none makes a copy of it in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvforge.worker.device.device import Device
from kvforge.worker.kernels import quantised, stored
from kvforge.worker.kernels.packed import PackedOperations
from kvforge.worker.kernels.quantised import quantise_int4, quantise_int8
from kvforge.worker.kernels.stored import quantise_codes

N, K = 512, 512


class WidestMade(TorchDispatchMode):
    """Notes the most bytes of a tensor of floats, and of one of whole numbers, that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.floats = self.whole = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if type(each) is torch.Tensor and not each.is_mkldnn:
                if each.is_floating_point():
                    self.floats = max(self.floats, each.nbytes)
                else:
                    self.whole = max(self.whole, each.nbytes)
        return made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "QUANTISED_NUMBERS", 1 << 14)
    monkeypatch.setattr(stored, "WIDENED_NUMBERS", 1 << 14)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_no_copy_of_a_weight_in_float32_is_made(kind: str, cpu: Device) -> None:
    if problem := cpu.quantising_problem(kind):
        pytest.skip(problem)
    weight = torch.randn(N, K).bfloat16()
    operations = PackedOperations(cpu)
    with torch.inference_mode(), WidestMade() as made:
        operations.quantise(weight, kind)
    assert made.floats < 4 * N * K  # the weight itself has half of that
    assert made.whole <= N * K


def test_pieces_have_the_levels_of_the_whole(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    weight = torch.randn(N, K)
    in_pieces = quantise_int4(weight)
    eight = None if cpu.quantising_problem("int8") else quantise_int8(weight).widened()
    monkeypatch.setattr(quantised, "QUANTISED_NUMBERS", 1 << 30)
    whole = quantise_int4(weight)
    assert torch.equal(in_pieces.levels, whole.levels) and torch.equal(in_pieces.lows, whole.lows)
    if eight is not None:
        assert torch.allclose(eight, quantise_int8(weight).widened(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_widened_in_pieces(dtype: torch.dtype) -> None:
    codes = quantise_codes(torch.randn(N, K), "int8")
    with WidestMade() as made:
        numbers = codes.widened(dtype)
    assert numbers.dtype == dtype and made.floats == numbers.nbytes and made.whole < N * K
    assert torch.equal(numbers, codes.widened().to(dtype))
