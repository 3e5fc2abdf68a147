"""Products with weights in oneDNN's packed layout, for CPUs; otherwise as `PlainOperations`.

A plain product reads its weight in the file's layout: it reorders the weight in every call, or reads it inefficiently.
The blocked layout ("packed") is an opaque tensor that only oneDNN's products can read; the expected number of rows
determines the blocks. Sums have another order than in torch's library: float32 differs in the last bits, 16 bits
occasionally in the last one. Quantised weights (quantised.py) are multiplied here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch.nn.functional import linear

from kvforge.worker.device.check import require_right
from kvforge.worker.device.device import Device

from .plain import PlainOperations
from .quantised import Groups, Int4Weight, Int8Weight, QuantisedWeight, can_be_int4, quantise_int4, quantise_int8
from .row_counts import least_rows, padded, row_count
from .selftest import TOLERANCE

# Blocks for 1 row make float32 products slower at every number of rows. Blocks for 16 are as fast as any at 1 and at 8
# rows, and faster than blocks for 64 at 256 and more (benchmarks/NOTES.md, "CPU: packed weights").
EXPECTED_ROWS = 16
_OWN_PRODUCT = "_kvforge_product"  # attribute of a packed weight
CHECKED_ROWS = (1, 20, 150)  # single rows, and many rows of int4, take other kernels
WAY_OUT = "set kernels = 'reference' to serve with plain torch"
QUANTISED_WAY_OUT = "set weight_dtype = 'dtype' to serve weights that are not quantised"
# Compared with float32 products of the same numbers: int4 computes in bfloat16.
QUANTISED_TOLERANCE = {"int8": 1e-4, "int4": TOLERANCE[torch.bfloat16]}


def packing_problem(device: Device, dtype: torch.dtype) -> str:
    """Return why weights of `dtype` are not packed; "" if `PackedOperations` can serve."""
    if not device.kernels:
        return "kernels = 'reference'"
    if problem := device.packing_problem(dtype):
        return problem
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')} is not packed"
    return ""


def quantising_problem(device: Device, dtype: torch.dtype, kind: str) -> str:
    """Return why weights cannot be quantised to `kind` ("int8", "int4") for a model of `dtype`; "" if they can."""
    problem = device.quantising_problem(kind) if device.kernels else ""
    return problem or packing_problem(device, dtype)


def is_packed(weight: torch.Tensor) -> bool:
    """Return whether only the products of `PackedOperations` can use a weight."""
    return weight.is_mkldnn or isinstance(weight, QuantisedWeight)


def weight_kind(weight: torch.Tensor) -> str:
    """Return int8, int4, or "" for a weight that is not quantised."""
    return {Int8Weight: "int8", Int4Weight: "int4"}.get(type(weight), "")


class PackedOperations(PlainOperations):
    """Operations with packed products; see LayerOperations. Weights that are not packed are multiplied by torch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._checked: set[tuple[int, int, str]] = set()

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack a weight [n, k], for products of this class only.

        Args:
            weight: [n, k].

        Returns:
            A packed copy.

        Raises:
            KernelError: A product with it differs from torch's with `weight`.
        """
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
        self._look_at(packed, weight)
        kind = str(weight.dtype).removeprefix("torch.")
        for count, what in self._unchecked(weight, kind):
            require_right(self._device, "packed product", what, partial(_compare, packed, weight, count), WAY_OUT)
        return packed

    def _look_at(self, packed: torch.Tensor, weight: torch.Tensor) -> None:
        """Inspect a packed weight before its products are compared. Subclasses may call `set_product`."""

    def quantise(self, weight: torch.Tensor, kind: str, groups: Groups | None = None) -> torch.Tensor:
        """Quantise a weight [n, k] to 8 or 4 bits, for products of this class only.

        Args:
            weight: [n, k].
            kind: "int8", or "int4", which falls back to int8 if `can_be_int4` is false.
            groups: The weight in 4 bits, if a file stores it that way.

        Returns:
            A quantised copy.

        Raises:
            KernelError: A product differs from torch's with the same numbers, or these are not the nearest to the
                weight's.
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
        self._device.release_cached()  # the C library keeps the pieces, and the weight that it takes the place of
        return quantised

    def _unchecked(self, weight: torch.Tensor, kind: str) -> Iterator[tuple[int, str]]:
        """Yield row counts to check a weight with, and descriptions: the full set for the first weight of a shape."""
        n, k = weight.shape
        rows = CHECKED_ROWS if (n, k, kind) not in self._checked else CHECKED_ROWS[:1]
        self._checked.add((n, k, kind))
        for count in rows:
            yield count, f"{count} tokens, a weight of {n} x {k}, {kind}"

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `PlainOperations.product`."""
        return _product(x, weight, bias) if is_packed(weight) else super().product(x, weight, bias)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `LayerOperations.linear`."""
        if not is_packed(weight):
            return super().linear(x, weight, bias, output)
        found = self.product(x, weight, bias)
        return found if output is None else output.copy_(found)


def dense(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [n, k] that may be packed or quantised as an ordinary tensor."""
    if isinstance(weight, QuantisedWeight):
        return weight.widened()
    return weight.to_dense() if is_packed(weight) else weight


class PackedRows(torch.nn.Module):
    """Replaces a Linear of a transformers model by some rows of a packed weight.

    Each access unpacks the weight, and nothing keeps the copy: the model computes the same results, slowly, and its
    state keeps its names.

    Args:
        packed: The packed weight [rows of all parts, k].
        rows: The part's rows.
        bias: [n] in the order of these rows, or None.
        order: [n] int64: the part's rows are the original weight's rows of these numbers. None: in order.

    Attributes:
        is_wide: Whether `weight` is float32, for modules that multiply by it themselves.
    """

    is_wide = False

    def __init__(
        self, packed: torch.Tensor, rows: slice, bias: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._packed, self._rows = packed, rows
        self._inverse = None if order is None else order.argsort()
        self.bias = None if bias is None else torch.nn.Parameter(self._in_order(bias), requires_grad=False)

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._inverse is None else rows[self._inverse]

    @property
    def weight(self) -> torch.Tensor:
        """The weight [n, k], a new tensor."""
        found = self._in_order(dense(self._packed)[self._rows]).clone()
        return found.float() if self.is_wide else found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute as Linear does, in the dtype of x."""
        return linear(x, self.weight.to(x.dtype), self.bias)

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, whether packed (with padded blocks), quantised, or plain."""
    if isinstance(tensor, QuantisedWeight):
        return tensor.stored_bytes
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes


class OwnProduct(Protocol):
    """A product with one packed weight that replaces oneDNN's (see tiles.py, amx.py), for any number of rows.

    Attributes:
        name: What multiplies, for people.
    """

    name: ClassVar[str]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Compute x weight^T + bias [..., n], contiguous. x: [..., k], contiguous. bias: from `bias_for`."""

    def bias_for(self, bias: torch.Tensor | None, /) -> torch.Tensor | None:
        """Return the bias in the form that the product needs."""


def set_product(packed: torch.Tensor, product: OwnProduct) -> None:
    """Let `product` compute the products of a packed weight from now on."""
    setattr(packed, _OWN_PRODUCT, product)


def own_product(weight: torch.Tensor) -> OwnProduct | None:
    """Return the product that replaces oneDNN's for a weight, or None."""
    found: OwnProduct | None = getattr(weight, _OWN_PRODUCT, None)
    return found


class Product:
    """The product with one weight, for callers that provide the required number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._k, self._own, self._multiply = weight.shape[1], own_product(weight), _multiply_with(weight, bias)

    def rows(self, wanted: int) -> int:
        """Return the number of rows to pass for `wanted` rows, which come first."""
        return wanted if self._own is not None else max(row_count(wanted), least_rows(self._k))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., k] of `rows(wanted)` rows, contiguous, in the weight's dtype. Returns [..., n]."""
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
    """Return the fault of a packed product, or "". NaN follows the rows in memory."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.full((rows + 1, weight.shape[1]), float("nan"), dtype=weight.dtype)
    x = numbers[:rows].normal_(generator=generator)
    got, want = _product(x, packed, None).float(), linear(x, weight).float()
    # The few results of a narrow weight may all be near 0 by chance.
    usual = torch.maximum(want.abs().max(), weight.float().norm(dim=1).max())
    return _problem_of((got - want).abs().max(), usual, TOLERANCE[weight.dtype])


@torch.no_grad()
def _compare_quantised(quantised: QuantisedWeight, kind: str, weight: torch.Tensor, rows: int) -> str:
    """Return the fault of a quantised product, or "". Rows differ in magnitude, so each needs its own scale."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.full((rows + 1, weight.shape[1]), float("nan"))
    x = numbers[:rows].normal_(generator=generator)
    x *= torch.logspace(-3, 3, rows)[:, None]
    seen = quantised.seen(x)
    apart, largest, first, parts = torch.zeros(()), torch.zeros(()), 0, []
    for numbers in quantised.pieces():
        original = weight[first : first + len(numbers)].float()
        first += len(numbers)
        apart = torch.maximum(apart, (numbers - original).abs().max())
        largest = torch.maximum(largest, original.abs().max())
        parts.append(linear(seen, numbers))
    # Half a level of x is 1/254 of its row's largest rotated number. Half a level of a weight is the same, or 1/30 of a
    # group's range; a file's levels may be worse than the nearest.
    tolerance = 5e-2 if kind == "int8" else 0.2
    if problem := _difference(seen, x, 5e-2) or _problem_of(apart, largest, tolerance):
        return problem
    of_one_size = x.abs().amax(1, keepdim=True)
    got, want = _product(x, quantised, None), torch.cat(parts, 1)
    return _difference(got / of_one_size, want / of_one_size, QUANTISED_TOLERANCE[kind])


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    got, want = got.float(), want.float()
    return _problem_of((got - want).abs().max(), want.abs().max(), tolerance)


def _problem_of(apart: torch.Tensor, largest: torch.Tensor, tolerance: float) -> str:
    difference = float(apart / largest.clamp_min(1e-6))
    if not difference <= tolerance:
        return f"it differs from the reference by {difference:.1e} of the largest number"
    return ""
