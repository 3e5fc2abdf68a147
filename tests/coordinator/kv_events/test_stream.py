"""The event stream: sequence numbers, the replay buffer, and the recovery of subscribers that missed events."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest

from kvforge.coordinator.kv_events.settings import KvEventsSection
from kvforge.coordinator.kv_events.stream import (
    ANSWERS_A_TURN,
    END,
    REQUESTS_MAX,
    RESEND_S,
    STUCK_S,
    EventStream,
    ReplayRequest,
)
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver
from tools.simulation.mirror import Mirror

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]


class FakePost:
    """A recording publisher; it accepts `room` more replay answers, and none if the requester is `gone`."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.questions: list[ReplayRequest] = []
        self.answers: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self.room, self.gone = 1 << 30, False

    def publish(self, number: bytes, payload: bytes) -> None:
        self.sent.append((int.from_bytes(number, "big"), payload))

    def pop_requests(self) -> list[ReplayRequest]:
        questions, self.questions = self.questions, []
        return questions

    def answer(self, who: bytes, number: bytes, payload: bytes) -> bool | None:
        if self.gone:
            return None
        if not self.room:
            return False
        self.room -= 1
        self.answers.setdefault(who, []).append((number, payload))
        return True


class Told:
    """A driver, its stream, and a manual clock."""

    def __init__(self, driver: Driver, **settings: object) -> None:
        self.now_s = 1000.0
        self.driver, self.post = driver, FakePost()
        section = msgspec.structs.replace(KvEventsSection(), **settings)  # type: ignore[arg-type]
        self.stream = EventStream(driver.machine, self.post, section, lambda: self.now_s)
        self.stream.turned()

    def serve(self, prompt: list[int]) -> None:
        self.driver.submit(prompt, 2)
        self.driver.run_until_idle()
        self.stream.turned()

    def ask(self, first: int) -> list[tuple[bytes, bytes]]:
        """Return all answers to a replay request."""
        self.post.questions.append(ReplayRequest(b"r", first))
        while self.stream.turned():
            pass
        return self.post.answers.pop(b"r", [])

    def check(self, payloads: list[bytes], mirror: Mirror | None = None) -> None:
        mirror = mirror or Mirror()
        for payload in payloads:
            mirror.apply(payload)
        mirror.check(self.driver.machine)


@pytest.fixture
def told(make_pool: MakePool) -> Told:
    return Told(make_pool(blocks=12)[0])


def test_it_begins_with_all_pools_cleared_and_numbers_follow_each_other(told: Told) -> None:
    cleared = told.driver.machine.limits.bounds.pools_max
    assert len(told.post.sent) == cleared
    for first in range(6):
        told.serve([first, *PROMPT])
    numbers = [number for number, _ in told.post.sent]
    assert numbers == list(range(1_000_000_000, 1_000_000_000 + len(numbers)))
    told.check([payload for _, payload in told.post.sent])


def test_a_turn_that_changed_nothing_tells_nothing(told: Told) -> None:
    before = len(told.post.sent)
    assert not told.stream.turned()
    assert len(told.post.sent) == before


def test_who_missed_some_is_told_those_and_the_end(told: Told) -> None:
    for first in range(6):
        told.serve([first, *PROMPT])
    first = told.post.sent[-3][0]
    answers = told.ask(first)
    assert answers[-1] == (END, b"")
    assert [(int.from_bytes(number, "big"), payload) for number, payload in answers[:-1]] == told.post.sent[-3:]
    assert told.ask(told.post.sent[-1][0] + 1) == [(END, b"")]


def test_who_asks_for_what_is_not_kept_gets_everything_and_so_does_everybody_else(make_pool: MakePool) -> None:
    told = Told(make_pool(blocks=12)[0], replay_batches_max=100)
    for first in range(120):
        told.serve([first, *PROMPT])
    everybody = Mirror()
    for _, payload in told.post.sent:
        everybody.apply(payload)
    assert told.ask(0)[-1] == (END, b"")  # announced a moment ago: only what is kept
    told.now_s += RESEND_S
    sent = len(told.post.sent)
    told.check([payload for _, payload in told.ask(0)[:-1]])
    told.check([payload for _, payload in told.post.sent[sent:]], everybody)
    assert told.post.sent[sent][0] == told.post.sent[sent - 1][0] + 1


def test_after_a_restart_numbers_go_on_and_who_missed_it_gets_right(told: Told) -> None:
    for first in range(6):
        told.serve([first, *PROMPT])
    before = Mirror()
    for _, payload in told.post.sent:
        before.apply(payload)
    last = told.post.sent[-1][0]
    told.driver.machine.cache.store.changed = None  # as in a machine rebuilt from its journal
    again = Told(told.driver)
    again.now_s = told.now_s + 0.5
    again.stream = EventStream(told.driver.machine, again.post, KvEventsSection(), lambda: again.now_s)
    again.post.sent.clear()
    again.serve([9, *PROMPT])
    assert again.post.sent[0][0] > last + 1
    again.check([payload for _, payload in again.ask(last + 1)[:-1]], before)


def test_changes_that_were_too_many_to_keep_are_told_anew(told: Told) -> None:
    told.serve(PROMPT)
    changed = told.driver.machine.cache.store.changed
    assert changed is not None
    changed.removed([0] * 1000)
    told.serve([1, *PROMPT])
    told.check([payload for _, payload in told.post.sent])


def test_who_takes_nothing_is_given_up_and_holds_up_nobody(told: Told) -> None:
    told.serve(PROMPT)
    told.post.room = 3
    told.post.questions.append(ReplayRequest(b"slow", 0))
    assert all(told.stream.turned() for _ in range(1000))
    told.now_s += STUCK_S
    assert not told.stream.turned()
    assert len(told.post.answers[b"slow"]) == 3
    told.post.gone = True
    assert told.ask(0) == []


def test_a_turn_answers_so_much_and_so_many_at_most(told: Told) -> None:
    told.serve(PROMPT)
    told.post.questions = [ReplayRequest(bytes([i]), 0) for i in range(REQUESTS_MAX + 4)]
    assert told.stream.turned()
    assert sum(map(len, told.post.answers.values())) <= ANSWERS_A_TURN
    while told.stream.turned():
        pass
    assert len(told.post.answers) == REQUESTS_MAX


def test_what_is_kept_is_bounded_in_bytes(make_pool: MakePool) -> None:
    told = Told(make_pool(blocks=12)[0], replay_bytes_max=1 << 16)
    for first in range(300):
        told.serve([first, *PROMPT])
    assert sum(map(len, deque(told.stream._kept))) == told.stream._kept_bytes <= 1 << 16
