"""Memory that torch leaves undefined is NaN in every test of the worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .undefined import BYTES_MAX

MADE: dict[str, Callable[..., torch.Tensor]] = {
    "empty": lambda *given, **named: torch.empty(given, **named),
    "empty_like": lambda *given, **named: torch.empty_like(torch.zeros(*given), **named),
    "empty_strided": lambda *given, **named: torch.empty_strided(given, (5, 1), **named),
    "new_empty": lambda *given, **named: torch.zeros(1).new_empty(given, **named),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_undefined_numbers_are_nan(name: str, dtype: torch.dtype) -> None:
    made = MADE[name](3, 5, dtype=dtype)
    assert made.shape == (3, 5) and made.dtype == dtype
    assert made.isnan().all()


def test_a_large_tensor_stays_as_it_is() -> None:
    """The system has given it no pages yet: they read as zeros."""
    assert torch.empty(BYTES_MAX // 4 + 1)[-1] == 0


@pytest.mark.parametrize("name", ["empty", "empty_strided"])
def test_a_chosen_device_holds(name: str) -> None:
    with torch.device("meta"):
        assert MADE[name](3, 5).is_meta
