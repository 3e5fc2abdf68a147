"""A draft model in real processes: answers keep their bits, and its K and V follow hits, forks, preemption and deaths.

The model is its draft model with layers behind that add zeros, so that the two choose the same greedy tokens: each
greedy draft must be accepted, wherever its K and V come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from kvforge import Client, Request, SamplingParams
from kvforge.client.results import Finished
from tools.cluster.cluster import Cluster
from tools.cluster.running import CONFIG

from .drafting_cluster import DraftingCluster
from .midway import stopped_midway
from .shared import wait_empty

TOKENS, WAIT_S, LAYERS = 60, 120.0, 4
COORDINATOR = "[schedule]\ndrafts_max = 4\ndrafts_shared = false\n"
VOCABULARY = 3000  # prompts and answers repeat no two tokens, so that lookup proposes nothing
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.0, ignore_eos=True, frequency_penalty=0.3, logprobs=3),
    SamplingParams(temperature=0.8, seed=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, seed=6, ignore_eos=True, top_k=20, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, seed=7, ignore_eos=True, min_p=0.05, top_p=0.95),
]
NUMBERS = range(len(SAMPLINGS))
PROMPTS = [[7 + number, *Random(number).sample(range(VOCABULARY), 40)] for number in NUMBERS]


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


def submitted(kv: Client, number: int, **changes: object) -> Request:
    return kv.submit(
        PROMPTS[number],
        max_tokens=TOKENS,
        sampling=replace(SAMPLINGS[number], **changes),  # type: ignore[arg-type]
    )


def results(requests: Sequence[Request]) -> list[Finished]:
    return [request.result(WAIT_S) for request in requests]


def bits(found: Finished) -> tuple[object, ...]:
    return found.tokens, found.logprobs, found.top_logprobs, found.reason


def counts(kv: Client) -> tuple[int, int]:
    """Return the drafted and the accepted tokens of all workers."""
    workers = kv.health().workers
    return sum(worker.drafted_total for worker in workers), sum(worker.accepted_total for worker in workers)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def want(models: tuple[Path, Path]) -> list[Finished]:
    """The answers of a service without a draft model, one by one."""
    with Cluster(model=models[0]) as cluster:
        kv = cluster.start("w0")
        return [submitted(kv, number).result(WAIT_S) for number in NUMBERS]


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether two tokens in a row occur again, which lookup would find."""
    pairs = [*pairwise(tokens)]
    return len(set(pairs)) < len(pairs)


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


@contextmanager
def all_accepted(kv: Client, drafted_min: int) -> Iterator[None]:
    """Check that so many drafts are verified inside the block, of greedy requests, and that all are accepted."""
    before = counts(kv)
    yield
    drafted, accepted = (now - then for now, then in zip(counts(kv), before, strict=True))
    assert drafted >= drafted_min
    assert accepted == drafted, "the draft model chose another token than the model that computes the same"


def test_answers_are_those_without_a_draft_model(kv: Client, want: list[Finished]) -> None:
    (worker,) = kv.health().workers
    assert (worker.drafts, worker.kernels["drafts"].startswith("lookup, and 0-of-1 in float32")) == (4, True)
    for number in NUMBERS:
        assert bits(submitted(kv, number).result(WAIT_S)) == bits(want[number])
    for mine, other in zip(results([submitted(kv, number) for number in NUMBERS]), want, strict=True):
        assert bits(mine) == bits(other)
    stop = want[2].tokens[30]
    found = submitted(kv, 2, stop_tokens=(stop,)).result(WAIT_S)
    assert (found.tokens, found.reason) == (want[2].tokens[: want[2].tokens.index(stop) + 1], "stop")


def test_hits_and_forks_bring_the_keys_and_values_of_the_draft_model(kv: Client) -> None:
    prompt = Random("forks").sample(range(VOCABULARY), 70)
    first = kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt="forks").result(WAIT_S)
    branch = kv.submit([*prompt, *first.tokens[:5], 9], max_tokens=TOKENS, sampling=GREEDY, cache_salt="fresh")
    other = branch.result(WAIT_S).tokens
    assert not repeats([*prompt, *first.tokens])
    assert not repeats([*prompt, *first.tokens[:5], 9, *other])

    with all_accepted(kv, 3 * TOKENS):
        again = kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY, cache_salt="forks").result(WAIT_S)
        assert again.cached_tokens >= 64
        assert again.tokens == first.tokens
        parent = kv.create_sequence(prompt, cache_salt="forks")
        kv.submit(sequence=parent, max_tokens=5, sampling=GREEDY).result(WAIT_S)
        children = kv.fork(parent, 2)
        kv.append(children[1], [9])
        runs = [kv.submit(sequence=each, max_tokens=TOKENS, sampling=GREEDY) for each in (*children, parent)]
        answers = [found.tokens for found in results(runs)]
        assert answers[1] == other
        assert answers[0] == answers[2]
        assert answers[0][: TOKENS - 5] == first.tokens[5:]
        kv.remove([parent, *children])


def test_preempted_requests_and_those_of_a_killed_worker_go_on(models: tuple[Path, Path], want: list[Finished]) -> None:
    draft = f'draft_model = "{models[1]}"\n'
    with DraftingCluster(model=models[0], blocks=24, coordinator=COORDINATOR, worker=draft) as cluster:
        kv = cluster.start("w0")

        for mine, other in zip(results([submitted(kv, number) for number in NUMBERS]), want, strict=True):
            assert bits(mine) == bits(other)
        assert kv.stats().requests.preemptions_total > 0, "24 blocks hold fewer than these five at their ends"
        with all_accepted(kv, 2 * TOKENS):
            requests = [kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY) for prompt in PROMPTS]
            found = results(requests)
            assert found[0].tokens == want[0].tokens
            assert not any(repeats([*prompt, *each.tokens]) for prompt, each in zip(PROMPTS, found, strict=True))
        few = NUMBERS[2:]  # all of them run at once
        requests = stopped_midway(cluster, kv, lambda: [submitted(kv, each) for each in few], TOKENS, "w0", begun=2)
        cluster.kill("w0")
        cluster.start_worker("w0")
        for mine, other in zip(results(requests), want[2:], strict=True):
            assert bits(mine) == bits(other)
        assert wait_empty(kv).requests.recomputed_tokens_total > 0


def test_the_host_tier_keeps_the_draft_model_and_another_one_is_a_miss(
    models: tuple[Path, Path], want: list[Finished], tmp_path: Path
) -> None:
    _, other = write_models(tmp_path, seed=1)
    draft = f'draft_model = "{models[1]}"\n'
    learns = COORDINATOR + "[cache]\nhost_learn_blocks = 0\n"
    with DraftingCluster(model=models[0], blocks=10, coordinator=learns, worker=draft, host_bytes=64 << 20) as cluster:
        kv = cluster.start("w0")
        for number in NUMBERS:
            assert bits(submitted(kv, number).result(WAIT_S)) == bits(want[number])

        def run() -> None:
            """Each prompt evicts the one before to the host file."""
            for prompt in PROMPTS:
                found = kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY).result(WAIT_S)
                assert not repeats([*prompt, *found.tokens])

        run()
        loaded = kv.stats().pools[0].host_loaded_total
        with all_accepted(kv, 2 * TOKENS):
            run()
        assert kv.stats().pools[0].host_loaded_total > loaded + 5
        cluster.kill("w0")
        cluster.start_worker("w0", changed=f'draft_model = "{other}"')
        cluster.wait_workers(kv, 1)
        before = kv.stats().pools[0].host_loaded_total
        found = submitted(kv, 1).result(WAIT_S)
        assert bits(found) == bits(want[1])
        assert found.cached_tokens == 0
        assert kv.stats().pools[0].host_loaded_total == before


@pytest.mark.parametrize(
    ("coordinator", "fields", "words"),
    [
        ("", {}, "schedule.drafts_max is 0: set it to 4 or so, or leave draft_model out"),
        (COORDINATOR, {"vocab_size": 2999}, "has not the same number of tokens, 2999 and not 3000,"),
    ],
)
def test_a_draft_model_that_cannot_serve_is_refused(
    coordinator: str, fields: dict[str, int], words: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    draft = write_models(tmp_path, **fields)[1] if fields else models[1]
    with Cluster(model=models[0], coordinator=coordinator, worker=f'draft_model = "{draft}"\n') as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w0")
        assert cluster.end("w0") == 2
        assert f"draft_model: '{draft}'" in cluster.log("w0") or f"draft_model: '{draft.name}'" in cluster.log("w0")
        assert words in cluster.log("w0")
