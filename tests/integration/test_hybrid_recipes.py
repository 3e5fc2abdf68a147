"""The recipes of `hybrid_recipes` give the answers of an empty cache, with every family of hybrids."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fresh
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE, RECURRENT, save

from . import hybrid_recipes

pytestmark = [NEEDS_CACHE, pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")]


def _save(name: str, folder: Path) -> Path:
    model_type, fields = HYBRIDS[name]
    return save(folder / "model", model_type, {**fields, "max_position_embeddings": 4096})


def test_the_recipes(tmp_path: Path) -> None:
    """behaviours 15, 28, 35, in the family with the cheapest layers."""
    hybrid_recipes.run(_save("lfm2", tmp_path), 600, thorough=False)


@pytest.mark.parametrize("name", fresh.of_the_day(HYBRIDS, 3))
def test_the_recipes_with_thousands_of_tokens(name: str, tmp_path: Path) -> None:
    """A third of the families on each day: with all, they took a fifth of the soak tests' time.

    Mamba 1 has 1,000 tokens: its scan is a loop over tokens, which took five minutes of one core.
    """
    room = 120 if name in RECURRENT else 60  # a block without K and V is small, and a state has a dozen of them
    tokens = 1000 if name in ("falcon_mamba", "mamba") else 2500
    hybrid_recipes.run(_save(name, tmp_path), tokens, thorough=tokens == 2500, room=room)


@pytest.mark.parametrize("name", fresh.of_the_day(["granite", "lfm2", "qwen3_next"], 3))
def test_the_recipes_in_16_bits(name: str, tmp_path: Path) -> None:
    hybrid_recipes.run(_save(name, tmp_path), 600, "bfloat16")
