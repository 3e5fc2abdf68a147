"""The loop of a driver: requests and their times, over a fake target."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import pytest

from kvforge.loadtest.drive.engine import TICK_S, Engine
from kvforge.loadtest.drive.outcome import FAILED, FINISHED, INTERRUPTED, UNSENT, Outcome
from kvforge.loadtest.drive.plan import Plan
from kvforge.loadtest.drive.target import TargetRequest
from kvforge.loadtest.load.workload import ALL, FloatArray, Session, Turn


@dataclass
class Sessions:
    """A workload listed by a test."""

    sessions: Sequence[Session]
    arrivals: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.sessions)

    def session(self, index: int) -> Session:
        return self.sessions[index % len(self.sessions)]


@dataclass
class Played:
    """Answers each request after `after_s` with tokens 100, 101, ...; None: never."""

    after_s: float | None = 0.001
    state: str = FINISHED
    asked: list[TargetRequest] = field(default_factory=list)
    under_way: int = 0
    most: int = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def send(
        self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
    ) -> Callable[[], None]:
        self.asked.append(ask)
        self.under_way += 1
        self.most = max(self.most, self.under_way)

        def end(state: str) -> None:
            handle.cancel()
            self.under_way -= 1
            outcome.state, outcome.ended_s = state, monotonic() - start
            if state == FINISHED:
                outcome.tokens = array("i", range(100, 100 + ask.output_tokens))
                outcome.tokens_s = array("d", [outcome.ended_s] * ask.output_tokens)
            ended(outcome)

        after_s = 60.0 if self.after_s is None else self.after_s
        handle = asyncio.get_running_loop().call_later(after_s, end, self.state)
        return lambda: end(INTERRUPTED)


def one(*tokens: int, output: int = 2) -> Session:
    return Session(turns=(Turn(tokens=np.array(tokens, np.int32), output_tokens=output),))


def run(
    load: Sessions,
    target: Played,
    plan: Plan | None = None,
    *,
    stop_when: Callable[[], bool] = lambda: False,
) -> tuple[list[Outcome], array[float]]:
    async def stopping(stop: asyncio.Event) -> None:
        while not stop_when():
            await asyncio.sleep(0.001)
        stop.set()

    async def main() -> tuple[list[Outcome], array[float]]:
        stop = asyncio.Event()
        waiting = asyncio.create_task(stopping(stop))
        engine = Engine(load, target, plan or Plan())
        outcomes, drove = await engine.run(monotonic(), stop)
        waiting.cancel()
        assert engine.progress.under_way == 0
        return outcomes, drove.late_s

    return asyncio.run(main())


def test_an_open_loop_sends_at_the_arrivals_though_nothing_is_answered() -> None:
    load = Sessions([one(1), one(2), one(3)], np.array([0.0, 0.01, 0.02]))
    target = Played(after_s=None)
    outcomes, _ = run(load, target, stop_when=lambda: len(target.asked) == 3)
    assert [outcome.due_s for outcome in outcomes] == [0.0, 0.01, 0.02]
    assert [ask.prompt.tolist() for ask in target.asked] == [[1], [2], [3]]
    assert all(outcome.due_s <= outcome.awake_s <= outcome.sent_s for outcome in outcomes)
    assert {outcome.state for outcome in outcomes} == {INTERRUPTED}


def test_a_later_turn_holds_what_really_came_and_is_due_after_its_thinking() -> None:
    session = Session(
        turns=(
            Turn(tokens=np.array([1, 2], np.int32), output_tokens=2),
            Turn(tokens=np.array([3], np.int32), output_tokens=1, kept=ALL, think_s=0.02),
            Turn(tokens=np.array([4], np.int32), output_tokens=1, kept=3),
        ),
        tenant="a",
        kind="chat",
    )
    target = Played()
    outcomes, _ = run(Sessions([session], np.array([0.0])), target)
    assert [ask.prompt.tolist() for ask in target.asked] == [[1, 2], [1, 2, 100, 101, 3], [1, 2, 100, 4]]
    first, second, third = outcomes
    assert second.due_s == pytest.approx(first.ended_s + 0.02)
    assert third.due_s == second.ended_s
    assert [(outcome.turn, outcome.tenant, outcome.kind) for outcome in outcomes] == [
        (turn, "a", "chat") for turn in range(3)
    ]


def test_what_was_said_is_passed_on_as_text_while_all_of_it_is_held() -> None:
    def turn(text: str, kept: int) -> Turn:
        return Turn(tokens=np.array([1], np.int32), output_tokens=1, text=text, kept=kept)

    class Says(Played):
        def send(
            self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
        ) -> Callable[[], None]:
            outcome.answer = f"{ask.text}!" if ask.followed else ""
            return super().send(ask, outcome, start, ended)

    target = Says()
    turns = (turn("a", 0), turn("b", ALL), turn("c", ALL), turn("d", 0), turn("e", 1), turn("f", ALL))
    run(Sessions([Session(turns=turns)], np.array([0.0])), target)
    assert [(ask.text, ask.history, ask.followed) for ask in target.asked] == [
        ("a", (), True),
        ("b", (("a", "a!"),), True),
        ("c", (("a", "a!"), ("b", "b!")), False),
        ("d", (), True),
        ("", (), True),  # a part of an answer: only as token ids
        ("", (), False),
    ]


def test_a_session_ends_with_its_first_turn_that_does_not_finish() -> None:
    turn = Turn(tokens=np.array([1], np.int32), output_tokens=1)
    outcomes, _ = run(Sessions([Session(turns=(turn, turn, turn))], np.array([0.0])), Played(state=FAILED))
    assert [(outcome.turn, outcome.state) for outcome in outcomes] == [(0, FAILED), (1, UNSENT), (2, UNSENT)]
    assert outcomes[1].due_s == -1


def test_a_session_goes_on_until_the_load_is_over() -> None:
    turn = Turn(tokens=np.array([1], np.int32), output_tokens=1)
    later = Turn(tokens=np.array([2], np.int32), output_tokens=1, kept=ALL, think_s=0.02)
    load = Sessions([Session(turns=(turn, *[later] * 999))], np.zeros(1))
    outcomes, _ = run(load, Played(), Plan(duration_s=0.1))
    sent = [outcome for outcome in outcomes if outcome.state == FINISHED]
    assert 1 <= len(sent) <= 6 and max(outcome.due_s for outcome in sent) < 0.1
    assert len(outcomes) == 1000 and {outcome.state for outcome in outcomes} == {FINISHED, UNSENT}


def test_a_closed_loop_keeps_its_places_full_and_is_due_when_a_place_is_free() -> None:
    target = Played(after_s=0.005)
    outcomes, _ = run(Sessions([one(i) for i in range(7)]), target, Plan(closed=2, sessions_max=7))
    assert target.most == 2
    assert [outcome.state for outcome in outcomes] == [FINISHED] * 7
    assert [outcome.session for outcome in outcomes] == list(range(7))
    assert [outcome.due_s for outcome in outcomes[:2]] == [0, 0]
    assert {outcome.due_s for outcome in outcomes[2:]} <= {outcome.ended_s for outcome in outcomes}


def test_a_closed_loop_begins_again_until_its_time_is_over() -> None:
    load, target = Sessions([one(1), one(2)]), Played()
    run(load, target, Plan(closed=1, sessions_max=5))
    assert [ask.prompt.tolist() for ask in target.asked] == [[1], [2], [1], [2], [1]]
    outcomes, _ = run(load, Played(), Plan(closed=1, duration_s=1e-9))
    assert len(outcomes) == 1


def test_with_a_schedule_a_closed_loop_counts_from_it() -> None:
    target = Played(after_s=0.01)
    load = Sessions([one(i) for i in range(4)], np.zeros(4))
    outcomes, _ = run(load, target, Plan(closed=1))
    assert target.most == 1
    assert [outcome.due_s for outcome in outcomes] == [0.0] * 4
    assert [outcome.sent_s for outcome in outcomes] == sorted(outcome.sent_s for outcome in outcomes)
    assert outcomes[3].sent_s > outcomes[3].awake_s + 0.02


def test_requests_beyond_the_limit_wait_and_are_charged_for_it() -> None:
    target = Played(after_s=0.01)
    outcomes, _ = run(Sessions([one(i) for i in range(4)], np.zeros(4)), target, Plan(concurrency_max=2))
    assert target.most == 2
    assert outcomes[3].sent_s > outcomes[3].awake_s
    assert [outcome.state for outcome in outcomes] == [FINISHED] * 4


def test_what_a_stop_leaves_undone_is_said() -> None:
    think = Turn(tokens=np.array([1], np.int32), output_tokens=1, think_s=60)
    load = Sessions([Session(turns=(think, think)), one(2), one(3)], np.array([0.0, 0.01, 60.0]))
    target = Played()
    outcomes, _ = run(load, target, stop_when=lambda: len(target.asked) == 2 and not target.under_way)
    assert [(outcome.session, outcome.turn, outcome.state) for outcome in outcomes] == [
        (0, 0, FINISHED),
        (1, 0, FINISHED),
        (0, 1, UNSENT),
        (2, 0, UNSENT),
    ]
    assert [outcome.due_s for outcome in outcomes[2:]] == [-1, 60.0]


def test_processes_share_a_load() -> None:
    load = Sessions([one(i) for i in range(5)], np.zeros(5))
    parts = [run(load, Played(), Plan(index=index, processes=2))[0] for index in range(2)]
    assert [[outcome.session for outcome in part] for part in parts] == [[0, 2, 4], [1, 3]]
    places = [Plan(index=index, processes=3, closed=4).places() for index in range(3)]
    assert places == [2, 1, 1]


def test_every_tick_is_counted_also_those_that_a_stall_swallowed() -> None:
    class Stalls(Played):
        def send(
            self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
        ) -> Callable[[], None]:
            end = monotonic() + 10 * TICK_S
            while monotonic() < end:
                pass
            return super().send(ask, outcome, start, ended)

    _, late_s = run(Sessions([one(1)], np.array([0.001])), Stalls())
    assert sum(late > TICK_S / 2 for late in late_s) >= 9


def test_a_broken_target_ends_the_run() -> None:
    class Broken(Played):
        def send(
            self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
        ) -> Callable[[], None]:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(Sessions([one(1)], np.array([0.0])), Broken())
