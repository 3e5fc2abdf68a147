"""NaN in memory that torch leaves undefined, so that a test which depends on it fails in every run.

Some kernels compute with such numbers and their results are discarded: the norm behind a form of prompts also runs over
tokens outside its rows. The memory holds numbers of earlier tests. Squares of 1e19 overflow in a sum, and numpy warns
of that; most other numbers give no warning. NaN gives none, and every result that depends on it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
BYTES_MAX = 1 << 26  # a larger tensor stays as it is, because the system gives it pages of zeros


def fill_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's functions that leave memory undefined fill it with NaN."""
    # torch lists the functions that `with torch.device(...)` affects once a process: not the patched ones.
    _device_constructors()
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _filling(getattr(owner, name)))


def _filling(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def filled(*given: Any, **named: Any) -> torch.Tensor:
        made = make(*given, **named)
        if made.is_cpu and made.dtype in DTYPES and made.nbytes <= BYTES_MAX:
            (made.detach() if made.requires_grad else made).fill_(math.nan)
        return made

    return filled
