"""GPTQ: int4 or int8 in groups of columns, packed along the columns (Frantar and others, arXiv 2210.17323).

    qweight  I32 [k / codes of a word, n]       consecutive columns in a word, the lowest bits first
    qzeros   I32 [groups, n / codes of a word]  consecutive rows in a word; in version 1 less 1
    scales   F16 [groups, n]
    g_idx    I32 [k]                            group of each column

A number is (code - zero) x scale. With act-order (`desc_act`) the columns of a group are not adjacent; they are sorted
by their group here, and the columns of x likewise at each product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.kernels.code_tables import ZERO, pack
from kvforge.worker.kernels.stored import Codes

from .format import FLOATS, GROUP_SIZES, Tensors, Wanted, refuse, unpacked, whole_number

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what a stored zero lacks


@dataclass(frozen=True)
class Gptq:
    """The format. bits: of a code. group: columns that share a scale; 0: all. lacking: see `VERSIONS`."""

    bits: int
    group: int
    lacking: int

    @property
    def kind(self) -> str:
        """Implement `PublishedFormat.kind`."""
        return f"int{self.bits}"

    @property
    def label(self) -> str:
        """Implement `PublishedFormat.label`."""
        return f"GPTQ of {self.bits} bits" + (f" in groups of {self.group}" if self.group else "")

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Implement `PublishedFormat.covers`."""
        return any(f"{path}.{each}" in stored for each in ("qweight", "qzeros", "scales", "g_idx"))

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:
        """Implement `PublishedFormat.wanted`."""
        word, groups = 32 // self.bits, k // (self.group or k)
        order = (Wanted("g_idx", ("I32",), (k,)),) if f"{path}.g_idx" in stored else ()
        return (
            Wanted("qweight", ("I32",), (k // word, n)),
            Wanted("qzeros", ("I32",), (groups, n // word)),
            Wanted("scales", FLOATS, (groups, n)),
            *order,
        )

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return ()

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:
        """Implement `PublishedFormat.codes`."""
        group, word = self.group or k, 32 // self.bits
        if k % group or n % word or k % word:
            raise ValueError(f"qweight is of a projection of {n} x {k}: groups of {group} do not divide it")
        codes = unpacked(tensors["qweight"].t().contiguous(), self.bits)
        zeros = unpacked(tensors["qzeros"], self.bits).int() + self.lacking
        order = None
        if "g_idx" in tensors:
            order = order_of(tensors["g_idx"], group)
            codes = codes if order is None else codes[:, order]
        scales = tensors["scales"].float().contiguous()
        if self.bits == 4:
            if int(zeros.max()) > 15:
                raise ValueError("qzeros has a zero of 16, which no code of 4 bits reaches")
            symmetric = bool((zeros == ZERO).all())
            of_codes = None if symmetric else zeros.to(torch.uint8)
            return Codes("int4", pack(codes, "int4", len(scales)), scales, of_codes, order=order)
        if not bool((zeros == 128).all()):
            raise ValueError("qzeros of 8 bits has other zeros than 128, which kvforge does not read")
        return Codes("int8", pack(codes ^ 128, "int8", len(scales)), scales, order=order)


def order_of(groups: torch.Tensor, group: int) -> torch.Tensor | None:
    """Return the order in which the columns of each group are adjacent, [k] int64; None if they are already.

    Raises:
        ValueError: Groups have other sizes than `group`.
    """
    counts = groups.long().bincount(minlength=len(groups) // group) if int(groups.min()) >= 0 else groups.new_zeros(1)
    if len(counts) * group != len(groups) or not bool((counts == group).all()):
        raise ValueError(f"g_idx has groups of other sizes than {group}")
    order = groups.argsort(stable=True)
    is_sorted = bool((order == torch.arange(len(order), device=order.device)).all())
    return None if is_sorted else order


def parse(values: Mapping[str, Any], model: str) -> Gptq:
    """Parse the configuration.

    Raises:
        UnsupportedModel: It describes another packing.
    """
    bits = whole_number(values, "bits", model, (4, 8))
    group = whole_number(values, "group_size", model, (-1, *GROUP_SIZES))
    version = values.get("checkpoint_format", "gptq")
    if version not in VERSIONS:
        refuse(model, "checkpoint_format", version, " or ".join(VERSIONS))
    if values.get("dynamic"):
        refuse(model, "dynamic", values["dynamic"], "one format for all layers")
    return Gptq(bits, max(group, 0), VERSIONS[version])
