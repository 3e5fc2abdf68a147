"""Elementwise functions of torch with results that do not depend on a number's place in the tensor.

On a CPU torch gives each thread a contiguous part of a tensor. It computes a part in vectors, and what remains one
number at a time. SiLU, GELU, the sigmoid and others round differently in these two loops. `apply_aligned` appends zeros
until every part of every thread is a whole number of vectors, so that the second loop is never entered.

Sources: ATen/TensorIterator.cpp (`for_each`), ATen/ParallelOpenMP.h (`parallel_for` makes min(threads, ceil(count /
grain)) parts of ceil(count / parts) numbers each) and ATen/native/cpu/Activation.cpp (the grain of GELU) of torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

VECTOR_STEP = 64  # the most numbers that one turn of torch's loops takes: two AVX-512 vectors of 16-bit numbers
GRAIN = 32768  # an elementwise function gives a thread at least this many numbers
GELU_SERIAL_MAX = 16384  # GELU is cut into one part for each thread when it has more numbers than this


def aligned_count(count: int, threads: int) -> int:
    """Return the least length from `count` on that torch cuts at multiples of VECTOR_STEP only.

    It holds for GELU's partition and for that of all other elementwise functions, and for compositions of both.

    Args:
        count: numbers in the tensor.
        threads: torch's intra-op threads.
    """
    while True:
        parts = {max(1, min(threads, -(-count // GRAIN))), threads if count > GELU_SERIAL_MAX else 1}
        unit = VECTOR_STEP * math.lcm(*parts)
        aligned = -(-count // unit) * unit
        if aligned == count:
            return count
        count = aligned


def apply_aligned(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return function(x), with bits that depend on each number alone.

    Args:
        function: elementwise, keeps the shape and the dtype.
        x: [any shape] float, any device.
    """
    if x.device.type != "cpu":
        return function(x)
    count = x.numel()
    missing = aligned_count(count, torch.get_num_threads()) - count
    if not missing:  # contiguous, because torch has other loops for strided tensors
        return function(x.contiguous())
    return function(torch.nn.functional.pad(x.reshape(-1), (0, missing)))[:count].view(x.shape)
