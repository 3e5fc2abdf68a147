"""Sums of ranks through each other's memory: which models use it, in what order, and with the bits of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvforge.worker.device.exchange import ATTENTION, INNER
from kvforge.worker.loading.model import LoadedModel
from tests.worker.loading.random_models import DESCRIBED
from tests.worker.step.company import Alone, Request

pytestmark = pytest.mark.usefixtures("quick_loads")
PLAIN_SUMS = ("gpt_oss", "qwen3_moe", "mixtral", "mimo_v2_flash")
OTHER_SUMS = ("granitemoe", "gemma3", "cohere", "olmo2")


class OtherRankIsZero:
    """Two ranks as seen by one; the parts of the other one are zeros. Its memory is the `Sharing` too if it shares."""

    def __init__(self, model: LoadedModel, shares: bool) -> None:
        assert model.fused is not None
        self.count, self.rank, self.used = 2, 0, list[int]()
        self.shared = self if shares else None
        self._operations, self._places = model.fused.operations, dict[int, torch.Tensor]()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack((part, torch.zeros_like(part)))

    def place(self, which: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        self._places[which] = torch.full(shape, float("nan"), dtype=dtype)
        return self._places[which]

    def add_norm(self, which: int, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        self.used.append(which)
        return self._operations.add_norm(self.gather(self._places[which]), residual, weight, epsilon)


def say(model: LoadedModel, ranks: Any) -> list[tuple[int, int]]:
    assert model.fused is not None
    alone = Alone(replace(model, fused=replace(model.fused, ranks=ranks)), 0)
    try:
        return alone.say(Request(0, [5, 6, 7, 8, 9], 8, 2, 0.0))
    finally:
        alone.close()


@pytest.mark.parametrize("kind", PLAIN_SUMS)
def test_a_mixture_shares_memory_with_the_bits_of_the_library(kind: str, tiny: Callable[..., LoadedModel]) -> None:
    model_type, fields = DESCRIBED[kind]
    model = tiny(model_type, **{"num_hidden_layers": 3, **fields})
    assert model.fused is not None and model.fused.sums_into_norms
    sharing, library = OtherRankIsZero(model, shares=True), OtherRankIsZero(model, shares=False)
    assert say(model, sharing) == say(model, library)
    assert sharing.used[:2] == [ATTENTION, INNER] and not library.used
    assert all(one != other for one, other in pairwise(sharing.used)), "no buffer twice in a row"


@pytest.mark.parametrize("kind", OTHER_SUMS)
def test_other_sums_go_through_the_library(kind: str, tiny: Callable[..., LoadedModel]) -> None:
    model_type, fields = DESCRIBED[kind]
    model = tiny(model_type, **{"num_hidden_layers": 3, **fields})
    assert model.fused is not None and not model.fused.sums_into_norms
