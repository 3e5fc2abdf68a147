"""Ranks that divide the experts answer as one process does, for every described family, and hold their part alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.config import WorkerConfig
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.slices import slices_of
from tests import fresh
from tests.amount import examples
from tests.worker.conftest import TINY
from tests.worker.loading.covering import EXPERTS, by_parts, covering
from tests.worker.loading.random_models import DESCRIBED, save
from tests.worker.loading.several import say, several

pytestmark = pytest.mark.usefixtures("quick_loads")

COMPANY = 3 + examples(3)
SIZES = {"vocab_size": 256, "max_position_embeddings": 2048}
KINDS = (
    "ernie4_5_moe",
    "gemma4 with experts",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_moe",
    "llama4",
    "mimo_v2_flash",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
# In `make test`, in company too: every part that experts and their router have. The other kinds are soak tests, and a
# third of them runs in company on each day. test_split.py has the other parts of layers.
FEW = covering(KINDS, within=EXPERTS)
OTHERS = [kind for kind in KINDS if kind not in FEW]
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}  # for three ranks
ON_GPUS = ("qwen3_moe", "mixtral", "gpt_oss")
THROUGH_TRANSFORMERS = ("gemma4 with experts", "minimax_m2", "olmoe")  # see `can_be_split`


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder_of(kind) -> its checkpoint, written once."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def write(kind: str) -> Path:
        return save(root / kind.replace(" ", "_"), DESCRIBED[kind][0], {**DESCRIBED[kind][1], **SIZES})

    return write


def answers(
    kinds: Sequence[str], folder_of: Callable[[str], Path], meeting: Path, in_company: bool
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of each of two ranks by kind. One pair of processes loads all models: its start is slow."""
    models = [(folder_of(kind), "float32", "dtype") for kind in kinds]
    told = several(2, models, meeting, asked=2, company=COMPANY if in_company else 0, expert_parallel=True)
    return {kind: [rank[place] for rank in told] for place, kind in enumerate(kinds)}


@pytest.fixture(scope="module")
def of_two(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """of_two(kind) -> the answers of each of two ranks: the kinds of `make test` together, and the others together."""

    @cache
    def answers_of(is_in_few: bool) -> dict[str, list[dict[str, Any]]]:
        meeting = tmp_path_factory.mktemp("meeting") / "two"
        return answers(FEW if is_in_few else OTHERS, folder_of, meeting, in_company=is_in_few)

    return lambda kind: answers_of(kind in FEW)[kind]


@pytest.mark.parametrize("kind", by_parts(KINDS, within=EXPERTS))
def test_two_ranks_say_what_one_says(
    kind: str, folder_of: Callable[[str], Path], of_two: Callable[[str], list[dict[str, Any]]]
) -> None:
    alone, (first, second) = say(folder_of(kind), "float32", "dtype", asked=2), of_two(kind)
    assert "error" not in first, first
    assert first["said"] == second["said"], "both draw the same tokens, with the same bits"
    assert [[token for token, _ in each] for each in first["said"]] == [
        [token for token, _ in each] for each in alone["said"]
    ]
    assert first["company"] == second["company"] == "", "the same bits in every company"
    assert first["fused"] == second["fused"] == (kind not in THROUGH_TRANSFORMERS)
    assert first["determinism"] == alone["determinism"]


def test_other_kinds_have_the_same_bits_in_company(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    others = fresh.of_the_day(OTHERS, 3)
    print(others)
    for first, second in answers(others, folder_of, tmp_path / "two", in_company=True).values():
        assert "error" not in first, first
        assert first["company"] == second["company"] == "", "the same bits in every company"


@pytest.mark.parametrize(
    ("model_type", "fields", "problem"),
    [
        ("llama", {}, "LlamaForCausalLM has no experts that can be divided; use false"),
        ("mixtral", {"num_local_experts": 3}, "has 3 experts for 4 ranks; use at most 3 ranks, or false"),
    ],
)
def test_what_cannot_be_divided_is_refused(model_type: str, fields: dict[str, Any], problem: str) -> None:
    module = without_weights(model_type, fields)
    with pytest.raises(InvalidConfiguration, match="expert_parallel: true: ") as refused:
        slices_of(module, 0, 4, expert_parallel=True)
    assert problem in str(refused.value)


def test_one_rank_has_nothing_to_divide() -> None:
    with pytest.raises(InvalidConfiguration, match="expert_parallel: true, but ranks is 1; set ranks"):
        WorkerConfig(name="w", model="m", expert_parallel=True)
    assert WorkerConfig(name="w", model="m", expert_parallel=True, ranks=2).expert_parallel


def test_ranks_have_every_expert_once() -> None:
    """Seven experts over three ranks: two, two and three."""
    module = without_weights("mixtral", {"num_local_experts": 7, **THREE})
    ranges = [slices_of(module, rank, 3, expert_parallel=True).experts for rank in range(3)]
    of_layer = [each["model.layers.1.mlp.experts"] for each in ranges]
    assert [(each.first, each.stop, each.total) for each in of_layer] == [(0, 2, 7), (2, 4, 7), (4, 7, 7)]


def without_weights(model_type: str, fields: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, "vocab_size": 96, **fields})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("collectives", ["auto", "nccl"])
def test_two_gpus_say_what_one_says(collectives: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """In graphs, with sums through each other's memory and through the library."""
    device, chosen = open_device("cuda"), {kind: folder_of(kind) for kind in ON_GPUS}
    models = [(folder, "float32", "dtype") for folder in chosen.values()]
    told = several(
        2, models, tmp_path / "here", 2, device="cuda", collectives=collectives, company=20, expert_parallel=True
    )
    for place, folder in enumerate(chosen.values()):
        alone, first, second = say(folder, "float32", "dtype", asked=2, device=device), told[0][place], told[1][place]
        assert "error" not in first, first
        assert first["said"] == second["said"], "both draw the same tokens, with the same bits"
        assert [[token for token, _ in each] for each in first["said"]] == [
            [token for token, _ in each] for each in alone["said"]
        ]
        assert first["company"] == second["company"] == ""
        assert ("each other's memory" in first["ranks"]) == (collectives == "auto"), first["ranks"]
