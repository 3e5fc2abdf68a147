"""Weights that stay in the codes of a file on a GPU, multiplied by kernels that unpack them in registers.

Every published format becomes one of four codes, with scales for groups of numbers of a row:

    code   number of a code
    int8   -128 to 127
    e4m3   a float of 8 bits: 4 of exponent, 3 of mantissa, no infinity
    int4   0 to 15, less a zero for each group (8 without zeros)
    e2m1   a float of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign

Codes are stored in words of 16 bits in an order that kernels unpack without moving numbers between threads: a word has
two codes of 8 bits or four of 4 bits, and those of one word are 16 columns apart. A unit is the codes of 16 words of a
row, 32 or 64 columns; units of the same columns are adjacent, so that a tile of rows is read as one piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from .quantised import QuantisedWeight

WORDS = 16  # words of a unit, which are 16 columns of each tile
CODES = {"int8": 2, "e4m3": 2, "int4": 4, "e2m1": 4}  # codes of a word
NAMES = {"int8": "int8", "e4m3": "fp8", "int4": "int4", "e2m1": "mxfp4"}  # for people
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WIDENED_NUMBERS = 1 << 24  # numbers that are widened at a time
ZERO = 8  # the code of 0 in int4 without zeros
SMALLEST = 1e-30  # scale of a group of zeros, to avoid division by 0
TOP = {"int8": 127.0, "e4m3": 448.0, "int4": 7.0}
MADE_GROUPS = {"int8": 0, "e4m3": 0, "int4": 128}  # columns of a group that `quantise` makes; 0: all of a row


def unit_columns(code: str) -> int:
    """Return the columns of a unit: k of a weight must be a multiple of it."""
    return WORDS * CODES[code]


@dataclass(frozen=True)
class Codes:
    """A matrix [n, k], or one for each of several experts, in codes with scales.

    Attributes:
        code: A key of `CODES`.
        words: [(experts,) k / unit, n, WORDS] int16.
        scales: [(experts,) groups, n / scaled_rows] float32, each of k / groups columns.
        zeros: [(experts,) groups, n] uint8: the codes of 0 in int4; None: `ZERO`.
        scaled_rows: Rows that share a scale.
        order: [k] int64: column i of the codes is this column of the matrix; None: in order. Not of experts.
    """

    code: str
    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    scaled_rows: int = 1
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix: [(experts,) n, k]."""
        *experts, units, n, _ = self.words.shape
        return (*experts, n, units * unit_columns(self.code))

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[-1] // self.scales.shape[-2]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that exist."""
        return [each for each in (self.words, self.scales, self.zeros, self.order) if each is not None]

    def to(self, device: torch.device) -> Codes:
        """Return the codes on another device."""
        zeros, order = (None if each is None else each.to(device) for each in (self.zeros, self.order))
        return replace(self, words=self.words.to(device), scales=self.scales.to(device), zeros=zeros, order=order)

    def of_expert(self, index: int) -> Codes:
        """Return the matrix of one of several experts."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, words=self.words[index], scales=self.scales[index], zeros=zeros)

    def rows(self, rows: slice) -> Codes:
        """Return some rows."""
        first, stop, _ = rows.indices(self.shape[-2])
        shared = self.scaled_rows
        if first % shared or (stop % shared and stop != self.shape[-2]):
            return by_row(self).rows(rows)
        scaled = slice(first // shared, -(-stop // shared))
        zeros = None if self.zeros is None else self.zeros[..., rows].contiguous()
        words, scales = self.words[..., rows, :].contiguous(), self.scales[..., scaled].contiguous()
        return replace(self, words=words, scales=scales, zeros=zeros)

    def in_row_order(self, order: torch.Tensor) -> Codes:
        """Return the codes with row order[i] as row i. order: [n] int64."""
        each, order = by_row(self), order.to(self.words.device)
        zeros = None if each.zeros is None else each.zeros[..., order].contiguous()
        return replace(each, words=each.words[..., order, :], scales=each.scales[..., order].contiguous(), zeros=zeros)

    def columns(self, first: int, stop: int) -> Codes:
        """Return some columns.

        Raises:
            ValueError: They begin or end inside of a unit or group, or the columns are in another order.
        """
        unit, group, k = unit_columns(self.code), self.group, self.shape[-1]
        step = unit if group == k else max(unit, group)
        if self.order is not None or first % step or stop % step:
            problem = "are in the order of activations" if self.order is not None else f"come in steps of {step}"
            raise ValueError(f"its {k} columns {problem}, and cannot be cut at {first} and {stop}")
        words = self.words[..., first // unit : stop // unit, :, :].contiguous()
        if group == k:
            return replace(self, words=words)
        groups = slice(first // group, stop // group)
        zeros = None if self.zeros is None else self.zeros[..., groups, :].contiguous()
        return replace(self, words=words, scales=self.scales[..., groups, :].contiguous(), zeros=zeros)

    def widened(self) -> torch.Tensor:
        """Return the represented numbers, [(experts,) n, k] float32, new."""
        if self.words.dim() == 4:
            return torch.stack([self.of_expert(index).widened() for index in range(len(self.words))])
        n, k = self.shape
        found = torch.empty((n, k), device=self.words.device)
        step = max(1, WIDENED_NUMBERS // k // self.scaled_rows) * self.scaled_rows
        for first in range(0, n, step):  # so that little memory is needed beside the result
            rows = slice(first, min(first + step, n))
            found[rows] = _widened(self.rows(rows)) if step < n else _widened(self)
        if self.order is not None:
            found = found[:, self.order.argsort()]
        return found


def _widened(codes: Codes) -> torch.Tensor:
    numbers = _numbers_of(unpack(codes.words, codes.code), codes.code, codes.zeros)
    scales = codes.scales.repeat_interleave(codes.scaled_rows, -1)[..., : numbers.shape[-2]].transpose(-1, -2)
    return numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None]).flatten(-2)


def stack_experts(parts: Sequence[Codes]) -> Codes:
    """Return the matrices of several experts as one; all have the same layout."""
    if any(each.scaled_rows != parts[0].scaled_rows for each in parts):
        parts = [by_row(each) for each in parts]
    zeros = None
    if any(each.zeros is not None for each in parts):
        zeros = torch.stack([_zeros_of(each) for each in parts])
    words, scales = torch.stack([each.words for each in parts]), torch.stack([each.scales for each in parts])
    return Codes(parts[0].code, words, scales, zeros, parts[0].scaled_rows)


def _numbers_of(codes: torch.Tensor, code: str, zeros: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers of codes [..., n, k] uint8 without scales, float32."""
    if code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if code == "int8":
        return codes.view(torch.int8).float()
    if code == "e2m1":
        magnitudes = torch.tensor(E2M1, device=codes.device)[(codes & 7).long()]
        return torch.where(codes >= 8, -magnitudes, magnitudes)
    if zeros is None:
        return codes.float() - ZERO
    by_group = codes.float().unflatten(-1, (zeros.shape[-2], -1))
    return by_group.sub_(zeros.float().transpose(-1, -2)[..., None]).flatten(-2)


def pack(codes: torch.Tensor, code: str) -> torch.Tensor:
    """Pack codes.

    Args:
        codes: [..., n, k] uint8, one code each; k is a multiple of `unit_columns`.
        code: A key of `CODES`.

    Returns:
        [..., k / unit, n, WORDS] int16.
    """
    count = CODES[code]
    bits = 16 // count
    parts = codes.unflatten(-1, (-1, count, WORDS)).unbind(-2)  # [..., n, units, WORDS] each
    words = torch.zeros(parts[0].shape, dtype=torch.int32, device=codes.device)
    for place, part in enumerate(parts):
        words |= part.int() << (bits * place)
    return words.to(torch.int16).transpose(-2, -3).contiguous()


def unpack(words: torch.Tensor, code: str) -> torch.Tensor:
    """Return the codes [..., n, k] uint8 of words [..., k / unit, n, WORDS]."""
    count = CODES[code]
    bits = 16 // count
    wide = words.transpose(-2, -3).int() & 0xFFFF
    parts = [(wide >> (bits * place)) & ((1 << bits) - 1) for place in range(count)]
    return torch.stack(parts, -2).to(torch.uint8).flatten(-3)


class StoredWeight(QuantisedWeight):
    """A weight [n, k], or [experts, n, k], of codes, that presents itself in the dtype of the model.

    Args:
        codes: The codes.
        dtype: Dtype of the products.
    """

    @staticmethod
    def __new__(cls, codes: Codes, dtype: torch.dtype) -> Self:
        """Make a tensor without memory of its own."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.words.device)
        return made

    def __init__(self, codes: Codes, _dtype: torch.dtype) -> None:
        self._codes = codes

    def __getitem__(self, expert: int) -> StoredWeight:  # type: ignore[override]
        """Return the weight [n, k] of one of several experts."""
        return StoredWeight(self._codes.of_expert(expert), self.dtype)

    def __iter__(self) -> Iterator[StoredWeight]:
        """Yield the weights of all experts."""
        return (self[expert] for expert in range(len(self)))

    @property
    def codes(self) -> Codes:
        """The codes and their scales."""
        return self._codes

    @property
    def stored_bytes(self) -> int:
        """Implement `QuantisedWeight.stored_bytes`."""
        return sum(each.nbytes for each in self._codes.tensors())

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Implement `QuantisedWeight.product`: the reference of the kernels."""
        return torch.nn.functional.linear(x, self.widened().to(x.dtype), bias)

    def widened(self) -> torch.Tensor:
        """Implement `QuantisedWeight.widened`: [n, k], or [experts, n, k]."""
        return self._codes.widened()

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `QuantisedWeight.seen`."""
        return x.float()


def join_rows(parts: Sequence[Codes]) -> Codes | None:
    """Return the matrix with the rows of all parts in order; None if their codes or groups differ."""
    first = parts[0]
    if any((each.code, each.group) != (first.code, first.group) for each in parts):
        return None
    if any(not _same_order(each.order, first.order) for each in parts):
        return None
    if any(each.scaled_rows != first.scaled_rows or each.shape[-2] % each.scaled_rows for each in parts):
        parts = [by_row(each) for each in parts]
    zeros = None
    if any(each.zeros is not None for each in parts):
        zeros = torch.cat([_zeros_of(each) for each in parts], -1)
    words, scales = torch.cat([each.words for each in parts], -2), torch.cat([each.scales for each in parts], -1)
    return Codes(first.code, words, scales, zeros, parts[0].scaled_rows, first.order)


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def by_row(codes: Codes) -> Codes:
    """Return the codes with a scale for each row."""
    if codes.scaled_rows == 1:
        return codes
    scales = codes.scales.repeat_interleave(codes.scaled_rows, -1)[..., : codes.shape[-2]].contiguous()
    return replace(codes, scales=scales, scaled_rows=1)


def _zeros_of(codes: Codes) -> torch.Tensor:
    if codes.zeros is not None:
        return codes.zeros
    return torch.full((*codes.scales.shape[:-1], codes.shape[-2]), ZERO, dtype=torch.uint8, device=codes.words.device)


def stored_problem(shape: Sequence[int], code: str, group: int = 0, has_zeros: bool = False) -> str:
    """Return why kernels do not multiply a matrix of this shape in codes; "" if they do.

    Args:
        shape: [(experts,) n, k].
        code: A key of `CODES`.
        group: Columns of a group; 0: all.
        has_zeros: Whether groups have zeros.
    """
    k, unit = shape[-1], unit_columns(code)
    if has_zeros and group and group < unit:
        return f"groups of {group} columns have zeros"
    if k % unit:
        return f"its {k} columns are not a multiple of {unit}"
    if group and (k % group or (group % unit and 2 * group != unit)):
        return f"groups of {group} columns do not fit {k}"
    return ""


@torch.no_grad()
def quantise_codes(weight: torch.Tensor, code: str) -> Codes:
    """Quantise to the nearest codes; the largest number of a group has the largest code.

    Args:
        weight: [(experts,) n, k], finite; see `stored_problem`.
        code: int8 or e4m3, with a scale for each row, or int4, with one for each 128 columns (fewer if 128 does not
            divide k).

    Returns:
        The codes.
    """
    k, group = weight.shape[-1], MADE_GROUPS[code]
    group = k if not group else next(size for size in (group, group // 2) if k % size == 0)
    parts = [weight] if weight.dim() == 2 else list(weight)
    words, scales = zip(*(_quantised(each, code, group) for each in parts), strict=True)
    if weight.dim() == 2:
        return Codes(code, words[0], scales[0])
    return Codes(code, torch.stack(words), torch.stack(scales))


def _quantised(weight: torch.Tensor, code: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = weight.detach().float().unflatten(-1, (-1, group))
    scales = grouped.abs().amax(-1).clamp_min_(SMALLEST) / TOP[code]
    levels = grouped.div_(scales[..., None]) if grouped.data_ptr() != weight.data_ptr() else grouped / scales[..., None]
    if code == "e4m3":
        codes = levels.to(torch.float8_e4m3fn).view(torch.uint8)
    elif code == "int8":
        codes = levels.round_().to(torch.int8).view(torch.uint8)
    else:
        codes = levels.round_().add_(ZERO).to(torch.uint8)
    return pack(codes.flatten(-2), code), scales.t().contiguous()


def code_name(weight: torch.Tensor) -> str:
    """Return the name of a weight's format for people; "" if it is not in codes."""
    return NAMES[weight.codes.code] if isinstance(weight, StoredWeight) else ""


def codes_of(weight: Any) -> Codes | None:
    """Return the codes of a weight that stays in them; None for any other."""
    return weight.codes if isinstance(weight, StoredWeight) else None
