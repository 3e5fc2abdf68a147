"""Functions of torch that give a number the same bits wherever it stands among others.

On a CPU torch computes most numbers of a tensor by vectors and what is left over, of each thread's part, one by one;
SiLU, GELU, the sigmoid and others round differently then. So numbers that do not fill the vectors of every thread are
followed by zeros. A mean over the rows of a GPU's tensor is cut into parts where there are few of them; that of a layer
norm is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from . import LayerOperations
from .packed import is_packed

STEP = 64  # numbers that torch's loops take at a time, at most: two vectors of 16-bit numbers on AVX-512
GRAIN = 32768  # numbers from which on torch gives each of its threads a part

_Function = Callable[..., Any]


def even_count(count: int, threads: int) -> int:
    """The least number of numbers, `count` or more, of which no thread's part ends within a step."""
    while True:
        parts = max(1, min(threads, -(-count // GRAIN)))
        even = -(-count // (parts * STEP)) * parts * STEP
        if even == count:
            return count
        count = even


def evenly(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), which computes each number from the one in its place. x: any shape, float."""
    if x.device.type != "cpu":
        return function(x)
    count = x.numel()
    missing = even_count(count, torch.get_num_threads()) - count
    if not missing:  # in one piece: of what lies apart some functions are computed in another way
        return function(x.contiguous())
    return function(functional.pad(x.reshape(-1), (0, missing)))[:count].view(x.shape)


def mean_of_rows(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **keywords: Any) -> torch.Tensor:
    """torch.mean; over the last dimension, of float32, as a layer norm computes it: each row by itself."""
    last = dim in (-1, [-1], (-1,), x.dim() - 1)
    if not last or x.device.type == "cpu" or x.dtype != torch.float32 or keywords:
        return torch.mean(x, dim, keepdim, **keywords) if dim is not None else torch.mean(x, **keywords)
    means: torch.Tensor = torch.native_layer_norm(x, x.shape[-1:], None, None, 0.0)[1]
    return means if keepdim else means.squeeze(-1)


class Evenly(TorchFunctionMode):
    """Inside, torch's functions are those above, and products with a matrix are those of `operations`."""

    def __init__(self, operations: LayerOperations) -> None:
        super().__init__()
        self._operations = operations
        self._instead: dict[Any, _Function] = {functional.linear: self._linear}
        for function in ELEMENTWISE:
            self._instead[function] = _even(function)
        for function in (torch.mean, torch.Tensor.mean):
            self._instead[function] = mean_of_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(self._operations, x, weight, bias)


# Those that round differently by vectors and one by one, as torch 2.13 has them, and their kin.
ELEMENTWISE = (
    torch.sigmoid,
    torch.Tensor.sigmoid,
    functional.sigmoid,
    functional.silu,
    functional.gelu,
    functional.softplus,
    functional.elu,
    functional.mish,
    functional.hardswish,
)


def product(
    operations: LayerOperations, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x weight^T + bias [..., n]. x: [..., k]. weight: [n, k]. bias: [n]."""
    if x.dtype != weight.dtype:
        return functional.linear(x, (weight.to_dense() if is_packed(weight) else weight).to(x.dtype), bias)
    shape = (*x.shape[:-1], weight.shape[0])
    if not x.numel():  # the head's, of a step that samples nothing
        return x.new_empty(shape)
    return operations.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(shape)


def _even(function: _Function) -> _Function:
    def run(x: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return evenly(lambda numbers: function(numbers, *arguments, **keywords), x)

    return run
