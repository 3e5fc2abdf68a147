"""Puts the weights of a model into codes that a GPU's kernels multiply (see `kernels.stored`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvforge.worker.device.device import Device
from kvforge.worker.device.targets import current_target
from kvforge.worker.kernels import LayerOperations
from kvforge.worker.kernels.stored import StoredWeight, quantise_codes, stack_experts, stored_problem

CODES = {"fp8": "e4m3", "int8": "int8", "int4": "int4"}  # by the name of the setting
HEAD_CODES = CODES | {"int4": "int8"}  # 4 bits cost more there than they save
log = logging.getLogger("worker")


def codes_problem(device: Device, dtype: torch.dtype) -> str:
    """Return why a GPU does not multiply weights in codes for a model of `dtype`; "" if it does."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.bfloat16, torch.float16):
        return f"products with {name} are not quantised on a GPU: use dtype bfloat16 or float16"
    target = current_target(device)
    if target.backend == "cuda" and not target.matrix:
        return f"{device.name} has no matrix instructions that the kernels can use"
    return ""


def codes_made(kind: str) -> frozenset[str]:
    """Return the codes of the weights that `CodePacker` makes for a setting."""
    return frozenset({CODES[kind], HEAD_CODES[kind]})


class CodePacker:
    """Quantises the joined weights of a transformers model; see `quantisation.Packer`.

    Args:
        operations: The operations that multiply them.
        kind: A key of `CODES`.
        module: The transformers model.
    """

    quantises = True

    def __init__(self, operations: LayerOperations, kind: str, module: Any) -> None:
        self._operations, self._kind = operations, kind
        self._head = id(module.lm_head)  # an id, not a reference, so that the weight can be freed

    @property
    def operations(self) -> LayerOperations:
        """The operations that multiply by packed weights."""
        return self._operations

    def pack(self, weight: torch.Tensor, parts: Sequence[Any], is_reordered: bool = False) -> torch.Tensor:  # noqa: ARG002
        """Quantise a weight.

        Args:
            weight: The joined weight [n, k].
            parts: The Linears that it was joined from.
            is_reordered: Whether the rows are in another order than those of the parts in the file.

        Returns:
            The weight in codes; the same weight if its shape does not allow that.
        """
        return self._quantised(weight, (HEAD_CODES if id(parts[0]) == self._head else CODES)[self._kind])

    def pack_experts(self, matrices: torch.Tensor, owner: Any) -> torch.Tensor:  # noqa: ARG002
        """Quantise the weights of all experts of a layer.

        Args:
            matrices: [experts, n, k].
            owner: The module of the experts.

        Returns:
            The weights, as `pack` returns one.
        """
        return self._quantised(matrices, CODES[self._kind])

    def _quantised(self, weight: torch.Tensor, code: str) -> torch.Tensor:
        if isinstance(weight, StoredWeight):  # of experts in other codes, one by one
            parts = [quantise_codes(each.widened(), code) for each in weight]
            return StoredWeight(stack_experts(parts), weight.dtype)
        if problem := stored_problem(weight.shape, code):
            log.info("a weight of %s stays in %s: %s", list(weight.shape), weight.dtype, problem)
            return weight
        return StoredWeight(quantise_codes(weight, code), weight.dtype)
