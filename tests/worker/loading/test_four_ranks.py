"""Four ranks answer as one process does for every style of plan, and each holds no more than its part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import fresh
from tests.worker.loading.random_models import DESCRIBED, save
from tests.worker.loading.several import say, several

COUNT, COMPANY = 4, 4
SIZES = {"vocab_size": 256, "max_position_embeddings": 2048}
# Name: the model, its settings, whether experts are divided, and the K and V heads of each rank.
PLANS: dict[str, tuple[str, dict[str, Any], bool, int]] = {
    "dense": ("llama", {"num_key_value_heads": 4, "attention_bias": True}, False, 1),
    "K and V heads of two ranks each": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}, False, 1),
    "one K and V head": ("qwen2", {"num_key_value_heads": 1}, False, 1),
    "gathered outputs": ("olmo2", {"num_key_value_heads": 4}, False, 4),  # each rank attends with all heads
    "joined projections": ("phi3", {"num_key_value_heads": 2}, False, 1),  # two ranks share a K and V head
    "a part of each expert": ("qwen3_moe", DESCRIBED["qwen3_moe"][1], False, 1),
    "a part of shared experts too": ("glm4_moe", DESCRIBED["glm4_moe"][1], False, 1),
    "two experts": ("qwen3_moe", DESCRIBED["qwen3_moe"][1], True, 1),
    "two experts, shared experts cut": ("glm4_moe", DESCRIBED["glm4_moe"][1], True, 1),
    "two experts in the layout of gpt-oss": ("gpt_oss", DESCRIBED["gpt_oss"][1], True, 1),
    "one or two experts": ("mixtral", {"num_local_experts": 7, "num_experts_per_tok": 3}, True, 1),
}
# In `make test`: the plans that two ranks cannot have, with a part of the experts and without. The others are a soak
# test, a third on each day. test_split.py and test_expert_parallel.py have every style for two ranks.
FEW = ("K and V heads of two ranks each", "one or two experts")
OTHERS = tuple(plan for plan in PLANS if plan not in FEW)
# In each rank, as are K and V heads of several ranks. Rank 0 alone has the biases of sums.
WHOLE = ("embed", "norm", "mlp.gate.", "router", "correction_bias", "o_proj.bias")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        plan: save(root / str(number), model_type, {**fields, **SIZES})
        for number, (plan, (model_type, fields, _, _)) in enumerate(PLANS.items())
    }


def answers(plans: Sequence[str], folders: dict[str, Path], meeting: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of each rank by plan. Two groups of processes load all models."""
    found = {}
    for divides in (False, True):
        chosen = [plan for plan in plans if PLANS[plan][2] == divides]
        if not chosen:
            continue
        models = [(folders[plan], "float32", "dtype") for plan in chosen]
        place = meeting / str(divides)
        told = several(COUNT, models, place, asked=2, company=COMPANY, expert_parallel=divides)
        found |= {plan: [rank[number] for rank in told] for number, plan in enumerate(chosen)}
    return found


@pytest.fixture(scope="module")
def of_four(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return answers(FEW, folders, tmp_path_factory.mktemp("meeting"))


@pytest.mark.parametrize("plan", FEW)
def test_four_ranks_say_what_one_says(
    plan: str, folders: dict[str, Path], of_four: dict[str, list[dict[str, Any]]]
) -> None:
    check_answers(plan, folders[plan], of_four[plan])


@pytest.mark.parametrize("plan", FEW)
def test_a_rank_holds_its_part_alone(
    plan: str, folders: dict[str, Path], of_four: dict[str, list[dict[str, Any]]]
) -> None:
    check_parts(plan, folders[plan], of_four[plan])


def test_with_other_plans_too(folders: dict[str, Path], tmp_path: Path) -> None:
    plans = fresh.of_the_day(OTHERS, 3)
    print(plans)
    for plan, ranks in answers(plans, folders, tmp_path).items():
        check_answers(plan, folders[plan], ranks)
        check_parts(plan, folders[plan], ranks)


def check_answers(plan: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    alone = say(folder, "float32", "dtype", asked=2)
    assert "error" not in ranks[0], ranks[0]
    assert all(rank["said"] == ranks[0]["said"] for rank in ranks), "all draw the same tokens, with the same bits"
    assert [[token for token, _ in each] for each in ranks[0]["said"]] == [
        [token for token, _ in each] for each in alone["said"]
    ]
    assert not any(rank["company"] for rank in ranks), "the same bits in every company"
    assert {rank["kv_heads"] for rank in ranks} == {PLANS[plan][3]}


def check_parts(plan: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    sizes = {name: tensor.nbytes for name, tensor in module.state_dict().items()}
    tied = module.config.tie_word_embeddings
    kv_heads = module.config.num_key_value_heads
    limit, divided = 0.0, 0
    for name, size in sizes.items():
        if ".experts." in name and PLANS[plan][2]:
            divided += size
        elif any(part in name for part in WHOLE) or (tied and name == "lm_head.weight"):
            limit += size
        elif ".qkv_proj" in name:
            heads, both = module.config.num_attention_heads, 2 * kv_heads
            limit += size * (heads / COUNT + both / min(COUNT, kv_heads)) / (heads + both)
        elif ".k_proj" in name or ".v_proj" in name:
            limit += size / min(COUNT, kv_heads)
        else:
            limit += size / COUNT
    held = [rank["bytes"] for rank in ranks]
    most = divided * (2 / 7 if plan == "one or two experts" else 1 / COUNT)
    assert max(held) <= 1.001 * (limit + most), (held, limit, divided)
    assert sum(held) >= sum(sizes.values()) - sizes.get("lm_head.weight", 0) * tied, "nothing is left out"
