"""Sizes of kernels' grids, on the host."""

from __future__ import annotations

from typing import Any


def ceil_div(count: int, size: Any) -> int:
    """Return count / size, rounded up. size: int or a constant of kernels.

    `triton.cdiv` wraps and unwraps its numbers for the compiler. A launch has up to three of these, which took as long
    as allocating its result.
    """
    return -(-count // getattr(size, "value", size))
