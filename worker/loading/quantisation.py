"""In how many bits a model's weights stay: what `weight_dtype` stands for, and what becomes of each of its matrices.

"dtype" is what `dtype` says, and exact. "int8" and "int4" quantise every matrix that is multiplied with, the vocabulary
head to 8 bits in either case: 4 there cost more than they save. "auto" leaves a quantised GGUF file as it is, as far as
there are kernels: what it holds in 4 bits (Q4_0, Q4_1, Q4_K) keeps its levels, what it holds in others gets 8 bits of
ours, and what is not quantised stays as `dtype` says. The embedding is looked up, not multiplied with: it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.protocol.choices import WEIGHT_DTYPES
from kvforge.protocol.errors import InvalidConfiguration
from worker.device.device import Device
from worker.kernels.packed import PackedOperations, quantising_problem
from worker.kernels.quantised import Groups

from .gguf_groups import FOUR_BITS, StoredGroups
from .source import Source

NOT_QUANTISED = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class Quantisation:
    """kind: "int8" or "int4", of most of the matrices. as_stored: a matrix that a file holds in more bits than 4 does
    not get 4."""

    kind: str
    as_stored: bool

    @property
    def digest(self) -> str:
        """What tells it from others in a fingerprint."""
        return f"{self.kind}{' as stored' if self.as_stored else ''}"


def choose_quantisation(name: str, source: Source, dtype: torch.dtype, device: Device) -> Quantisation | None:
    """What the setting `weight_dtype` stands for; None: weights are as `dtype` says.

    Errors: InvalidConfiguration (`weight_dtype`): an unknown name, or one that this device has no products for.
    """
    if name not in WEIGHT_DTYPES:
        raise InvalidConfiguration("weight_dtype", f"{name!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    if name == "dtype":
        return None
    if name != "auto":
        if problem := quantising_problem(device, dtype, name) or quantising_problem(device, dtype, "int8"):
            raise InvalidConfiguration("weight_dtype", f"{name!r} is not for this worker: {problem}; use 'dtype'")
        return Quantisation(name, as_stored=False)
    sizes: dict[str, int] = {}
    if source.format == "gguf":
        for tensor in source.gguf_header.tensors:
            if len(tensor.shape) == 2:
                sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size
    kinds = ["int4" if type_name in FOUR_BITS else "int8" for type_name in sizes if type_name not in NOT_QUANTISED]
    kind = "int4" if "int4" in kinds else "int8"
    if not kinds or quantising_problem(device, dtype, "int8") or quantising_problem(device, dtype, kind):
        return None
    return Quantisation(kind, as_stored=True)


class Packer:
    """Makes one weight [n, k] of parts that were joined: Linears of a transformers model, their rows in order."""

    def __init__(
        self, operations: PackedOperations, quantisation: Quantisation | None, source: Source, module: Any
    ) -> None:
        """Reads the names of all parts, which are then replaced one by one."""
        self._operations, self._quantisation = operations, quantisation
        self._head = id(module.lm_head)  # nothing here may keep a weight that is given up
        wanted = quantisation is not None and quantisation.kind == "int4" and source.format == "gguf"
        self._stored = StoredGroups(source, module) if wanted else None

    @property
    def quantises(self) -> bool:
        """Whether what is made takes fewer bits."""
        return self._quantisation is not None

    def pack(self, weight: torch.Tensor, parts: Sequence[Any]) -> torch.Tensor:
        """Errors: those of `PackedOperations.pack` and `quantise`."""
        operations, quantisation = self._operations, self._quantisation
        if quantisation is None:
            return operations.pack(weight)
        if quantisation.kind == "int8" or id(parts[0]) == self._head:
            return operations.quantise(weight, "int8")
        found = [] if self._stored is None else [self._stored.of(part) for part in parts]
        joined = [groups for groups in found if groups is not None]
        if len(joined) == len(parts):
            return operations.quantise(weight, "int4", _joined(joined))
        return operations.quantise(weight, "int8" if quantisation.as_stored else "int4")


def _joined(parts: Sequence[Groups]) -> Groups:
    return Groups(*(torch.cat([getattr(part, name) for part in parts]) for name in ("levels", "scales", "lows")))
