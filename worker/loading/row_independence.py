"""Makes the rows of a transformers model independent of each other by replacing its parts at load.

- Linear, and the Conv1D of GPT-2, multiply through `LayerOperations.linear`, with packed weights where available.
- Activations round the same at every index (see `kernels.partition`).
- Experts run as grouped products on a GPU with kernels, and one after the other elsewhere (see `kernels.experts`). The
  exception is bfloat16 without kernels on NVIDIA compute capabilities 9 and 10, where one torch kernel computes all
  experts with sums that depend on nothing else.
- Routers, and other modules that multiply by their own weights, run with torch's functions replaced the same way.
- On a GPU, norms written in torch compute the mean of each row separately.

Other dependencies are not searched for here: `trial` runs the model and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from kvforge.worker.device.device import Device
from kvforge.worker.kernels import LayerOperations
from kvforge.worker.kernels.decoder import FusedDecoder
from kvforge.worker.kernels.expert_loop import ExpertMatrices, Matrices
from kvforge.worker.kernels.experts import Experts, grouped_experts, is_experts
from kvforge.worker.kernels.packed import PackedOperations, PackedRows, Product, is_packed
from kvforge.worker.kernels.packed_table import read_from, table_of
from kvforge.worker.kernels.partition import apply_aligned
from kvforge.worker.kernels.torch_functions import SteadyFunctions, product

from .fusion import in_place_of
from .mixers import MIXING, mixers_of

GROUPED = ("sm_9", "sm_10")  # torch has a grouped product of bfloat16 there
ACTIVATIONS = tuple(each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())


class SteadyLinear(torch.nn.Module):
    """Replaces a Linear or Conv1D: x weight^T + bias, by `operations`. weight: [n, k]. bias: [n]."""

    def __init__(
        self, operations: LayerOperations, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None
    ) -> None:
        super().__init__()
        self._operations = operations
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., k] by the weight."""
        return product(self._operations, x, self.weight, self.bias)


class PackedLinear(PackedRows):
    """Replaces a Linear or Conv1D with a packed weight."""

    def __init__(self, operations: PackedOperations, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(packed, slice(None), bias)
        self.out_features, self.in_features = packed.shape
        self._operations, self._dtype = operations, packed.dtype
        self._multiply = Product(packed, bias)

    @property
    def packed(self) -> torch.Tensor:
        """The packed weight."""
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., k] by the weight."""
        k = self.in_features
        rows = x.numel() // k
        if x.dtype is self._dtype and rows == self._multiply.rows(rows) and x.is_contiguous():  # fast path
            return self._multiply(x)
        return product(self._operations, x, self._packed, self.bias)


@torch.no_grad()
def make_rows_steady(module: Any, operations: LayerOperations, device: Device) -> None:
    """Replace the model's parts one after the other, so that at most one weight exists twice at any time.

    Raises:
        KvforgeError: As raised by `PackedOperations.pack`.
    """
    packing = operations if isinstance(operations, PackedOperations) else None
    if packing is not None:
        _pack_tied_head(module, packing)
    _replace_products(module, operations, packing)
    _separate_experts(module, operations, packing, device)
    _even(module, operations, device)


@torch.no_grad()
def make_mixers_steady(module: Any, operations: LayerOperations, device: Device) -> None:
    """Replace the parts of layers with a recurrent state, in a model that is described beside them.

    Raises:
        KvforgeError: As raised by `PackedOperations.pack`.
    """
    packing = operations if isinstance(operations, PackedOperations) else None
    for mixer in mixers_of(module):
        _replace_products(mixer, operations, packing)
        _join_inputs(mixer, operations)
        _even(mixer, operations, device)


def _join_inputs(mixer: Any, operations: LayerOperations) -> None:
    """Compute a mixer's projections of its input in one product, where their weights are not packed."""
    projections = mixer.__dict__[MIXING].projections
    modules = [place.module for place in projections.inputs]
    if all(isinstance(each, SteadyLinear) for each in modules) and len({each.weight.dtype for each in modules}) == 1:
        projections.join(lambda matrix: SteadyLinear(operations, matrix, None))


def _replace_products(module: Any, operations: LayerOperations, packing: PackedOperations | None) -> None:
    shared = _shared_weights(module)
    for owner, name in _places(module):
        part = getattr(owner, name)
        if type(part) in (torch.nn.Linear, Conv1D):
            packs = packing is not None and part.weight.data_ptr() not in shared
            setattr(owner, name, in_place_of(part, _linear(part, operations, packing if packs else None)))
        elif isinstance(part, ACTIVATIONS):
            part.forward = partial(apply_aligned, part.forward)


def _even(module: Any, operations: LayerOperations, device: Device) -> None:
    """Let modules that multiply by their own weights, and norms, compute each row by itself."""
    evened = list(_with_weights_of_their_own(module))
    if not device.computes_on_cores:
        evened += [part for part in module.modules() if _is_norm(part) and not _is_torchs(part)]
    for part in evened:
        part.forward = _inside(SteadyFunctions(operations), part.forward)


def first_experts(module: Any, operations: LayerOperations, fused: FusedDecoder | None) -> Experts | None:
    """Return the first experts of a model that run as grouped products, in transformers' module or as described."""
    mixtures = () if fused is None else (layer.mixture for layer in fused.layers)
    if (mixture := next(filter(None, mixtures), None)) is not None:
        return Experts(None, operations, mixture.matrices, mixture.activation, mixture.interleaved)
    found = (grouped_experts(part, operations) for part in module.modules() if is_experts(part))
    return next(filter(None, found), None)


def packed_weights(module: Any) -> Iterator[torch.Tensor]:
    """Yield the weights that `make_rows_steady` has packed."""
    for part in module.modules():
        if isinstance(part, PackedLinear):
            yield part.packed
        elif isinstance(experts := part.__dict__.get("forward"), Experts):
            yield from filter(is_packed, (*experts.matrices.up, *experts.matrices.down))


def _linear(part: Any, operations: LayerOperations, packing: PackedOperations | None) -> torch.nn.Module:
    weight: torch.nn.Parameter = part.weight
    if isinstance(part, Conv1D):
        weight = torch.nn.Parameter(weight.t().contiguous(), requires_grad=False)
    if packing is None:
        return SteadyLinear(operations, weight, part.bias)
    return PackedLinear(packing, packing.pack(weight), part.bias)


def _pack_tied_head(module: Any, packing: PackedOperations) -> None:
    """Pack a head that is tied to the embedding, and read the embedding from it, if possible."""
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
    """Return the owner and name of each part, without references to parts that may be released."""
    return [(owner, name) for owner in module.modules() for name, _ in owner.named_children()]


def _shared_weights(module: Any) -> set[int]:
    """Return the addresses of weights with several owners, such as a head that is tied to the embedding."""
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
    """Replace experts that transformers computes together, in sums that depend on each expert's number of tokens."""
    for part in module.modules():
        if not is_experts(part):
            continue
        if (device.runs_kernels or part.is_transposed) and (grouped := grouped_experts(part, operations)) is not None:
            part.forward = grouped
            continue
        if part.is_transposed or getattr(part, "has_post_expert_norm", False):
            continue
        up = "gate_up_proj" if part.has_gate else "up_proj"
        if getattr(part, up).dtype == torch.bfloat16 and device.architecture[0].startswith(GROUPED):
            continue
        biases = [getattr(part, f"{name}_bias", None) if part.has_bias else None for name in (up, "down_proj")]
        matrices = [_matrices(part, name, packing) for name in (up, "down_proj")]
        part.forward = Experts(part, operations, ExpertMatrices(matrices[0], biases[0], matrices[1], biases[1]))
    if device.computes_on_cores and module.get_experts_implementation()[""] != "eager":
        module.set_experts_implementation("eager")  # computes experts one after the other


def _matrices(part: Any, name: str, packing: PackedOperations | None) -> Matrices:
    """Return the matrices of the experts. Packed ones are no longer parameters."""
    weights: torch.Tensor = getattr(part, name).detach()
    if packing is None:
        return weights
    delattr(part, name)
    return [packing.pack(weight) for weight in weights]


def _with_weights_of_their_own(module: Any) -> Iterator[Any]:
    """Yield the parts that multiply by matrices outside any Linear, or parents of such parts.

    A parent may combine the results of a router into the weights of experts.
    """
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


def _inside(mode: SteadyFunctions, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **keywords: Any) -> Any:
        with mode:
            return forward(*given, **keywords)

    return run
