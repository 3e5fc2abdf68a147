"""Products with weights that oneDNN has laid out once, for CPUs: `PlainOperations` otherwise.

A plain product reads its weight as the file has it, and has to lay it out anew in every call, or reads it badly. The
layout in blocks ("packed") is an opaque tensor that oneDNN's own products alone can read; which blocks it takes depends
on the rows that it is told to expect. Sums are taken in another order than in torch's library: float32 differs in the
last bits, 16 bits now and then in the last one. Weights that are quantised (quantised.py) are multiplied here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch.nn.functional import linear

from worker.device.check import require_right
from worker.device.device import Device

from .plain import PlainOperations
from .quantised import Groups, Int4Weight, Int8Weight, QuantisedWeight, can_be_int4, quantise_int4, quantise_int8
from .row_counts import least_rows, padded, row_count
from .selftest import TOLERANCE

# Blocks for 1 row make float32 products slower at every number of rows; those for 16 are as fast as any others at 1 and
# at 8, and faster than those for 64 at 256 and more (benchmarks/NOTES.md, "CPU: packed weights").
EXPECTED_ROWS = 16
_OWN_PRODUCT = "_kvforge_product"  # of a packed weight
CHECKED_ROWS = (1, 20, 150)  # a single row is a product of its own kind, and so are many of int4
WAY_OUT = "set kernels = 'reference' to serve with plain torch"
QUANTISED_WAY_OUT = "set weight_dtype = 'dtype' to serve weights that are not quantised"
# Where a product is compared with that of the same numbers in float32: int4 computes in bfloat16.
QUANTISED_TOLERANCE = {"int8": 1e-4, "int4": TOLERANCE[torch.bfloat16]}


def packing_problem(device: Device, dtype: torch.dtype) -> str:
    """Why weights of `dtype` stay as they are; "" where `PackedOperations` serve."""
    if not device.kernels:
        return "kernels = 'reference'"
    if problem := device.packing_problem(dtype):
        return problem
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')} is not packed"
    return ""


def quantising_problem(device: Device, dtype: torch.dtype, kind: str) -> str:
    """Why weights are not quantised to `kind` ("int8", "int4") here, where a model computes in `dtype`; "" where they
    are."""
    problem = device.quantising_problem(kind) if device.kernels else ""
    return problem or packing_problem(device, dtype)


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a weight takes part in the products of `PackedOperations` alone."""
    return weight.is_mkldnn or isinstance(weight, QuantisedWeight)


def weight_kind(weight: torch.Tensor) -> str:
    """int8, int4, or "" where it is not quantised."""
    return {Int8Weight: "int8", Int4Weight: "int4"}.get(type(weight), "")


class PackedOperations(PlainOperations):
    """See LayerOperations. Weights that `pack` or `quantise` returned are multiplied by oneDNN, all others by torch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._checked: set[tuple[int, int, str]] = set()

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A packed copy of a weight [n, k], which takes part in this class's products alone.

        Errors: KernelError where a product with it is not what torch computes with `weight`.
        """
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
        self._look_at(packed, weight)
        kind = str(weight.dtype).removeprefix("torch.")
        for count, what in self._unchecked(weight, kind):
            require_right(self._device, "packed product", what, partial(_compare, packed, weight, count), WAY_OUT)
        return packed

    def _look_at(self, packed: torch.Tensor, weight: torch.Tensor) -> None:
        """Before its products are compared: `set_product`, perhaps."""

    def quantise(self, weight: torch.Tensor, kind: str, groups: Groups | None = None) -> torch.Tensor:
        """A copy of a weight [n, k] in 8 or 4 bits, which takes part in this class's products alone.

        kind: "int8", or "int4", which becomes int8 where `can_be_int4` says no. groups: the weight in 4 bits, where a
        file has it so. Errors: KernelError where a product is not what torch computes with the numbers that are kept,
        or these are not nearest to the weight's.
        """
        kind = "int4" if kind == "int4" and can_be_int4(weight) else "int8"
        quantised: QuantisedWeight
        if kind == "int4":
            n, k = weight.shape
            quantised = Int4Weight(n, k, quantise_int4(weight) if groups is None else groups)
        else:
            quantised = quantise_int8(weight)
        for count, what in self._unchecked(weight, kind):
            compare = partial(_compare_quantised, quantised, kind, weight, count)
            require_right(self._device, "quantised product", what, compare, QUANTISED_WAY_OUT)
        return quantised

    def _unchecked(self, weight: torch.Tensor, kind: str) -> Iterator[tuple[int, str]]:
        """Rows to check a weight with, and words: all of them for a first one of its shape."""
        n, k = weight.shape
        rows = CHECKED_ROWS if (n, k, kind) not in self._checked else CHECKED_ROWS[:1]
        self._checked.add((n, k, kind))
        for count in rows:
            yield count, f"{count} tokens, a weight of {n} x {k}, {kind}"

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _product(x, weight, bias) if is_packed(weight) else super().product(x, weight, bias)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not is_packed(weight):
            return super().linear(x, weight, bias, output)
        found = self.product(x, weight, bias)
        return found if output is None else output.copy_(found)


class PackedRows(torch.nn.Module):
    """Stands in a transformers model where a Linear was, whose weight is some rows of a packed one.

    The weight is unpacked whenever it is asked for, and kept by nobody: the model computes what it did, slowly, and its
    state has the names it had.
    """

    def __init__(self, packed: torch.Tensor, rows: slice, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed, self._rows = packed, rows
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """[n, k], new."""
        if isinstance(self._packed, QuantisedWeight):
            return self._packed.widened()[self._rows].clone()
        return self._packed.to_dense()[self._rows].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As Linear's, in the dtype of x."""
        return linear(x, self.weight.to(x.dtype), self.bias)

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes, packed (where blocks are filled up), quantised, or neither."""
    if isinstance(tensor, QuantisedWeight):
        return tensor.stored_bytes
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes


class OwnProduct(Protocol):
    """What multiplies with one packed weight in oneDNN's place (see tiles.py), any number of rows."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """x weight^T + bias [..., n], contiguous. x: [..., k], contiguous. bias: from `bias_for`."""

    def bias_for(self, bias: torch.Tensor | None, /) -> torch.Tensor | None:
        """As it has to be."""


def set_product(packed: torch.Tensor, product: OwnProduct) -> None:
    """From now on it makes the weight's products."""
    setattr(packed, _OWN_PRODUCT, product)


def own_product(weight: torch.Tensor) -> OwnProduct | None:
    """None: oneDNN makes them."""
    found: OwnProduct | None = getattr(weight, _OWN_PRODUCT, None)
    return found


class Product:
    """`PackedOperations.product` with one weight, for whoever gives it as many rows as it takes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._k, self._own, self._multiply = weight.shape[1], own_product(weight), _multiply_with(weight, bias)

    def rows(self, wanted: int) -> int:
        """How many it has to be given where so many are wanted: those first."""
        return wanted if self._own is not None else max(row_count(wanted), least_rows(self._k))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n]. x: [..., k], of `rows(wanted)` rows, in the weight's dtype, contiguous."""
        return self._multiply(x)


def _multiply_with(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(weight, QuantisedWeight):
        return partial(weight.product, bias=bias)
    if (own := own_product(weight)) is not None:
        fitting = own.bias_for(bias)
        return lambda x: own(x, fitting)
    if not weight.is_mkldnn:
        return lambda x: linear(x, weight, bias)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, weight, bias, "none", [], "")


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, QuantisedWeight):
        return weight.product(x, bias)
    if not weight.is_mkldnn:
        return linear(x, weight, bias)
    if (own := own_product(weight)) is not None:
        return own(x.contiguous(), own.bias_for(bias))
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded(x), weight, bias, "none", [], "")
    return found[: x.shape[0]]


@torch.no_grad()
def _compare(packed: torch.Tensor, weight: torch.Tensor, rows: int) -> str:
    """What is wrong, "" where nothing is. Behind the rows lies NaN."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.full((rows + 1, weight.shape[1]), float("nan"), dtype=weight.dtype)
    x = numbers[:rows].normal_(generator=generator)
    return _difference(_product(x, packed, None), linear(x, weight), TOLERANCE[weight.dtype])


@torch.no_grad()
def _compare_quantised(quantised: QuantisedWeight, kind: str, weight: torch.Tensor, rows: int) -> str:
    """As `_compare`. The rows are of different sizes, as quantising them has to be of each alone."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.full((rows + 1, weight.shape[1]), float("nan"))
    x = numbers[:rows].normal_(generator=generator)
    x *= torch.logspace(-3, 3, rows)[:, None]
    seen, widened = quantised.seen(x), quantised.widened()
    # Half a level of x is 1/254 of its row's largest number, once rotated; of a weight the same, or 1/30 of a group's
    # range, where a file's levels may be worse than nearest.
    if problem := _difference(seen, x, 5e-2) or _difference(widened, weight, 5e-2 if kind == "int8" else 0.2):
        return problem
    of_one_size = x.abs().amax(1, keepdim=True)
    got, want = _product(x, quantised, None), linear(seen, widened)
    return _difference(got / of_one_size, want / of_one_size, QUANTISED_TOLERANCE[kind])


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    got, want = got.float(), want.float()
    difference = float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))
    if not difference <= tolerance:
        return f"it differs from the reference by {difference:.1e} of the largest number"
    return ""
