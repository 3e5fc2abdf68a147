"""A transformers model whose rows do not depend on each other: what it is made of is replaced, part by part, at load.

- Linear, and the Conv1D of GPT-2, multiply by `LayerOperations.linear`, with packed weights where these serve.
- Activations round alike wherever a number stands (see `kernels.evenly`).
- Routers and experts, and whatever else multiplies with weights of its own, run with the same put in the place of
  torch's functions; experts one by one, each token's sum in their order.
- On a GPU norms that are written in torch take the mean of each row by itself.

What else a model may do is not looked for here: `trial` runs it and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from worker.device.device import Device
from worker.kernels import LayerOperations
from worker.kernels.evenly import Evenly, evenly, product
from worker.kernels.packed import PackedOperations, PackedRows

ACTIVATIONS = tuple(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())


class SteadyLinear(torch.nn.Module):
    """In the place of a Linear or a Conv1D: x weight^T + bias, of `operations`. weight: [n, k]. bias: [n]."""

    def __init__(self, operations: LayerOperations, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._operations = operations
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., k]."""
        return product(self._operations, x, self.weight, self.bias)


class PackedLinear(PackedRows):
    """As SteadyLinear, with a weight that was packed."""

    def __init__(self, operations: PackedOperations, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(packed, slice(None), bias)
        self._operations = operations
        self.out_features, self.in_features = packed.shape

    @property
    def packed(self) -> torch.Tensor:
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., k]."""
        if x.dtype != self._packed.dtype:
            return super().forward(x)
        return product(self._operations, x, self._packed, self.bias)


@torch.no_grad()
def make_rows_steady(module: Any, operations: LayerOperations, device: Device) -> None:
    """Replaces its parts, one after the other, so that no more than one weight is there twice.

    Errors: those of `PackedOperations.pack`.
    """
    packs = isinstance(operations, PackedOperations)
    shared = _shared_weights(module)
    for owner, name, part in list(_children(module)):
        if type(part) in (torch.nn.Linear, Conv1D):
            packable = packs and part.weight.data_ptr() not in shared
            setattr(owner, name, _linear(part, operations, packable))
        elif isinstance(part, ACTIVATIONS) and not isinstance(part, torch.nn.Linear):
            part.forward = partial(evenly, part.forward)
    _one_expert_after_the_other(module)
    evened = {id(part): part for part in _with_weights_of_their_own(module)}
    if not device.computes_on_cores:
        norms = [part for part in module.modules() if "Norm" in type(part).__name__ and not _is_torchs(part)]
        evened |= {id(part): part for part in norms}
    for part in evened.values():
        part.forward = _inside(Evenly(operations), part.forward)


def _linear(part: Any, operations: LayerOperations, packable: bool) -> torch.nn.Module:
    weight = part.weight.detach()
    if isinstance(part, Conv1D):
        weight = weight.t().contiguous()
    bias = None if part.bias is None else part.bias.detach()
    if packable:
        assert isinstance(operations, PackedOperations)
        return PackedLinear(operations, operations.pack(weight), bias)
    return SteadyLinear(operations, weight, bias)


def _children(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Each part, its owner, and its name there."""
    for owner in module.modules():
        for name, part in owner.named_children():
            yield owner, name, part


def _shared_weights(module: Any) -> set[int]:
    """Where weights lie that more than one part has: those of a head that is tied to the embedding."""
    places = [
        parameter.data_ptr()
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if parameter.dim() == 2
    ]
    return {place for place in places if places.count(place) > 1}


def _one_expert_after_the_other(module: Any) -> None:
    """transformers' own loop, in which each has a product of its own: not all in one, whose sums depend on how many
    tokens each of them got."""
    if module.get_experts_implementation()[""] != "eager":
        module.set_experts_implementation("eager")


def _with_weights_of_their_own(module: Any) -> Iterator[Any]:
    """Parts that multiply with matrices which no Linear holds, or those that hold such parts: there the weights of what
    experts give are made, and their sums."""
    bare = {id(part) for part in module.modules() if _has_matrices(part)}
    inside: set[int] = set()
    for part in module.modules():
        if id(part) in inside:
            continue
        if id(part) in bare or any(id(child) in bare for child in part.children()):
            inside |= {id(each) for each in part.modules()}
            yield part


def _has_matrices(part: Any) -> bool:
    if _is_torchs(part) or isinstance(part, (SteadyLinear, torch.nn.Embedding)):
        return False
    return any(each.dim() > 1 for each in part.parameters(recurse=False))


def _is_torchs(part: Any) -> bool:
    return type(part).__module__.startswith("torch.")


def _inside(mode: Evenly, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **keywords: Any) -> Any:
        with mode:
            return forward(*given, **keywords)

    return run
