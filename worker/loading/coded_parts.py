"""Parts of a transformers model with weights in codes (see `kernels.stored`).

They compute what the model's own parts would with the numbers of the codes, slowly: a weight is widened for each call
and kept nowhere. `fusion` gives the same codes to the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.experts import Experts, find_activation
from kvforge.worker.kernels.packed import PackedRows
from kvforge.worker.kernels.plain import PlainOperations
from kvforge.worker.kernels.stored import Codes, StoredWeight, join_alike, with_exponents


class CodedLinear(PackedRows):
    """Replaces a Linear by some rows of a weight in codes.

    Args:
        weight: The weight [rows of all parts, k].
        rows: The part's rows.
        bias: [n] in the order of these rows, or None.
        order: See `PackedRows`.
    """

    def __init__(
        self, weight: StoredWeight, rows: slice, bias: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> None:
        super().__init__(weight, rows, bias, order)
        self._stored = weight
        first, stop, _ = rows.indices(len(weight))
        self.out_features, self.in_features = stop - first, weight.shape[1]

    @property
    def codes(self) -> Codes:
        """The codes of these rows, in the order of the weight."""
        return self._stored.codes.rows(self._rows)

    @property
    def stored(self) -> StoredWeight:
        """The weight that these rows belong to."""
        return self._stored

    @property
    def weight(self) -> torch.Tensor:
        """The weight [n, k] in the dtype of the model, a new tensor."""
        return self._in_order(self.codes.widened(self._stored.dtype))


def coded_linears(parts: Sequence[Any], orders: Sequence[torch.Tensor | None]) -> StoredWeight | None:
    """Return the joined weight of projections in codes; None if one of them is not, or they have none in common.

    Args:
        parts: The projections.
        orders: For each the order of its rows in the result, [n] int64; None: as they are.
    """
    if not all(isinstance(part, CodedLinear) for part in parts):
        return None
    found = [
        part.codes if order is None else part.codes.in_row_order(order)
        for part, order in zip(parts, orders, strict=True)
    ]
    joined = found[0] if len(found) == 1 else join_alike(found)
    dtype = parts[0].stored.dtype
    return None if joined is None else StoredWeight(with_exponents(joined, dtype), dtype)


def hold_experts(part: Any, up: Codes, down: Codes, dtype: torch.dtype) -> None:
    """Let a transformers module of experts compute with weights in codes, and release its own.

    Args:
        part: The module.
        up: [experts, rows, k] of gate and up.
        down: [experts, hidden, n].
        dtype: Dtype of the model.
    """
    name = "gate_up_proj" if part.has_gate else "up_proj"
    biases = [getattr(part, f"{each}_bias").detach() if part.has_bias else None for each in (name, "down_proj")]
    part.down_proj = torch.nn.Parameter(torch.empty(0, device=up.words.device), requires_grad=False)
    activation, interleaved = find_activation(part)
    for each in (name, "down_proj"):
        delattr(part, each)
    first, second = (StoredWeight(with_exponents(each, dtype), dtype) for each in (up, down))
    matrices = ExpertMatrices(first, biases[0], second, biases[1])
    part.forward = Experts(part, PlainOperations(), matrices, activation, interleaved)


def coded_experts(part: Any) -> Experts | None:
    """Return the forward pass that `hold_experts` gave a module; None: it has its own."""
    found = part.__dict__.get("forward")
    return found if isinstance(found, Experts) and isinstance(found.matrices.up, StoredWeight) else None


def coded_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of every weight in codes, by name."""
    for name, part in module.named_modules():
        if isinstance(part, CodedLinear):
            found = {"weight": part.stored}
        elif (experts := coded_experts(part)) is not None:
            found = {"up": experts.matrices.up, "down": experts.matrices.down}  # type: ignore[dict-item]
        else:
            continue
        for which, weight in found.items():
            for number, tensor in enumerate(weight.codes.tensors()):
                yield f"{name}.{which}.{number}", tensor


def has_codes(module: Any) -> bool:
    """Return whether any weight of a model is in codes."""
    return next(coded_tensors(module), None) is not None
