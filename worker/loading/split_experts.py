"""One rank's experts in transformers' modules (expert parallelism): the experts of other ranks add nothing.

Described layers leave them out by themselves: see `kernels.router.Router.held`.
"""

from __future__ import annotations

from typing import Any

import torch

from kvforge.worker.kernels.experts import is_experts

from .slices import ExpertRange

FIRST_HELD = "_kvforge_first_held"  # attribute of a module of experts: the number of its first expert in the model


def first_held(part: Any) -> int:
    """Return the number of a module's first expert in the whole model."""
    return int(getattr(part, FIRST_HELD, 0))


def leave_out_others(part: Any, held: ExpertRange) -> None:
    """Register hooks on a module of experts that has only those of this rank.

    Args:
        part: transformers' module, with the weights of `held` alone.
        held: The experts that it has.
    """
    if is_experts(part):
        part.register_forward_pre_hook(_Renumbered(held))
    else:  # Llama 4's: rows of all experts one after the other
        part.register_forward_pre_hook(_OwnRows(held))
        part.register_forward_hook(_AllRows(held))


class _Renumbered:
    """Renumbers the chosen experts. Those of other ranks become the first one, with weight 0."""

    def __init__(self, held: ExpertRange) -> None:
        self._held = held

    def __call__(self, _part: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, chosen, weights, *others = given
        here = (chosen >= self._held.first) & (chosen < self._held.stop)
        return (x, torch.where(here, chosen - self._held.first, 0), torch.where(here, weights, 0.0), *others)


class _OwnRows:
    """Keeps the rows of this rank's experts."""

    def __init__(self, held: ExpertRange) -> None:
        self._held = held

    def __call__(self, _part: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        tokens = len(given[0]) // self._held.total
        return (given[0][self._held.first * tokens : self._held.stop * tokens],)


class _AllRows:
    """Adds rows of zeros for the experts of other ranks."""

    def __init__(self, held: ExpertRange) -> None:
        self._held = held

    def __call__(self, _part: Any, _given: Any, output: torch.Tensor) -> torch.Tensor:
        held = self._held
        tokens = len(output) // (held.stop - held.first)
        before, after = held.first * tokens, (held.total - held.stop) * tokens
        return torch.nn.functional.pad(output, (0, 0, before, after))
