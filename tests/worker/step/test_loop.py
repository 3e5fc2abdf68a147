"""The worker's loop over steps, with a runner whose steps end when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvforge.protocol.errors import GpuError
from kvforge.protocol.messages import (
    NO_FLOAT32,
    NO_INT32,
    ErrorInfo,
    Message,
    PoolRegistered,
    RowError,
    RowStart,
    Sampling,
    Step,
    StepResult,
    Stop,
)
from worker.config import WorkerConfig
from worker.step.loop import Worker
from worker.step.meter import Meter
from worker.step.pending import StepOutcome


def outcome(*errors: RowError) -> StepOutcome:
    return StepOutcome(NO_INT32, NO_INT32, NO_FLOAT32, errors, 1, NO_INT32, NO_INT32, NO_FLOAT32)


@dataclass
class FakePending:
    number: int
    over: bool = False
    result: StepOutcome = field(default_factory=outcome)

    def done(self) -> bool:
        return self.over

    def finish(self) -> StepOutcome:
        self.over = True
        return self.result


class FakeRunner:
    def __init__(self) -> None:
        self.launched: list[FakePending] = []
        self.meter = Meter()
        self.device = SimpleNamespace(name="a device", survives=lambda: True)
        self.model = SimpleNamespace(device=self.device)
        self.pool = SimpleNamespace(block_size=16)
        self.result = outcome()

    def launch(self, step: Step, tables: Any) -> FakePending:
        assert sum(not pending.over for pending in self.launched) < 2
        self.launched.append(FakePending(step.step_id, result=self.result))
        return self.launched[-1]

    def end(self, index: int) -> Callable[[], None]:
        """What ends the step that was launched as number `index`."""

        def now() -> None:
            self.launched[index].over = True

        return now


class FakeLink:
    """Gives out what it holds, one at a time: messages, and functions that are called instead."""

    connected, connections = True, 1

    def __init__(self, *script: Any) -> None:
        self.script, self.sent, self.waits = deque(script), list[Message](), list[int]()

    def receive(self, timeout_ms: int) -> Message | None:
        self.waits.append(timeout_ms)
        if not self.script:
            self.connected = False
            return None
        what = self.script.popleft()
        return what() if callable(what) else what

    def send(self, message: Message) -> bool:
        self.sent.append(message)
        return True

    @property
    def answered(self) -> list[int]:
        return [message.step_id for message in self.sent if isinstance(message, StepResult)]


def serve(runner: FakeRunner, link: FakeLink) -> FakeLink:
    worker = Worker.__new__(Worker)  # without sockets and signals
    worker.config = WorkerConfig(name="w", model="m")
    worker._stopping = False
    worker._request_of = {}
    worker._link = link  # type: ignore[assignment]
    worker._engine = SimpleNamespace(runner=runner)  # type: ignore[assignment]
    worker._under_way = deque()
    patience = SimpleNamespace(begin=lambda _: None, end=lambda _: None, wait_ms=lambda: 0)
    worker._patience = patience  # type: ignore[assignment]
    worker._pool_at = PoolRegistered(rid=0, epoch=3, base_block=0)
    worker._connection = 1
    tables = SimpleNamespace(rows=lambda slots, width: (np.zeros((len(slots), width), np.int32), None))
    worker._tables = tables  # type: ignore[assignment]
    worker._serve()
    return link


def step(number: int) -> Step:
    return Step(number, slots=np.zeros(1, np.int32), starts=np.zeros(1, np.int32), counts=np.ones(1, np.int32))


def test_a_second_step_is_launched_before_the_first_has_ended() -> None:
    runner, link = FakeRunner(), FakeLink(step(1), step(2))
    seen: list[tuple[int, list[int]]] = []

    def look() -> None:
        seen.append((len(runner.launched), link.answered))

    link.script += [look, runner.end(0), look]
    serve(runner, link)
    assert seen == [(2, []), (2, [1])]
    assert link.answered == [1]


def test_a_step_that_ends_early_waits_for_the_one_before_it() -> None:
    runner = FakeRunner()
    link = serve(runner, FakeLink(step(1), step(2), runner.end(1), None, runner.end(0), None))
    assert link.answered == [1, 2]


def test_a_third_step_waits_for_the_first() -> None:
    assert serve(FakeRunner(), FakeLink(step(1), step(2), step(3), step(4))).answered == [1, 2]


def test_a_worker_that_is_told_to_stop_finishes_what_it_was_sent() -> None:
    assert serve(FakeRunner(), FakeLink(step(1), step(2), Stop(reason="enough"))).answered == [1, 2]


def test_it_sleeps_only_where_nothing_is_under_way() -> None:
    runner = FakeRunner()
    link = serve(runner, FakeLink(None, step(1), None, runner.end(0)))
    assert link.waits == [1000, 1000, 0, 0, 1000]


@pytest.mark.parametrize("survives", [True, False])
def test_a_lost_device_ends_the_worker_after_the_last_result(survives: bool) -> None:
    runner = FakeRunner()
    runner.device.survives = lambda: survives
    runner.result = outcome(RowError(0, ErrorInfo.of(GpuError("an illegal address"))))
    link = FakeLink(step(1), runner.end(0), None)
    with nullcontext() if survives else pytest.raises(GpuError, match="a device is lost: an illegal address"):
        serve(runner, link)
    assert [type(message).__name__ for message in link.sent] == ["StepResult"] + ["WorkerFailed"] * (not survives)


def test_the_log_of_a_step_names_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    def starts(number: int, *begins: tuple[int, int], slots: list[int]) -> Step:
        rows = np.array(slots, np.int32)
        return Step(
            number,
            begins=tuple(RowStart(slot=slot, request_id=id_, sampling=Sampling(), seed=0) for slot, id_ in begins),
            slots=rows,
            starts=np.zeros(len(rows), np.int32),
            counts=rows + 1,
            tokens=np.zeros(sum(rows + 1), np.int32),
        )

    with caplog.at_level("DEBUG", logger="worker"):
        serve(FakeRunner(), FakeLink(starts(1, (0, 41), (2, 42), slots=[0, 2]), starts(2, (0, 43), slots=[0, 2])))
    assert [record.getMessage() for record in caplog.records if "step" in record.message] == [
        "step 1: 2 rows, 4 tokens (request 41: 1, request 42: 3)",
        "step 2: 2 rows, 4 tokens (request 43: 1, request 42: 3)",
    ]
