"""A transformers model whose rows do not depend on each other: what it is made of is replaced, part by part, at load.

- Linear, and the Conv1D of GPT-2, multiply by `LayerOperations.linear`, with packed weights where these serve.
- Activations round alike wherever a number stands (see `kernels.partition`).
- Experts are computed one after the other (see `kernels.experts`), but in bfloat16 on NVIDIA's compute capabilities 9
  and 10: there torch has one kernel for all of them, whose sums depend on nothing else. Elsewhere it computes them one
  after the other too, by whatever kernel it takes for as many tokens as each got.
- Routers, and whatever else multiplies with weights of its own, run with the same put in the place of torch's
  functions.
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
from worker.kernels.evenly import Evenly, product
from worker.kernels.experts import Experts, Matrices
from worker.kernels.packed import PackedOperations, PackedRows, Product, is_packed
from worker.kernels.packed_table import read_from, table_of
from worker.kernels.partition import apply_aligned

from .fusion import in_place_of

GROUPED = ("sm_9", "sm_10")  # where torch has a kernel for products of groups, of bfloat16
ACTIVATIONS = tuple(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())


class SteadyLinear(torch.nn.Module):
    """In the place of a Linear or a Conv1D: x weight^T + bias, of `operations`. weight: [n, k]. bias: [n]."""

    def __init__(
        self, operations: LayerOperations, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None
    ) -> None:
        super().__init__()
        self._operations = operations
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., k]."""
        return product(self._operations, x, self.weight, self.bias)


class PackedLinear(PackedRows):
    """As SteadyLinear, with a weight that was packed."""

    def __init__(self, operations: PackedOperations, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(packed, slice(None), bias)
        self.out_features, self.in_features = packed.shape
        self._operations, self._dtype = operations, packed.dtype
        self._multiply = Product(packed, bias)

    @property
    def packed(self) -> torch.Tensor:
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., k]."""
        k = self.in_features
        rows = x.numel() // k
        if x.dtype is self._dtype and rows == self._multiply.rows(rows) and x.is_contiguous():  # nothing to do but this
            return self._multiply(x)
        return product(self._operations, x, self._packed, self.bias)


@torch.no_grad()
def make_rows_steady(module: Any, operations: LayerOperations, device: Device) -> None:
    """Replaces its parts, one after the other, so that no more than one weight is there twice.

    Errors: those of `PackedOperations.pack`.
    """
    packing = operations if isinstance(operations, PackedOperations) else None
    if packing is not None:
        _pack_tied_head(module, packing)
    shared = _shared_weights(module)
    for owner, name in _places(module):
        part = getattr(owner, name)
        if type(part) in (torch.nn.Linear, Conv1D):
            packs = packing is not None and part.weight.data_ptr() not in shared
            setattr(owner, name, in_place_of(part, _linear(part, operations, packing if packs else None)))
        elif isinstance(part, ACTIVATIONS):
            part.forward = partial(apply_aligned, part.forward)
    _separate_experts(module, operations, packing, device)
    evened = list(_with_weights_of_their_own(module))
    if not device.computes_on_cores:
        evened += [part for part in module.modules() if _is_norm(part) and not _is_torchs(part)]
    for part in evened:
        part.forward = _inside(Evenly(operations), part.forward)


def packed_weights(module: Any) -> Iterator[torch.Tensor]:
    """What `make_rows_steady` has packed."""
    for part in module.modules():
        if isinstance(part, PackedLinear):
            yield part.packed
        elif isinstance(experts := part.__dict__.get("forward"), Experts):
            yield from filter(is_packed, (*experts.up, *experts.down))


def _linear(part: Any, operations: LayerOperations, packing: PackedOperations | None) -> torch.nn.Module:
    weight: torch.nn.Parameter = part.weight
    if isinstance(part, Conv1D):
        weight = torch.nn.Parameter(weight.t().contiguous(), requires_grad=False)
    if packing is None:
        return SteadyLinear(operations, weight, part.bias)
    return PackedLinear(packing, packing.pack(weight), part.bias)


def _pack_tied_head(module: Any, packing: PackedOperations) -> None:
    """Whose embedding is read out of it from then on, if it can be."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if type(head) is not torch.nn.Linear or not isinstance(embedding, torch.nn.Embedding):
        return
    if embedding.weight is not head.weight or embedding.max_norm is not None or "forward" in vars(embedding):
        return
    weight = head.weight.detach()
    packed = packing.pack(weight)
    if (table := table_of(packed, weight)) is None:
        return
    read_from(embedding, table)
    module.set_output_embeddings(in_place_of(head, PackedLinear(packing, packed, head.bias)))


def _places(module: Any) -> list[tuple[Any, str]]:
    """Owner and name there of each part; not the parts, which may be given up."""
    return [(owner, name) for owner in module.modules() for name, _ in owner.named_children()]


def _shared_weights(module: Any) -> set[int]:
    """Where weights lie that more than one part has: those of a head that is tied to the embedding."""
    places = [
        parameter.data_ptr()
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if parameter.dim() == 2
    ]
    return {place for place in places if places.count(place) > 1}


def _separate_experts(
    module: Any, operations: LayerOperations, packing: PackedOperations | None, device: Device
) -> None:
    """Those that transformers computes all at once, in sums that depend on how many tokens each of them got."""
    for part in module.modules():
        if getattr(part, "is_transposed", True) or not hasattr(part, "_apply_gate"):
            continue
        if getattr(part, "has_post_expert_norm", False):  # as transformers 5.24 has it; 5.17 has none
            continue
        up = "gate_up_proj" if part.has_gate else "up_proj"
        if getattr(part, up).dtype == torch.bfloat16 and device.architecture[0].startswith(GROUPED):
            continue
        biases = [getattr(part, f"{name}_bias", None) if part.has_bias else None for name in (up, "down_proj")]
        matrices = [_matrices(part, name, packing) for name in (up, "down_proj")]
        part.forward = Experts(part, operations, matrices[0], biases[0], matrices[1], biases[1])
    if device.computes_on_cores and module.get_experts_implementation()[""] != "eager":
        module.set_experts_implementation("eager")  # others do it one by one, too


def _matrices(part: Any, name: str, packing: PackedOperations | None) -> Matrices:
    """Of each expert; packed ones are no parameters any more."""
    weights: torch.Tensor = getattr(part, name).detach()
    if packing is None:
        return weights
    delattr(part, name)
    return [packing.pack(weight) for weight in weights]


def _with_weights_of_their_own(module: Any) -> Iterator[Any]:
    """Parts that multiply with matrices which no Linear holds, or those that hold such parts: it may be there that the
    weights of experts are made of what a router gives."""
    bare = {id(part) for part in module.modules() if _has_matrices(part)}
    inside: set[int] = set()
    for part in module.modules():
        if id(part) in inside:
            continue
        if id(part) in bare or any(id(child) in bare for child in part.children()):
            inside |= {id(each) for each in part.modules()}
            yield part


def _has_matrices(part: Any) -> bool:
    if _is_torchs(part) or _is_norm(part) or isinstance(part, (SteadyLinear, PackedLinear, torch.nn.Embedding)):
        return False
    return any(each.dim() > 1 for each in part.parameters(recurse=False))


def _is_norm(part: Any) -> bool:
    return "Norm" in type(part).__name__


def _is_torchs(part: Any) -> bool:
    return type(part).__module__.startswith("torch.")


def _inside(mode: Evenly, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **keywords: Any) -> Any:
        with mode:
            return forward(*given, **keywords)

    return run
