"""Two ranks divide layers with a recurrent state by heads: they answer as one process does, with bits of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import fresh
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE, save
from tests.worker.loading.several import say, several

pytestmark = [NEEDS_CACHE, pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")]
TOLERANCE = 1e-4  # of a log-probability
ONE_GROUP = {"mamba_n_groups": 1}  # of B and C, which both ranks have
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **HYBRIDS,
    "granite with one group": ("granitemoehybrid", {**HYBRIDS["granite"][1], **ONE_GROUP}),
    "falcon_h1 with one group": (
        "falcon_h1",
        {**HYBRIDS["falcon_h1"][1], **ONE_GROUP, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
}
FUSED = (
    "bamba",
    "falcon_h1",
    "falcon_h1 with one group",
    "granite",
    "granite with one group",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "nemotron_h with experts",
    "nemotron_h with latent experts",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
)
REFUSED = {
    "olmo_hybrid": "ranks = 2: its OlmoHybridGatedDeltaNet keeps a recurrent state, which several ranks cannot divide",
}


# In `make test`; the others are a soak test, a third on each day.
FEW = ("lfm2", "qwen3_next")
OTHERS = tuple(name for name in MODELS if name not in FEW)


def save_model(name: str, root: Path) -> Path:
    model_type, fields = MODELS[name]
    return save(root / name.replace(" ", "_"), model_type, {**fields, "vocab_size": 98})


def answers(names: Sequence[str], root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return by name the answers of one rank alone and of two. One pair of processes loads all models."""
    folders = [save_model(name, root) for name in names]
    first, second = several(2, [(folder, "float32", "dtype") for folder in folders], root / "meeting")
    return {
        name: [say(folders[place], "float32", "dtype"), first[place], second[place]] for place, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return answers(FEW, tmp_path_factory.mktemp("few"))


@pytest.mark.parametrize("name", FEW)
def test_two_ranks_say_what_one_says(name: str, few: dict[str, list[dict[str, Any]]]) -> None:
    """behaviours 15, 28."""
    check(name, *few[name])


def test_the_same_with_other_families(tmp_path: Path) -> None:
    names = fresh.of_the_day(OTHERS, 3)
    print(names)
    for name, found in answers(names, tmp_path).items():
        if name in REFUSED:
            assert all(REFUSED[name] in rank.get("error", "") for rank in found[1:])
        else:
            check(name, *found)


def check(name: str, alone: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    assert "error" not in first, first
    assert first["said"] == second["said"], "both draw the same tokens, with the same bits"
    for (token, logprob), (wanted, near) in zip(first["said"], alone["said"], strict=True):
        assert token == wanted and abs(logprob - near) < TOLERANCE
    assert first["fused"] == alone["fused"] == (name in FUSED)
    assert first["state"] <= 0.75 * alone["state"] and first["bytes"] < 0.8 * alone["bytes"]
