"""The bits of a model's weights: resolves `weight_dtype`, and packs each matrix accordingly.

- "dtype" keeps the numbers of the files, exactly: in the dtype of the model, or in the codes of a published format.
- "fp8" (on a GPU), "int8" and "int4" quantise every matrix of a product. The vocabulary head always gets 8 bits: 4
  bits cost more there than they save. On a GPU see `code_packer`.
- "auto" keeps a quantised file as it is on a CPU where kernels exist: matrices stored in 4 bits (Q4_0, Q4_1, Q4_K;
  AWQ, GPTQ and compressed-tensors in groups of a multiple of 32) keep their levels, other quantised ones get 8 bits,
  and the rest stays in `dtype`. A GPU always keeps published formats.

The embedding is looked up rather than multiplied, so it is never quantised.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvforge.protocol.choices import WEIGHT_DTYPES
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import LayerOperations
from kvforge.worker.kernels.code_tables import ZERO, unpack
from kvforge.worker.kernels.expert_loop import Matrices
from kvforge.worker.kernels.packed import PackedOperations, quantising_problem
from kvforge.worker.kernels.quantised import GROUP, Groups
from kvforge.worker.kernels.stored import Codes, StoredWeight, by_row

from .code_packer import codes_problem
from .coded_parts import CodedLinear
from .formats import format_of_folder
from .gguf_groups import FOUR_BITS, StoredGroups
from .published import PARSERS, parse_format
from .source import Source

log = logging.getLogger("worker")
NOT_QUANTISED = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class Quantisation:
    """A way of quantising weights.

    Attributes:
        kind: "fp8", "int8" or "int4", for most matrices.
        as_stored: Whether a matrix that the file stores in more than 4 bits keeps at least 8.
    """

    kind: str
    as_stored: bool

    @property
    def digest(self) -> str:
        """Text that distinguishes it in a fingerprint."""
        return f"{self.kind}{' as stored' if self.as_stored else ''}"


def choose_quantisation(
    name: str, source: Source, config: Any, dtype: torch.dtype, device: Device
) -> Quantisation | None:
    """Resolve the `weight_dtype` setting.

    Args:
        name: The setting.
        source: The model's files.
        config: Its transformers configuration.
        dtype: Dtype of the model.
        device: The device that computes.

    Returns:
        The quantisation; None: weights stay in `dtype`.

    Raises:
        InvalidConfiguration: The name is unknown, or this device has no such products (`weight_dtype`).
    """
    if name not in WEIGHT_DTYPES:
        raise InvalidConfiguration("weight_dtype", f"{name!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    if name == "dtype":
        return None
    if name != "auto":
        if problem := _problem(device, dtype, name):
            raise InvalidConfiguration("weight_dtype", f"{name!r} is not for this worker: {problem}; use 'dtype'")
        return Quantisation(name, as_stored=False)
    if device.runs_kernels:
        return None
    kinds = _kinds_in(source, config)
    kind = "int4" if "int4" in kinds else "int8"
    if not kinds or quantising_problem(device, dtype, "int8") or quantising_problem(device, dtype, kind):
        return None
    return Quantisation(kind, as_stored=True)


def _kinds_in(source: Source, config: Any) -> list[str]:
    """Return the quantisations that keep what a file stores."""
    if source.format == "gguf":
        names = {each.type_name for each in source.gguf_header.tensors if len(each.shape) == 2} - NOT_QUANTISED
        return ["int4" if name in FOUR_BITS else "int8" for name in names]
    values = format_of_folder(source.folder, config) if source.format == "safetensors" else None
    if values is None or values["quant_method"] not in PARSERS:
        return []
    found = parse_format(values, source.name)
    if found.kind != "int4":
        log.info("%s: weights in %s are quantised anew, to int8, for this CPU", source.name, found.label)
    return ["int4" if found.kind == "int4" else "int8"]


def _problem(device: Device, dtype: torch.dtype, name: str) -> str:
    """Return why weights cannot be quantised to `name` here; "" if they can."""
    if device.runs_kernels:
        return codes_problem(device, dtype)
    if name == "fp8":
        return "fp8 weights are multiplied by kernels of a GPU"
    return quantising_problem(device, dtype, name) or quantising_problem(device, dtype, "int8")


class WeightPacker(Protocol):
    """Makes the weights that a device multiplies of the weights of a transformers model, one by one."""

    @property
    def operations(self) -> LayerOperations:
        """The operations that multiply by packed weights."""

    @property
    def quantises(self) -> bool:
        """Whether packed weights have fewer bits."""

    def pack(self, weight: torch.Tensor, parts: Sequence[Any], is_reordered: bool = False) -> torch.Tensor:
        """Pack the joined weight [n, k] of several Linears."""

    def pack_experts(self, matrices: torch.Tensor, owner: Any) -> Matrices:
        """Pack the weights [experts, n, k] of a module of experts."""


class Packer:
    """Packs the joined weight [n, k] of several Linears of a transformers model, with their rows in order."""

    def __init__(
        self, operations: PackedOperations, quantisation: Quantisation | None, source: Source, module: Any
    ) -> None:
        """Find all parts in the file before they are replaced one by one."""
        self._operations, self._quantisation = operations, quantisation
        self._head = id(module.lm_head)  # an id, not a reference, so that the weight can be freed
        wanted = quantisation is not None and quantisation.kind == "int4" and source.format == "gguf"
        self._stored = StoredGroups(source, module) if wanted else None

    @property
    def operations(self) -> PackedOperations:
        """The operations that multiply by packed weights."""
        return self._operations

    @property
    def quantises(self) -> bool:
        """Whether packed weights have fewer bits."""
        return self._quantisation is not None

    def pack(self, weight: torch.Tensor, parts: Sequence[Any], is_reordered: bool = False) -> torch.Tensor:
        """Pack a weight.

        Args:
            weight: The joined weight [n, k].
            parts: The Linears that it was joined from.
            is_reordered: Whether the rows are in another order than those of the parts in the file.

        Returns:
            The packed weight.

        Raises:
            KvforgeError: As raised by `PackedOperations.pack` and `quantise`.
        """
        operations, quantisation = self._operations, self._quantisation
        if quantisation is None:
            return operations.pack(weight)
        if quantisation.kind == "int8" or id(parts[0]) == self._head:
            return operations.quantise(weight, "int8")
        found = [] if is_reordered else [self._groups_of(part) for part in parts]
        joined = [groups for groups in found if groups is not None]
        if joined and len(joined) == len(parts):
            return operations.quantise(weight, "int4", _joined(joined))
        return operations.quantise(weight, "int8" if quantisation.as_stored else "int4")

    def _groups_of(self, part: Any) -> Groups | None:
        if isinstance(part, CodedLinear):
            found = groups_of_codes(part.codes)
            if found is None:
                shape = list(part.codes.shape)
                log.info("a projection of %s is quantised anew, to int8: its codes do not suit this CPU", shape)
            return found
        return None if self._stored is None else self._stored.of(part)

    def pack_experts(self, matrices: torch.Tensor, owner: Any) -> Matrices:
        """Implement `WeightPacker.pack_experts`: one packed matrix per expert."""
        if isinstance(matrices, StoredWeight):
            return [self._pack_codes(each) for each in matrices]
        return [self.pack(each.contiguous(), [owner], is_reordered=True) for each in matrices]

    def _pack_codes(self, weight: StoredWeight) -> torch.Tensor:
        """Pack the weight of one expert."""
        numbers, quantisation = weight.codes.widened(weight.dtype), self._quantisation
        if quantisation is None:
            return self._operations.pack(numbers)
        groups = groups_of_codes(weight.codes) if quantisation.kind == "int4" else None
        return self._operations.quantise(numbers, "int8" if groups is None else "int4", groups)


def groups_of_codes(codes: Codes) -> Groups | None:
    """Return a weight in codes as groups of a CPU, without rounding; None if their levels are others."""
    if codes.code != "int4" or codes.order is not None or codes.group % GROUP:
        return None
    codes = by_row(codes)
    scales = codes.scales.t()
    zeros = ZERO if codes.zeros is None else codes.zeros.t().float()
    times = codes.group // GROUP
    scales, lows = (each.repeat_interleave(times, 1).contiguous() for each in (scales, -zeros * scales))
    return Groups(unpack(codes.words, codes.code), scales, lows)


def _joined(parts: Sequence[Groups]) -> Groups:
    return Groups(*(torch.cat([getattr(part, name) for part in parts]) for name in ("levels", "scales", "lows")))
