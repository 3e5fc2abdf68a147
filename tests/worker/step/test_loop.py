"""The worker's loop over steps, with a runner that completes steps on the test's command."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvforge.protocol.errors import DeadlineExceeded, GpuError, ProtocolError, Unavailable
from kvforge.protocol.messages import (
    NO_FLOAT32,
    NO_INT32,
    DiskEntries,
    DiskOrders,
    DiskResults,
    DiskScan,
    ErrorInfo,
    Message,
    PoolRegistered,
    RowError,
    RowStart,
    SamplingParams,
    Step,
    StepResult,
    Stop,
    WorkerFailed,
    WorkerWelcome,
)
from kvforge.protocol.notify import Watchdog
from kvforge.worker.config import WorkerConfig
from kvforge.worker.drafts.drafter import Proposals
from kvforge.worker.step import loop
from kvforge.worker.step.loop import ANSWERS_KEPT, BEFORE_IDLE_WORK_MS, Worker
from kvforge.worker.step.meter import Meter
from kvforge.worker.step.pending import StepOutcome
from kvforge.worker.step.step_failures import StateLostError
from tests.protocol.systemd_ear import Ear


def outcome(*errors: RowError) -> StepOutcome:
    return StepOutcome(NO_INT32, NO_INT32, NO_FLOAT32, errors, 1, NO_INT32, NO_INT32, NO_FLOAT32)


@dataclass
class FakePending:
    number: int
    over: bool = False
    result: StepOutcome = field(default_factory=outcome)
    host_copied: Any = field(default_factory=lambda: np.array([6, 2], np.int32))
    host_missed: Any = field(default_factory=lambda: np.array([2, 1], np.int32))
    host_us: tuple[int, int] = (70, 50)
    idle_us: int = 30

    def done(self) -> bool:
        return self.over


class FakeRunner:
    def __init__(self) -> None:
        self.launched: list[FakePending] = []
        self.meter = Meter()
        self.device = SimpleNamespace(name="a device", survives=lambda: True)
        self.model = SimpleNamespace(device=self.device)
        geometry = SimpleNamespace(block_size=16, state_blocks=0, window=0, window_pages=0)
        self.pool = SimpleNamespace(geometry=geometry)
        self.states: list[Any] = []
        self.windows: list[Any] = []
        self.result = outcome()
        self.on_accept: Callable[[], None] = lambda: None

    def launch(self, step: Step, tables: Any, states: Any, windows: Any) -> FakePending:
        self.states.append(states)
        self.windows.append(windows)
        assert sum(not pending.over for pending in self.launched) < 2
        self.launched.append(FakePending(step.step_id, result=self.result))
        return self.launched[-1]

    def finish(self, pending: FakePending) -> StepOutcome:
        pending.over = True
        return pending.result

    def accept_drafts(self) -> None:
        self.on_accept()

    def end(self, index: int) -> Callable[[], None]:
        """Complete the step launched as number `index`."""

        def now() -> None:
            self.launched[index].over = True

        return now


class FakeLink:
    """Delivers queued messages one at a time; queued functions are called instead."""

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

    def look(self) -> None:
        pass

    def send(self, message: Message) -> bool:
        assert self.connected, "a message sent without a connection is lost"
        self.sent.append(message)
        return True

    @property
    def answered(self) -> list[int]:
        return [message.step_id for message in self.sent if isinstance(message, StepResult)]


def serve(runner: FakeRunner, link: FakeLink) -> FakeLink:
    worker_of(runner, link)._serve()
    return link


def worker_of(runner: FakeRunner, link: FakeLink) -> Worker:
    worker = Worker.__new__(Worker)  # without sockets and signals
    worker.config = WorkerConfig(name="w", model="m")
    worker._stopping = False
    worker._request_of = {}
    worker._connection = link  # type: ignore[assignment]
    worker._engine = SimpleNamespace(runner=runner, ring_blocks=0, disk=None)  # type: ignore[assignment]
    worker._idle_work, worker._active_ns = False, time.monotonic_ns()
    worker._under_way, worker._answered, worker._last_step = deque(), deque(maxlen=ANSWERS_KEPT), 0
    patience = SimpleNamespace(begin=lambda _: None, end=lambda _: None, wait_ms=lambda: 0)
    worker._backoff = patience  # type: ignore[assignment]
    worker._watchdog = Watchdog()
    worker._pool_at = PoolRegistered(rid=0, epoch=3, base_block=0)
    worker._connected_as = 1
    tables = SimpleNamespace(rows=lambda slots, width: (np.zeros((len(slots), width), np.int32), None))
    worker._tables = tables  # type: ignore[assignment]
    return worker


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


def test_a_step_over_states_has_their_pages_and_ends_the_worker_if_it_fails() -> None:
    runner, tables = FakeRunner(), SimpleNamespace()
    runner.pool.geometry.state_blocks = 2
    tables.rows = lambda slots, width: (np.full((len(slots), width), 40, np.int32), None)
    tables.states = lambda slots, width: 40 + np.arange(len(slots) * width, dtype=np.int32).reshape(-1, width)
    nothing = Step(2)

    def fail(*_: Any) -> FakePending:
        raise StateLostError("half-way")

    link = FakeLink(step(1), nothing, lambda: setattr(runner, "launch", fail), step(3))
    worker = worker_of(runner, link)
    worker._tables, worker._pool_at = tables, PoolRegistered(rid=0, epoch=3, base_block=40)  # type: ignore[assignment]
    with pytest.raises(StateLostError):
        worker._serve()
    assert [states.tolist() for states in runner.states] == [[[0, 1]], []]
    assert runner.states[1].shape == (0, 2)
    assert isinstance(link.sent[-1], WorkerFailed) and link.sent[-1].error.message == "half-way"


def test_the_pages_of_windows_are_read_from_the_ring_behind_the_state() -> None:
    """Only cells of blocks that a row writes or sees are read. Here a cell has the number of its column."""
    runner, tables = FakeRunner(), SimpleNamespace()
    runner.pool.geometry = SimpleNamespace(block_size=16, state_blocks=3, window=20, window_pages=2)
    tables.rows = lambda slots, width: (np.full((len(slots), width), 40, np.int32), None)
    tables.states = lambda slots, width: np.full((len(slots), width), 40, np.int32)
    asked: list[Any] = []

    def state_groups(slots: Any, first: int, width: int, groups: Any) -> Any:
        asked.append(slots)
        return (40 + first + groups[..., None] * width + np.arange(width)).astype(np.int32)

    tables.state_groups = state_groups
    rows = {"slots": [2, 1], "starts": [100, 7], "counts": [1, 20]}
    arrays = {name: np.array(each, np.int32) for name, each in rows.items()}
    link = FakeLink(Step(1, **arrays), Step(2))
    worker = worker_of(runner, link)
    worker._tables, worker._pool_at = tables, PoolRegistered(rid=0, epoch=3, base_block=40)  # type: ignore[assignment]
    worker._engine.ring_blocks = 4  # type: ignore[union-attr]
    worker._serve()
    found, nothing = runner.windows
    assert asked[0].tolist() == [2, 1]
    assert found.first.tolist() == [5, 0]  # of tokens 81 and 0
    assert found.pages.tolist() == [[[5, 6], [7, 8]], [[3, 4], [5, 6]]]  # blocks 5 and 6 are cells 1 and 2 of four
    assert nothing.pages.shape == (0, 1, 2)


def test_a_third_step_waits_for_the_first() -> None:
    assert serve(FakeRunner(), FakeLink(step(1), step(2), step(3), step(4))).answered == [1, 2]


def test_a_worker_that_is_told_to_stop_finishes_what_it_was_sent() -> None:
    assert serve(FakeRunner(), FakeLink(step(1), step(2), Stop(reason="enough"))).answered == [1, 2]


def test_it_sleeps_only_where_nothing_is_under_way() -> None:
    runner = FakeRunner()
    link = serve(runner, FakeLink(None, step(1), None, runner.end(0)))
    assert link.waits == [1000, 1000, 0, 0, 1000]


def test_work_that_was_left_is_done_in_idle_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece at a time, between two looks at the messages; never while a step is in flight, or soon after one."""
    now = [10**9]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic_ns=lambda: now[0], monotonic=time.monotonic))

    def later(ms: int) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + ms * 1_000_000)

    runner, done = FakeRunner(), list[str]()
    at = ["before"]

    def say(where: str) -> Callable[[], None]:
        return lambda: at.__setitem__(0, where)

    link = FakeLink(None, later(BEFORE_IDLE_WORK_MS), None, step(1), say("in flight"), later(9999), None)
    link.script += [runner.end(0), say("soon after"), None, later(BEFORE_IDLE_WORK_MS - 1), None]
    link.script += [say("idle"), later(1), None, None, None]
    worker = worker_of(runner, link)
    worker._idle_work, worker._active_ns = True, now[0]

    def work() -> bool:
        done.append(at[0])
        return len(done) < 4

    worker._engine.use_idle_time = work  # type: ignore[method-assign, union-attr]
    worker._serve()
    assert done == ["before", "before", "idle", "idle"]
    assert link.waits[0] == BEFORE_IDLE_WORK_MS
    assert link.waits[-1] == 1000, "nothing is left"


def test_once_no_step_has_come_for_a_while_the_engine_rests() -> None:
    """It rests once, and not again before another step."""
    runner, rested = FakeRunner(), list[int]()
    worker = worker_of(runner, FakeLink())
    worker._engine.release_idle_memory = lambda: rested.append(runner.meter.steps)  # type: ignore[method-assign, union-attr]
    seen = []
    for steps, ended_ns in ((0, 0), (1, time.monotonic_ns()), (1, 0), (0, 0), (1, 0)):
        runner.meter.steps, runner.meter.last_ns = runner.meter.steps + steps, ended_ns
        worker._wait_ms()
        seen.append(len(rested))
    assert seen == [0, 0, 1, 1, 2]


def test_the_loop_feeds_the_watchdog_whether_steps_come_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Ear(tmp_path / "notify", monkeypatch)) as ear:
        ear.watch(4)  # a microsecond's pause: every turn counts
        fed: list[int] = []
        runner, link = FakeRunner(), FakeLink()
        link.script += [lambda: fed.append(len(ear.heard())), step(1), lambda: fed.append(len(ear.heard()))]
        serve(runner, link)
        assert fed == [1, 2]


@pytest.mark.parametrize("survives", [True, False])
def test_a_lost_device_ends_the_worker_after_the_last_result(survives: bool) -> None:
    runner = FakeRunner()
    runner.device.survives = lambda: survives
    runner.result = outcome(RowError(0, ErrorInfo.of(GpuError("an illegal address"))))
    link = FakeLink(step(1), runner.end(0), None)
    with nullcontext() if survives else pytest.raises(GpuError, match="a device is lost: an illegal address"):
        serve(runner, link)
    assert [type(message).__name__ for message in link.sent] == ["StepResult"] + ["WorkerFailed"] * (not survives)


def test_a_result_carries_the_proposals_of_the_runner() -> None:
    runner = FakeRunner()
    runner.result = replace(outcome(), proposals=Proposals.of({5: [9, 8], 3: [], 1: [7]}))
    link = serve(runner, FakeLink(step(1), runner.end(0), None))
    (result,) = (message for message in link.sent if isinstance(message, StepResult))
    assert [array.tolist() for array in (result.draft_slots, result.draft_counts, result.draft_tokens)] == [
        [5, 1],
        [2, 1],
        [9, 8, 7],
    ]


def test_accepted_drafts_advance_their_slots_behind_the_result() -> None:
    runner, answered = FakeRunner(), list[list[int]]()
    link = FakeLink(step(1), runner.end(0), None, step(2), runner.end(1), None)
    runner.on_accept = lambda: answered.append(link.answered)
    serve(runner, link)
    assert answered == [[1], [1, 2]]


def test_a_result_acknowledges_the_host_copies_of_its_step() -> None:
    runner = FakeRunner()
    link = serve(runner, FakeLink(step(1), runner.end(0), None))
    (result,) = (message for message in link.sent if isinstance(message, StepResult))
    assert (result.host_copied.tolist(), result.host_missed.tolist()) == ([6, 2], [2, 1])
    assert (result.host_write_us, result.host_read_us, result.idle_us) == (70, 50, 30)


def test_the_log_of_a_step_names_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    def starts(number: int, *begins: tuple[int, int], slots: list[int]) -> Step:
        rows = np.array(slots, np.int32)
        return Step(
            number,
            begins=tuple(
                RowStart(slot=slot, request_id=id_, sampling=SamplingParams(), seed=0) for slot, id_ in begins
            ),
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


def test_a_step_that_comes_again_is_not_done_again() -> None:
    """A restarted coordinator resends steps without a result."""
    runner = FakeRunner()
    link = FakeLink(step(1), step(2), step(1), runner.end(0), step(2), runner.end(1), step(1), step(2), step(3))
    serve(runner, link)
    assert [pending.number for pending in runner.launched] == [1, 2, 3]
    assert link.answered == [1, 2]


def test_what_ends_while_nobody_is_connected_is_sent_first_to_who_comes_next() -> None:
    """Results are sent in the order of the steps, whatever completes meanwhile."""
    runner = FakeRunner()
    link = FakeLink(step(1), step(2))

    def hang_up() -> None:
        runner.end(0)()
        link.connected = False

    link.script.append(hang_up)
    worker = worker_of(runner, link)
    worker._serve()
    assert link.answered == [] and [result.step_id for result in worker._answered] == [1]
    assert [step_id for step_id, _ in worker._under_way] == [2], "it goes on"
    runner.end(1)()
    link.connected = True
    worker._resend_results(0)
    link.script.extend([step(1), step(2), step(3)])
    worker._serve()
    assert link.answered == [1, 2]
    assert [pending.number for pending in runner.launched] == [1, 2, 3]


# behaviour: orders for the disk reach it beside the steps, and an idle worker sends their results
def test_orders_for_the_disk_and_their_results_pass_beside_the_steps() -> None:
    taken: list[Message] = []
    results = deque([None, DiskResults(3, np.array([1, 0, 0], np.int32)), None])
    entries = DiskEntries(3, 0, True)
    disk = SimpleNamespace(
        take=taken.append,
        scan=lambda scan: entries,
        results=lambda epoch: results.popleft() if results else None,
        fileno=lambda: 9,
    )
    link = FakeLink(DiskScan(3), DiskScan(2), DiskOrders(2), DiskOrders(3), step(1))
    woken: list[int] = []
    link.also_wake = woken.append  # type: ignore[attr-defined]
    worker = worker_of(FakeRunner(), link)
    worker._engine.disk = disk  # type: ignore[union-attr, assignment]
    worker._serve()
    assert [type(message) for message in link.sent] == [DiskEntries, DiskResults]
    (order,) = taken
    assert isinstance(order, DiskOrders) and order.epoch == 3
    assert set(woken[:-1]) == {9} and woken[-1] == -1  # no descriptor ends the wait for another coordinator


@pytest.mark.parametrize("done", [0, 1, ANSWERS_KEPT + 1])
def test_results_that_are_no_longer_kept_are_missed(done: int) -> None:
    runner, last = FakeRunner(), ANSWERS_KEPT + 1
    script: list[Any] = []
    for number in range(1, last + 1):
        script += [step(number), runner.end(number - 1)]
    worker = worker_of(runner, link := FakeLink(*script))
    worker._serve()
    assert link.answered == list(range(1, last + 1))
    link.sent.clear()
    link.connected = True
    if done == 0:
        with pytest.raises(ProtocolError, match="the result of step 1 is no longer kept"):
            worker._resend_results(done)
    else:
        worker._resend_results(done)
    assert link.answered == list(range(done + 1, last + 1))[: 0 if done == 0 else None]


def test_rows_whose_writer_died_in_the_middle_are_left_to_its_successor() -> None:
    """The coordinator was killed while writing a row, so the row stays torn; the step is resent."""
    runner = FakeRunner()
    link = FakeLink(step(1))
    worker = worker_of(runner, link)
    looks = []

    def torn(_slots: Any, _width: int) -> None:
        raise DeadlineExceeded("a row never comes to rest")

    def look() -> None:
        looks.append(1)
        link.connected = len(looks) < 3

    worker._tables, link.look = SimpleNamespace(rows=torn), look  # type: ignore[assignment, method-assign]
    worker._serve()
    assert len(looks) == 3, "one that was only stopped there is waited for"
    assert runner.launched == []
    again = FakeLink(step(1), lambda: runner.end(0)())
    worker_of(runner, again)._serve()
    assert again.answered == [1]


def welcome_to(folder: Path) -> WorkerWelcome:
    """Return the welcome of a coordinator with its tables in this folder."""
    return WorkerWelcome(
        rid=1,
        version=1,
        boot="b",
        tables_path=str(folder / "tables.shm"),
        block_size=16,
        slots_max=4,
        blocks_per_sequence_max=4,
        step_tokens_max=64,
        step_rows_max=4,
    )


def test_tables_that_are_gone_with_their_coordinator_are_no_fault(tmp_path: Path) -> None:
    """During a long model load the coordinator may exit and remove its tables."""
    link = FakeLink()
    worker = worker_of(FakeRunner(), link)
    assert not worker._map_tables(welcome_to(tmp_path)), (
        "the end of the connection is heard of after the tables are gone"
    )


def test_tables_that_cannot_be_read_here_are_an_error_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TABLES_GONE_S", 0.0)
    worker = worker_of(FakeRunner(), FakeLink())
    with pytest.raises(Unavailable, match="cannot be read here: No such file"):
        worker._map_tables(welcome_to(tmp_path))
