"""The recipes of `hybrid_recipes` give the answers of an empty cache, with every family of hybrids."""

from __future__ import annotations

import os
from datetime import date
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


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_recipes_with_thousands_of_tokens(name: str, tmp_path: Path) -> None:
    """Each family has 2,500 tokens on every other day (KVFORGE_DAY), and 1,000 on the others.

    With 2,500 for each, they took a fifth of the soak tests' time. Mamba 1 alone always has 1,000: its scan is a loop
    over tokens, which took five minutes of one core.
    """
    room = 120 if name in RECURRENT else 60  # a block without K and V is small, and a state has a dozen of them
    slow = name in ("falcon_mamba", "mamba")
    day = date.fromisoformat(os.environ[fresh.DAY]).toordinal()
    tokens = 2500 if (day + [*HYBRIDS].index(name)) % 2 and not slow else 1000
    hybrid_recipes.run(_save(name, tmp_path), tokens, thorough=tokens == 2500, room=room)


@pytest.mark.parametrize("name", ["granite", "lfm2", "qwen3_next"])
def test_the_recipes_in_16_bits(name: str, tmp_path: Path) -> None:
    hybrid_recipes.run(_save(name, tmp_path), 600, "bfloat16")
