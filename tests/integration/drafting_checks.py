"""What is checked of all that drafts beside a model: a draft model, and heads.

Each drafts what the model computes, so that every greedy draft must be accepted, wherever its K and V come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

from kvforge import Client, Request, SamplingParams
from kvforge.client.results import Finished

from .drafting_cluster import DraftingCluster
from .midway import stopped_midway
from .shared import wait_empty
from .test_disk_tier import all_again, disk_of, started

TOKENS, WAIT_S = 60, 120.0
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


def submitted(kv: Client, number: int, **changes: object) -> Request:
    return kv.submit(
        PROMPTS[number],
        max_tokens=TOKENS,
        sampling=replace(SAMPLINGS[number], **changes),  # type: ignore[arg-type]
    )


def results(requests: Sequence[Request]) -> list[Finished]:
    return [request.result(WAIT_S) for request in requests]


def answers_without(kv: Client) -> list[Finished]:
    """Return the answers of a service without drafts, computed together."""
    return results([submitted(kv, number) for number in NUMBERS])


def bits(found: Finished) -> tuple[object, ...]:
    return found.tokens, found.logprobs, found.top_logprobs, found.reason


def counts(kv: Client) -> tuple[int, int]:
    """Return the drafted and the accepted tokens of all workers."""
    workers = kv.health().workers
    return sum(worker.drafted_total for worker in workers), sum(worker.accepted_total for worker in workers)


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether two tokens in a row occur again, which lookup would find."""
    pairs = [*pairwise(tokens)]
    return len(set(pairs)) < len(pairs)


@contextmanager
def all_accepted(kv: Client, drafted_min: int) -> Iterator[None]:
    """Check that so many drafts are verified inside the block, of greedy requests, and that all are accepted."""
    before = counts(kv)
    yield
    drafted, accepted = (now - then for now, then in zip(counts(kv), before, strict=True))
    assert drafted >= drafted_min
    assert accepted == drafted, "the draft model chose another token than the model that computes the same"


def check_answers(kv: Client, want: list[Finished]) -> None:
    """Check that answers are those without drafts, one by one and together."""
    for number in NUMBERS:
        assert bits(submitted(kv, number).result(WAIT_S)) == bits(want[number])
    check_together(kv, want)


def check_together(kv: Client, want: list[Finished]) -> None:
    """Check that answers of requests that run together are those without drafts."""
    for mine, other in zip(results([submitted(kv, number) for number in NUMBERS]), want, strict=True):
        assert bits(mine) == bits(other)


def check_hits_and_forks(kv: Client) -> None:
    """Check that prefix hits and forks bring what a draft reads."""
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


def check_preemption_and_death(model: Path, worker: str, want: list[Finished]) -> None:
    """Check that preempted requests and those of a killed worker go on; `worker`: its settings."""
    with DraftingCluster(model=model, blocks=24, coordinator=COORDINATOR, worker=worker) as cluster:
        kv = cluster.start("w0")
        check_together(kv, want)
        assert kv.stats().requests.preemptions_total > 0, "24 blocks hold fewer than these five at their ends"
        with all_accepted(kv, 2 * TOKENS):
            found = results([kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY) for prompt in PROMPTS])
            assert found[0].tokens == want[0].tokens
            assert not any(repeats([*prompt, *each.tokens]) for prompt, each in zip(PROMPTS, found, strict=True))
        few = NUMBERS[2:]  # these run at once
        requests = stopped_midway(cluster, kv, lambda: [submitted(kv, each) for each in few], TOKENS, "w0", begun=2)
        cluster.kill("w0")
        cluster.start_worker("w0")
        for mine, other in zip(results(requests), want[2:], strict=True):
            assert bits(mine) == bits(other)
        assert wait_empty(kv).requests.recomputed_tokens_total > 0


def check_host_tier(model: Path, worker: str, want: list[Finished], changed: str) -> None:
    """Check that the host tier keeps what a draft reads, and is a miss for a worker that drafts in another way.

    Args:
        model: The model.
        worker: Settings of the worker.
        want: The answers without drafts.
        changed: Settings of the other worker.
    """
    learns = COORDINATOR + "[cache]\nhost_learn_blocks = 0\n"
    with DraftingCluster(model=model, blocks=10, coordinator=learns, worker=worker, host_bytes=64 << 20) as cluster:
        kv = cluster.start("w0")

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
        for number in NUMBERS:
            assert bits(submitted(kv, number).result(WAIT_S)) == bits(want[number])
        cluster.kill("w0")
        cluster.start_worker("w0", changed=changed)
        cluster.wait_workers(kv, 1)
        before = kv.stats().pools[0].host_loaded_total
        found = submitted(kv, 1).result(WAIT_S)
        assert bits(found) == bits(want[1])
        assert found.cached_tokens == 0
        assert kv.stats().pools[0].host_loaded_total == before


def check_disk_tier(model: Path, worker: str, changed: str) -> None:
    """Check that the disk tier keeps what a draft reads, and is a miss for a worker that drafts in another way.

    Args:
        model: The model.
        worker: Settings of the worker.
        changed: Settings of the other worker.
    """
    learns = COORDINATOR + "[cache]\nhost_learn_blocks = 0\n"
    evicted = PROMPTS[:-1]  # the last one is on the device alone
    with DraftingCluster(model=model, blocks=10, coordinator=learns, worker=worker) as cluster:
        kv = started(cluster)
        whole = [greedy(kv, prompt) for prompt in PROMPTS]
        assert not any(repeats([*prompt, *each.tokens]) for prompt, each in zip(PROMPTS, whole, strict=True))
        assert disk_of(kv).saved_total >= 2 * len(evicted)
        kv = all_again(cluster)
        with all_accepted(kv, TOKENS):
            again = [greedy(kv, prompt) for prompt in evicted]
        assert [found.tokens for found in again] == [found.tokens for found in whole[:-1]]
        assert all(found.cached_tokens >= 32 for found in again)
        disk = disk_of(kv)
        assert min(disk.recovered_total, disk.loaded_total) >= 2 * len(evicted)
        for name in ("w0", "coordinator"):
            cluster.kill(name)
        kv = started(cluster, changed=changed)
        found = greedy(kv, PROMPTS[0])
        assert (found.tokens, found.cached_tokens) == (whole[0].tokens, 0)
        (pool,) = kv.stats().pools
        assert pool.disk is not None
        assert pool.disk.recovered_total == pool.disk.loaded_total == 0


def greedy(kv: Client, prompt: list[int]) -> Finished:
    """Return the greedy answer of a prompt."""
    return kv.submit(prompt, max_tokens=TOKENS, sampling=GREEDY).result(WAIT_S)
