"""AWQ: int4 in groups of columns, packed along the rows of the product's result (Lin and others, arXiv 2306.00978).

    qweight  I32 [k, n / 8]          eight rows of a column in a word, in the order 0 2 4 6 1 3 5 7
    qzeros   I32 [k / group, n / 8]  as qweight
    scales   F16 [k / group, n]

A number is (code - zero) x scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.kernels.code_tables import pack
from kvforge.worker.kernels.stored import Codes

from .format import FLOATS, GROUP_SIZES, Tensors, Wanted, refuse, unpacked, whole_number

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight rows
WORD = 8  # codes in a word


@dataclass(frozen=True)
class Awq:
    """The format. group: columns that share a scale."""

    group: int
    kind: str = "int4"

    @property
    def label(self) -> str:
        """Implement `PublishedFormat.label`."""
        return f"AWQ in groups of {self.group}"

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Implement `PublishedFormat.covers`."""
        return any(f"{path}.{each}" in stored for each in ("qweight", "qzeros", "scales"))

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:  # noqa: ARG002
        """Implement `PublishedFormat.wanted`."""
        groups = k // self.group
        return (
            Wanted("qweight", ("I32",), (k, n // WORD)),
            Wanted("qzeros", ("I32",), (groups, n // WORD)),
            Wanted("scales", FLOATS, (groups, n)),
        )

    def ignored(self, path: str) -> Sequence[str]:  # noqa: ARG002
        """Implement `PublishedFormat.ignored`."""
        return ()

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:
        """Implement `PublishedFormat.codes`."""
        if k % self.group or n % WORD:
            raise ValueError(f"qweight is of a projection of {n} x {k}: groups of {self.group} do not divide it")
        order = torch.tensor(ORDER, device=tensors["qweight"].device)

        def in_order(words: torch.Tensor) -> torch.Tensor:
            return unpacked(words, 4).unflatten(-1, (-1, WORD))[..., order].flatten(-2)

        codes = in_order(tensors["qweight"]).t().contiguous()
        scales = tensors["scales"].float()
        return Codes("int4", pack(codes, "int4", len(scales)), scales, in_order(tensors["qzeros"]))


def parse(values: Mapping[str, Any], model: str) -> Awq:
    """Parse the configuration.

    Raises:
        UnsupportedModel: It describes another packing.
    """
    whole_number(values, "bits" if "bits" in values else "w_bit", model, (4,))
    version = values.get("version", "gemm")
    if str(version).lower() != "gemm":
        refuse(model, "version", version, "gemm")
    if values.get("zero_point", True) is not True:
        refuse(model, "zero_point", values["zero_point"], "true")
    return Awq(whole_number(values, "group_size" if "group_size" in values else "q_group_size", model, GROUP_SIZES))
