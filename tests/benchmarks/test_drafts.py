"""`benchmarks.drafts` runs the requests of a round so many at a time, and its services have room for them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import drafts
from benchmarks.drafts import Service, installation
from benchmarks.drafts_sessions import SESSION
from benchmarks.drafts_tasks import Task
from kvforge import Client, SamplingParams

SEED = 1000


class ScriptedRequest:
    """A request that gets one token in each step, or two if its number is odd."""

    def __init__(self, client: ScriptedClient, number: int, answer: list[int]) -> None:
        self.client, self.number, self.answer, self.count = client, number, answer, 0

    @property
    def done(self) -> bool:
        return self.count >= len(self.answer)

    def __iter__(self) -> Iterator[int]:
        read = 0
        while read < len(self.answer):
            if read >= self.count:
                self.client.step()
            yield self.answer[read]
            read += 1

    def result(self, timeout_s: float) -> Any:
        while not self.done:
            self.client.step()
        return SimpleNamespace(tokens=self.answer, logprobs=[0.0] * len(self.answer))


class ScriptedClient:
    """A service: the answers of a task, and how many requests ran in each step."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.requests: list[ScriptedRequest] = []
        self.running: list[int] = []

    def step(self) -> None:
        live = [request for request in self.requests if not request.done]
        self.running.append(len(live))
        for request in live:
            request.count += 1 + request.number % 2

    def submit(self, prompt: list[int], max_tokens: int, sampling: SamplingParams) -> ScriptedRequest:
        number = self.task.prompts.index(prompt)
        assert sampling.seed == SEED + number, "the seed is that of another answer"
        self.requests.append(ScriptedRequest(self, number, self.task.answers[number][:max_tokens]))
        return self.requests[-1]

    def health(self) -> Any:
        return SimpleNamespace(workers=[SimpleNamespace(drafted_total=0, accepted_total=0)])

    def stats(self) -> Any:
        return SimpleNamespace(pools=[SimpleNamespace(steps=len(self.running))])


def task_of(*lengths: int) -> Task:
    return Task([[number] for number in range(len(lengths))], [[7] * length for length in lengths])


def run(task: Task, batch: int, **fields: int) -> tuple[ScriptedClient, Any]:
    client = ScriptedClient(task)
    return client, Service(cast("Client", client)).run(task, SEED, batch, **fields)


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_a_round_has_all_requests_and_keeps_so_many_running(batch: int) -> None:
    task = task_of(9, 4, 2, 12, 1, 5)
    client, done = run(task, batch, requests=6)
    assert [list(tokens) for tokens, _ in done.answers] == task.answers
    assert [request.number for request in client.requests] == list(range(6))
    last = next(at for at, count in enumerate([*client.running, 0]) if count < batch)
    assert set(client.running[:last]) == {batch}
    assert max(client.running[last:], default=0) < batch, "a request began late"
    assert done.steps == len(client.running)


def test_without_a_number_a_round_has_as_many_requests_as_run_together() -> None:
    client, done = run(task_of(3, 4, 5, 6), 2, first=1)
    assert [request.number for request in client.requests] == [1, 2]
    assert len(done.answers) == 2
    client, done = run(task_of(3, 4, 5, 6), 2, tokens=1, requests=4)
    assert [list(tokens) for tokens, _ in done.answers] == [[7]] * 4


def test_services_hold_all_prompts_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "Installation", SimpleNamespace)
    options = argparse.Namespace(model="smollm2-135m", gpu=False, threads=1, batch=[1], prompt=1024, tokens=32)
    options.draft_rows, options.draft_model, options.chance = 64, "", 0.7
    task = Task([[1] * 1000, [1] * 16], [[2] * 24, [2] * 8])
    sizes = {}
    for tasks in ({SESSION: task}, {"edit": task_of(3)}, {"edit": task_of(3), SESSION: task}):
        options.tasks = list(tasks)
        place: Any = installation(options, tasks, 8, Path("answers.npy"))
        assert place.schedule["drafts_shared"] is False and place.schedule["step_rows_max"] == 64
        sizes[tuple(tasks)] = place.context_tokens, place.blocks
    edit = 2 * 1024 + 32 + 64
    assert sizes == {
        (SESSION,): (1024 + 64, 64 + 66 + 4),
        ("edit",): (edit, 64 + 134),
        ("edit", SESSION): (edit, 64 + 134 + 66 + 4),
    }
