"""`Deadlines`: the timers of requests and the bounds of the parts, against a plain list of deadlines."""

from __future__ import annotations

from random import Random

import pytest

from kvforge.coordinator.core.deadlines import DEADLINE, NEVER, RETURNS, SEQUENCES, SESSIONS, WORKERS, Deadlines, Parts

PARTS = RETURNS + 1
LATER_US = 100


class Part:
    """A part with its deadlines in a list. It counts how often it is asked."""

    def __init__(self, clock: list[int]) -> None:
        self.clock, self.deadlines_us, self.asked, self.acted = clock, list[int](), 0, list[int]()

    def pass_time(self) -> int:
        """Do what is due, and return the next deadline."""
        self.asked += 1
        due = [us for us in self.deadlines_us if us <= self.clock[0]]
        self.acted += due
        self.deadlines_us = [us for us in self.deadlines_us if us > self.clock[0]]
        return min(self.deadlines_us, default=NEVER)


def made(clock: list[int]) -> tuple[Deadlines, list[Part], Parts]:
    """Return deadlines, and parts without any."""
    parts = [Part(clock) for _ in range(PARTS)]
    return Deadlines(), parts, tuple(part.pass_time for part in parts)


@pytest.mark.parametrize("seed", range(40))
def test_the_first_deadline_is_that_of_a_scan(seed: int) -> None:
    draw, clock = Random(seed), [0]
    deadlines, parts, acts = made(clock)
    live: dict[int, int] = {}
    for request_id in range(1, 200):
        what, number, due_us = draw.randrange(6), draw.randrange(PARTS), clock[0] + draw.randrange(1, 40)
        if what == 0:  # a deadline is added
            parts[number].deadlines_us.append(due_us)
            deadlines.arm(number, due_us - draw.randrange(due_us - clock[0]))  # a bound may be early
        elif what == 1 and parts[number].deadlines_us:  # one moves to a later time, as a worker's does
            parts[number].deadlines_us[0] += 20
        elif what == 2 and parts[number].deadlines_us:  # one is no longer needed
            parts[number].deadlines_us.pop()
        elif what == 3:
            live[request_id] = due_us
            deadlines.set(due_us, request_id, DEADLINE)
        elif what == 4 and live:
            del live[draw.choice(list(live))]
        else:
            clock[0] += draw.randrange(10)
            if deadlines.first_us <= clock[0]:
                deadlines.pass_time(acts)
                for ended, _ in deadlines.due(clock[0]):
                    live.pop(ended, None)
        every = [*live.values(), *(us for part in parts for us in part.deadlines_us)]
        assert deadlines.first_us <= min(every, default=NEVER)
        if draw.randrange(2):
            continue
        waiting = [us for part in parts for us in part.deadlines_us if us > clock[0]]
        overdue = [us for part in parts for us in part.deadlines_us if us <= clock[0]]
        found = deadlines.next_us(clock[0], live, acts)
        if overdue or (found is not None and found <= clock[0]):
            assert found is not None and found <= min([*overdue, *live.values(), clock[0]])
        else:
            assert found == min([*waiting, *live.values()], default=None)
        bounds_us = deadlines.bounds_us.copy()
        assert deadlines.next_us(clock[0], live, acts) == found
        assert deadlines.bounds_us == bounds_us, "a command that is refused next would change the state"
    assert all(us <= clock[0] for part in parts for us in part.acted)


def test_a_deadline_that_moves_is_asked_for_once_in_each_turn() -> None:
    clock = [0]
    deadlines, parts, acts = made(clock)
    for number in (SEQUENCES, SESSIONS):
        parts[number].deadlines_us.append(10_000)
        deadlines.arm(number, 10_000)
    parts[WORKERS].deadlines_us.append(LATER_US)
    deadlines.arm(WORKERS, LATER_US)
    deadlines.set(20_000, 1, DEADLINE)
    for now_us in range(1, 1000):
        clock[0] = now_us
        assert deadlines.first_us > now_us, "a turn must not let time pass in every part"
        parts[WORKERS].deadlines_us = [now_us + LATER_US]
        assert deadlines.next_us(now_us, {1}, acts) == now_us + LATER_US
    assert [part.asked for part in parts] == [0, 0, 0, 999, 0, 0, 0]
    assert len(deadlines.heap) == 1


def test_asking_again_changes_nothing_where_an_early_bound_equals_the_deadline_of_a_later_part() -> None:
    """A refused command asks again behind each turn, and must leave every bound as it was."""
    clock = [0]
    deadlines, parts, acts = made(clock)
    deadlines.arm(WORKERS, LATER_US)  # the worker that had this deadline is gone
    parts[SESSIONS].deadlines_us.append(LATER_US)
    deadlines.arm(SESSIONS, LATER_US - 1)  # so that the sessions are asked first
    assert deadlines.next_us(0, (), acts) == LATER_US
    bounds_us = deadlines.bounds_us.copy()
    clock[0] = 1
    assert deadlines.next_us(1, (), acts) == LATER_US
    assert deadlines.bounds_us == bounds_us


def test_what_is_due_waits_for_the_parts_to_act_in_their_order() -> None:
    clock = [0]
    deadlines, parts, acts = made(clock)
    for number in (SESSIONS, SEQUENCES):
        parts[number].deadlines_us.append(LATER_US)
        deadlines.arm(number, LATER_US)
    clock[0] = LATER_US
    assert deadlines.next_us(LATER_US, (), acts) == LATER_US
    assert not any(part.acted for part in parts)
    deadlines.pass_time(acts)
    assert parts[SEQUENCES].acted == parts[SESSIONS].acted == [LATER_US]
    assert deadlines.next_us(LATER_US, (), acts) is None


def test_a_part_that_acts_may_give_an_earlier_part_a_deadline() -> None:
    clock = [LATER_US]
    deadlines, parts, _ = made(clock)

    def gone() -> int:
        parts[SEQUENCES].deadlines_us.append(LATER_US)
        deadlines.arm(SEQUENCES, LATER_US)
        return NEVER

    acts = (*(part.pass_time for part in parts[:RETURNS]), gone)
    deadlines.pass_time(acts)
    assert deadlines.next_us(LATER_US, (), acts) == LATER_US


def test_after_a_recovery_every_part_is_asked() -> None:
    clock = [5]
    deadlines, parts, acts = made(clock)
    parts[WORKERS].deadlines_us.append(LATER_US)
    deadlines.heap = [(LATER_US + 1, 1, DEADLINE)]
    deadlines.arm_all(5)
    assert deadlines.next_us(5, {1}, acts) == deadlines.first_us == 5
    deadlines.pass_time(acts)
    assert deadlines.next_us(5, {1}, acts) == LATER_US
