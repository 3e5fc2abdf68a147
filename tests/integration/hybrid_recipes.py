"""Recipes by which caches of hybrid models have gone wrong, as a check that any model can run through real processes.

Every answer must have the tokens and log-probabilities, bit by bit, of the same prompt in an empty cache and alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvforge import Client, Request, SamplingParams
from tools.cluster.cluster import Cluster

from .shared import wait_empty

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
BLOCK, CHUNK, EVERY = 16, 64, 128
BEYOND = (0, 1, 15, 16, 17, 63, 64, 65)  # tokens that two prompts share beyond a border
VOCABULARY = range(3, 90)
ANSWER, WAIT_S = 6, 120
CONFIG = f"""
[cache]
checkpoint_tokens = {EVERY}
[schedule]
step_tokens_max = 96
"""


@dataclass(frozen=True)
class Answer:
    """The numbers of an answer that no cache may change."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]

    def after(self, count: int) -> Answer:
        """Return the answer without its first tokens."""
        return Answer(self.tokens[count:], self.logprobs[count:], self.top_logprobs[count:])


class Recipes:
    """Prompts against one cluster with the worker w0, and their answers in an empty cache.

    Args:
        cluster: Has one worker, with room for a few prompts.
        kv: Its client.
        tokens: Length of a long prompt.
        thorough: Run each recipe with more lengths, orders and positions.
    """

    def __init__(self, cluster: Cluster, kv: Client, tokens: int, thorough: bool) -> None:
        self._cluster, self._kv, self._tokens, self._thorough = cluster, kv, tokens, thorough
        self._random, self._salts = random.Random(1), 0
        self.cached: list[int] = []

    def text(self, count: int) -> list[int]:
        """Return random tokens."""
        return self._random.choices(VOCABULARY, k=count)

    def submit(self, prompt: Sequence[int], salt: str = "", count: int = ANSWER) -> Request:
        """Submit a prompt."""
        return self._kv.submit(prompt, max_tokens=count, sampling=GREEDY, cache_salt=salt)

    def read(self, request: Request) -> Answer:
        """Wait for an answer, and note how many tokens of its prompt were cached."""
        done = request.result(WAIT_S)
        self.cached.append(done.cached_tokens)
        return Answer(done.tokens, done.logprobs, done.top_logprobs)

    def cold(self, prompt: Sequence[int], count: int = ANSWER) -> Answer:
        """Return the answer to a prompt alone, with no token cached."""
        self._salts += 1
        answer = self.read(self.submit(prompt, f"cold {self._salts}", count))
        assert self.cached.pop() == 0
        return answer

    def warm(self, prompt: Sequence[int], count: int = ANSWER) -> Answer:
        """Return the answer to a prompt from the cache as it is."""
        return self.read(self.submit(prompt, count=count))

    # ------------------------------------------------------------------------------------------------ the recipes

    def cold_warm_evicted_restarted(self) -> None:
        """Recipe 1: one long prompt, from an empty cache, a full one, a partly evicted one, and after each death."""
        prompt = self.text(self._tokens)
        want = self.cold(prompt)
        self.cached.clear()
        assert [self.warm(prompt) for _ in range(2)] == [want] * 2
        assert self.cached[0] == 0 and self.cached[1] >= self._tokens - CHUNK
        for share in (4, 2, 1) if self._thorough else (1,):
            self.cold(self.text(self._tokens // share))
            assert self.warm(prompt) == want
        self._cluster.kill("coordinator")
        self._cluster.start_coordinator()
        assert self.warm(prompt) == want
        self._cluster.kill("w0")
        self._cluster.start_worker("w0")
        self.cached.clear()
        assert [self.warm(prompt) for _ in range(2)] == [want] * 2
        assert self.cached[1] >= self._tokens - CHUNK, "the new worker's checkpoints are used"

    def shared_lengths(self) -> None:
        """Recipe 2: prompts that share some tokens beyond a border of blocks, chunks and checkpoints."""
        base = self.text(2 * EVERY + 2 * CHUNK)
        borders = (BLOCK, CHUNK, EVERY, 2 * EVERY) if self._thorough else (CHUNK, EVERY)
        lengths = sorted({border + more for border in borders for more in BEYOND})
        self._random.shuffle(lengths)
        prompts = [[*base[:shared], *self.text(self._random.randint(1, 40))] for shared in lengths]
        want = [self.cold(prompt) for prompt in prompts]
        self.cached.clear()
        for _ in range(2):
            assert [self.warm(prompt) for prompt in prompts] == want
        first, second = self.cached[: len(prompts)], self.cached[len(prompts) :]
        assert all(count % BLOCK == 0 for count in self.cached)
        assert sum(first) < sum(second), "the second round finds the checkpoints of the first"
        assert len(set(second)) >= len(borders) + 1, "hits end at several checkpoints"

    def neighbours(self) -> None:
        """Recipe 4: prompts of different lengths in one step, beside rows that generate."""
        lengths = (1, 15, 64, 65, 130, 200, 17, 63)
        prompts = [self.text(count) for count in lengths]
        want = [self.cold(prompt, ANSWER + place) for place, prompt in enumerate(prompts)]
        for order in (prompts, prompts[::-1]) if self._thorough else (prompts,):
            counts = {id(prompt): ANSWER + place for place, prompt in enumerate(prompts)}
            salt = f"neighbours {order is prompts}"
            running = {id(prompt): self.submit(prompt, salt, counts[id(prompt)]) for prompt in order}
            assert [self.read(running[id(prompt)]) for prompt in prompts] == want

    def copies_beside_steps(self) -> None:
        """Recipe 6: forks, rewinds and checkpoints of generated tokens while steps of the same state are on the way."""
        prompt, kv = self.text(CHUNK + 7), self._kv
        want = self.cold(prompt, EVERY + 40)
        for salt in ("one", "two") if self._thorough else ("one",):
            source = kv.create_sequence(prompt, cache_salt=salt)
            first = kv.submit(sequence=source, max_tokens=30, sampling=GREEDY)
            assert self.read(first) == Answer(want.tokens[:30], want.logprobs[:30], want.top_logprobs[:30])
            forks = kv.fork(source, 3)
            running = [kv.submit(sequence=each, max_tokens=EVERY + 10, sampling=GREEDY) for each in (source, *forks)]
            others = [self.submit(self.text(50), "others", 20) for _ in range(3)]
            assert [self.read(each) for each in running] == [want.after(30)] * 4
            for kept in (125, 90, 57, 30, 1) if self._thorough else (125, 57):
                kv.rewind(forks[0], len(prompt) + kept)
                (again,) = kv.fork(forks[0])
                left = EVERY + 40 - kept
                both = [kv.submit(sequence=each, max_tokens=left, sampling=GREEDY) for each in (forks[0], again)]
                assert [self.read(each) for each in both] == [want.after(kept)] * 2
                kv.remove([again])
            for each in others:
                each.result(WAIT_S)
            kv.remove([source, *forks])

    def all(self) -> None:
        """Run every recipe, and check that no block is held at the end."""
        self.neighbours()
        self.shared_lengths()
        self.copies_beside_steps()
        self.cold_warm_evicted_restarted()
        stats = wait_empty(self._kv)
        assert stats.requests.failed_total == 0


def run(folder: Path, tokens: int, dtype: str = "float32", thorough: bool = True, room: int = 60) -> None:
    """Run all recipes with a model.

    Args:
        folder: The model.
        tokens: Tokens of a long prompt, which fits, while others evict parts of it.
        dtype: As in the worker's configuration.
        thorough: Run each recipe with more lengths, orders and positions.
        room: Blocks beside those of a long prompt's tokens, for states and checkpoints.
    """
    with Cluster(model=folder, blocks=tokens // BLOCK + room, coordinator=CONFIG, dtype=dtype) as cluster:
        Recipes(cluster, cluster.start("w0"), tokens, thorough).all()
