"""Reads the quantised weights of a folder one projection at a time, as codes or as numbers.

A tensor is never expanded where kernels multiply codes: it is read, repacked and cut to this rank's part. Elsewhere it
becomes numbers in the model's dtype, one projection at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.kernels.stored import (
    Codes,
    StoredWeight,
    join_rows,
    quantise_codes,
    stack_experts,
    stored_problem,
    with_exponents,
)

from .coded_parts import CodedLinear, hold_experts
from .mixers import mixers_of
from .published import PublishedFormat, check_tensors
from .published.mxfp4 import GROUP, Mxfp4, codes_of_experts
from .report import EXPERT
from .slices import TensorSlice, stored_names

# Experts stored one by one, and the parameter that joins them.
JOINED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),  # of experts without a gate
    "down_proj": (("down_proj",), ("w2",)),
}
COLUMNS = {"int8": 32, "fp8": 32, "int4": 64, "mxfp4": 64, "nvfp4": 64, "nf4": 64}  # that columns must be a multiple of
WEIGHT = ".weight"
log = logging.getLogger("worker")


@dataclass(frozen=True)
class Published:
    """The format of a folder's weights. keeps: whether they stay in codes."""

    format: PublishedFormat
    keeps: bool


class QuantisedReader:
    """Reads the projections of one model.

    Args:
        published: The format.
        stored: The files' tensors, by name.
        dtype: Dtype of the model.
        device: Where the weights go.
        model: The name for errors.
    """

    def __init__(
        self,
        published: Published,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        device: Device,
        model: str,
    ) -> None:
        self._published, self._keeps, self._stored = published.format, published.keeps, stored
        self._dtype, self._device, self._model = dtype, device, model
        self._experts: dict[str, dict[str, Codes]] = {}
        self._numbers: dict[str, set[int]] = {}  # of experts that are stored one by one
        for match in filter(None, map(EXPERT.match, stored)):
            self._numbers.setdefault(match["experts"], set()).add(int(match["number"]))
        self.used: set[str] = set()
        self._mixers: tuple[str, ...] | None = None  # beginnings of the names of their parts

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the types and shapes of every quantised tensor before any is read. shapes: of whole parameters.

        Raises:
            UnsupportedModel: Names the tensor.
        """
        for name, shape in shapes.items():
            for path, n, k in self._projections(name, shape):
                self._names(path, n, k)
            self._check_blocks(name, shape)

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter is stored in the format. shape: of the whole parameter."""
        return bool(self._projections(name, shape)) or self._blocks(name) is not None

    def read(self, module: Any, name: str, shape: tuple[int, ...], cut: TensorSlice, of: Mapping[str, Any]) -> None:
        """Read a parameter and put it into the model.

        Args:
            module: The transformers model.
            name: The parameter's name.
            shape: Shape of the whole parameter.
            cut: This rank's part.
            of: The open file of each tensor.

        Raises:
            UnsupportedModel: Names the tensor that is damaged or cannot be cut.
        """
        owner, _, last = name.rpartition(".")
        if (blocks := self._blocks(name)) is not None:
            codes = self._mxfp4(blocks, cut, of)
            self._put_experts(module, owner, last, codes, is_transposed=True)
            return
        projections = self._projections(name, shape)
        if last in JOINED:
            count = len(JOINED[last][0])
            experts = [projections[first : first + count] for first in range(0, len(projections), count)]
            for path, rows, columns in projections:  # those of other ranks are not left over
                self._use(path, self._names(path, rows, columns))
            if cut.dimension == 0:
                experts, cut = experts[slice(*cut.ranges[0])], TensorSlice()
            one = cut if cut.is_whole else TensorSlice(cut.dimension - 1, cut.ranges[:1])
            parts = [self._joined([self._alone(path, n, k, one, of) for path, n, k in each]) for each in experts]
            self._put_experts(module, owner, last, self._kept(owner, stack_experts(parts)), is_transposed=False)
            return
        ((path, n, k),) = projections
        self._put(module, owner, self._kept(path, self._cut(path, n, k, cut, of)))

    def finish(self, module: Any) -> None:
        """Give the experts' codes to their modules, once everything is read."""
        for path, found in self._experts.items():
            part = module.get_submodule(path)
            up = found["gate_up_proj" if part.has_gate else "up_proj"]
            hold_experts(part, up, found["down_proj"], self._dtype)
        self._experts.clear()

    # -------------------------------------------------------------------------------------------------------- inside

    def _projections(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, int, int]]:
        """Return the paths, rows and columns of the quantised projections of a parameter; none: it is plain."""
        for stored in stored_names(name):
            path, _, last = stored.rpartition(".")
            if last == "weight" and len(shape) == 2 and self._published.covers(path, self._stored):
                return [(path, *shape)]
            for parts in JOINED.get(last, ()):
                numbers = sorted(self._numbers.get(path, ()))
                rows = shape[1] // len(parts)
                found = [(f"{path}.{number}.{part}", rows, shape[2]) for number in numbers for part in parts]
                if found and all(self._published.covers(each, self._stored) for each, *_ in found[: len(parts)]):
                    return found
        return []

    def _blocks(self, name: str) -> str | None:
        """Return the stored name, without its end, of experts in mxfp4; None: they are not."""
        if not isinstance(self._published, Mxfp4):
            return None
        return next((each for each in stored_names(name) if f"{each}_blocks" in self._stored), None)

    def _names(self, path: str, n: int, k: int) -> list[str]:
        if k % COLUMNS[self._published.kind]:
            problem = f"its projection {path} has {k} columns, which is not a multiple of"
            raise UnsupportedModel(self._model, f"{problem} {COLUMNS[self._published.kind]}")
        return check_tensors(self._published, path, n, k, self._stored, self._model)

    def _use(self, path: str, names: Sequence[str]) -> None:
        self.used |= {f"{path}.{each}" for each in (*names, *self._published.ignored(path))} & self._stored.keys()

    def _cut(self, path: str, n: int, k: int, cut: TensorSlice, of: Mapping[str, Any]) -> Codes:
        """Return this rank's part of a projection [n, k]."""
        names = self._names(path, n, k)
        self._use(path, names)
        tensors = {each: of[f"{path}.{each}"].get_slice(f"{path}.{each}")[...] for each in names}
        try:
            codes = self._published.codes(tensors, n, k)
            if not bool(codes.scales.isfinite().all()):
                raise ValueError(f"{names[-1]} holds NaN or infinity")
        except ValueError as error:
            raise UnsupportedModel(self._model, f"its tensor {path}.{error}") from error
        if cut.is_whole:
            return codes
        try:
            if cut.dimension == 0:
                parts = [codes.rows(slice(*each)) for each in cut.ranges]
                return self._joined(parts)
            ((first, stop),) = cut.ranges
            return codes.columns(first, stop)
        except ValueError as error:
            raise UnsupportedModel(
                self._model, f"its projection {path} cannot be divided among ranks: {error}"
            ) from error

    def _alone(self, path: str, n: int, k: int, cut: TensorSlice, of: Mapping[str, Any]) -> Codes:
        """Return this rank's part of a projection of one expert, with its columns in order."""
        codes = self._cut(path, n, k, cut, of)
        if codes.order is None:
            return codes
        log.info("%s is quantised anew, to int8: its columns are in the order of activations", path)
        return quantise_codes(codes.widened(), "int8")

    def _joined(self, parts: Sequence[Codes]) -> Codes:
        joined = parts[0] if len(parts) == 1 else join_rows(parts)
        assert joined is not None, "parts of one format have one layout"
        return joined

    def _kept(self, path: str, codes: Codes) -> Codes:
        """Return the codes, in 8 bits if no kernel multiplies them as they are."""
        group = codes.group if codes.group != codes.shape[-1] else 0
        problem = stored_problem(codes.shape, codes.code, group, codes.zeros is not None)
        if not self._keeps or not problem:
            return codes
        log.info("%s is quantised anew, to int8: %s", path, problem)
        return quantise_codes(codes.widened(), "int8")

    def _mxfp4(self, name: str, cut: TensorSlice, of: Mapping[str, Any]) -> Codes:
        blocks, scales = (of[f"{name}_{each}"].get_slice(f"{name}_{each}") for each in ("blocks", "scales"))
        self.used |= {f"{name}_blocks", f"{name}_scales"}
        if not cut.is_whole and cut.dimension != 0:
            problem = f"its tensor {name}_blocks holds whole experts: several ranks need expert_parallel"
            raise UnsupportedModel(self._model, problem)
        index: Any = ... if cut.is_whole else (slice(*cut.ranges[0]),)
        try:
            return codes_of_experts(blocks[index], scales[index])
        except ValueError as error:
            raise UnsupportedModel(self._model, f"its tensor {name}_{error}") from error

    def _check_blocks(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the tensors of experts in mxfp4. shape: [experts, k, rows], of the whole parameter.

        Raises:
            UnsupportedModel: Names the tensor.
        """
        stored = self._blocks(name)
        if stored is None:
            return
        experts, k, rows = shape
        wanted = {"blocks": (experts, rows, k // GROUP, GROUP // 2), "scales": (experts, rows, k // GROUP)}
        for end, sizes in wanted.items():
            found = self._stored.get(f"{stored}_{end}")
            if found is None or found.type_name != "U8" or tuple(found.shape) != sizes:
                has = "missing" if found is None else f"{found.type_name} {list(found.shape)}"
                problem = f"its tensor {stored}_{end} is {has}, and has to be U8 {list(sizes)}"
                raise UnsupportedModel(self._model, f"{problem}: mxfp4 has a scale for each {GROUP} numbers")

    def _put(self, module: Any, path: str, codes: Codes) -> None:
        parent, _, last = path.rpartition(".")
        owner, codes = module.get_submodule(parent), codes.to(self._device.torch_device)
        part = getattr(owner, last)
        if self._mixers is None:
            mixers = {id(each) for each in mixers_of(module)}
            self._mixers = tuple(f"{name}." for name, each in module.named_modules() if id(each) in mixers)
        if self._keeps and not path.startswith(self._mixers):  # recurrent layers multiply numbers
            made = CodedLinear(StoredWeight(codes, self._dtype), slice(None), None)
            made._parameters["bias"] = part._parameters.get("bias")
            setattr(owner, last, made)
            return
        part._parameters["weight"] = torch.nn.Parameter(codes.widened(self._dtype), requires_grad=False)

    def _put_experts(self, module: Any, path: str, last: str, codes: Codes, is_transposed: bool) -> None:
        codes = codes.to(self._device.torch_device)
        if self._keeps:
            self._experts.setdefault(path, {})[last] = with_exponents(codes, self._dtype)
            return
        experts, n, k = codes.shape
        shape = (experts, k, n) if is_transposed else (experts, n, k)
        filled = torch.empty(shape, dtype=self._dtype, device=codes.words.device)
        for index in range(experts):
            wide = codes.of_expert(index).widened(self._dtype)
            filled[index] = wide.t() if is_transposed else wide
        module.get_submodule(path)._parameters[last] = torch.nn.Parameter(filled, requires_grad=False)
