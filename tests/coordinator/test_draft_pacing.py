"""The coordinator's choice of drafts and the pace of a draft model together: drafts that do not pay cost little.

The passes of a proposal come behind the step, and behind the next one where that is in flight. They delay the result,
and are no part of the time that the worker reports for a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvforge.protocol.messages import StepResult
from kvforge.worker.drafts.pacing import DraftPacing
from tests.coordinator.driver import FakeWorker, choose, continuation, fingerprint
from tests.coordinator.test_draft_choice import STEP_US, TimedDrafter, TimedDriver
from tests.coordinator.test_drafts import drafted

TOKENS = 300
FIRST_PASSES = 20


class PassingDrafter(TimedDrafter):
    """A worker with a draft model: each drafted token takes a pass of all rows."""

    pass_us = 0

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.pacing, self.now_us = DraftPacing(), lambda: 0
        self.passes: dict[int, int] = {}  # by step
        self.done = 0  # the step that ended while passes waited for it
        self.proposed: set[int] = set()

    def execute(self, step: Any) -> StepResult:
        """Execute a step, and propose as the pace says."""
        result = super().execute(step)
        for start in step.begins:
            self.pacing.begin(start.slot)
        sampled = result.slots.tolist()
        drafts = step.drafts.tolist() if step.drafts.size else [0] * step.slots.size
        of = dict(zip(step.slots.tolist(), drafts, strict=True))
        used = [(slot, of[slot], sampled.count(slot) - 1) for slot in self.proposed if of.get(slot)]
        self.pacing.verified(used)
        parts = np.split(result.draft_tokens, np.cumsum(result.draft_counts)[:-1])
        found = dict(zip(result.draft_slots.tolist(), parts, strict=False))  # one empty part for none
        now_ns = 1000 * self.now_us()
        self.proposed = set()
        self.pacing.stepped(1000 * result.duration_us)
        if found and self.pacing.is_due(now_ns, len(found)):
            found = {slot: tokens[: self.pacing.count(slot)] for slot, tokens in found.items()}
            passes = max(len(tokens) for tokens in found.values())
            self.passes[step.step_id] = passes * self.pass_us
            self.pacing.proposed(now_ns, 1000 * passes * self.pass_us, len(found), passes)
            self.proposed = set(found)
        else:
            found = {}
        fields = {name: getattr(result, name) for name in result.__struct_fields__ if not name.startswith("draft_")}
        return StepResult(
            **fields,
            draft_slots=np.array([*found], np.int32),
            draft_counts=np.array([len(tokens) for tokens in found.values()], np.int32),
            draft_tokens=np.concatenate([np.zeros(0, np.int32), *found.values()]),
        )


class ChanceDrafter(PassingDrafter):
    """Such a worker: eight of ten drafted tokens are right, independently of each other."""

    def propose(self, slot: int, context: int) -> list[int]:
        tokens, size = list[int](), self.model.vocab_size
        for _ in range(self.width):
            token = choose(context, size)
            is_right = (context * 2654435761 >> 7) % 10 < 8
            tokens.append(token if is_right else (token + 1) % size)
            context = fingerprint(context, token)
        return tokens


class PassingDriver(TimedDriver):
    """A driver with such workers."""

    worker_type = PassingDrafter

    def report(self, worker: FakeWorker, result: Any) -> Any:
        """Deliver a result after its time, and after the passes of its proposals."""
        assert isinstance(worker, PassingDrafter)
        (group,) = self.machine.cache.groups.values()
        took_us = 0 if worker.done == result.step_id else result.duration_us
        passes_us = worker.passes.pop(result.step_id, 0)
        if passes_us and len(group.sent) > 1:
            later = group.sent[1]
            took_us += STEP_US + worker.row_us * int(later.message.counts.sum())
            worker.done = later.step_id
        self.advance(took_us + passes_us - result.duration_us)
        return super().report(worker, result)


def drafting(
    drafts: int, pass_us: int, way_us: int, kind: type[PassingDrafter]
) -> tuple[PassingDriver, PassingDrafter]:
    """Return a driver and its worker."""
    driver = PassingDriver(
        drafts_max=drafts,
        step_rows_max=96,
        step_tokens_max=96,
        draft_rows_max=96,
        sequences_max=96,
        block_size=8,
        blocks_max=4096,
        blocks_per_sequence_max=256,
        steps_in_flight_max=2,
    )
    driver.way_us, driver.worker_type = way_us, kind
    worker = driver.add_worker(4096)
    assert isinstance(worker, PassingDrafter)
    worker.row_us, worker.pass_us, worker.now_us = 10, pass_us, lambda: driver.now_us
    return driver, worker


def time_us(drafts: int, rows: int, pass_us: int, right: float, way_us: int = 100) -> tuple[int, int]:
    """Return how long requests take, and the steps with drafts."""
    driver, worker = drafting(drafts, pass_us, way_us, PassingDrafter)
    worker.right = right
    prompts = [[10 + row, 2, 3, 4] for row in range(rows)]
    first = driver.now_us
    requests = [driver.submit(prompt, TOKENS) for prompt in prompts]
    driver.run_until_idle()
    for request, prompt in zip(requests, prompts, strict=True):
        assert driver.answer_of(request) == continuation(prompt, TOKENS)
    return driver.now_us - first, sum(count > 0 for count in drafted(worker))


def rounds_us(drafts: int, way_us: int, number: int) -> int:
    """Return how long three requests take, one after another, with idle time between them."""
    driver, took_us = drafting(drafts, 130, way_us, ChanceDrafter)[0], 0
    for each in range(3):
        prompt, first = [10, 2, 3 + number, 4 + each], driver.now_us
        request = driver.submit(prompt, 256)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(prompt, 256)
        took_us += driver.now_us - first
        driver.advance(280_000)
    return took_us


def test_later_requests_are_drafted_too() -> None:
    """With four drafts, a step has 3.4 tokens, and takes 1.9 times as long as one without."""
    gains = [rounds_us(0, 300, 0) / rounds_us(8, 300, number) for number in range(4)]
    assert sum(gains) / len(gains) >= 1.6


@pytest.mark.parametrize(
    ("rows", "pass_us", "right"),
    [
        *((1, pass_us, right) for pass_us in (50, 200, 1000) for right in (-1.0, 0.3, 1.0)),
        *((4, 50, -1.0), (4, 200, 0.3), (4, 1000, 1.0)),
    ],
)
def test_a_draft_model_costs_at_most_a_fiftieth(rows: int, pass_us: int, right: float) -> None:
    """Beside the first trials of the worker, in which all is unknown."""
    without, _ = time_us(0, rows, pass_us, right)
    took, _ = time_us(8, rows, pass_us, right)
    assert without / (took - FIRST_PASSES * pass_us) >= 0.98


@pytest.mark.parametrize(("pass_us", "gain"), [(50, 4.0), (100, 3.0), (200, 1.5)])
def test_a_cheap_draft_model_that_is_right_makes_answers_fast(pass_us: int, gain: float) -> None:
    """The time of its passes is part of the way that the coordinator measures."""
    without, _ = time_us(0, 1, pass_us, 1.0)
    took, steps = time_us(8, 1, pass_us, 1.0)
    assert without / took >= gain
    assert steps < TOKENS / 8


def test_a_draft_model_as_dear_as_the_model_is_hardly_used() -> None:
    _, steps = time_us(8, 1, 1000, 1.0)
    assert 1 <= steps <= 3
