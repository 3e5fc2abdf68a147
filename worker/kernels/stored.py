"""Weights that stay in the codes of a file on a GPU, multiplied by kernels that unpack them in registers.

Every published format becomes one of the codes of `code_tables`, with scales for groups of numbers of a row. A group
may have more than its scale: a zero (a code), a low (a number that is added), or narrow factors of 16 columns each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Self

import torch

from .code_tables import CODES, NAMES, WORDS, ZERO, narrow_spans, numbers_of, pack, unit_columns, unpack
from .quantised import QuantisedWeight
from .stored_exponents import EXPONENT_COLUMNS, exponents_of, powers_of

WORDS_MAX = (1 << 31) - 1  # of a matrix: 8 GB of 4-bit codes
WIDENED_NUMBERS = 1 << 22  # numbers that are widened at a time
SMALLEST = 1e-30  # scale of a group of zeros, to avoid division by 0
TOP = {"int8": 127.0, "e4m3": 448.0, "int4": 7.0}
MADE_GROUPS = {"int8": 0, "e4m3": 0, "int4": 128}  # columns of a group that `quantise` makes; 0: all of a row


@dataclass(frozen=True)
class Codes:
    """A matrix [n, k], or one for each of several experts, in codes with scales.

    Attributes:
        code: A key of `CODES`.
        words: [(experts,) spans, n, words of a span] int16; see `code_tables`.
        scales: [(experts,) groups, n / scaled_rows] float32, each of k / groups columns.
        zeros: [(experts,) groups, n] uint8: the codes of 0 in int4; None: `ZERO`, with lows 0.
        scaled_rows: Rows that share a scale.
        order: [k] int64: column i of the codes is this column of the matrix; None: in order. Not of experts.
        lows: [(experts,) groups, n] float32, added to the scaled numbers of int4 and int8; None: nothing.
        factors: [(experts,) k / unit, n] int32: four e4m3 factors, the first in the lowest bits, each of 16 columns of
            a unit of e2m1; None: 1. A row then has one scale. Products with a code are exact in 16 bits.
        exponents: [(experts,) k / unit / 2 rounded up, n] int32: four exponents with a bias of 1, the first in the
            lowest bits, of powers of two, each of 32 columns of two units of e2m1; 0 stands for a factor of 0; None:
            1. A row then has one scale. See `with_exponents`.
        format: Name of the format for people; "": that of the code.

    Raises:
        ValueError: A matrix has more words than kernels can count in 32 bits.
    """

    code: str
    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    scaled_rows: int = 1
    order: torch.Tensor | None = None
    lows: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    exponents: torch.Tensor | None = None
    format: str = ""

    def __post_init__(self) -> None:
        spans, n, words = self.words.shape[-3:]
        if spans * n * words > WORDS_MAX:
            raise ValueError(f"a matrix of {n} x {self.shape[-1]} codes has more than {WORDS_MAX} words; divide it")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix: [(experts,) n, k]."""
        *experts, spans, n, words = self.words.shape
        return (*experts, n, spans * words * CODES[self.code])

    @property
    def span(self) -> int:
        """Units of a span."""
        return self.words.shape[-1] // WORDS

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[-1] // self.scales.shape[-2]

    @property
    def name(self) -> str:
        """Name of the format for people."""
        return self.format or NAMES[self.code]

    @property
    def kind(self) -> str:
        """What kernels distinguish: the code, and what groups have beside scales."""
        extra, _ = self.extra
        return f"{self.code} with {extra}" if extra in ("lows", "factors", "exponents") else self.code

    @property
    def extra(self) -> tuple[str, torch.Tensor | None]:
        """What groups have beside scales, [(experts,) groups, n], and its name; "": nothing."""
        return next(((name, each) for name, each in self._extras().items() if each is not None), ("", None))

    @property
    def has_step_factors(self) -> bool:
        """Whether numbers have factors of their own before a product: a step is then a unit, with one scale."""
        return self.factors is not None or self.exponents is not None

    def _extras(self) -> dict[str, torch.Tensor | None]:
        return {"zeros": self.zeros, "lows": self.lows, "factors": self.factors, "exponents": self.exponents}

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return what exists of `_extras`, changed."""
        return {name: None if each is None else change(each) for name, each in self._extras().items()}

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that exist."""
        every = (self.words, self.scales, *self._extras().values(), self.order)
        return [each for each in every if each is not None]

    def to(self, device: torch.device) -> Codes:
        """Return the codes on another device."""
        order = None if self.order is None else self.order.to(device)
        others = self._changed(lambda each: each.to(device))
        return replace(self, words=self.words.to(device), scales=self.scales.to(device), order=order, **others)

    def of_expert(self, index: int) -> Codes:
        """Return the matrix of one of several experts."""
        others = self._changed(lambda each: each[index])
        return replace(self, words=self.words[index], scales=self.scales[index], **others)

    def rows(self, rows: slice) -> Codes:
        """Return some rows."""
        first, stop, _ = rows.indices(self.shape[-2])
        shared = self.scaled_rows
        if first % shared or (stop % shared and stop != self.shape[-2]):
            return by_row(self).rows(rows)
        scaled = slice(first // shared, -(-stop // shared))
        others = self._changed(lambda each: each[..., rows].contiguous())
        words, scales = self.words[..., rows, :].contiguous(), self.scales[..., scaled].contiguous()
        return replace(self, words=words, scales=scales, **others)

    def in_row_order(self, order: torch.Tensor) -> Codes:
        """Return the codes with row order[i] as row i. order: [n] int64."""
        each, order = by_row(self), order.to(self.words.device)
        others = each._changed(lambda tensor: tensor[..., order].contiguous())
        return replace(each, words=each.words[..., order, :], scales=each.scales[..., order].contiguous(), **others)

    def columns(self, first: int, stop: int) -> Codes:
        """Return some columns.

        Raises:
            ValueError: They begin or end inside of a unit or group, or the columns are in another order.
        """
        unit, group, k = unit_columns(self.code), self.group, self.shape[-1]
        step = unit if group == k else max(unit, group)
        step = 2 * unit if self.exponents is not None else step
        if self.order is not None or first % step or (stop % step and stop != k):
            problem = "are in the order of activations" if self.order is not None else f"come in steps of {step}"
            raise ValueError(f"its {k} columns {problem}, and cannot be cut at {first} and {stop}")
        units = slice(first // unit, stop // unit)
        span = gcd(self.span, units.start, units.stop)
        spans = slice(units.start // span, units.stop // span)
        words = narrow_spans(self.words, span)[..., spans, :, :].contiguous()
        if self.factors is not None:
            return replace(self, words=words, factors=self.factors[..., units, :].contiguous())
        if self.exponents is not None:
            pairs = slice(units.start // 2, (units.stop + 1) // 2)
            return replace(self, words=words, exponents=self.exponents[..., pairs, :].contiguous())
        if group == k:
            return replace(self, words=words)
        groups = slice(first // group, stop // group)
        others = self._changed(lambda each: each[..., groups, :].contiguous())
        return replace(self, words=words, scales=self.scales[..., groups, :].contiguous(), **others)

    def widened(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the represented numbers, rounded to `dtype`, [(experts,) n, k], new."""
        found = torch.empty(self.shape, dtype=dtype, device=self.words.device)
        if self.words.dim() == 4:
            for index, expert in enumerate(found):
                expert.copy_(self.of_expert(index).widened(dtype))
            return found
        n, k = self.shape
        step = max(1, WIDENED_NUMBERS // k // self.scaled_rows) * self.scaled_rows
        for first in range(0, n, step):  # so that little memory is needed beside the result
            rows = slice(first, min(first + step, n))
            found[rows] = _widened(self.rows(rows)) if step < n else _widened(self)
        if self.order is not None:
            found = found[:, self.order.argsort()]
        return found


def _widened(codes: Codes) -> torch.Tensor:
    zero = ZERO if codes.lows is None else 0
    numbers = numbers_of(unpack(codes.words, codes.code), codes.code, codes.zeros, zero)
    if codes.factors is not None:
        four = codes.factors.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)).view(torch.float8_e4m3fn).float()
        numbers = numbers.unflatten(-1, (-1, WORDS)).mul_(four.transpose(0, 1).flatten(1)[..., None]).flatten(1)
    if codes.exponents is not None:
        powers = powers_of(codes.exponents, numbers.shape[-1] // EXPONENT_COLUMNS)
        numbers = numbers.unflatten(-1, (-1, EXPONENT_COLUMNS)).mul_(powers[..., None]).flatten(1)
    scales = codes.scales.repeat_interleave(codes.scaled_rows, -1)[..., : numbers.shape[-2]].transpose(-1, -2)
    found = numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
    if codes.lows is not None:
        found.add_(codes.lows.transpose(-1, -2)[..., None])
    return found.flatten(-2)


def stack_experts(parts: Sequence[Codes]) -> Codes:
    """Return the matrices of several experts as one; all have the same layout."""
    parts = _alike(parts)
    words, scales = torch.stack([each.words for each in parts]), torch.stack([each.scales for each in parts])
    return replace(parts[0], words=words, scales=scales, **_together(parts, torch.stack))


def _alike(parts: Sequence[Codes]) -> list[Codes]:
    """Return the parts with the same spans and rows for a scale, and zeros in all or in none."""
    found = list(parts)
    if any(each.scaled_rows != found[0].scaled_rows or each.shape[-2] % each.scaled_rows for each in found):
        found = [by_row(each) for each in found]
    span = gcd(*(each.span for each in found))
    if any(each.span != span for each in found):
        found = [replace(each, words=narrow_spans(each.words, span)) for each in found]
    if any(each.zeros is not None for each in found):
        found = [replace(each, zeros=_zeros_of(each)) for each in found]
    return found


def _together(parts: Sequence[Codes], put: Callable[[list[torch.Tensor]], torch.Tensor]) -> dict[str, Any]:
    """Return the extras of all parts, put together, and the name of their format."""
    every = [each._extras() for each in parts]
    found: dict[str, Any] = {
        name: None if first is None else put([each[name] for each in every])  # type: ignore[misc]
        for name, first in every[0].items()
    }
    return found | {"format": parts[0].format if len({each.format for each in parts}) == 1 else ""}


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
        return torch.nn.functional.linear(x, self._codes.widened(x.dtype), bias)

    def widened(self) -> torch.Tensor:
        """Implement `QuantisedWeight.widened`: [n, k], or [experts, n, k]."""
        return self._codes.widened()

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """Implement `QuantisedWeight.seen`."""
        return x.float()


def join_rows(parts: Sequence[Codes]) -> Codes | None:
    """Return the matrix with the rows of all parts in order; None if their codes, groups or columns differ."""
    first = parts[0]
    if any((each.kind, each.group) != (first.kind, first.group) for each in parts):
        return None
    if any(not _same_order(each.order, first.order) for each in parts):
        return None
    parts = _alike(parts)
    words, scales = torch.cat([each.words for each in parts], -2), torch.cat([each.scales for each in parts], -1)
    return replace(parts[0], words=words, scales=scales, **_together(parts, lambda each: torch.cat(each, -1)))


def join_alike(parts: Sequence[Codes]) -> Codes | None:
    """Return what `join_rows` does; of different codes the same numbers in codes of 8 bits, if all have such."""
    joined = join_rows(parts)
    if joined is not None:
        return joined
    wide = [as_int8(each) for each in parts]
    found = [each for each in wide if each is not None]
    if len(found) < len(parts):
        return None
    group = min(each.group for each in found)
    if any(each.group % group for each in found):
        return None
    has_lows = any(each.lows is not None for each in found)
    return join_rows([_regrouped(each, group, has_lows) for each in found])


def _regrouped(codes: Codes, group: int, has_lows: bool) -> Codes:
    """Return the same numbers in smaller groups, with a scale for each row."""
    codes, times = by_row(codes), codes.group // group
    scales = codes.scales.repeat_interleave(times, -2)
    lows = codes.lows
    if has_lows:
        lows = torch.zeros_like(scales) if lows is None else lows.repeat_interleave(times, -2)
    return replace(codes, scales=scales, lows=lows)


def with_exponents(codes: Codes, dtype: torch.dtype) -> Codes:
    """Return mxfp4 codes with scales of 8 bits, if products in `dtype` with them are exact; all others as they are."""
    if codes.code != "e2m1" or codes.group != EXPONENT_COLUMNS or codes.extra[0]:
        return codes
    scales = by_row(codes).scales
    exponents = exponents_of(scales, dtype)
    if exponents is None:
        return codes
    ones = torch.ones_like(scales[..., :1, :], memory_format=torch.contiguous_format)
    return replace(codes, scales=ones, scaled_rows=1, exponents=exponents)


def without_exponents(codes: Codes) -> Codes:
    """Return codes with scales of 32 bits in place of exponents; all others as they are."""
    if codes.exponents is None:
        return codes
    powers = powers_of(codes.exponents, codes.shape[-1] // EXPONENT_COLUMNS)
    return replace(codes, scales=powers.transpose(-1, -2) * codes.scales, exponents=None)


def as_int8(codes: Codes) -> Codes | None:
    """Return the same numbers in codes of 8 bits; None: they are of floats or quantiles that are no whole numbers."""
    if codes.code == "int8":
        return codes
    if codes.code not in ("int4", "iq4", "e2m1") or codes.factors is not None:
        return None
    codes = without_exponents(codes)
    doubled = codes.code == "e2m1"  # halves
    zero = ZERO if codes.lows is None else 0
    numbers = numbers_of(unpack(codes.words, codes.code), codes.code, codes.zeros, zero)
    octets = (numbers * 2 if doubled else numbers).to(torch.int8).view(torch.uint8)
    scales = codes.scales / 2 if doubled else codes.scales
    return replace(codes, code="int8", words=pack(octets, "int8", scales.shape[-2]), scales=scales, zeros=None)


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
    return pack(codes.flatten(-2), code, scales.shape[1]), scales.t().contiguous()


def code_name(weight: torch.Tensor) -> str:
    """Return the name of a weight's format for people; "" if it is not in codes."""
    return weight.codes.name if isinstance(weight, StoredWeight) else ""


def codes_of(weight: Any) -> Codes | None:
    """Return the codes of a weight that stays in them; None for any other."""
    return weight.codes if isinstance(weight, StoredWeight) else None
