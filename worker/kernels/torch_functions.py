"""Replacements for torch functions that compute a number differently depending on the other numbers of the tensor.

Elementwise functions are computed by `partition.apply_aligned`. On a GPU, torch splits a mean over few rows into parts;
the mean inside a layer norm is never split and takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .interface import LayerOperations
from .packed import is_packed
from .partition import apply_aligned
from .quantised import QuantisedWeight

_Function = Callable[..., Any]


def mean_of_rows(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **keywords: Any) -> torch.Tensor:
    """Compute torch.mean; over the last dimension of float32 as a layer norm does, each row separately."""
    last = dim in (-1, [-1], (-1,), x.dim() - 1)
    if not last or x.device.type == "cpu" or x.dtype != torch.float32 or keywords:
        return torch.mean(x, dim, keepdim, **keywords) if dim is not None else torch.mean(x, **keywords)
    means: torch.Tensor = torch.native_layer_norm(x, x.shape[-1:], None, None, 0.0)[1]
    return means if keepdim else means.squeeze(-1)


class SteadyFunctions(TorchFunctionMode):
    """Replaces torch's functions by those above, and products with a matrix by those of `operations`."""

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


# The functions that round differently in torch 2.13's vector loop and in its scalar loop, with AVX2 or AVX-512, in any
# of float32, bfloat16 and float16. tests/worker/kernels/test_partition.py compares these and the ones left out.
ELEMENTWISE = (
    torch.sigmoid,
    torch.Tensor.sigmoid,
    torch.rsqrt,
    torch.Tensor.rsqrt,
    torch.exp2,
    torch.Tensor.exp2,
    torch.special.exp2,
    torch.special.expit,
    torch.pow,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    functional.sigmoid,
    functional.silu,
    functional.gelu,
    functional.softplus,
    functional.elu,
    functional.selu,
    functional.celu,
    functional.mish,
    functional.hardswish,
)


def product(
    operations: LayerOperations, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute x weight^T + bias [..., n]. x: [..., k]. weight: [n, k]. bias: [n]."""
    if x.dtype != weight.dtype:
        if isinstance(weight, QuantisedWeight):
            numbers = weight.widened()
        else:
            numbers = weight.to_dense() if is_packed(weight) else weight
        return functional.linear(x, numbers.to(x.dtype), bias)
    shape = (*x.shape[:-1], weight.shape[0])
    if not x.numel():  # the head in a step that samples nothing
        return x.new_empty(shape)
    rows = x.reshape(-1, x.shape[-1])
    # transformers' layers also multiply views whose numbers lie apart; kernels read them next to each other.
    return operations.linear(rows if rows.stride(1) == 1 else rows.contiguous(), weight, bias).view(shape)


def _even(function: _Function) -> _Function:
    def run(x: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor) or any(isinstance(each, torch.Tensor) for each in arguments):
            return function(x, *arguments, **keywords)  # pow of two tensors, which broadcasts
        return apply_aligned(lambda numbers: function(numbers, *arguments, **keywords), x)

    return run
