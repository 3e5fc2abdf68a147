"""A draft model in real processes: answers keep their bits, and its K and V follow hits, forks, preemption and deaths.

The model is its draft model with layers behind that add zeros, so that the two choose the same greedy tokens: each
greedy draft must be accepted, wherever its K and V come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvforge import Client
from kvforge.client.results import Finished
from tools.cluster.cluster import Cluster
from tools.cluster.running import CONFIG

from .drafting_checks import (
    COORDINATOR,
    VOCABULARY,
    WAIT_S,
    answers_without,
    check_answers,
    check_disk_tier,
    check_hits_and_forks,
    check_host_tier,
    check_preemption_and_death,
    submitted,
)
from .drafting_cluster import NO_DRAFTS, DraftingCluster
from .shared import wait_empty

LAYERS = 4


def write_models(folder: Path, seed: int = 0, **fields: int) -> tuple[Path, Path]:
    """Write a draft model of one layer, and a model that computes the same in more layers.

    Args:
        folder: Where to make the folders.
        seed: Of the weights.
        fields: Changes of the configuration.

    Returns:
        The folders of the model and of its draft model.
    """
    config = CONFIG | {"vocab_size": VOCABULARY} | fields
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = hidden // config["num_attention_heads"]
    rows = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rows) * 0.3

    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (2 * size, hidden)}
    shapes |= {"self_attn.v_proj": (2 * size, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    ends = {"model.embed_tokens": made(config["vocab_size"], hidden), "lm_head": made(config["vocab_size"], hidden)}
    weights = {f"{name}.weight": tensor for name, tensor in ends.items()} | {"model.norm.weight": torch.ones(hidden)}
    folders = []
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            adds = layer == 0 or name not in ("self_attn.o_proj", "mlp.down_proj")
            weights[f"model.layers.{layer}.{name}.weight"] = made(*shape) if adds else torch.zeros(shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
        if layer in (0, LAYERS - 1):
            place = folder / f"{seed}-of-{layer + 1}"
            place.mkdir()
            save_file(weights, place / "model.safetensors", {"format": "pt"})
            own = {"num_hidden_layers": layer + 1, "num_key_value_heads": 2, "tie_word_embeddings": False}
            (place / "config.json").write_text(json.dumps(config | own))
            folders.append(place)
    draft, model = folders
    return model, draft


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def want(models: tuple[Path, Path]) -> list[Finished]:
    """The answers of a service without a draft model."""
    with Cluster(model=models[0], coordinator=NO_DRAFTS) as cluster:
        return answers_without(cluster.start("w0"))


@pytest.fixture(scope="module")
def cluster(models: tuple[Path, Path]) -> Iterator[Cluster]:
    with DraftingCluster(model=models[0], coordinator=COORDINATOR, worker=f'draft_model = "{models[1]}"\n') as cluster:
        cluster.start("w0")
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    kv = cluster.client()
    yield kv
    wait_empty(kv)


def test_answers_are_those_without_a_draft_model(kv: Client, want: list[Finished]) -> None:
    (worker,) = kv.health().workers
    assert (worker.drafts, worker.kernels["drafts"].startswith("lookup, and 0-of-1 in float32")) == (4, True)
    check_answers(kv, want)
    stop = want[2].tokens[30]
    found = submitted(kv, 2, stop_tokens=(stop,)).result(WAIT_S)
    assert (found.tokens, found.reason) == (want[2].tokens[: want[2].tokens.index(stop) + 1], "stop")


def test_hits_and_forks_bring_the_keys_and_values_of_the_draft_model(kv: Client) -> None:
    check_hits_and_forks(kv)


def test_preempted_requests_and_those_of_a_killed_worker_go_on(models: tuple[Path, Path], want: list[Finished]) -> None:
    check_preemption_and_death(models[0], f'draft_model = "{models[1]}"\n', want)


def test_the_host_tier_keeps_the_draft_model_and_another_one_is_a_miss(
    models: tuple[Path, Path], want: list[Finished], tmp_path: Path
) -> None:
    _, other = write_models(tmp_path, seed=1)
    check_host_tier(models[0], f'draft_model = "{models[1]}"\n', want, f'draft_model = "{other}"')


def test_the_disk_tier_keeps_the_draft_model_and_another_one_is_a_miss(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other = write_models(tmp_path, seed=1)
    check_disk_tier(models[0], f'draft_model = "{models[1]}"\n', f'draft_model = "{other}"')
